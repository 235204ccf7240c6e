"""Kinds of tensors: what goes into a region, what comes out, and what is pulled back."""

import pytest
import torch
from cases import DTYPE, numbers
from references import assert_same
from torch.utils import _pytree as pytree

import functx

from .programs import identity

pytestmark = pytest.mark.usefixtures("no_hooks")
X = numbers(4)


def weighted(tree):
    """One number from all floating point results."""
    leaves = [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]
    parts = [torch.view_as_real(t) if t.is_complex() else t for t in leaves]
    return sum(
        (t.to(DTYPE) * numbers(*t.shape, start=2.0 + i)).sum()
        for i, t in enumerate(parts)
        if t.is_floating_point()
    )


def check(f, x=X, ways=("backward", "vmap(grad)")):
    """Results and what is no tensor bit by bit, gradients up to the order of a sum."""

    def program(remat):
        found = []

        def loss(x):
            out = remat(f)(x)
            found.append(pytree.tree_map_only(torch.Tensor, lambda t: t.dtype, out))
            return weighted(out), [t for t in pytree.tree_leaves(out) if torch.is_tensor(t)]

        if "backward" in ways:
            leaf = x.detach().clone().requires_grad_()
            value, out = loss(leaf)
            found.append((out, torch.autograd.grad(value, leaf)))
        if "vmap(grad)" in ways:
            found.append(functx.vmap(functx.grad(loss, has_aux=True))(torch.stack([x, -x])))
        return found

    assert_same(program(functx.remat), program(identity), eps=8)


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
        check(f)

    def test_nothing_at_all(self):
        f = functx.remat(lambda x, nothing: nothing)
        for nothing in (None, (), [], {}):
            assert f(X.clone().requires_grad_(), nothing) == nothing
        assert functx.grad(lambda x: (f(x, None), x.sum())[1])(X).equal(torch.ones_like(X))
        assert functx.vmap(lambda x: (f(x, ()), x)[1])(X).equal(X)

    def test_results_can_be_written_to(self):
        def f(remat, x):
            first, second = remat(lambda x: (x * 2, x * 3))(x)
            first.mul_(x)
            first[0] = 1.0
            return first.sin() * second

        found = [functx.grad(lambda x: f(r, x).sum())(X) for r in (functx.remat, identity)]  # noqa: B023
        assert_same(*found, eps=8)


INPUTS = {
    "zero size": numbers(0, 3),
    "scalar": numbers(),
    "float32": X.float(),
    "float16": X.half(),
    "complex128": torch.complex(X, X.cos()),
    "conjugate": torch.complex(X, X.cos()).conj(),
    "transposed": numbers(4, 3).mT,
    "expanded": numbers(1, 4).expand(3, 4),
    "an offset": numbers(9)[5:],
}


class TestInputs:
    @pytest.mark.parametrize("name", INPUTS)
    def test_kinds_of_inputs(self, name):
        """Strides count too: they are part of what an operation sees."""
        x = INPUTS[name]
        ways = ("backward", "vmap(grad)") if x.is_contiguous() else ("backward",)
        check(lambda x: ((torch.sin(x) * torch.exp(x)).reshape(-1), x.stride()), x, ways)

    def test_mixed_dtypes(self):
        half, index, w = X.bfloat16(), torch.tensor([3, 1, 0, 2]), X.float()

        def f(x):
            y = (x.float() * w).to(torch.bfloat16) + half
            return y[index].double() * x * (x > 0), (y > 0), y

        check(f)

    @pytest.mark.parametrize(
        "f",
        [
            lambda x: torch.view_as_real(torch.polar(x.exp(), x)).sum(-1),
            lambda x: torch.fft.fft(x * (1 + 2j)).conj().imag * x,
            lambda x: torch.cat([functx.remat(torch.sin)(x[:0]), x.exp()]),
        ],
        ids=["complex", "conjugate", "a region of no elements"],
    )
    def test_kinds_of_intermediates(self, f):
        check(f, ways=("backward",))


class TestCotangents:
    @pytest.mark.parametrize(
        "cotangent",
        [
            torch.ones(1, dtype=DTYPE).expand(4, 3),
            numbers(3, 4).mT,
            numbers(4, 6)[:, ::2],
        ],
        ids=["expanded", "transposed", "strided"],
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
            w = torch.nn.Parameter(X.clone().as_subclass(Tagged))
            out = remat(lambda x: x.sin() * w.exp())(x)
            found = torch.autograd.grad(out.sum(), (x, w))
            return (out, found), type(out).__name__, [type(g).__name__ for g in found]

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


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:torch.quantize")
class TestOfOtherLayouts:
    @pytest.mark.parametrize(("layout", "inner"), [("coo", True), ("csr", False)])
    def test_a_sparse_constant_of_regions_in_regions(self, layout, inner):
        s = torch.eye(4, dtype=DTYPE)
        s = s.to_sparse() if layout == "coo" else s.to_sparse_csr()

        def program(remat):
            x = numbers(4, 3).requires_grad_()
            region = remat(lambda x: (s @ x).sin())
            y = remat(lambda x: region(x if inner else s @ x).cos())(x)
            y.sum().backward()
            return x.grad

        assert_same(program(functx.remat), program(identity))
