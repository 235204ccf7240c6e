"""Kinds of tensors that go in and out and are pulled back; custom Functions, what they hide."""

import pytest
import torch
from cases import DTYPE, custom_function, identity, judged_by, numbers, saves_inputs, unchanged
from references import assert_same, count
from torch import nn
from torch.utils import _pytree as pytree

import functx

from .refusals import right_or_refused
from .refusals import same as as_without

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


RESULTS = {
    "no gradient": lambda x: (x.sin(), x.detach().exp(), torch.ones(2, dtype=DTYPE)),
    "integer and bool": lambda x: (x.sin(), x.argsort(), (x > 0), x.detach().to(torch.int8)),
    "an input": lambda x: (x, x.sin(), x),
    "one twice": lambda x: [y := x.sin(), y, {"again": y}, y.exp()],
    "empty": lambda x: (x.sin(), x.new_empty(0), [], None, ()),
    "views": lambda x: (x.sin().view(2, 2), x.exp()[1:], x.cos().expand(3, 4)),
    "views of each other": lambda x: (y := x.sin(), y.view(2, 2), y[1:]),
    "named tuple": lambda x: torch.sort(x * 2),
    "scalars": lambda x: (x.sin(), x.sum() > 0, x.isnan().any(), x.size(0)),
}
unread = lambda x: functx.jvp(lambda v: (v[0], v * 2)[1], (x.view(2, 2).mT[0],), (x[:2],))
zero = lambda x: functx.jacfwd(functx.jacfwd(functx.remat(lambda y: y * 2)))(x).sum()
INTERMEDIATES = {
    "complex": lambda x: torch.view_as_real(torch.polar(x.exp(), x)).sum(-1),
    "conjugate": lambda x: torch.fft.fft(x * (1 + 2j)).conj().imag * x,
    "tangents laid out as their primals": lambda x: (unread(x), x.sin())[1],
    "zeros without memory": lambda x: functx.grad(zero)(x.detach()) + x.sin(),
    "a region of no elements": lambda x: torch.cat([functx.remat(torch.sin)(x[:0]), x.exp()]),
}


@pytest.mark.parametrize("name", [*RESULTS, *INTERMEDIATES])
def test_kinds_of_results_and_intermediates(name):
    ways = ("backward", "vmap(grad)") if name in RESULTS else ("backward",)
    check((RESULTS | INTERMEDIATES)[name], ways=ways)


class TestResults:
    def test_nothing_at_all(self):
        f = functx.remat(lambda x, nothing: nothing)
        for nothing in (None, (), [], {}):
            assert f(X.clone().requires_grad_(), nothing) == nothing
        assert functx.grad(lambda x: (f(x, None), x.sum())[1])(X).equal(torch.ones_like(X))
        assert functx.vmap(lambda x: (f(x, ()), x)[1])(X).equal(X)

    def test_results_can_be_written_to(self):
        def f(remat, x):
            first, second, again = remat(lambda x: (y := x * 2, x * 3, y))(x)
            first.mul_(x)
            first[0] = 1.0
            return first.sin() * second + again

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
        x = INPUTS[name]
        ways = ("backward", "vmap(grad)") if x.is_contiguous() else ("backward",)
        check(lambda x: ((torch.sin(x) * torch.exp(x)).reshape(-1), x.stride()), x, ways)

    def test_mixed_dtypes(self):
        half, index, w = X.bfloat16(), torch.tensor([3, 1, 0, 2]), X.float()

        def f(x):
            y = (x.float() * w).to(torch.bfloat16) + half
            return y[index].double() * x * (x > 0), (y > 0), y

        check(f)


