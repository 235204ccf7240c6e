"""What a body does about gradients by name: ``.grad``, ``retain_grad``, ``.data``, casts."""

import re

import pytest
import torch
from cases import numbers
from programs import check_program, identity
from references import assert_same
from torch import nn

import functx

pytestmark = pytest.mark.usefixtures("no_hooks")

X = numbers(3)


def retained(remat, body, nested=False):
    x, log = X.clone().requires_grad_(), []
    region = remat(lambda x: body(x, log))
    y = remat(lambda x: region(x))(x) if nested else region(x)
    weight = numbers(3, start=2.0)
    (sum(t.flatten() for t in (y, *log)) * weight).sum().backward()
    return x.grad, y.grad, *(t.grad for t in log)


def result(x, log):
    h = x.sin()
    h.retain_grad()
    return h


def view(x, log):
    h = x.sin().reshape(1, 3)
    h.retain_grad()
    return h


def left(x, log):
    log.append(x.sin())
    log[0].retain_grad()
    h = x.cos()
    h.retain_grad()
    return h


def given(x, log):
    x.retain_grad()
    return x.sin()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("body", [result, view, left])
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_retained_inside(body, nested):
    assert_same(retained(functx.remat, body, nested), retained(identity, body, nested))


@pytest.mark.parametrize("nested", [False, True])
def test_retained_of_an_argument(nested):
    def program(remat):
        h = X.clone().requires_grad_() * 2
        f = remat(lambda h: (h.retain_grad(), h.sin())[1])
        (remat(lambda h: f(h)) if nested else f)(h).sum().backward()
        return h.grad

    assert_same(program(functx.remat), program(identity))


def test_what_is_retained_of_a_part_is_an_error():
    x = X.clone().requires_grad_()

    def body(x):
        h = x.sin()
        h.retain_grad()
        return h, h.cos()

    _h, y = functx.remat(body)(x)
    with pytest.raises(functx.RematError, match="gradient is retained"):
        y.sum().backward()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("as_argument", [False, True])
def test_a_gradient_from_outside(nested, as_argument):
    """Read where there is none; where there is one, an error."""
    w = X.clone().requires_grad_()
    x = X.clone().requires_grad_()

    def body(x, v):
        v = v if as_argument else w
        return x * v if v.grad is None else x * v * 2

    region = functx.remat(body)
    f = functx.remat(lambda x, v: region(x, v)) if nested else region
    f(x, w).sum().backward()
    assert_same(w.grad, X)
    with pytest.raises(functx.RematError, match=r"reads the \.grad"):
        f(x, w)


@pytest.mark.parametrize("value", [None, X])
def test_a_gradient_that_is_assigned(value):
    w = X.clone().requires_grad_()

    def body(x):
        w.grad = value
        return x * w

    f = functx.remat(body)
    x = X.clone().requires_grad_()
    if value is None:
        f(x).sum().backward()  # as it was
    with pytest.raises(functx.RematError, match=r"assigns the \.grad"):
        f(x)


def test_gradients_of_what_a_body_makes():
    def program(remat):
        x = X.clone().requires_grad_()

        def body(x):
            z = x.detach().requires_grad_()
            (z**3).sum().backward()
            return x * z.grad

        remat(body)(x).sum().backward()
        return x.grad

    assert_same(program(functx.remat), program(identity))


class Casts(nn.Module):
    def __init__(self, cast):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("shift", torch.ones(3))
        self.cast = cast

    def forward(self, x):
        self.cast(self)
        return self.layer(x.to(self.layer.weight.dtype)) + self.shift


@pytest.mark.parametrize(
    "cast", [lambda m: m.double(), lambda m: m.to(torch.float64), lambda m: m.layer.half()]
)
def test_a_cast_inside_is_an_error(cast):
    with pytest.raises(functx.RematError, match="cast the module outside"):
        functx.remat(Casts(cast))(torch.ones(3, requires_grad=True))


def test_a_cast_to_what_it_is_already():
    module = Casts(lambda m: m.float().to("cpu"))
    x = torch.ones(3, requires_grad=True)
    functx.remat(module)(x).sum().backward()
    expected = torch.autograd.grad(module(x).sum(), [x, *module.parameters()])
    assert_same([x.grad, *(p.grad for p in module.parameters())], [*expected])


