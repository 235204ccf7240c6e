"""``remat(f, budget=)``: the function itself, with a measured peak that is within the budget."""

import copy

import pytest
import torch
from plans import NETWORKS, Residual
from references import assert_same, count, peak, total
from torch import nn
from torch.nn import functional as F

import functx

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
def test_networks(name):
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
def test_functions(share):
    planned = functx.remat(mlp, budget=share)
    assert_same(functx.grad(planned)(WEIGHTS, X), functx.grad(mlp)(WEIGHTS, X))
    plain = peak(functx.grad(mlp), WEIGHTS, X)
    assert peak(functx.grad(planned), WEIGHTS, X) <= share * plain + 100
    again = count(functx.grad(planned), WEIGHTS, X)["tanh"] - len(WEIGHTS)
    assert (again == 0) == (share == 1.0)


def test_under_transforms():
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


def test_bytes_are_those_of_all_examples():
    x = X.reshape(8, 25, 24)
    grads = functx.vmap(functx.grad(mlp, argnums=1), (None, 0))
    plain = peak(grads, WEIGHTS, x)
    budget = int(0.8 * plain)
    planned = functx.vmap(functx.grad(functx.remat(mlp, budget=budget), argnums=1), (None, 0))
    assert_same(planned(WEIGHTS, x), grads(WEIGHTS, x), 64)
    assert peak(planned, WEIGHTS, x) <= budget


def test_what_a_function_closes_over():
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
    def test_random_numbers(self):
        def f(x):
            for w in WEIGHTS:
                x = F.dropout(torch.tanh(x @ w), 0.3)
            return x

        def run(f):
            torch.manual_seed(3)
            return there_and_back(f, X), torch.rand(1)

        run(functx.remat(f, budget=0.8))
        assert_same(run(functx.remat(f, budget=0.8)), run(f))

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

    def test_no_grad_and_in_place_inside(self):
        def f(x):
            for w in WEIGHTS:
                y = torch.tanh(x @ w)
                with torch.no_grad():
                    norm = y.abs().amax() + 1
                y = y / norm
                y += 1
                y[:, 0] = 0
                x = y
            return x

        assert_same(there_and_back(functx.remat(f, budget=0.85), X), there_and_back(f, X), 64)

    def test_results_that_are_no_tensors_or_inputs(self):
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
    def test_as_a_policy(self, tmp_path):
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

    def test_less_recompute_than_segments_of_the_same_peak(self):
        """Of layers, as one would cut by hand; and products are kept before activations."""
        for k in (2, 3, 5):

            def f(weights, x, k=k):
                for start in range(0, len(weights), k):
                    part = weights[start : start + k]
                    wrap = functx.remat if start + k < len(weights) else (lambda segment: segment)

                    def segment(x, *part):
                        for w in part:
                            x = torch.tanh(x @ w)
                        return x

                    x = wrap(segment)(x, *part)
                return x.square().sum()

            allowed = peak(functx.grad(f, (0, 1)), WEIGHTS, X)
            grads = functx.grad(functx.remat(mlp, budget=allowed), (0, 1))
            ours, theirs = (count(g, WEIGHTS, X)["mm"] for g in (grads, functx.grad(f, (0, 1))))
            assert ours <= theirs

    def test_a_deep_network_is_cut_into_32_blocks(self):
        weights = [w for w in WEIGHTS for _ in range(2)]
        plan = functx.plan(mlp, weights, X, budget=0.7)
        assert plan.blocks <= 32
        planned = functx.remat(mlp, policy=plan)
        assert_same(functx.grad(planned, 1)(weights, X), functx.grad(mlp, 1)(weights, X))

    def test_attention(self):
        torch.manual_seed(0)
        module = nn.Sequential(*[Residual(16) for _ in range(3)])
        x = torch.randn(2, 12, 16)
        f = functx.remat(module, budget=0.8)
        assert_same(there_and_back(f, x, module), there_and_back(module, x, module), 640)


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
    def test_what_cannot_be_recorded(self, f, message):
        with pytest.raises(functx.RematError, match=message):
            functx.remat(f, budget=0.5)(X.clone().requires_grad_())

    def test_what_is_kept_otherwise_than_by_return(self):
        seen = []

        def f(x):
            y = x.sin()
            seen.append(y)
            return y.cos()

        with pytest.raises(functx.RematError, match="otherwise than by return"):
            functx.remat(f, budget=1.0)(X.clone().requires_grad_())

    def test_options(self):
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


class TestModulesCalledWithOtherParameters:
    """`functional_call` puts parameters in place of a module's own while it runs."""

    @pytest.mark.filterwarnings("ignore:There is a performance drop")
    @pytest.mark.parametrize("kind", ["lstm", "experts"])
    def test_per_example(self, kind):
        torch.manual_seed(0)
        module = nn.LSTM(6, 6, 2, batch_first=True) if kind == "lstm" else Experts(6)
        x = torch.randn(8, 10, 6)

        def gradients(module):
            def loss(params, x):
                out = torch.func.functional_call(module, params, (x[None],))
                return (out[0] if kind == "lstm" else out).square().sum()

            params = {name: p.detach() for name, p in module.named_parameters()}
            return functx.vmap(functx.grad(loss), (None, 0))(params, x)

        most = peak(gradients, module)
        planned = functx.remat(module, budget=most)
        expected = gradients(module)
        assert_same(list(gradients(planned).values()), list(expected.values()), 64)
        assert peak(gradients, planned) <= most

    def test_inside_of_the_function(self):
        """Whose recurrent layers list the parameters that they were called with."""
        torch.manual_seed(0)
        module, x = nn.GRU(6, 6, 2, batch_first=True), torch.randn(8, 10, 6)
        params = {name: p.detach() for name, p in module.named_parameters()}

        def f(params, x):
            return torch.func.functional_call(module, params, (x,))[0].square().sum()

        most = peak(functx.grad(f), params, x)
        planned = functx.grad(functx.remat(f, budget=most))
        assert_same(planned(params, x), functx.grad(f)(params, x), 64)
        assert peak(planned, params, x) <= most


class Experts(nn.Module):
    """A mixture: each expert sees everything, two of them count."""

    def __init__(self, width):
        super().__init__()
        self.gate = nn.Linear(width, 3)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        shares, chosen = torch.softmax(self.gate(x), -1).topk(2, -1)
        shares = torch.zeros_like(x[..., :3]).scatter(-1, chosen, shares)
        return x + sum(shares[..., i : i + 1] * e(x) for i, e in enumerate(self.experts))