class TestCotangents:
    @pytest.mark.parametrize(
        "cotangent", [numbers(1).expand(4, 3), numbers(3, 4).mT, numbers(4, 6)[:, ::2]]
    )
    @judged_by(unchanged)
    def test_layouts(self, remat, cotangent):
        x = numbers(4, 3).requires_grad_()
        out = remat(lambda x: x.sin().exp())(x)
        plain = torch.autograd.grad(out, x, cotangent, retain_graph=True)
        batched = torch.autograd.grad(
            out, x, torch.stack([cotangent, cotangent]), is_grads_batched=True
        )
        _, pullback = functx.vjp(remat(lambda x: x.sin().exp()), numbers(4, 3))
        return plain, batched, pullback(cotangent)

    def test_of_an_argument_that_no_result_depends_on(self):
        x = X.clone().requires_grad_()
        spoiled, unread = x.exp(), X.clone().requires_grad_()
        spoiled.mul_(2)  # its gradient could not be pulled back
        out = functx.remat(lambda a, b, c: (a * b).detach() + c.sin())(spoiled, unread, x)
        (found, none) = torch.autograd.grad(out.sum(), (x, unread), allow_unused=True)
        assert none is None
        assert_same(found, X.cos(), eps=8)

    @judged_by(unchanged, eps=8)
    def test_of_some_results_only(self, remat):
        x = X.clone().requires_grad_()
        first, second, third = remat(lambda x: (x.sin(), x.exp(), x.tan()))(x)
        return (
            torch.autograd.grad(first.sum(), x, retain_graph=True),
            torch.autograd.grad((second * third).sum(), x, retain_graph=True),
            torch.autograd.grad([third, first], x, [X, X.cos()]),
        )


class Tagged(torch.Tensor):
    """A subclass that torch carries through every operation."""


