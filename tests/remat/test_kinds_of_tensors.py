"""Kinds of tensors: what goes into a region, what comes out, and what is pulled back."""

import pytest
import torch
from cases import DTYPE, numbers
from programs import check_program, identity
from references import assert_same
from right import X, check, weighted

import functx

pytestmark = pytest.mark.usefixtures("no_hooks")


class TestResults:
    @pytest.mark.parametrize(
        "f",
        [
            lambda x: (x.sin(), x.detach().exp(), torch.ones(2, dtype=DTYPE)),
            lambda x: (x.sin(), x.argsort(), (x > 0), x.detach().to(torch.int8)),
            lambda x: (x, x.sin(), x),
            lambda x: [y := x.sin(), y, {"again": y}, y.exp()],
            lambda x: (x.sin(), x.new_empty(0), [], None, ()),
            lambda x: (x.sin().view(2, 2), x.exp()[1:], x.cos().expand(3, 4)),
            lambda x: (y := x.sin(), y.view(2, 2), y[1:]),
            lambda x: torch.sort(x * 2),
            lambda x: (x.sin(), x.sum() > 0, x.isnan().any(), x.size(0)),
        ],
        ids=[
            "no gradient",
            "integer and bool",
            "an input",
            "one twice",
            "empty",
            "views",
            "views of each other",
            "named tuple",
            "scalars",
        ],
    )
    def test_results(self, f):
        check(lambda remat: remat(f))

    def test_nothing_at_all(self):
        f = functx.remat(lambda x, nothing: nothing)
        for nothing in (None, (), [], {}):
            assert f(X.clone().requires_grad_(), nothing) == nothing
        assert functx.grad(lambda x: (f(x, None), x.sum())[1])(X).equal(torch.ones_like(X))
        assert functx.vmap(lambda x: (f(x, ()), x)[1])(X).equal(X)

    def test_results_can_be_written_to(self):
        def build(remat):
            def f(x):
                out = remat(lambda x: x * 2)(x)
                out.mul_(x)
                out[0] = 1.0
                return out.sin()

            return f

        check(build)

    def test_one_of_two_results_is_written_to(self):
        def build(remat):
            def f(x):
                first, second = remat(lambda x: (x * 2, x * 3))(x)
                first.mul_(x)
                return first * second

            return f

        check(build)


