"""Plans: the measured peak is within the budget, derivatives are the same, recompute is least."""

import copy
import json
import pickle
import re

import pytest
import torch
from references import assert_same, gradients, peak
from torch import nn
from torch.nn import functional as F

import functx
from functx._budget.solver import work_again
from functx._loops import binomial

from .networks import NETWORKS, all_trees, pullback_peak, there_and_back, works

pytestmark = pytest.mark.usefixtures("no_hooks")


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.sweep) if name in ("mlp", "transformer") else name
        for name in NETWORKS
    ]
)
def network(request):
    torch.manual_seed(1)
    return NETWORKS[request.param]()


def uniform(blocks, segments):
    """The tree of segments of one length, the last in no region."""
    cuts = binomial.segments(len(blocks), segments)
    return [list(range(*cut)) for cut in cuts[:-1]] + list(range(*cuts[-1]))


LEAST = {}  # of a network, by its number of blocks: they differ in it, and it takes long


def least_possible(blocks, x):
    if len(blocks) not in LEAST:
        with pytest.raises(ValueError, match="the least possible is") as caught:
            functx.plan(blocks, x, budget=1000)
        least = str(caught.value).split("is ")[1].split(" bytes")[0]
        LEAST[len(blocks)] = int(least.replace(",", ""))
    return LEAST[len(blocks)]


