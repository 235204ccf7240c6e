"""``remat(f, budget=)``: the function itself, with a measured peak that is within the budget."""

import contextlib
import copy

import pytest
import torch
from cases import custom_function, dense
from references import assert_same, count, peak, total
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import functx

from .networks import NETWORKS, Chain, there_and_back

pytestmark = pytest.mark.usefixtures("no_hooks")


def mlp(weights, x):
    return dense(weights, x).square().sum()


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


def test_a_share_is_of_what_normalisations_take_in_the_same_transforms():
    def f(weights, x):  # (by their definition, where derivatives nest, they take more)
        for w in weights:
            x = torch.tanh(torch.nn.functional.layer_norm(x, (24,)) @ w)
        return x.square().sum()

    per_example = lambda f: functx.vmap(functx.grad(f), (None, 0))
    for transform, x in ((functx.grad, X), (per_example, X.reshape(4, 50, 24))):
        plain = peak(transform(f), WEIGHTS, x)
        planned = transform(functx.remat(f, budget=0.8))
        assert_same(planned(WEIGHTS, x), transform(f)(WEIGHTS, x), 64)
        assert peak(planned, WEIGHTS, x) <= 0.8 * plain + 100


def test_derivatives_are_those_of_the_function():
    weights = WEIGHTS[:5]
    planned = functx.remat(mlp, budget=0.95)
    x = X.reshape(4, 50, 24)
    for transform in (
        lambda f: (
            lambda w, x: functx.jacrev(functx.grad(lambda s: f(w, s * x[0])))(torch.ones(1)[0])
        ),
        lambda f: lambda w, x: functx.grad(lambda x: total(functx.grad(f)(w, x)))(x[0]),
    ):
        assert_same(transform(planned)(weights, x), transform(mlp)(weights, x), 640)


def test_it_may_close_over_tensors_of_every_level():
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
        return remat(lambda x: dense([w * s for w in WEIGHTS], x).sum())(X)

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
            ours = there_and_back(f, [planned], x)
            assert_same(ours, there_and_back(plain, [plain], x), 640)
            assert_same(list(planned.buffers()), list(plain.buffers()))

    def test_results_may_be_no_tensors_or_inputs(self):
        f = lambda x: {"out": dense(WEIGHTS, x), "n": 3, "w": WEIGHTS[0], "none": None}

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

        assert count(functx.grad(functx.remat(f, budget=1.0)), X)["tanh"] == len(WEIGHTS)


def test_a_plan_is_a_policy_and_can_be_saved(tmp_path):
    plan = functx.plan(mlp, WEIGHTS, X, budget=0.8)
    plan.save(tmp_path / "plan.json")
    again = functx.Plan.load(tmp_path / "plan.json")
    assert again == plan
    f = functx.remat(mlp, policy=again)
    assert_same(functx.grad(f)(WEIGHTS, X), functx.grad(mlp)(WEIGHTS, X))
    for planned in (f, plan.apply(mlp)):
        assert count(functx.grad(planned), WEIGHTS, X)["tanh"] > len(WEIGHTS)
    assert "matmul" in str(plan)
    with pytest.raises(functx.RematError, match="for another function"):
        functx.grad(f)(WEIGHTS[:3], X)


doubled = custom_function(lambda ctx, x: x * 2, lambda ctx, g: g * 2)
LEFT = []


class Twice(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {})) * 2


def seeds(around):
    def f(x):
        with around():
            torch.manual_seed(0)
            noise = torch.rand(24)
        return torch.tanh(x) * noise

    return f


def enters_a_mode(x):
    with Twice():
        return x.sin()


