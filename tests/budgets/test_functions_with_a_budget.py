"""``remat(f, budget=)``: the function itself, with a measured peak that is within the budget."""

import copy

import pytest
import torch
from references import assert_same, count, peak, total
from torch import nn

import functx

from .networks import NETWORKS

pytestmark = pytest.mark.usefixtures("no_hooks")


class Chain(nn.Module):
    """A network as one module, with control flow of its own."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(b for b in blocks if isinstance(b, nn.Module))
        self.order = list(blocks)

    def forward(self, x):
        for block in self.order:
            x = block(x)
        return x


def there_and_back(f, x, module=None):
    """Result, and gradients of the input and of all parameters, on plain autograd."""
    leaves, spec = torch.utils._pytree.tree_flatten(x)
    leaves = [t.detach().requires_grad_() for t in leaves]
    out = f(torch.utils._pytree.tree_unflatten(leaves, spec))
    parameters = [] if module is None else list(module.parameters())
    return out, torch.autograd.grad(out.sum(), [*leaves, *parameters])


SHARES = {"mlp": 0.7, "transformer": 0.8, "conv net": 0.85, "u-net": 0.85}


@pytest.mark.parametrize("name", NETWORKS)
# A plan of a transformer measures some hundred stretches of it.
def test_a_network_keeps_to_its_budget(name):
    torch.manual_seed(1)
    blocks, x = NETWORKS[name]()
    module = Chain(blocks)
    most = functx.plan(module, x, budget=1.0).peak
    expected = there_and_back(module, x, module)
    f = functx.remat(module, budget=SHARES[name])
    assert_same(there_and_back(f, x, module), expected, 64)
    assert peak(there_and_back, f, x, module) <= SHARES[name] * most + 100


def mlp(weights, x):
    for w in weights:
        x = torch.tanh(x @ w)
    return x.square().sum()


WEIGHTS = [torch.randn(24, 24, generator=torch.Generator().manual_seed(i)) / 5 for i in range(10)]
X = torch.randn(200, 24, generator=torch.Generator().manual_seed(100))


@pytest.mark.parametrize("share", [1.0, 0.8, 0.65])
def test_a_function_keeps_to_its_budget(share):
    planned = functx.remat(mlp, budget=share)
    assert_same(functx.grad(planned)(WEIGHTS, X), functx.grad(mlp)(WEIGHTS, X))
    plain = peak(functx.grad(mlp), WEIGHTS, X)
    assert peak(functx.grad(planned), WEIGHTS, X) <= share * plain + 100
    again = count(functx.grad(planned), WEIGHTS, X)["tanh"] - len(WEIGHTS)
    assert (again == 0) == (share == 1.0)


def test_derivatives_are_those_of_the_function():
    weights = WEIGHTS[:5]
    planned = functx.remat(mlp, budget=0.95)
    x = X.reshape(4, 50, 24)
    for transform in (
        lambda f: functx.vmap(functx.grad(f), (None, 0)),
        lambda f: functx.vmap(functx.grad(f, argnums=1), (None, 0)),
        lambda f: lambda w, x: functx.jvp(lambda x: f(w, x), (x[0],), (x[1],)),
        lambda f: (
            lambda w, x: functx.jacrev(functx.grad(lambda s: f(w, s * x[0])))(torch.ones(1)[0])
        ),
        lambda f: lambda w, x: functx.grad(lambda x: total(functx.grad(f)(w, x)))(x[0]),
    ):
        assert_same(transform(planned)(weights, x), transform(mlp)(weights, x), 640)


def test_it_may_close_over_tensors_of_every_level():
    """Parameters of every level, read at each call."""
    scale = torch.tensor(0.5, requires_grad=True)
    flag = {"on": True}

    def f(x):
        for w in WEIGHTS:
            x = torch.tanh(x @ w) * scale if flag["on"] else torch.sin(x @ w)
        return x.sum()

    planned = functx.remat(f, budget=0.8)
    for on in (True, False, True):
        flag["on"] = on
        inputs = [X.clone().requires_grad_()] + ([scale] if on else [])
        ours, plain = (torch.autograd.grad(g(inputs[0]), inputs) for g in (planned, f))
        assert_same(ours, plain, 64)

    def outer(s, remat):
        def inner(x):
            for w in WEIGHTS:
                x = torch.tanh(x @ w * s)
            return x.sum()

        return remat(inner)(X)

    ours, plain = (
        functx.grad(lambda s, r=r: outer(s, r))(scale.detach())
        for r in (lambda f: functx.remat(f, budget=0.8), lambda f: f)
    )
    assert_same(ours, plain, 64)


class TestState:
    def test_batch_norm_counts_once_and_follows_its_mode(self):
        torch.manual_seed(1)
        blocks, x = NETWORKS["conv net"]()
        plain = Chain(blocks)
        planned = copy.deepcopy(plain)
        f = functx.remat(planned, budget=0.95)
        for training in (True, False, True):
            plain.train(training)
            planned.train(training)
            assert_same(there_and_back(f, x, planned), there_and_back(plain, x, plain), 640)
            assert_same(list(planned.buffers()), list(plain.buffers()))

    def test_results_may_be_no_tensors_or_inputs(self):
        def f(x):
            for w in WEIGHTS:
                x = torch.tanh(x @ w)
            return {"out": x, "n": 3, "w": WEIGHTS[0], "none": None}

        leaf = X.clone().requires_grad_()
        result = functx.remat(lambda x: {**f(x), "x": x}, budget=0.8)(leaf)
        assert result["w"] is WEIGHTS[0]
        assert (result["n"], result["none"]) == (3, None)
        assert_same(result["out"], f(X)["out"])
        assert_same(result["x"], leaf)

    def test_without_a_derivative_it_is_the_function(self):
        calls = []

        def f(x):
            calls.append(type(x))
            return x.sin()

        with torch.no_grad():
            functx.remat(f, budget=1)(X)
        assert calls == [torch.Tensor]

    def test_regions_inside_are_left_to_the_plan(self):
        def f(x):
            for w in WEIGHTS:
                x = functx.remat(lambda x, w=w: torch.tanh(x @ w))(x)
            return x.sum()

        planned = functx.remat(f, budget=1.0)
        assert count(functx.grad(planned), X)["tanh"] == len(WEIGHTS)


class TestPlans:
    def test_a_plan_is_a_policy_and_can_be_saved(self, tmp_path):
        plan = functx.plan(mlp, WEIGHTS, X, budget=0.8)
        plan.save(tmp_path / "plan.json")
        again = functx.Plan.load(tmp_path / "plan.json")
        assert again == plan
        f = functx.remat(mlp, policy=again)
        assert_same(functx.grad(f)(WEIGHTS, X), functx.grad(mlp)(WEIGHTS, X))
        assert count(functx.grad(f), WEIGHTS, X)["tanh"] > len(WEIGHTS)
        assert count(functx.grad(plan.apply(mlp)), WEIGHTS, X)["tanh"] > len(WEIGHTS)
        assert "matmul" in str(plan)
        with pytest.raises(functx.RematError, match="made for another function"):
            functx.grad(f)(WEIGHTS[:3], X)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


class TestRefused:
    @pytest.mark.parametrize(
        ("f", "message"),
        [
            (lambda x: x * 2 if x.sum() > 0 else x, "depends on values"),
            (lambda x: x[x > 0], "depends on values"),
            (lambda x: Double.apply(x).sin(), "custom Function"),
            (lambda x: functx.grad(lambda x: x.sin().sum())(x), "where no record sees it"),
            (lambda x: [y := x.sin(), y.sum().backward()][0] * 2, "calls backward on a tensor"),
            (lambda x: x[torch.tensor(1) :].sin(), "slices by tensors"),
        ],
        ids=["control flow", "shapes", "custom Function", "transform", "backward", "slices"],
    )
    def test_what_cannot_be_recorded_is_an_error(self, f, message):
        with pytest.raises(functx.RematError, match=message):
            functx.remat(f, budget=0.5)(X.clone().requires_grad_())

    def test_what_leaves_otherwise_than_by_return_is_an_error(self):
        seen = []

        def f(x):
            y = x.sin()
            seen.append(y)
            return y.cos()

        with pytest.raises(functx.RematError, match="otherwise than by return"):
            functx.remat(f, budget=1.0)(X.clone().requires_grad_())

    def test_options_that_make_no_sense_are_an_error(self):
        plan = functx.plan(mlp, WEIGHTS, X, budget=1.0)
        for wrong, error in (
            (1.5, ValueError),
            (0, ValueError),
            ("much", ValueError),
            (True, TypeError),
        ):
            with pytest.raises(error, match="budget"):
                functx.remat(mlp, budget=wrong)
        with pytest.raises(ValueError, match="don't give another budget"):
            functx.remat(mlp, policy=plan, budget=0.5)
        with pytest.raises(ValueError, match="don't give a policy too"):
            functx.remat(mlp, policy=[torch.ops.aten.mm], budget=0.5)
        with pytest.raises(
            ValueError, match=r"no plan fits in .* the least possible is [\d,]+ bytes"
        ):
            functx.grad(functx.remat(mlp, budget=0.1))(WEIGHTS, X)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_module_may_be_called_with_other_parameters():
    """`functional_call` puts them in place of its own while it runs."""
    torch.manual_seed(0)
    module, x = nn.LSTM(6, 6, 2, batch_first=True), torch.randn(8, 10, 6)

    def gradients(module):
        def loss(params, x):
            return torch.func.functional_call(module, params, (x[None],))[0].square().sum()

        params = {name: p.detach() for name, p in module.named_parameters()}
        return functx.vmap(functx.grad(loss), (None, 0))(params, x)

    most = peak(gradients, module)
    planned = functx.remat(module, budget=most)
    assert_same(list(gradients(planned).values()), list(gradients(module).values()), 64)
    assert peak(gradients, planned) <= most
