"""`functx.graph.remat`: joint graphs from anywhere, with recompute."""

import collections
import contextlib
import copy

import pytest
import torch
from cases import numbers
from references import assert_same
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors, make_boxed_func
from torch._functorch.partitioners import default_partition
from torch._library.effects import EffectType
from torch.export.experimental import _export_forward_backward
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import functx
from functx import checkpoint_policies as cp
from functx._compile.joint_graph import Joint
from functx.graph import remat

aten = torch.ops.aten
WIDTH, BLOCKS = 16, 6


class Block(nn.Module):
    def __init__(self, checkpointed, extra):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.extra, self.checkpointed = extra(), checkpointed

    def body(self, x):
        return x + self.extra(self.down(torch.tanh(self.up(x))))

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)


class Net(nn.Module):
    def __init__(self, checkpointed=False, extra=nn.Identity):
        super().__init__()
        self.layers = nn.ModuleList([Block(checkpointed, extra) for _ in range(BLOCKS)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


X = numbers(64, WIDTH)


def net(**options):
    torch.manual_seed(0)
    return Net(**options).double()


def step_of(model):
    """Loss and gradients, of parameters and data."""

    def step(params, x):
        loss = torch.func.functional_call(model, params, (x,))
        return loss, torch.autograd.grad(loss, [*params.values()])

    return step


def by_make_fx(model):
    params = dict(model.named_parameters())
    traced = make_fx(step_of(model), tracing_mode="fake", _allow_non_fake_inputs=True)
    return traced(params, X), (params, X)


def by_aot(model):
    """As graph trainers get it: with modules, and a cotangent."""
    exported = torch.export.export(model, (X,)).module()
    with contextlib.ExitStack() as stack:
        joint = aot_export_joint_with_descriptors(stack, exported, (X,)).graph_module
    state = *exported.parameters(), *exported.buffers(), X
    return joint, ([*state], [torch.ones((), dtype=X.dtype)])


def by_export(model):
    joint = _export_forward_backward(torch.export.export(model, (X,))).graph_module
    return joint, (*model.parameters(), X)


def by_compile(model):
    """With torch's tags, of its own checkpoint."""
    found = []

    def partition(joint, *args, **kwargs):
        joint.graph.eliminate_dead_code()
        found.append(copy.deepcopy(joint))
        return default_partition(joint, *args, **kwargs)

    def forward(graph, inputs):
        return lambda *args: (found.append([*args]), graph(*args))[1]

    backend = aot_autograd(fw_compiler=forward, bw_compiler=forward, partition_fn=partition)
    torch._dynamo.reset()
    torch.compile(model, backend=backend)(X)
    return found[0], (found[1], [torch.ones((), dtype=X.dtype)])


def ran(graph, args):
    """What it returns, and its peak; arguments are written to in copies."""
    torch.manual_seed(0)
    args = copy.deepcopy(args)
    with torch.no_grad():
        results = [t for t in tree_leaves(graph(*args)) if t is not None]
        return results, functx.memory.peak(graph, *args)


def again(graph):
    return collections.Counter(n.target for n in graph.graph.nodes if "_again_" in n.name)


SOURCES = {
    "make_fx": (by_make_fx, {"policy": [aten.add.Tensor]}),
    "modules": (by_aot, {}),
    "export": (by_export, {"budget": 0.6}),
    "tags": (lambda _: by_compile(net(checkpointed=True)), {}),
}


@pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning")  # torch copies one
@pytest.mark.parametrize("source", SOURCES)
def test_a_graph_computes_the_same_in_less_memory(source):
    make, options = SOURCES[source]
    joint, args = make(net())
    less = remat(joint, **options)
    (expected, most), (found, peak) = ran(joint, args), ran(less, args)
    assert all(map(torch.equal, found, expected))
    assert peak <= 0.6 * most
    known = Joint(less.graph)
    assert abs(known.peak(known.steps(set())) - peak) <= 64  # a scalar's memory may be shared
    assert again(less)[aten.addmm.default] <= 2 * BLOCKS
    assert again(less)[aten.tanh.default] in (BLOCKS, BLOCKS - 1)
    assert not again(joint)
    meta = {n.meta["custom"]["functx_phase"] for n in less.graph.nodes if "_again_" in n.name}
    assert meta == {"replay"}


def chain(policy, region):
    """A loss in which two products, a name and other operations can be kept."""

    def body(x, w):
        return torch.tanh(functx.checkpoint_name(torch.sin(x @ w), "sine") @ w).exp()

    body = functx.remat(body, policy=policy) if region else body
    return torch.func.grad_and_value(lambda x, w: body(x, w).sum(), (0, 1))


POLICIES = {
    "nothing": cp.nothing_saveable,
    "dots": cp.dots_saveable,
    "no batch": cp.dots_with_no_batch_dims_saveable,
    "names": cp.save_only_these_names("sine"),
    "operators": [aten.tanh.default],
    "combined": cp.dots_saveable | cp.save_only_these_names("sine"),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_saves_what_it_saves_in_a_region(policy):
    x, w = numbers(8, 4), numbers(4, 4)
    expected = make_fx(chain(POLICIES[policy], True))(x, w)
    found = remat(make_fx(chain(None, False))(x, w), policy=POLICIES[policy])
    counts = [collections.Counter(str(n.target) for n in g.graph.nodes) for g in (found, expected)]
    for name in ("mm", "sin", "tanh", "exp"):
        assert counts[0][f"aten.{name}.default"] == counts[1][f"aten.{name}.default"]
    assert_same(found(x, w), expected(x, w), eps=4)


@pytest.mark.parametrize("extra", [lambda: nn.Dropout(0.5), lambda: nn.BatchNorm1d(WIDTH)])
def test_random_numbers_and_what_is_written_run_once(extra):
    for make, options in ((by_aot, {}), (by_make_fx, {"policy": [aten.add.Tensor]})):
        joint, args = make(net(extra=extra))
        less = remat(joint, **options)
        found, expected = (ran(graph, args)[0] for graph in (less, joint))
        assert all(map(torch.equal, found, expected))
        names = " ".join(f.name() for f in again(less))
        assert "addmm" in names
        assert "bernoulli" not in names
        assert "batch_norm" not in names


NET = net()


def two_steps(params, x):
    """Updates in place: what reads a parameter must not run again behind its update."""
    for _ in range(2):
        leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
        loss, gradients = step_of(NET)(leaves, x)
        with torch.no_grad():
            for p, g in zip(params.values(), gradients):
                p.sub_(0.1 * g)
    return loss, params


def two_passes(params, x):
    """The gradients of two halves."""
    first, second = (step_of(NET)(params, half) for half in x.chunk(2))
    return [a + b for a, b in zip(first[1], second[1])]


@pytest.mark.parametrize("step", [two_steps, two_passes])
def test_several_backward_passes_compute_again_each(step):
    args = (
        dict(NET.named_parameters()),
        numbers(256, WIDTH),
    )  # activations are larger than gradients
    joint = make_fx(step, tracing_mode="fake")(*args)
    less = remat(joint, policy=[aten.add.Tensor])
    (expected, most), (found, peak) = ran(joint, args), ran(less, args)
    assert all(map(torch.equal, found, expected))
    assert peak < 0.85 * most
    runs = {n.name[-1] for n in less.graph.nodes if "_again_" in n.name}
    assert runs == {"1", "2"}


def test_a_budget_is_kept_and_the_least_possible_is_possible():
    joint, args = by_make_fx(net())
    most = ran(joint, args)[1]
    with pytest.raises(ValueError, match="the least possible is") as caught:
        remat(joint, budget=1)
    least = int(str(caught.value).rpartition(" ")[2].replace(",", "").rstrip("."))
    work = []
    for budget in (most, 0.8, (least + most) // 2, f"{least} B"):
        less = remat(joint, budget=budget)
        peak = ran(less, args)[1]
        assert peak <= (most * budget if isinstance(budget, float) else most) + 64
        work.append(sum(again(less).values()))
    assert work[0] == 0
    assert work == sorted(work)
    assert peak <= least + 64 < 0.65 * most


def test_ones_of_the_forward_are_no_cotangent():
    def f(x):
        return (torch.sin(x) * torch.ones_like(x).tril()).sum()

    joint = make_fx(torch.func.grad(f))(X[:WIDTH])
    less = remat(joint, policy=cp.nothing_saveable)
    assert_same(less(X[:WIDTH]), torch.cos(X[:WIDTH]).tril(), eps=4)
    assert again(less)[aten.tril.default] == 1


def test_wrong_use_says_what_to_do():
    joint = make_fx(torch.func.grad(lambda x: x.sin().exp().sum()))(X)
    with pytest.raises(TypeError, match=r"expected an fx\.GraphModule, got function"):
        remat(step_of)
    with pytest.raises(ValueError, match="Give a policy or a budget"):
        remat(joint)
    with pytest.raises(ValueError, match="don't give a policy"):
        remat(joint, policy=cp.dots_saveable, budget=0.5)
    with pytest.raises(ValueError, match='"is_backward"'):
        remat(make_fx(torch.sin)(X), policy=cp.dots_saveable)
    offload = cp.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["a"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    named = make_fx(torch.func.grad(lambda x: functx.checkpoint_name(x.sin(), "a").exp().sum()))(X)
    with pytest.raises(ValueError, match="can't offload"):
        remat(named, policy=offload)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_it_is_a_part_of_a_partition_function(checkpointed):
    """What runs again belongs to the backward graph, and nobody computes it again once more."""
    kept, graphs = {}, {}

    def compiled(model, **options):
        def partition_fn(joint, *args, **kwargs):
            joint = remat(joint, **options) if options else joint
            forward, backward = default_partition(joint, *args, **kwargs)
            *_, outputs = forward.graph.nodes
            name = bool(options)
            kept[name] = sum(
                n.meta["val"].nbytes for n in outputs.args[0] if n.op == "call_function"
            )
            graphs[name] = collections.Counter(n.target for n in backward.graph.nodes)
            return forward, backward

        plain = lambda graph, inputs: make_boxed_func(graph)
        backend = aot_autograd(fw_compiler=plain, bw_compiler=plain, partition_fn=partition_fn)
        torch._dynamo.reset()
        loss = torch.compile(model, backend=backend)(X)
        return torch.autograd.grad(loss, [*model.parameters()])

    expected = compiled(net())
    found = compiled(net(checkpointed=checkpointed), policy=[aten.add.Tensor])
    assert_same(found, expected, eps=4)
    assert kept[True] < 0.5 * kept[False]
    assert graphs[True][aten.tanh.default] == BLOCKS
    assert graphs[True][aten.addmm.default] == BLOCKS  # of each block the first


def accumulated_as_they_come(params, x):
    total = [torch.zeros_like(p) for p in params]
    for part in x.chunk(4):
        total = [a + g for a, g in zip(total, gradients_of(params, part), strict=True)]
    return total


def accumulated_at_the_end(params, x):
    return [sum(g) for g in zip(*[gradients_of(params, part) for part in x.chunk(3)], strict=True)]


def updated(params, x):
    """What the next forward reads depends on the backward before."""
    for part in x.chunk(3):
        gradients = gradients_of(params, part)
        params = [p - 0.1 * g for p, g in zip(params, gradients, strict=True)]
    return params


def updated_by_momentum(params, x):
    momenta, labels = [torch.zeros_like(p) for p in params], (x > 0).to(x.dtype)
    for part, label in zip(x.chunk(3), labels.chunk(3), strict=True):
        gradients = gradients_of(params, part, label)
        momenta = [0.9 * m + g for m, g in zip(momenta, gradients, strict=True)]
        params = [p - 0.1 * m / (m.norm() + 1) for p, m in zip(params, momenta, strict=True)]
    return params, momenta


def pulled_back_twice(params, x):
    params = [p.detach().requires_grad_() for p in params]
    first = layers(params[:3], x)
    losses = first.mean(), layers(params[3:], first).square().mean()
    some = torch.autograd.grad(losses[0], params[:3], retain_graph=True)
    return [sum(g) for g in zip(some, torch.autograd.grad(losses[1], params))]


def differentiated_twice(params, x):
    params = [p.detach().requires_grad_() for p in params]
    first = torch.autograd.grad(layers(params, x).mean(), params, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in first), params)


def layers(params, x):
    for p in params:
        x = torch.tanh(x @ p).sin()
    return x


def gradients_of(params, x, label=0.0):
    params = [p.detach().requires_grad_() for p in params]
    return torch.autograd.grad((layers(params, x) - label).square().mean(), params)


SEVERAL = [accumulated_as_they_come, accumulated_at_the_end, updated, updated_by_momentum]


@pytest.mark.parametrize("step", [*SEVERAL, pulled_back_twice, differentiated_twice])
@pytest.mark.parametrize(
    "options",
    [{"policy": cp.nothing_saveable}, {"policy": cp.dots_saveable}, {"budget": 0.8}],
    ids=str,
)
def test_a_backward_pass_does_not_run_again_for_what_it_hands_on(step, options):
    args = [numbers(WIDTH, WIDTH, start=i) / 4 for i in range(6)], numbers(240, WIDTH)
    joint = make_fx(step, tracing_mode="fake")(*args)
    less = remat(joint, **options)
    (expected, most), (found, peak) = ran(joint, args), ran(less, args)
    assert all(map(torch.equal, found, expected))
    assert peak <= (0.8 if "budget" in options else 0.85 if "dots" in str(options) else 1) * most
    pulled = [n for n in again(less).elements() if "backward" in str(n)]
    assert not pulled or step is differentiated_twice


@torch.library.custom_op("functx_tests::logged", mutates_args=())
def logged(x: torch.Tensor, at: int) -> torch.Tensor:
    LOG.append(at)
    return x.clone()


LOG: list[int] = []
logged.register_fake(lambda x, at: torch.empty_like(x))
logged.register_effect(EffectType.ORDERED)
logged.register_autograd(
    lambda ctx, g: (logged(g, -ctx.at), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "at", inputs[1]),
)


def test_ordered_effects_run_once_and_in_order():
    def step(x):
        x = y = x.detach().requires_grad_()
        for at in (1, 2, 3):
            y = logged(torch.tanh(y), at).exp().sin()
        return torch.autograd.grad(y.sum(), x)

    joint = make_fx(step, tracing_mode="fake")(X)
    for options in ({"policy": cp.nothing_saveable}, {"budget": 0.8}):
        less = remat(joint, **options)
        assert again(less)
        LOG.clear()
        assert_same(less(X), joint(X), eps=4)
        assert LOG == 2 * [1, 2, 3, -3, -2, -1]


@pytest.mark.parametrize("share", [0.9, 0.8, 0.7])
def test_a_share_is_one_of_the_peak_that_is_measured(share):
    """Of several results of one operator, each is freed by itself."""
    torch.manual_seed(0)
    layer = lambda: (nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU())
    model = nn.Sequential(*[x for _ in range(4) for x in layer()], nn.MaxPool2d(2)).double()
    args = dict(model.named_parameters()), numbers(6, 4, 8, 8)

    joint = make_fx(lambda p, x: step_of(nn.Sequential(model, Square()))(under(p), x))(*args)
    less = remat(joint, budget=share)
    (expected, most), (found, peak) = ran(joint, args), ran(less, args)
    assert_same(found, expected, eps=4)
    known = Joint(joint.graph)
    assert known.peak(known.steps(set())) == most
    assert peak <= share * most


class Square(nn.Module):
    def forward(self, x):
        return x.square().mean()


def under(params):
    return {f"0.{name}": p for name, p in params.items()}