class TestRefused:
    @pytest.mark.parametrize(
        ("f", "message"),
        [
            (lambda x: x * 2 if x.sum() > 0 else x, "depends on the values"),
            (lambda x: x[x > 0], "depends on the values"),
            (lambda x: doubled(x).sin(), "custom Function"),
            (lambda x: functx.grad(lambda x: x.sin().sum())(x), "in a way that can.t be recorded"),
            (lambda x: [y := x.sin(), y.sum().backward()][0] * 2, "calls backward on a tensor"),
            (lambda x: x[torch.tensor(1) :].sin(), "slices by tensors"),
            (
                lambda x: [y := x.sin(), LEFT.append(y)][0].cos(),
                "stores a tensor that it does not return",
            ),
            (seeds(contextlib.nullcontext), "seeds torch.s random generator"),
            (seeds(torch.random.fork_rng), "seeds torch.s random generator"),
            (enters_a_mode, "enters a dispatch mode"),
        ],
    )
    def test_what_cannot_be_recorded_is_an_error(self, f, message):
        with pytest.raises(functx.RematError, match=message):
            functx.remat(f, budget=0.5)(X.clone().requires_grad_())

    def test_options_that_make_no_sense_are_an_error(self):
        plan = functx.plan(mlp, WEIGHTS, X, budget=1.0)
        with pytest.raises(ValueError, match="don't pass another budget"):
            functx.remat(mlp, policy=plan, budget=0.5)
        with pytest.raises(ValueError, match="don't pass a policy too"):
            functx.remat(mlp, policy=[torch.ops.aten.mm], budget=0.5)
        with pytest.raises(
            ValueError, match=r"no plan fits in .* the least possible is [\d,]+ bytes"
        ):
            functx.grad(functx.remat(mlp, budget=0.1))(WEIGHTS, X)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_module_may_be_called_with_other_parameters():
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


SQUARES = [torch.randn(16, 16, generator=torch.Generator().manual_seed(i)) / 4 for i in range(6)]
SMALL = torch.randn(64, 16, generator=torch.Generator().manual_seed(100))


def cast_inside(weights, x):
    for w in weights:
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ w
        x = torch.tanh(y.float()) + y
    return x


def both(f, share, around=contextlib.nullcontext):
    """Gradients with a budget and without, from the same random state."""
    found = []
    for g in (functx.remat(f, budget=share), f):
        torch.manual_seed(0)
        with around():
            found.append(functx.grad(lambda w, g=g: g(w, SMALL).float().square().sum())(SQUARES))
    return found


def test_settings_inside_are_those_of_each_operation():
    assert_same(*both(cast_inside, 0.9))
    w = [w.clone().requires_grad_() for w in SQUARES]
    assert functx.remat(cast_inside, budget=0.9)(w, SMALL).dtype == cast_inside(w, SMALL).dtype


def test_settings_around_it_choose_the_plan():
    autocast = lambda: torch.autocast("cpu", torch.bfloat16)
    assert_same(*both(dense, 0.9, autocast))
    w = [w.clone().requires_grad_() for w in SQUARES]
    planned = functx.remat(dense, budget=1.0)
    assert planned(w, SMALL).dtype == torch.float32
    with autocast():  # the plan for other settings is another one
        assert planned(w, SMALL).dtype == torch.bfloat16


def test_generators_given_to_operations_are_used_as_they_are():
    generator = torch.Generator()

    def draws(weights, x):
        own = torch.Generator().manual_seed(1)
        for w in weights:
            x = torch.tanh(x @ w) * torch.rand(16, generator=generator)
            x = x * torch.rand(16, generator=own)
        return x

    assert_same(*both(draws, 0.9, lambda: contextlib.nullcontext(generator.manual_seed(0))))


@pytest.mark.parametrize("read", ["T", "mT", "H", "data", "real"])
def test_an_attribute_that_is_a_tensor_is_an_operation(read):
    weight = torch.randn(16, 16, dtype=torch.float64) / 4

    def f(x):
        for _ in range(6):
            x = torch.tanh(x @ getattr(weight, read))
        return x.sum()

    x = torch.randn(50, 16, dtype=torch.float64)
    assert_same(functx.grad(functx.remat(f, budget=0.95))(x), functx.grad(f)(x), eps=64)


def test_blocks_that_need_most_in_their_pullback_are_measured_there():
    """A mean of a stack hands on one tensor, and its pullback makes three."""

    def f(weights, x):
        for w in weights:
            y = torch.tanh(x @ w)
            x = torch.stack([y, y * 2, x]).mean(0)
        return x.square().sum()

    most = peak(functx.grad(f), SQUARES, SMALL)
    plan = functx.plan(f, SQUARES, SMALL, budget=int(0.8 * most))
    assert plan.peak <= 0.8 * most
    assert plan.again <= 0.5 * plan.work