@judged_by(unchanged)
def test_subclasses_by_torch_function(remat):
    x = X.clone().as_subclass(Tagged).requires_grad_()
    w = torch.nn.Parameter(X.clone().as_subclass(Tagged))
    out = remat(lambda x: x.sin() * w.exp())(x)
    found = torch.autograd.grad(out.sum(), (x, w))
    return (out, found), type(out).__name__, [type(g).__name__ for g in found]


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("sparse", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
@judged_by(unchanged)
def test_a_sparse_constant_of_regions_in_regions(remat, sparse):
    s = sparse(torch.eye(4, dtype=DTYPE))

    x = numbers(4, 3).requires_grad_()
    region = remat(lambda x: (s @ x).sin())
    return torch.autograd.grad(remat(lambda x: region(s @ x).cos())(x).sum(), x)


@pytest.mark.parametrize("way", ["backward", "vjp"])
@judged_by(unchanged)
def test_a_sparse_result_of_regions_in_regions(remat, way):
    f = remat(lambda x: remat(lambda x: (2 * x).to_sparse())(x.sin()))
    x = numbers(4, 3)
    if way == "vjp":
        out, pullback = functx.vjp(f, x)
        return out.to_dense(), pullback(x.to_sparse())[0].to_dense()
    x.requires_grad_()
    return torch.autograd.grad((f(x).to_dense() * x).sum(), x)


@pytest.mark.parametrize("way", ["backward", "grad", "vmap(grad)"])
@judged_by(unchanged)
def test_a_constant_of_inference_mode(remat, way):
    with torch.inference_mode():
        shift = X * 2
    f = remat(lambda x: (x.sin() + shift).sum())
    if way == "backward":
        x = X.clone().requires_grad_()
        return f(x).detach(), torch.autograd.grad(f(x), x)
    gradient = functx.grad(f)
    return gradient(X) if way == "grad" else functx.vmap(gradient)(numbers(3, 4))


VECTOR, W, BATCH = numbers(4), numbers(4, start=1.0), numbers(3, 4)


def scaled_backward(ctx, g):
    x, w = ctx.saved_tensors
    return g * x.cos() * w, g * x.sin()


def scaled_jvp(ctx, dx, dw):
    x, w = ctx.saved_tensors
    return dx * x.cos() * w + dw * x.sin()


# ``sin(x) * w``, by hand: the old form, with a context in forward; and as functorch wants it.
scale = custom_function(
    lambda ctx, x, w: (ctx.save_for_backward(x, w), x.sin() * w)[1], scaled_backward
)
mapped = custom_function(lambda x, w: x.sin() * w, scaled_backward, saves_inputs, scaled_jvp)


def leaf(t):
    return t.clone().requires_grad_()


def test_its_forward_runs_again_and_its_backward_once():
    x, w = leaf(VECTOR), leaf(W)
    counts = count(lambda: functx.remat(scale)(x, w).sum().backward())
    assert counts["cos"] == 1
    assert 2 <= counts["sin"] <= 3  # forward, backward, and replay, if anything reads it
    out = functx.remat(lambda x: scale(x, w))(VECTOR)  # where no mode sees what is differentiated
    assert out.grad_fn.name() == "RegionNodeBackward"


class TestWhatTheyHide:
    """``apply`` is not shown to function modes."""

    @pytest.mark.parametrize("depth", [1, 3])
    def test_captured_leaves_of_a_fused_layer_get_their_gradients_at_every_order(self, depth):
        class Fused(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(W.clone())

            def forward(self, x):
                return scale(x.cos(), self.weight).exp()

        def program(remat):
            layer, x = Fused(), leaf(VECTOR)
            region = layer
            for _ in range(depth):
                region = remat(lambda x, inner=region: inner(x))
            out = region(x).sum()
            first = torch.autograd.grad(out, (x, layer.weight), create_graph=True)
            return first, torch.autograd.grad(sum(g.sum() for g in first), (x, layer.weight))

        as_without(program)

    @pytest.mark.parametrize("function", [scale, mapped])
    @judged_by(right_or_refused, way_out="argument")
    def test_a_captured_non_leaf_is_right_or_an_error(self, remat, function):
        x, w = leaf(VECTOR), leaf(W)
        h = w * 2
        out = remat(lambda x: function(x, h).exp())(x).sum()
        return torch.autograd.grad(out, (x, w))

    @pytest.mark.parametrize("way", ["grad", "vmap(grad)"])
    @judged_by(right_or_refused)
    def test_under_transforms_a_capture_is_right_or_an_error(self, remat, way):
        def f(x, h):
            return (remat(lambda x: mapped(x, h * 1))(h) * x).sum() + remat(
                lambda x: mapped(x, h).exp()
            )(x).sum()

        gradient = functx.grad(f, argnums=(0, 1))
        if way == "grad":
            return gradient(VECTOR, W)
        return functx.vmap(gradient, in_dims=(0, None))(BATCH, W)

    @pytest.mark.parametrize("outer", ["backward", "grad"])
    @judged_by(right_or_refused, way_out="inside|outside|argument")
    def test_a_pullback_made_outside_is_right_or_an_error(self, remat, outer):
        def loss(x):
            h = x * 2
            y = h.exp()
            region = lambda v: torch.autograd.grad(y, h, v, create_graph=True)[0] * v
            return remat(region)(h.sin()).sum()

        if outer == "grad":
            return functx.grad(loss)(VECTOR)
        x = leaf(VECTOR)
        return torch.autograd.grad(loss(x), x)

    @pytest.mark.parametrize("vjp", [functx.vjp, torch.func.vjp], ids=["functx", "torch.func"])
    @judged_by(right_or_refused, way_out="differentiate it outside")
    def test_so_is_that_of_a_vjp(self, remat, vjp):
        _, pull = vjp(torch.sin, VECTOR)
        return functx.grad(lambda v: (remat(lambda v: pull(v)[0])(v) * v).sum())(VECTOR)


def adjoint(transforms):
    """``y = exp(sin(theta) * x)`` with a backward that asks ``grad``, as adjoints are written."""

    def backward(ctx, g):
        weighted = lambda x, t: ((t.sin() * x).exp() * g).sum()
        return transforms.grad(weighted, argnums=(0, 1))(*ctx.saved_tensors)

    return custom_function(lambda x, theta: (theta.sin() * x).exp(), backward, saves_inputs)


@pytest.mark.parametrize("inner", [functx, torch.func], ids=["functx", "torch.func"])
class TestBackwardsThatDifferentiate:
    @pytest.mark.parametrize("way", ["vmap(grad)", "vmap(grad) of a parameter"])
    def test_under_transforms(self, inner, way):
        def gradients(transforms, apply):
            loss = lambda x, w: (apply(x, w) * W).sum()
            gradient = transforms.grad(loss, int("parameter" in way))
            return transforms.vmap(gradient, in_dims=(0, None))(BATCH, W)

        expected = gradients(torch.func, adjoint(torch.func))
        assert_same(gradients(functx, adjoint(inner)), expected, eps=8)

    @pytest.mark.parametrize("way", ["backward", "vmap(grad)"])
    @judged_by(as_without)
    def test_in_regions(self, remat, inner, way):
        apply = adjoint(inner)

        loss = lambda x, w: (remat(lambda x, w: apply(x.sin(), w * 2).exp())(x, w) * W).sum()
        if way == "backward":
            x, w = leaf(VECTOR), leaf(W)
            return torch.autograd.grad(loss(x, w), (x, w))
        return functx.vmap(functx.grad(loss, argnums=(0, 1)), in_dims=(0, None))(BATCH, W)
