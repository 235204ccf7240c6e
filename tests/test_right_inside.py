"""What a region may hold: custom Functions and operators, derivatives, hooks, writes, no_grad."""

import pytest
import torch
from cases import numbers
from references import assert_same
from right import X, check

import functx

pytestmark = pytest.mark.usefixtures("no_hooks")


class OldStyle(torch.autograd.Function):
    """``sin`` whose own backward is not its derivative: its own must be used, at every order."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.factor = 3.0
        return x.sin()

    @staticmethod
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        return cotangent * x.exp() * ctx.factor


class NewStyle(torch.autograd.Function):
    """Has a backward, a jvp and a vmap of its own, none of them the true one."""

    @staticmethod
    def forward(x, y):
        return x.sin() * y

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, cotangent):
        x, y = ctx.saved_tensors
        return cotangent * x.exp() * 3, cotangent * y.cos()

    @staticmethod
    def jvp(ctx, x_t, y_t):
        x, y = ctx.saved_tensors
        return x.exp() * x_t * 5 + y.exp() * y_t

    @staticmethod
    def vmap(info, in_dims, x, y):
        x = x if in_dims[0] is None else x.movedim(in_dims[0], 0)
        y = y if in_dims[1] is None else y.movedim(in_dims[1], 0)
        return NewStyle.apply(x, y) * 2, 0


class Generated(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.sin(), x.exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, cotangent, _):
        x, e = ctx.saved_tensors
        return cotangent * e * x


@torch.library.custom_op("functx_tests::wave", mutates_args=())
def wave(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.sin(x * factor)


def _wave_setup(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.factor = inputs[1]


def _wave_backward(ctx, cotangent):
    (x,) = ctx.saved_tensors
    return cotangent * x.exp() * ctx.factor, None


def _wave_vmap(info, in_dims, x, factor):
    return wave(x.movedim(in_dims[0], 0), factor), 0


wave.register_autograd(_wave_backward, setup_context=_wave_setup)
wave.register_vmap(_wave_vmap)


@torch.library.custom_op("functx_tests::accumulate", mutates_args={"total"})
def accumulate(total: torch.Tensor, x: torch.Tensor) -> None:
    total.add_(x)


class TestCustomFunctions:
    def test_old_style(self):
        check(lambda remat: remat(lambda x: OldStyle.apply(x * 2).exp()), ways=["backward"])

    def test_old_style_twice(self):
        def build(remat):
            f = remat(lambda x: OldStyle.apply(x * 2).exp())

            def gradient(x):
                return torch.autograd.grad(f(x).sum(), x, create_graph=True)

            return gradient

        check(build, ways=["backward"], eps=16)

    @pytest.mark.parametrize(
        "f",
        [
            lambda x: NewStyle.apply(x * 2, x.exp()).tanh(),
            lambda x: Generated.apply(x * 2)[0].tanh() * Generated.apply(x)[1],
        ],
        ids=["own vmap", "generated vmap"],
    )
    def test_new_style(self, f):
        check(lambda remat: remat(f))

    @pytest.mark.parametrize("stack", ["grad(grad)", "vmap(grad(grad))", "jacrev(grad)"])
    def test_its_own_backward_at_every_order(self, stack):
        def build(remat):
            def loss(x):
                return remat(lambda x: NewStyle.apply(x * 2, x.exp()).tanh())(x).sum()

            inner = functx.grad(loss)
            return functx.jacrev(inner) if "jacrev" in stack else inner

        check(build, ways=["vmap"] if "vmap" in stack else ["backward", "grad"], eps=32)

    def test_its_own_jvp(self):
        def build(remat):
            f = remat(lambda x: NewStyle.apply(x * 2, x.exp()).tanh())
            return lambda x: functx.jvp(f, (x,), (X.cos(),))

        check(build, eps=16)

    def test_its_own_vmap_rule(self):
        f = functx.remat(lambda x: NewStyle.apply(x, x.exp()))
        batched = functx.vmap(f)(numbers(3, 4))
        assert torch.equal(batched, 2 * numbers(3, 4).sin() * numbers(3, 4).exp())


class TestCustomOperators:
    def test_with_an_own_backward(self):
        check(lambda remat: remat(lambda x: wave(x * 2, 3.0).tanh()), ways=["backward"])

    def test_below_vmap(self):
        def build(remat):
            return functx.vmap(remat(lambda x: wave(x * 2, 3.0).tanh()))

        check(build, numbers(3, 4), ways=["backward"])

    def test_that_writes(self):
        def build(remat):
            def f(x):
                total = torch.zeros(4, dtype=x.dtype)
                accumulate(total, x.detach().exp())
                return x.sin() * total

            return remat(f)

        check(build, ways=["backward"])

    def test_that_writes_to_a_capture(self):
        def build(remat):
            total = torch.zeros(4, dtype=torch.float64)

            def f(x):
                accumulate(total, x.detach().exp())
                return x.sin() * total

            region = remat(f)
            return lambda x: (region(x), total)

        check(build, ways=["backward"])


class TestDerivativesInside:
    def test_autograd_grad(self):
        def build(remat):
            def f(x):
                y = x * 2
                if not y.requires_grad:
                    y = y.detach().requires_grad_()
                (gradient,) = torch.autograd.grad(y.sin().sum(), y, create_graph=True)
                return gradient * x

            return remat(f)

        check(build, ways=["backward"], eps=16)

    def test_autograd_grad_on_a_tape_of_its_own(self):
        def build(remat):
            def f(x):
                with torch.enable_grad():
                    y = x.detach().requires_grad_()
                    (gradient,) = torch.autograd.grad(y.sin().sum(), y)
                return gradient * x

            return remat(f)

        check(build, ways=["backward"])

    def test_backward_into_a_local_leaf(self):
        def build(remat):
            def f(x):
                y = x.detach().clone().requires_grad_()
                y.sin().sum().backward()
                return y.grad * x.exp()

            return remat(f)

        check(build, ways=["backward"])

    @pytest.mark.parametrize("name", ["grad", "jacrev", "jacfwd", "vmap", "vjp", "jvp", "hessian"])
    @pytest.mark.parametrize("library", [functx, torch.func], ids=["functx", "torch.func"])
    def test_a_transform(self, name, library):
        def build(remat):
            w = numbers(4, start=1.0).requires_grad_()

            def inner(y):
                return torch.sin(y * 2) * y

            def f(x):
                if name == "grad":
                    return library.grad(lambda y: (inner(y) * x).sum())(w * x)
                if name == "vjp":
                    out, pullback = library.vjp(inner, x * w)
                    return out + pullback(out.exp())[0]
                if name == "jvp":
                    return library.jvp(inner, (x,), (w * x,))
                if name == "vmap":
                    return library.vmap(lambda y: inner(y) * x.sum())(x * w)
                return getattr(library, name)(inner)(x * w)

            return remat(f), [w]

        check(build, eps=64)

    @pytest.mark.parametrize("inner", ["grad", "jvp", "vjp"])
    @pytest.mark.parametrize("outer", ["jvp", "vjp", "jacrev", "jacfwd", "grad"])
    @pytest.mark.parametrize("library", [functx, torch.func], ids=["functx", "torch.func"])
    def test_a_transform_of_a_transform(self, library, outer, inner):
        """What one gives goes into the other with no operation between them, which modes see."""

        def cubes(x):
            return (x * x * x).sum()

        first = {
            "grad": library.grad(cubes),
            "jvp": lambda x: library.jvp(cubes, (x,), (x,))[1],
            "vjp": lambda x: library.vjp(cubes, x)[1](cubes(x))[0],
        }[inner]
        f = {
            "jvp": lambda x: library.jvp(first, (x,), (x,)),
            "vjp": lambda x: library.vjp(first, x)[1](first(x)),
            "jacrev": library.jacrev(first),
            "jacfwd": library.jacfwd(first),
            "grad": library.grad(lambda x: first(x).sum()),
        }[outer]
        check(lambda remat: remat(f), eps=64)
        x = numbers(2, 3, 4)
        for stack in (functx.vmap, lambda f: functx.vmap(functx.vmap(f))):
            assert_same(stack(functx.remat(f))(x), stack(f)(x))


SCALE = {"factor": 2.0}


class TestHooks:
    def test_register_hook(self):
        def build(remat):
            def f(x):
                y = x.sin()
                y.register_hook(lambda gradient: gradient * 3)
                return y.exp()

            return remat(f)

        check(build, ways=["backward", "grad"])

    def test_a_hook_runs_once_a_backward(self):
        seen = []

        def f(x):
            y = x.sin()
            y.register_hook(lambda gradient: seen.append(1))
            return y.exp()

        x = X.clone().requires_grad_()
        functx.remat(f)(x).sum().backward()
        assert len(seen) == 1

    def test_a_hook_that_reads_a_changing_global(self):
        """A hook runs in the backward, with and without remat."""

        def build(remat):
            SCALE["factor"] = 2.0

            def f(x):
                y = x.sin()
                y.register_hook(lambda gradient: gradient * SCALE["factor"])
                return y.exp()

            def g(x):
                out = remat(f)(x)
                SCALE["factor"] += 1.5
                return out

            return g

        check(build, ways=["backward", "grad"])

    def test_retain_grad_of_an_intermediate_does_not_disturb(self):
        def build(remat):
            def f(x):
                y = x.sin()
                if y.requires_grad:
                    y.retain_grad()
                return y.exp()

            return remat(f)

        check(build, ways=["backward"])


class TestCutTapes:
    def test_detach(self):
        check(lambda remat: remat(lambda x: x.sin() * x.exp().detach()))

    def test_detach_in_place(self):
        check(lambda remat: remat(lambda x: x.exp().detach_() * x.sin()), ways=["backward"])

    def test_no_grad_blocks(self):
        def build(remat):
            def f(x):
                with torch.no_grad():
                    scale = x.exp().sum()
                    with torch.enable_grad():
                        kept = x.sin()
                return x.sin() * scale * kept

            return remat(f)

        check(build)

    def test_no_grad_and_inference_mode_as_decorators(self):
        @torch.no_grad()
        def scale(x):
            return x.exp()

        check(lambda remat: remat(lambda x: x.sin() * scale(x)))

    def test_set_grad_enabled(self):
        def build(remat):
            def f(x):
                torch.set_grad_enabled(False)
                scale = x.exp()
                torch.set_grad_enabled(True)
                return x.sin() * scale

            return remat(f)

        check(build)

    def test_an_inference_mode_block(self):
        def build(remat):
            def f(x):
                with torch.inference_mode():
                    scale = (X.cos() * 2).sum().item()
                return x.sin() * scale

            return remat(f)

        check(build)

    def test_requires_grad_is_what_it_is_without_remat(self):
        seen = []

        def build(remat):
            def f(x, y):
                flags = x.requires_grad, y.requires_grad, (x * y).requires_grad
                seen.append((remat, flags))
                return x.sin() * y

            return lambda x: remat(f)(x, X.cos())

        check(build)
        assert len({flags for _, flags in seen}) == 1