# Plans are measured, many times: seconds for six blocks of a transformer.
def test_the_peak_is_within_the_budget(network):
    blocks, x = network
    least, most = least_possible(blocks, x), functx.plan(blocks, x, budget=1.0).peak
    assert least < 0.95 * most
    with pytest.raises(ValueError, match=f"the least possible is {least:,} bytes"):
        functx.plan(blocks, x, budget=least - 1)
    for budget in (least, (2 * least + most) // 3, 0.96):
        plan = functx.plan(blocks, x, budget=budget)
        f = plan.apply(blocks)
        assert plan.budget == budget if budget > 1 else int(budget * most)
        assert plan.peak <= plan.budget
        # Regions in regions, where there is least room.
        assert 0 < plan.again < (2 if budget != least else len(blocks) / 2) * plan.work
        # By another counter, of another gradient.
        own = peak(there_and_back, f, blocks, x)
        assert own <= plan.budget + 100
        plain = there_and_back(functx.plan(blocks, x, budget=1.0).apply(blocks), blocks, x)
        assert_same(there_and_back(f, blocks, x), plain, 64)


@pytest.mark.sweep  # a plan for every number of segments
def test_less_recompute_than_uniform_segments_of_the_same_peak(network):
    blocks, x = network
    less = 0
    for segments in range(2, len(blocks)):
        tree = uniform(blocks, segments)
        allowed = pullback_peak(tree, blocks, x)
        plan = functx.plan(blocks, x, budget=allowed)
        work = works(blocks, x)
        assert plan.peak <= allowed
        assert plan.again <= work_again(tree, work)
        less += plan.again < work_again(tree, work)
    assert less >= (len(blocks) - 2) // 2


def odd_blocks():
    """Wide and narrow layers, cheap and dear ones: no two blocks cost the same."""
    widths = [16, 48, 8, 32, 24, 40]
    activations = [nn.Tanh(), nn.GELU(), nn.Sigmoid(), nn.SiLU(), nn.Identity()]
    return [nn.Sequential(nn.Linear(a, b), f) for a, b, f in zip(widths, widths[1:], activations)]


def test_it_is_close_to_the_best_of_all_trees():
    torch.manual_seed(2)
    blocks, x = odd_blocks(), torch.randn(300, 16)
    work = works(blocks, x)
    known = [(pullback_peak(t, blocks, x), work_again(t, work)) for t in all_trees(0, len(blocks))]
    budgets = sorted({peak for peak, _ in known})
    for allowed in budgets[:: max(1, len(budgets) // 8)]:
        best = min(again for peak, again in known if peak <= allowed)
        assert functx.plan(blocks, x, budget=allowed).again <= 1.05 * best


def test_where_there_is_room_there_are_no_regions(network):
    blocks, x = network
    plan = functx.plan(blocks, x, budget=1.0)
    assert plan.tree == tuple(range(len(blocks)))
    assert plan.again == 0
    assert plan.recomputed == ()
    assert plan.peak == plan.peak_without == plan.budget


def test_planning_leaves_no_trace():
    blocks = [nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 3)) for _ in range(6)]
    buffers = [b.clone() for b in nn.Sequential(*blocks).buffers()]
    before = torch.get_rng_state()
    x = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
    functx.plan(blocks, x, budget=0.8)
    assert torch.equal(torch.get_rng_state(), before)
    assert_same([b.clone() for b in nn.Sequential(*blocks).buffers()], buffers)
    assert all(p.grad is None for p in nn.Sequential(*blocks).parameters())
    assert not x.requires_grad


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_a_model_that_holds_a_planned_chain_runs_its_own_blocks(copied):
    model, x = nn.Module(), torch.randn(64, 8)
    block = lambda: nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
    model.blocks = nn.ModuleList(block() for _ in range(4))
    model.run = functx.plan(model.blocks, x, budget=0.8).apply(model.blocks)
    other = copied(model)
    with torch.no_grad():
        [p.zero_() for p in other.parameters()]
    assert model.run(x).any()
    assert not other.run(x).any()


def test_a_plan_is_saved_as_json_and_printed(tmp_path):
    blocks, x = NETWORKS["mlp"]()
    plan = functx.plan(nn.Sequential(*blocks), x, budget=0.6)
    plan.save(file := tmp_path / "plan.json")
    assert functx.Plan.load(file) == plan
    saved = file.read_text()
    assert json.loads(saved)["peak"] == plan.peak
    hash(plan)
    text = str(plan)
    assert f"{plan.peak:,} bytes" in text
    assert "region\n" in text
    assert all(f"{i} Sequential" in text for i in range(len(blocks)))
    for text in ("", "[]", "{}", saved.replace('"blocks": 16', '"blocks": 15')):
        file.write_text(text)
        with pytest.raises(ValueError, match="is not a plan"):
            functx.Plan.load(file)
    with pytest.raises(ValueError, match="for 16 blocks, got 3"):
        plan.apply(blocks[:3])


@pytest.mark.parametrize(
    ("budget", "error"),
    [
        *((wrong, TypeError) for wrong in (True, None)),
        *((wrong, ValueError) for wrong in (1.5, 0.0, 0, -5, float("nan"), "much", "2 Gib")),
    ],
)
def test_budgets_that_are_none_are_an_error(budget, error):
    with pytest.raises(error, match="budget"):
        functx.plan([torch.sin], torch.ones(3), budget=budget)
    if budget is not None:  # which is a region without one
        with pytest.raises(error, match="budget"):
            functx.remat(torch.sin, budget=budget)


def test_chains_that_are_none_are_an_error():
    with pytest.raises(TypeError, match="expected a callable"):
        functx.plan(torch.ones(3), torch.ones(3), budget=0.5)
    with pytest.raises(TypeError, match="expected a callable"):
        functx.plan([torch.sin, 3], torch.ones(3), budget=0.5)
    with pytest.raises(TypeError, match="one argument, got 2"):
        functx.plan([torch.sin], torch.ones(3), torch.ones(3), budget=0.5)
    with pytest.raises(ValueError, match="list of blocks is empty"):
        functx.plan([], torch.ones(3), budget=0.5)


@pytest.mark.parametrize(
    ("text", "nbytes"), [("2GiB", 2 << 30), ("500 MB", 5 * 10**8), ("1.5kB", 1500), ("4096", 4096)]
)
def test_budgets_may_be_texts(text, nbytes):
    assert functx.plan([torch.sin], torch.ones(3), budget=text).budget == nbytes


def loss(weights, x):
    """Layers with a skip, a norm, dropout, writes, and a scale off the tape between them."""
    before = x
    for w in weights:
        before, here = x, before
        x = torch.cat([torch.tanh(x @ w), here], -1) @ torch.cat([w, w.T]) + x
        x = F.dropout(F.layer_norm(x, x.shape[-1:]), 0.3)
        x = (x * 2).clone().add_(1)
        x[..., 0] = 0
        with torch.no_grad():
            scale = x.abs().mean() + 1
        x = torch.relu(x / scale) - x.mean(0, keepdim=True)
    return x.square().mean()


NUMBERS = torch.Generator().manual_seed(5)
WEIGHTS = [torch.randn(16, 16, generator=NUMBERS) / 4 for _ in range(2)]
X = torch.randn(160, 16, generator=NUMBERS)


def per_example(f):
    run = functx.vmap(f, (None, 0), randomness="different")
    return lambda weights, x: run(weights, x.reshape(4, -1, x.shape[-1]))


STACKS = {
    "autograd": lambda f: lambda *args: gradients(f, *args),
    "grad": lambda f: functx.grad(f, (0, 1)),
    "grad of weights": functx.grad,
    "value_and_grad of inputs": lambda f: functx.value_and_grad(f, 1),
    "vmap(grad)": lambda f: per_example(functx.grad(f, (0, 1))),
    "vmap(grad) of inputs": lambda f: per_example(functx.grad(f, 1)),
    "grad(vmap)": lambda f: functx.grad(lambda w, x: per_example(f)(w, x).sum(), (0, 1)),
}


@pytest.mark.parametrize("stack", STACKS)
def test_a_budget_is_never_exceeded(stack):
    plain = STACKS[stack](loss)
    budget = int(0.95 * peak(plain, WEIGHTS, X))
    planned = STACKS[stack](functx.remat(loss, budget=budget))
    found = []
    for f in (planned, plain):
        torch.manual_seed(0)
        found.append(f(WEIGHTS, X))
    assert_same(*found, 64)
    assert peak(planned, WEIGHTS, X) <= budget


@pytest.mark.parametrize("stack", ["grad", "autograd"])
def test_the_least_that_an_error_names_is_possible(stack):
    with pytest.raises(ValueError, match="the least possible is") as error:
        STACKS[stack](functx.remat(loss, budget=1000))(WEIGHTS, X)
    least = int(re.search(r"least possible is ([\d,]+)", str(error.value))[1].replace(",", ""))
    planned = STACKS[stack](functx.remat(loss, budget=least))
    assert peak(planned, WEIGHTS, X) <= least


def test_forward_mode_keeps_nothing_and_needs_no_plan():
    found = []
    for f in (functx.remat(loss, budget=1), loss):
        torch.manual_seed(0)
        found.append(functx.jvp(lambda x, f=f: f(WEIGHTS, x), (X,), (X,)))
    assert_same(*found)
