"""Surroundings: what a region found around it when it ran forward, its replay finds again."""

import contextlib

import pytest
import torch
from cases import DTYPE, numbers
from programs import identity
from references import assert_same, count
from right import WAYS, X, check, settings, weighted
from surroundings import AROUND, default_dtype
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import functx

pytestmark = pytest.mark.usefixtures("no_hooks")


class TestSettings:
    """The body sees the same settings in the replay, wherever they were changed."""

    @pytest.mark.parametrize("order", ["forward", "backward"])
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("name", AROUND)
    def test_seen_by_the_replay(self, name, way, order):
        if name == "device" and way != "backward":
            pytest.skip("torch's own transforms make tensors, which then are on that device")
        around, get = AROUND[name]
        seen = []

        def f(x):
            seen.append(get())
            return x.sin().exp()

        def enter(when):
            return around() if when == order else contextlib.nullcontext()

        before = settings()
        if way == "backward":
            x = X.clone().requires_grad_()
            with enter("forward"):
                out = functx.remat(f)(x)
            with enter("backward"):
                torch.autograd.grad(out, x, X)
        elif way == "grad":
            with enter("forward"):
                _, pullback = functx.vjp(functx.remat(f), X)
            with enter("backward"):
                pullback(X)
        else:
            with enter("forward"):
                batched = functx.vmap(functx.remat(f))
                _, pullback = functx.vjp(batched, numbers(3, 4))
            with enter("backward"):
                pullback(numbers(3, 4))
        assert len(seen) == 2
        assert seen[0] == seen[1]
        assert settings() == before

    @pytest.mark.parametrize("name", ["default dtype", "deterministic", "autocast"])
    @pytest.mark.parametrize("order", ["forward", "backward"])
    def test_results(self, name, order):
        def program(remat):
            def f(x):
                made = torch.full((4,), 1.0) * torch.tensor(0.3)
                return (x[:, None] @ x[None]).sin() @ made.to(x.dtype) + made.double().sum()

            x = X.float().requires_grad_()
            around = AROUND[name][0]
            with around() if order == "forward" else contextlib.nullcontext():
                out = remat(f)(x)
            with around() if order == "backward" else contextlib.nullcontext():
                return out, torch.autograd.grad(out.double().sum(), x)

        assert_same(program(functx.remat), program(identity), eps=8)

    def test_set_inside(self):
        """What a body changes and leaves changed stays, and is changed once."""

        def program(remat):
            def f(x):
                made = torch.ones(4)
                torch.set_default_dtype(torch.float64)
                return x.sin() * made * torch.ones(4)

            with default_dtype(torch.float32):
                x = X.clone().requires_grad_()
                out = remat(f)(x)
                seen = [torch.get_default_dtype()]
                torch.set_default_dtype(torch.float16)
                gradient = torch.autograd.grad(out.sum(), x)
                return out, gradient, [*seen, torch.get_default_dtype()]

        assert_same(program(functx.remat), program(identity))

    @pytest.mark.parametrize("cache", [True, False])
    def test_autocast_with_shared_weights(self, cache):
        """One cast of a weight serves two regions, and the code between them."""

        def program(remat, cache=cache):
            w = numbers(8, 8, start=1.0).float().requires_grad_()
            x = numbers(8, 8).float().requires_grad_()
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
                f = remat(lambda x: torch.tanh(x @ w) @ w.mT)
                out = f(f(x) @ w)
                value = out.float().square().sum()
                inside = torch.autograd.grad(value, (w, x), retain_graph=True)
            return out, inside, torch.autograd.grad(value, (w, x))

        ours, plain = program(functx.remat), program(identity)
        assert_same(ours[0], plain[0])
        # A cast that is shared sums up gradients in bfloat16, casts of each region in float32.
        rounding = torch.finfo(torch.bfloat16).eps / torch.finfo(torch.float32).eps
        assert_same(ours[1:], plain[1:], eps=rounding if cache else 4)
        assert_same(ours[1:], program(identity, cache=False)[1:], eps=4)

    @pytest.mark.parametrize("way", ["grad", "vmap"])
    def test_autocast_under_transforms(self, way):
        def build(remat):
            w = numbers(4, 4, start=1.0).float()

            def f(x):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    y = remat(lambda x: torch.tanh(x @ w) @ w)(x)
                with torch.autocast("cpu", enabled=False):
                    return remat(lambda y: y.float() @ w)(y)

            return f

        check(build, numbers(2, 4).float(), ways=["backward", way])


