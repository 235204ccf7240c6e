"""Traced graphs of stacks of transforms over regions: values and products, also with symbols."""

import collections

import pytest
import torch
from references import count
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import functx
from tools.fuzz_traced import (
    FAILS,
    REFUSED,
    STACKS,
    WAYS,
    WEIGHT,
    WRONG,
    Program,
    argument,
    judged,
    stacked,
    written_for,
)

# What a region computes: products, views, reductions, writes in place.
STEPS = {
    "linear": "torch.tanh(F.linear(x, w, w[1]))",
    "folded": "(x.reshape(-1, 4) @ w.mT).view(x.shape).sin() + x",
    "reduced": "x @ w / (1 + (x @ w).square().sum(-1, keepdim=True)) + (x @ w).mean(0)",
    "in_place": "x.clone().mul_(w[0]).add_(x @ w).exp_().reciprocal()",
}


def of_one_region(name, stack):
    return Program([[], [STEPS[name]], []], nested=False, captures=False, policy=None, stack=stack)


def grid():
    """All stacks around all programs, traced in all ways; most of them in sweeps.

    Here each short stack is traced with each program, in one of the ways of ``make_fx``, and every
    other stack with one program, the short ones by `functx.jit`.
    """
    for i, stack in enumerate(STACKS):
        for j, name in enumerate(STEPS):
            one = i % 2 == 0 and i // 2 % 4 == j
            for k, way in enumerate(WAYS):
                if len(stack) < 3:
                    here = one if way == "jit" else (i + j) % 3 == k
                else:
                    here = one and i // 2 % 3 == k
                marks = () if here else pytest.mark.sweep
                label = f"{'('.join(stack)}-{name}-{way}"
                yield pytest.param(stack, name, way, marks=marks, id=label)


def check(program, way):
    outcome, said = judged(program, way)
    assert outcome not in (FAILS, WRONG, REFUSED), f"{way}: {outcome}: {said}\n{program}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("stack", "name", "way"), [*grid()])
def test_a_traced_stack_is_what_it_is_in_eager(stack, name, way):
    check(of_one_region(name, stack), way)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(6))
def test_a_random_program_is_traced_as_it_runs(seed):
    check(written_for(seed), WAYS[seed % 3])


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(10))
def test_a_thousand_random_programs_are_traced_as_they_run(part):
    found = collections.Counter()
    for seed in range(100 * part, 100 * part + 100):
        program, eager = written_for(seed), {}
        for way in WAYS:
            outcome, said = judged(program, way, eager)
            assert outcome not in (FAILS, WRONG), f"{seed}, {way}: {outcome}: {said}\n{program}"
            found[outcome] += 1
    assert found[REFUSED] < 5


@pytest.mark.parametrize("way", WAYS)
def test_a_wrong_graph_is_noticed(monkeypatch, way):
    """Where a region's pullback forgets what is inside."""
    monkeypatch.setattr(
        Program, "with_regions", lambda self: stacked(lambda x, w: x @ w, ("grad",))
    )
    outcome, said = judged(of_one_region("linear", ("grad",)), way)
    assert outcome == WRONG, said


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["real", "fake", "jit"])  # torch can't trace this with symbols
@pytest.mark.parametrize("inner", [None, "everything_saveable"])
def test_a_region_may_keep_all_of_one_inside_that_draws(inner, way):
    """On fake tensors its replay began again, with all that it had left out, and drew once more."""
    policies = functx.checkpoint_policies
    inside = functx.remat(
        lambda x: functional.dropout(x, 0.5), policy=inner and getattr(policies, inner)
    )
    region = functx.remat(lambda x: inside(x).sin(), policy=policies.everything_saveable)
    graph = graph_of(functx.grad(lambda x: region(x).sum()), way, torch.ones(3, 4))
    names = [n.name for n in graph.graph.nodes if n.op == "call_function"]
    assert sum(name.startswith("bernoulli") for name in names) == 1
    assert sum(name.startswith("sin") for name in names) == 1


@pytest.mark.parametrize("way", ["real", "fake", "jit"])
def test_a_replay_that_begins_again_has_what_was_drawn(way):
    """The replay of a norm differs under three levels; nothing else reads the random numbers."""
    norm_and_noise = ["F.layer_norm(x, (4,)) + torch.rand_like(x)"]
    stack = ("grad", "grad")
    check(
        Program([[], norm_and_noise, []], nested=False, captures=False, policy=None, stack=stack),
        way,
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["fake", "symbolic", "jit"])
def test_a_policy_is_asked_of_examples_whose_number_is_a_symbol(way):
    """The graph computed the size of the random numbers, of which it knew nothing."""
    steps = [[], ["x * torch.rand_like(x)"], []]
    policy, stack = "dots_saveable", ("vmap", "vmap")
    check(Program(steps, nested=True, captures=False, policy=policy, stack=stack), way)


def products(graph):
    graph.graph.eliminate_dead_code()  # (the tracer leaves what only its sizes were asked of)
    return collections.Counter(n.target for n in graph.graph.nodes)[torch.ops.aten.mm.default]


def graph_of(f, way, *args):
    if way != "jit":
        return make_fx(f, tracing_mode=way)(*args)
    graphs = []
    functx.jit(f, dynamic=True, backend=lambda module, _: graphs.append(module) or module)(*args)
    (graph,) = graphs
    return graph


COUNTED = {("grad",): "linear", ("vmap", "grad"): "folded", ("jvp", "vmap"): "reduced"}


@pytest.mark.parametrize(
    ("stack", "name"),
    [
        pytest.param(stack, name, marks=() if COUNTED.get(stack) == name else pytest.mark.sweep)
        for stack in STACKS
        for name in STEPS
    ],
)
def test_a_graph_with_symbols_has_the_products_of_one_without(stack, name):
    f, x = of_one_region(name, stack).with_regions(), argument(stack)
    ways = ("real", "symbolic", "jit")
    counts = {way: products(graph_of(f, way, x, WEIGHT)) for way in ways}
    assert counts["symbolic"] == counts["real"], counts
    # (Of two batches a size may be a quotient, which is read from a product made for it.)
    more = counts["jit"] - counts["real"]
    assert more == 0 or (more == 1 and stack.count("vmap") > 1), counts
    of_eager = count(f, x, WEIGHT)
    assert counts["real"] <= of_eager["mm"] + of_eager["bmm"]
