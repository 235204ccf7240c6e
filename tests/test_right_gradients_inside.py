"""What a body does about gradients by name: ``.grad``, ``retain_grad``, ``.data``, casts."""

import pytest
import torch
from cases import numbers
from programs import identity
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
    with pytest.raises(functx.RematError, match="Cast the module outside"):
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
