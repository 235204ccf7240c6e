"""Compiled functions, and operators that run functions, inside of a region."""

import pytest
import torch
from nets import seeded
from references import assert_same
from right import X, check
from torch import nn

import functx


class TestCompiled:
    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_a_region_of_a_compiled_block(self, backend):
        torch._dynamo.reset()

        def build(remat):
            net = seeded(
                lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
            ).double()
            compiled = torch.compile(net, backend=backend)
            region = remat(compiled)
            return (lambda x: region(region(x[None]))), list(net.parameters())

        check(build, ways=["backward"], eps=32)

    def test_the_engine_is_not_compiled(self):
        graphs = []

        def backend(graph, inputs):
            graphs.append(graph.code)
            return graph.forward

        torch._dynamo.reset()
        block = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double(), backend=backend)
        functx.remat(block)(X[None]).sum().backward()
        assert not [code for code in graphs if "linear" not in code]

    @pytest.mark.parametrize("fullgraph", [False, True])
    def test_what_a_region_runs_in_eager_is_compiled_elsewhere(self, fullgraph):
        graphs = []

        def backend(graph, inputs):
            graphs.append(graph.code)
            return graph.forward

        torch._dynamo.reset()
        block = torch.compile(torch.sin, backend=backend, fullgraph=fullgraph)
        x = X.clone().requires_grad_()
        functx.remat(lambda x: block(x).exp())(x).sum().backward()
        assert_same(x.grad, X.sin().exp() * X.cos())
        functx.grad(lambda x: functx.remat(lambda x: block(x).exp())(x).sum())(X)
        with pytest.raises(ZeroDivisionError):
            functx.remat(lambda x: block(x) / (1 // 0))(x)
        assert not graphs
        block(X)
        assert len(graphs) == 1


class TestOperatorsThatRunFunctions:
    @pytest.mark.filterwarnings("ignore")
    def test_scan(self):
        """Nothing is known of what it reads, so nothing is left out of its replay."""
        from torch._higher_order_ops.scan import scan

        k = X.clone().requires_grad_()

        def body(x):
            carry, states = scan(lambda c, x: ((c * x).sin(), c + x), k.sum(), (x * k).sin())
            return (carry * nn.functional.dropout(states, 0.5)).exp() * k

        def build(remat):
            region = remat(body)
            return (lambda x: region(region(x * 1))), [k]

        check(build, ways=["backward"], eps=32)


def hook_on_a_result(remat, net, x):
    y = remat(net)(x)
    y.register_hook(lambda g: g * 2)
    return y.exp()


def hook_inside(remat, net, x):
    def body(x):
        h = net(x)
        h.register_hook(lambda g: g * 2)
        return h.sin()

    return remat(body)(x)


def left_behind(remat, net, x):
    left = []
    y = remat(lambda x: left.append(net(x)) or left[-1].sin())(x)
    return y + left[0].exp()


def written_to(remat, net, x):
    y = x * 2
    return remat(lambda x: y.mul_(net(x)).sin())(x) + y


def penalty(remat, net, x):
    y = remat(net)(x)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y * g


def hooks_on_results(remat, net, x):
    ys = remat(lambda x: (x.sin(), net(x), x.exp()))(x)
    for i, y in enumerate(ys):
        y.register_hook(lambda g, i=i: None if g is None else g * (i + 2))
    return ys[0] * ys[2] + ys[1]


PROGRAMS = {
    "two results": lambda remat, net, x: remat(lambda x: (x.sin(), net(x)))(x)[1],
    "a nest": lambda remat, net, x: remat(lambda x: remat(net)(x).exp())(x),
    "random numbers": lambda remat, net, x: remat(lambda x: torch.dropout(net(x), 0.5, True))(x),
    "vmap": lambda remat, net, x: functx.vmap(remat(net))(x),
    "a gradient inside": lambda remat, net, x: remat(
        lambda x: functx.grad(lambda x: net(x).sum())(x)
    )(x),
    **{f.__name__: f for f in (hook_on_a_result, hook_inside, left_behind, written_to)},
    "hooks on results": hooks_on_results,
}


def gradients_compiled(program, asked, compiler, rows=2):
    """Of two backward passes: what is traced of one serves the next."""
    torch._dynamo.reset()
    net = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh())).double()

    def gradients(remat, scale):
        torch.manual_seed(3)
        x = torch.stack([X * scale, X.sin()] * (rows // 2)).requires_grad_()
        loss = PROGRAMS[program](remat, net, x).pow(2).sum()
        with torch._dynamo.compiled_autograd._enable(compiler):
            if asked:
                return torch.autograd.grad(loss, [x, net[0].weight])
            net.zero_grad()
            loss.backward()
        return x.grad, net[0].weight.grad

    for scale in (1.0, 0.5):
        assert_same(gradients(functx.remat, scale), gradients(lambda f: f, scale), eps=64)


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_compiled_autograd(program, asked):
    gradients_compiled(program, asked, lambda graph: graph)


@pytest.mark.parametrize("program", ["a nest", "random numbers", "hook_inside", "hooks on results"])
@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.sweep), "aot_eager"])
def test_compiled_autograd_by_a_compiler(program, backend):
    """Which looks into what Python is in the graph, as a hook on a node for memory that can go."""
    gradients_compiled(program, False, torch.compile(backend=backend), rows=8)


def test_compiled_autograd_of_a_second_derivative():
    """It would add nothing to something."""
    net = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh())).double()
    x = X[None].clone().requires_grad_()
    loss = penalty(functx.remat, net, x).sum()
    with (
        torch._dynamo.compiled_autograd._enable(lambda graph: graph),
        pytest.raises(functx.RematError, match="Turn it off for a second derivative"),
    ):
        loss.backward(retain_graph=True)
    loss.backward()
    assert_same(x.grad, torch.autograd.grad(penalty(lambda f: f, net, x).sum(), x)[0], eps=64)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=X.dtype)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return x + self.drop(torch.tanh(self.linear(x)))


def as_it_comes(graph, example):
    """A compiler of somebody's: it takes the graph as it is."""
    return graph.forward


HOW = {
    "a model of regions": lambda remat, compiled, net: compiled(nn.Sequential(*map(remat, net))),
    "regions of compiled blocks": lambda remat, compiled, net: nn.Sequential(
        *(remat(compiled(block)) for block in net)
    ),
    "a region in a function": lambda remat, compiled, net: compiled(
        lambda x: remat(lambda x: net(x) * 2)(x).sin()
    ),
    "a policy": lambda remat, compiled, net: compiled(
        functx.remat(net, policy=[torch.ops.aten.addmm.default]) if remat is functx.remat else net
    ),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", as_it_comes])
@pytest.mark.filterwarnings("ignore:Detected that context_fn")
def test_dropout_in_training_that_is_compiled(how, backend):
    """A graph that nothing but torch's checkpoint recomputes for draws the same numbers again."""

    def steps(remat, compiled):
        torch._dynamo.reset()
        net = seeded(lambda: nn.Sequential(*(Block() for _ in range(3))))
        model = HOW[how](remat, compiled, net)
        found = []
        for step in range(3):
            torch.manual_seed(step)
            x = torch.stack([X * step, X.cos()]).requires_grad_()
            loss = model(x).square().sum()
            found += torch.autograd.grad(loss, [x, *net.parameters()])
            found.append(torch.rand(2))
        return found

    compiled = lambda f: torch.compile(f, backend=backend)  # noqa: E731
    assert_same(steps(functx.remat, compiled), steps(lambda f: f, lambda f: f))