def test_memory_that_is_assigned():
    w = nn.Parameter(X.clone())

    def body(x):
        w.data = w.data * 2
        return x * w

    with pytest.raises(functx.RematError, match=r"assigns the \.data"):
        functx.remat(body)(X.clone().requires_grad_())

    def of_an_argument(x):
        x.data = x.data.float()
        return x * 2

    with pytest.raises(functx.RematError, match=r"assigns torch.float32 to the \.data"):
        functx.remat(of_an_argument)(X.clone().requires_grad_() * 1)


def test_an_edge_is_where_a_derivative_is_taken_from():
    def program(remat):
        def body(x):
            edge = torch.autograd.graph.get_gradient_edge(x.sin() * x)
            (gradient,) = torch.autograd.grad([edge], [x], [torch.ones_like(x)], create_graph=True)
            return gradient.exp()

        x = X.clone().requires_grad_()
        return torch.autograd.grad(remat(body)(x).sum(), x)

    check_program(program)


def curve(x):
    return torch.tanh(x * numbers(3, start=1.0)).cumprod(0)


def constant(region, pull_back):
    return functx.grad(lambda c: region(pull_back)(c).sum())(X)


RECORDED_OUTSIDE = {
    "constant, grad": (X, constant),
    "constant, backward": (
        X,
        lambda region, f: torch.autograd.grad(region(f)(c := X.clone().requires_grad_()).sum(), c),
    ),
    "constant, jacrev": (X, lambda region, f: functx.jacrev(region(f))(X)),
    "constant, jacfwd": (X, lambda region, f: functx.jacfwd(region(f))(X)),
    "constant, vmap": (X, lambda region, f: functx.vmap(region(f))(numbers(2, 3))),
    "grad mode off": (X.clone().requires_grad_(), lambda r, f: torch.no_grad()(r(f))(X)),
}
"""Primals of a pullback, and how a region that calls it is called, where it does as without."""


@pytest.mark.parametrize("way", RECORDED_OUTSIDE)
def test_a_pullback_made_outside(way):
    x, call = RECORDED_OUTSIDE[way]

    def program(remat):
        pullback = functx.vjp(curve, x)[1]
        return call(remat, lambda c: pullback(c)[0] * 2)

    check_program(program, eps=4)


MADE_OUTSIDE = {
    "functx.vjp": lambda f, x: functx.vjp(f, x),
    "torch.func.vjp": lambda f, x: torch.func.vjp(f, x),
    "linearize": lambda f, x: functx.linearize(f, x),
}


@pytest.mark.parametrize("transform", [functx.grad, functx.jacfwd, lambda f: functx.vmap(f)])
@pytest.mark.parametrize("make", MADE_OUTSIDE)
def test_a_pullback_of_what_is_transformed_outside_is_an_error(make, transform):
    """Its derivative would be zero."""

    def f(x):
        out, pullback = MADE_OUTSIDE[make](curve, x)
        return functx.remat(lambda c: pullback(c))(out)[0].sum()

    x = numbers(2, 3) if transform not in (functx.grad, functx.jacfwd) else X
    with pytest.raises(functx.RematError, match="was made outside of it"):
        transform(f)(x)


def test_a_pullback_of_what_plain_autograd_knows_outside_is_an_error():
    x = X.clone().requires_grad_()
    out, pullback = functx.vjp(curve, x)
    with pytest.raises(functx.RematError, match="was made outside of it"):
        functx.remat(lambda c: pullback(c)[0])(out)


def test_a_pullback_that_a_region_leaves_behind_is_an_error():
    """Though it holds no output otherwise."""
    pullbacks = []

    def body(x):
        out, pullback = functx.vjp(curve, x)
        pullbacks.append(pullback)
        return out

    with pytest.raises(functx.RematError, match="leaves behind"):
        functx.grad(lambda x: functx.remat(body)(x).sum())(X)