class TestGradModes:
    def test_inference_mode_around(self):
        def f(x):
            return x.sin().exp(), x

        with torch.inference_mode():
            x = X.clone()
            for ours, plain in zip(functx.remat(f)(x), f(x)):
                assert_same(ours, plain)
                assert ours.is_inference() == plain.is_inference()
                assert not ours.requires_grad
            assert_same(functx.grad(lambda x: functx.remat(f)(x)[0].sum())(x), x.cos() * f(x)[0])
            per_example = functx.vmap(functx.grad(lambda x: functx.remat(f)(x)[0].sum()))
            assert_same(per_example(x[:, None]), (x.cos() * f(x)[0])[:, None])
            assert_same(
                functx.jvp(lambda x: functx.remat(f)(x)[0], (x,), (x,)),
                functx.jvp(lambda x: f(x)[0], (x,), (x,)),
            )

    def test_inference_tensors_as_inputs_and_captures(self):
        with torch.inference_mode():
            made = X.cos()

        def program(remat):
            x = X.clone().requires_grad_()
            out = remat(lambda x, y: (x + y).sin() + made)(x, made)
            return out, torch.autograd.grad(out.sum(), x)

        assert_same(program(functx.remat), program(identity))

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
    def test_forward_in_a_grad_mode(self, mode):
        def program(remat):
            def f(x):
                return x.sin().exp(), torch.is_grad_enabled()

            x = X.clone().requires_grad_()
            with mode():
                out, flag = remat(f)(x)
            assert out.requires_grad == (mode is torch.enable_grad)
            gradient = functx.grad(lambda x: _under(mode, remat(f), x))(X)
            return out, flag, gradient

        def _under(mode, f, x):
            with mode():
                y = f(x)[0].sum()
            return y * x.sum()

        assert_same(program(functx.remat), program(identity))

    @pytest.mark.parametrize("way", WAYS)
    def test_a_body_that_turns_grad_mode_on(self, way):
        weight = numbers(4, start=1.0).requires_grad_()

        def build(remat):
            def f(x):
                constant = x.cos() * weight
                with torch.enable_grad():
                    return (x.sin() * weight).exp() * constant, constant, torch.is_grad_enabled()

            g = remat(f)

            def without(x):
                with torch.no_grad():
                    return g(x)

            return without, [weight]

        check(build, ways=[way])

        def of_tangents(remat):
            f, leaves = build(remat)
            return lambda x: functx.jvp(lambda x: f(x)[:2], (x,), (x.cos(),)), leaves

        check(of_tangents, ways=[way], eps=16)

    def test_set_grad_enabled_and_left_so(self):
        def program(remat):
            def f(x):
                y = x.sin()
                torch.set_grad_enabled(False)
                return y * x.exp()

            x = X.clone().requires_grad_()
            try:
                out = remat(f)(x + 0)
                after = torch.is_grad_enabled()
            finally:
                torch.set_grad_enabled(True)
            return out, out.requires_grad, after

        assert_same(program(functx.remat), program(identity))

    def test_backward_under_no_grad(self):
        def program(remat):
            x = X.clone().requires_grad_()
            out = remat(lambda x: x.sin().exp())(x)
            with torch.no_grad():
                return torch.autograd.grad(out, x, X)

        assert_same(program(functx.remat), program(identity))


class Doubles(TorchFunctionMode):
    """A mode that changes what operations do."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if getattr(func, "__name__", "") in ("sin", "exp") else out


class DoublesBelow(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out + out if func is torch.ops.aten.sin.default else out


class Counts(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def body(x):
    return x.sin() * x.cos().exp()


class TestModes:
    @pytest.mark.parametrize("mode", [Doubles, DoublesBelow])
    @pytest.mark.parametrize("when", ["forward", "backward", "both", "inside"])
    def test_pushed_by_the_user(self, mode, when):
        def program(remat):
            def inside(x):
                with mode():
                    return body(x)

            def enter(*times):
                return mode() if when in times else contextlib.nullcontext()

            w = numbers(4, start=1.0).requires_grad_()
            f = remat(lambda x: (inside if when == "inside" else body)(x) * w)
            x = X.clone().requires_grad_()
            with enter("forward", "both"):
                out = f(x)
            with enter("backward", "both"):
                return out, torch.autograd.grad(out.sum(), (x, w))

        assert_same(program(functx.remat), program(identity))

    @pytest.mark.parametrize("mode", [Doubles, DoublesBelow])
    @pytest.mark.parametrize("way", ["grad", "vmap"])
    def test_around_a_transform(self, mode, way):
        def program(remat):
            gradient = functx.grad(lambda x: weighted(remat(body)(x)))
            if way == "vmap":
                gradient = functx.vmap(gradient)
            with mode():
                return gradient(numbers(3, 4))

        assert_same(program(functx.remat), program(identity))

    def test_a_user_mode_sees_the_operations_of_the_forward_once(self):
        seen = []
        for remat in (functx.remat, identity):
            x = X.clone().requires_grad_()
            with Counts() as counts:
                remat(body)(x)
            seen.append([name for name in counts.seen if name in ("sin", "cos", "exp", "mul")])
        assert seen[0] == seen[1]

    def test_dispatch_modes_see_forward_and_replay(self):
        x = X.clone().requires_grad_()
        out = functx.remat(body)(x)
        assert count(lambda: out.sum().backward())["sin"] >= 1
        assert count(lambda: functx.remat(body)(x))["sin"] == 1

    def test_a_mode_around_a_chain_of_regions(self):
        def program(remat):
            x = X.clone().requires_grad_()
            with Doubles():
                y = remat(body)(x)
            y = remat(body)(y)
            with DoublesBelow():
                y = remat(body)(y)
            with Doubles():
                return y, torch.autograd.grad(y.sum(), x)

        assert_same(program(functx.remat), program(identity), eps=8)

    def test_device_context(self):
        """``torch.device`` is a mode too."""

        def program(remat):
            x = X.clone().requires_grad_()
            with torch.device("cpu"):
                out = remat(lambda x: x.sin() * torch.ones(4, dtype=DTYPE))(x)
            with torch.device("meta"):
                return out, torch.autograd.grad(out, x, X)

        assert_same(program(functx.remat), program(identity))


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("way", ["backward", "grad"])
def test_pulled_back_in_inference_mode(nested, way):
    """A replay needs a tape there, too; without one no gradient came, and no error."""

    def program(remat):
        x, w = X.clone().requires_grad_(), X.cos().requires_grad_()
        f = remat(lambda x: x.sin().exp() * w)
        f = remat(lambda x, inner=f: inner(x).cos()) if nested else f
        out = f(x)
        with torch.inference_mode():
            if way == "backward":
                out.backward(X)
            else:
                x.grad, w.grad = torch.autograd.grad(out, (x, w), X)
        return x.grad.clone(), w.grad.clone()

    for _ in range(6):  # the last ones are of code that is known
        assert_same(program(functx.remat), program(identity))