INPUTS = {
    "zero size": numbers(0, 3),
    "zero size inside": numbers(2, 0, 3),
    "scalar": numbers(),
    "float32": X.float(),
    "bfloat16": X.bfloat16(),
    "float16": X.half(),
    "complex128": torch.complex(X, X.cos()),
    "complex64": torch.complex(X, X.cos()).to(torch.complex64),
    "conjugate": torch.complex(X, X.cos()).conj(),
    "transposed": numbers(4, 3).mT,
    "strided": numbers(8)[::2],
    "expanded": numbers(1, 4).expand(3, 4),
    "channels last": numbers(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    "an offset": numbers(9)[5:],
}


class TestInputs:
    @pytest.mark.parametrize("name", INPUTS)
    def test_kinds_of_inputs(self, name):
        """Strides count too: they are part of what an operation sees."""

        def build(remat):
            def f(x):
                return (torch.sin(x) * torch.exp(x)).reshape(-1), x.stride()

            return remat(f)

        x = INPUTS[name]
        check(build, x, ways=["backward", "grad", *(["vmap"] if x.is_contiguous() else [])])

    def test_strides_reach_the_replay(self):
        """A kernel is picked by them."""
        seen = []

        def f(x):
            seen.append((x.stride(), x.storage_offset(), x.is_contiguous()))
            return x.sin().exp()

        x = numbers(6, 4).mT[:, ::2].requires_grad_()
        functx.remat(f)(x).sum().backward()
        assert seen[0] == seen[1]
        seen.clear()
        functx.grad(lambda x: functx.remat(f)(x).sum())(x.detach())
        assert seen[0] == seen[1]

    def test_mixed_dtypes(self):
        def build(remat):
            half, index = X.bfloat16(), torch.tensor([3, 1, 0, 2])
            w = X.float().requires_grad_()

            def f(x, half, index, mask):
                y = (x.float() * w).to(torch.bfloat16) + half
                return y[index].double() * x * mask, (y > 0), y

            return (lambda x: remat(f)(x, half, index, x > 0)), [w]

        check(build)

    def test_complex_inside(self):
        check(lambda remat: remat(lambda x: torch.view_as_real(torch.polar(x.exp(), x)).sum(-1)))
        check(lambda remat: remat(lambda x: torch.fft.rfft(x).abs()))

    def test_conjugates_inside(self):
        def f(x):
            return torch.fft.fft(x * (1 + 2j)).conj().imag * x

        check(lambda remat: remat(f), ways=["backward", "grad"])

    def test_a_zero_size_region_in_a_chain(self):
        def build(remat):
            return lambda x: remat(torch.cat)([remat(torch.sin)(x[:0]), x.exp()])

        check(build)

    def test_sparse_results_inside(self):
        def build(remat):
            def f(x):
                sparse = torch.diag(x).to_sparse()
                return torch.sparse.mm(sparse, x.exp()[:, None])

            return remat(f)

        check(build, ways=["backward"])


class TestCotangents:
    @pytest.mark.parametrize(
        "cotangent",
        [
            torch.ones(1, dtype=DTYPE).expand(4, 3),
            numbers(3, 4).mT,
            numbers(4, 6)[:, ::2],
            torch.zeros(4, 3, dtype=DTYPE),
        ],
        ids=["expanded", "transposed", "strided", "zero"],
    )
    def test_layouts(self, cotangent):
        def program(remat):
            x = numbers(4, 3).requires_grad_()
            out = remat(lambda x: x.sin().exp())(x)
            plain = torch.autograd.grad(out, x, cotangent, retain_graph=True)
            batched = torch.autograd.grad(
                out, x, torch.stack([cotangent, cotangent]), is_grads_batched=True
            )
            _, pullback = functx.vjp(remat(lambda x: x.sin().exp()), numbers(4, 3))
            return plain, batched, pullback(cotangent)

        assert_same(program(functx.remat), program(identity))

    def test_of_some_results_only(self):
        def program(remat):
            x = X.clone().requires_grad_()
            first, second, third = remat(lambda x: (x.sin(), x.exp(), x.tan()))(x)
            return (
                torch.autograd.grad(first.sum(), x, retain_graph=True),
                torch.autograd.grad((second * third).sum(), x, retain_graph=True),
                torch.autograd.grad([third, first], x, [X, X.cos()]),
            )

        assert_same(program(functx.remat), program(identity), eps=8)

    def test_nan_and_infinity_stay_where_they_are(self):
        def program(remat):
            x = torch.tensor([0.0, 1.0, -1.0], dtype=DTYPE).requires_grad_()
            out = remat(lambda x: x.sqrt() * x.log().clamp(min=-5))(x)
            (gradient,) = torch.autograd.grad(out.sum(), x)
            return [t.detach().view(torch.int64) for t in (out, gradient)]

        assert_same(program(functx.remat), program(identity))


class Tagged(torch.Tensor):
    """A subclass that torch carries through every operation."""


class Twice(torch.Tensor):
    """A wrapper of two tensors: its operations run on both."""

    @staticmethod
    def __new__(cls, a, b):
        return torch.Tensor._make_wrapper_subclass(
            cls, a.shape, dtype=a.dtype, strides=a.stride(), requires_grad=a.requires_grad
        )

    def __init__(self, a, b):
        self.a, self.b = a, b

    def __tensor_flatten__(self):
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return Twice(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def part(name):
            def get(t):
                return getattr(t, name) if isinstance(t, Twice) else t

            return func(*torch.utils._pytree.tree_map(get, args), **(kwargs or {}))

        a, b = part("a"), part("b")
        if not isinstance(a, torch.Tensor):
            return a
        return torch.utils._python_dispatch.return_and_correct_aliasing(
            func, args, kwargs or {}, Twice(a, b)
        )


class TestSubclasses:
    def test_by_torch_function(self):
        def program(remat):
            x = X.clone().as_subclass(Tagged).requires_grad_()
            out = remat(lambda x: x.sin() * x.exp())(x)
            (gradient,) = torch.autograd.grad(out.sum(), x)
            return (out, gradient), type(out).__name__, type(gradient).__name__

        assert_same(program(functx.remat), program(identity))

    def test_a_parameter_that_is_a_subclass(self):
        def program(remat):
            w = torch.nn.Parameter(X.clone().as_subclass(Tagged))
            out = remat(lambda x: x.sin() * w.exp())(X)
            return out, torch.autograd.grad(out.sum(), w)

        assert_same(program(functx.remat), program(identity))

    @pytest.mark.parametrize("captured", [True, False])
    def test_by_torch_dispatch(self, captured):
        def program(remat):
            w = Twice(X.clone(), X.cos()).requires_grad_()
            if captured:
                out = remat(lambda x: x.sin() * w.exp())(X)
            else:
                out = remat(lambda w: X.sin() * w.exp())(w)
            assert type(out) is Twice
            (gradient,) = torch.autograd.grad(out, w, Twice(X, X * 2))
            assert type(gradient) is Twice
            return out.a, out.b, gradient.a, gradient.b

        assert_same(program(functx.remat), program(identity))

    def test_made_inside(self):
        def program(remat):
            def f(x):
                wrapped = Twice(x.detach().sin(), x.detach().cos())
                return x.exp() * (wrapped * 2).b

            x = X.clone().requires_grad_()
            out = remat(f)(x)
            return out, torch.autograd.grad(weighted(out), x)

        assert_same(program(functx.remat), program(identity))

    def test_parameters_and_buffers_of_torch(self):
        def build(remat):
            buffer = torch.nn.Buffer(X.cos())
            w = torch.nn.Parameter(X.sin())
            return remat(lambda x: x * w * buffer), [w]

        check(build)


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:torch.quantize")
class TestOfOtherLayouts:
    @pytest.mark.parametrize("layout", ["coo", "csr"])
    @pytest.mark.parametrize("inner", [False, True])
    def test_a_sparse_constant_of_regions_in_regions(self, layout, inner):
        s = torch.eye(4, dtype=DTYPE)
        s = s.to_sparse() if layout == "coo" else s.to_sparse_csr()

        def program(remat):
            x = numbers(4, 3).requires_grad_()
            region = remat(lambda x: (s @ x).sin())
            y = remat(lambda x: region(x if inner else s @ x).cos())(x)
            y.sum().backward()
            return x.grad

        check_program(program)

    @pytest.mark.parametrize("check", ["default", "none"])
    def test_a_quantized_result(self, check):
        def program(remat):
            x = numbers(4, 3).float().requires_grad_()

            def body(x):
                q = torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8)
                return q, q.dequantize() * x.sin()

            q, y = remat(body)(x)
            y.sum().backward()
            return q.int_repr(), x.grad

        assert_same(program(lambda f: functx.remat(f, determinism_check=check)), program(identity))