DEPENDENT = {
    "what it is given": lambda x, y, o: torch.autograd.grad(o, y, allow_unused=True)[0],
    "it and something else": lambda x, y, o: torch.autograd.grad(
        [o, (x * y).sum()], [y], create_graph=True, allow_unused=True
    )[0],
    "what comes of it and another one": lambda x, y, o: torch.autograd.grad(
        (x * y * o.sin()).sum(), y, create_graph=True
    )[0],
}


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("leaf", [False, True])
@pytest.mark.parametrize("way", DEPENDENT)
def test_one_input_is_computed_from_another(way, leaf, closes):
    """Stand-ins do not depend on each other: part of the gradient was missing, without a word."""

    def program(remat):
        x, y = X.clone().requires_grad_(), (X * 2).requires_grad_()
        y = y if leaf else y.exp()
        o = (y * y).sin().sum()

        def body(x, *given):
            g = DEPENDENT[way](x, *(given or (y, o)))
            return x * (0 if g is None else g)

        out = remat(body)(x) if closes else remat(body)(x, y, o)
        return torch.autograd.grad(out.sum(), x)

    with pytest.raises(functx.RematError, match="was computed from that outside"):
        program(functx.remat)
    program(identity)


INDEPENDENT = {
    "one of two": lambda x, y, o: torch.autograd.grad((x * y).exp().sum(), y, create_graph=True)[0],
    "the one that comes after": lambda x, y, o: torch.autograd.grad(
        (x * y * o).exp().sum(), o, create_graph=True
    )[0],
    "a constant": lambda x, y, o: torch.autograd.grad(
        (x * y).exp().sum() * o.detach(), y, create_graph=True
    )[0],
    "a transform": lambda x, y, o: functx.grad(lambda y: (x * y * o).exp().sum())(y),
    "what it made": lambda x, y, o: torch.autograd.grad(
        (x * (h := y * 1) * o).exp().sum(), h, create_graph=True
    )[0],
}


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("leaf", [False, True])
@pytest.mark.parametrize("way", INDEPENDENT)
def test_gradients_by_what_others_do_not_depend_on(way, leaf, closes):
    def program(remat):
        x, z = X.clone().requires_grad_(), (X * 2).requires_grad_()
        y = z if leaf else z.exp()
        o = (y * y).sin().sum()

        def body(x, *given):
            return x * INDEPENDENT[way](x, *(given or (y, o)))

        out = remat(body)(x) if closes else remat(body)(x, y, o)
        return torch.autograd.grad(out.sum(), [x, z])

    for _ in range(6):
        assert_same(program(functx.remat), program(identity), 8)


REFUSING = {
    "grad": lambda f: functx.grad(f)(X),
    "vmap": lambda f: functx.vmap(f)(X[None]),
    "jvp": lambda f: functx.jvp(f, (X,), (X,)),
    "vmap(grad)": lambda f: functx.vmap(functx.grad(f))(X[None]),
    "no gradient": lambda f: f(X),
}


@pytest.mark.parametrize("way", REFUSING)
def test_gradients_that_torch_refuses_to_retain(way):
    def f(x):
        y = x.sin()
        y.retain_grad()
        return y.sum()

    with pytest.raises(RuntimeError) as expected:
        REFUSING[way](f)
    with pytest.raises(RuntimeError, match=re.escape(str(expected.value).partition("\n")[0])):
        REFUSING[way](functx.remat(f))


class TestIsLeaf:
    def f(self, x, h):
        return x * (1 if h.is_leaf else 2)

    @pytest.mark.parametrize("nested", [False, True])
    def test_of_an_argument_that_is_none(self, nested):
        x = X.clone().requires_grad_()
        f = functx.remat(functx.remat(self.f)) if nested else functx.remat(self.f)
        y, expected = f(x, x * 1), self.f(x, x * 1)
        assert_same(y, expected)
        assert_same(torch.autograd.grad(y.sum(), x), torch.autograd.grad(expected.sum(), x))

    def test_of_others(self):
        x, w = X.clone().requires_grad_(), X.clone()
        for h in (x, w, w * 1):
            y = functx.remat(self.f)(x, h)
            assert_same(y, self.f(x, h))
            assert_same(torch.autograd.grad(y.sum(), x), torch.autograd.grad(self.f(x, h).sum(), x))
        h = x * 1
        for f in (lambda x: self.f(x, h), lambda x: self.f(x, x.sin())):
            assert_same(functx.remat(f)(x), f(x))
