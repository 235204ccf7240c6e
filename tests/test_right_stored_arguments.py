"""An argument that a body stores: ``self.last = x``, a list of skip connections."""

import pytest
import torch
from cases import numbers
from known import KNOWN, Calls
from programs import identity
from references import assert_same
from right import right_or_raises
from torch import nn

import functx
from functx import checkpoint_policies as cp

pytestmark = pytest.mark.usefixtures("no_hooks")

X, W = numbers(4), numbers(4, start=0.3)


def everything(f):
    return functx.remat(f, policy=cp.everything_saveable)


def nested(f):
    inner = functx.remat(f)
    return functx.remat(lambda *args, **named: inner(*args, **named))


def within_two(f):
    return nested(functx.remat(f))


REMATS = (functx.remat, everything, nested, within_two)


def leaves(*tensors):
    return [t.clone().requires_grad_() for t in tensors]


def backward(loss):
    x, w = leaves(X, W)
    loss(x, w).backward()
    return x.grad, w.grad


def created(loss):
    x, w = leaves(X, W)
    gs = torch.autograd.grad(loss(x, w), [x, w], create_graph=True, allow_unused=True)
    total = sum((g * g).sum() for g in gs if g is not None)
    return gs, torch.autograd.grad(total, [x, w], allow_unused=True, materialize_grads=True)


def frozen(loss):
    (x,) = leaves(X)
    return torch.autograd.grad(loss(x, W), x)


WAYS = {
    "backward": backward,
    "computed": lambda f: backward(lambda x, w: f(x * 2, w * 3)),
    "autograd.grad": lambda f: torch.autograd.grad(f(*(ts := leaves(X, W))), ts, allow_unused=True),
    "create_graph": created,
    "w frozen": frozen,
    "grad": lambda f: functx.grad(f)(X, W),
    "grad of both": lambda f: functx.grad(f, (0, 1))(X, W),
    "torch's grad": lambda f: torch.func.grad(f, (0, 1))(X, W),
    "vmap of grad": lambda f: functx.vmap(functx.grad(f, (0, 1)))(
        torch.stack([X, W]), torch.stack([W, X])
    ),
    "grad of grad": lambda f: functx.grad(lambda x: functx.grad(f)(x, W).sin().sum())(X),
}

# What is computed, where no derivative flows to the argument that is stored, and where one does.
BODIES = {
    "other": lambda x, w: w * 1,
    "detached": lambda x, w: w * x.detach(),
    "compared": lambda x, w: w * (x > 0.2),
    "of its shape": lambda x, w: w.view(x.shape) * 1,
    "two": lambda x, w: (w * 1, w.sin()),
    "read": lambda x, w: x.sin() * w,
}


def appended(remat, body):
    box = []

    def f(x, w):
        box.append(x)
        return BODIES[body](x, w)

    f = remat(f)

    def loss(x, w):
        box.clear()
        y = f(x, w)
        y = sum(y) if isinstance(y, tuple) else y
        return y.sum() + (box.pop() ** 2).sum()

    return loss


@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("way", WAYS)
def test_it_has_its_gradient_in_each_run(way, body, remat):
    loss = appended(remat, body)
    expected = WAYS[way](appended(identity, body))
    for _ in range(KNOWN + 2 if remat in (functx.remat, nested) else 1):
        assert_same(WAYS[way](loss), expected, eps=8)


class Layer(nn.Module):
    def forward(self, x, w):
        self.last = x
        return w * 1


def of_a_dict(x, *, w):
    of_a_dict.box.append((x, {"w": w}))
    return x.sin()


@pytest.mark.parametrize("remat", REMATS)
def test_wherever_it_is_stored(remat):
    def program(remat):
        layer = Layer()
        x, w = leaves(X, W)
        y = remat(layer)(x * 1, w)
        (y.sum() + (layer.last**2).sum()).backward()
        of_a_dict.box = []
        v, u = leaves(X, W)
        y = remat(of_a_dict)(v, w=u)
        (y.sum() + (of_a_dict.box[0][1]["w"] ** 2).sum()).backward()
        return x.grad, w.grad, v.grad, u.grad

    assert_same(program(remat), program(identity), eps=4)


@pytest.mark.parametrize("remat", REMATS)
def test_skip_connections(remat):
    """The encoder stores what it is given, the decoder adds it."""

    def program(remat):
        skips = []

        def down(x, c):
            skips.append(x)
            return c.tanh()

        x, c = leaves(X, W)
        (remat(down)(x, c) + skips.pop()).sum().backward()
        return x.grad, c.grad

    assert_same(program(remat), program(identity), eps=4)


def hooked(x, y, stored):
    stored.register_hook(lambda g: g * 3)
    y.sum().backward()
    return x.grad


def both_used(x, y, stored):
    stored.register_hook(lambda g: g * 3)
    (y.sum() + (stored**2).sum()).backward()
    return x.grad


def asked(x, y, stored):
    return torch.autograd.grad(y.sum(), stored, allow_unused=True)


def retained(x, y, stored):
    stored.retain_grad()
    (y.sum() + stored.sum()).backward()
    return stored.grad


LOOKS = [hooked, both_used, asked, retained]


@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("look", LOOKS)
def test_it_is_the_callers_own(look, leaf, remat):
    def program(remat):
        box = []

        def f(x):
            box.append(x)
            return x.sin()

        (x0,) = leaves(X)
        x = x0 if leaf else x0 * 1
        y = remat(f)(x)
        assert box[0] is x
        return look(x0, y, box[0])

    assert_same(program(remat), program(identity), eps=4)


class Owner:
    __slots__ = ("slot",)


PLACES = {
    "list": lambda box, x: box.append(x),
    "dict": lambda box, x: box.append({"x": x}),
    "tuple": lambda box, x: box.append((1, (x, "x"))),
    "object": lambda box, x: box.append(type("Of", (), {})()) or setattr(box[-1], "x", x),
    "slot": lambda box, x: box.append(Owner()) or setattr(box[-1], "slot", x),
    "set": lambda box, x: box.append({x}),
    "cell": lambda box, x: box.append(lambda: x),
    "itself": lambda box, x: box.append([x, box]),
}


def stored_in(box):
    found = box[0]
    if isinstance(found, torch.Tensor):
        return found
    if isinstance(found, dict):
        return found["x"]
    if isinstance(found, (tuple, set)):
        return [*found][-1] if isinstance(found, set) else found[1][0]
    if isinstance(found, list):
        return found[0]
    if callable(found):
        return found()
    return getattr(found, "slot", None) if hasattr(found, "slot") else found.x


@pytest.mark.parametrize("transformed", [False, True])
@pytest.mark.parametrize("remat", [functx.remat, nested])
@pytest.mark.parametrize("place", PLACES)
def test_it_is_found_where_it_was_put(place, remat, transformed):
    def program(remat):
        box = []

        def f(x, w):
            PLACES[place](box, x)
            return w * x.sin()

        f = remat(f)

        def loss(x, w):
            box.clear()
            x = x * 1
            y = f(x, w)
            assert stored_in(box) is x
            stored_in(box).register_hook(lambda g: g * 3)
            return (y + stored_in(box) ** 2).sum()

        if transformed:
            return functx.vmap(functx.grad(loss, (0, 1)))(torch.stack([X, W]), torch.stack([W, X]))
        return backward(loss)

    for _ in range(KNOWN + 1):
        assert_same(program(remat), program(identity), eps=4)


@pytest.mark.parametrize("way", ["hessian", "jvp", "jacfwd of grad"])
@pytest.mark.parametrize("body", BODIES)
def test_it_has_its_tangent(body, way):
    def program(remat):
        f = appended(remat, body)
        if way == "hessian":
            return functx.hessian(f)(X, W)
        if way == "jvp":
            return functx.jvp(f, (X, W), (W, X))
        return functx.jacfwd(functx.grad(f))(X, W)

    assert_same(program(functx.remat), program(identity), eps=16)


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("remat", REMATS)
def test_where_it_is_not_found_it_has_its_gradient_and_looking_is_an_error(look, remat):
    def stored(remat):
        box = []

        def f(x, w):
            box.append(frozenset([x]))
            return x.sin() * w

        x, w = leaves(X, W)
        y = remat(f)(x * 1, w)
        (held,) = box[0]
        return x, y, held

    def used(remat):
        x, y, held = stored(remat)
        (y.sum() + (held**2).sum()).backward()
        return x.grad

    assert_same(used(remat), used(identity), eps=4)
    # In a nest it has left the region inside, as what that computes from has.
    with pytest.raises(functx.RematError, match=r"where functx does not find it|another one"):
        look(*stored(remat))


@pytest.mark.parametrize("look", LOOKS)
def test_what_was_written_to_is_looked_at_or_raises(look):
    def program(remat):
        box = []

        def f(x):
            box.append(x.mul_(2))
            return x.sin()

        (x,) = leaves(X)
        y = remat(f)(x * 1)
        return look(x, y, box[0])

    right_or_raises(program)


class Skipping(nn.Module):
    def forward(self, x):
        self.skip = x
        return x.sin()


def test_runs_that_store_it_are_known():
    """Nothing leaves the region, so it costs no more than one that stores nothing."""
    layer = Skipping()
    calls = Calls(layer)

    def run(region):
        (x,) = leaves(X)
        (region(x) + layer.skip).sum().backward()
        return x.grad

    for _ in range(KNOWN):
        calls.replays(run)
    replays, gradient = calls.replays(run)
    assert replays == 0
    assert_same(gradient, X.cos() + 1, eps=2)


@pytest.mark.parametrize("remat", REMATS)
def test_what_is_stored_twice_is_one(remat):
    class Stored:
        pass

    o = Stored()

    def f(x):
        o.a = o.b = pair = x, 1
        o.c = [pair, pair]
        return x.sin()

    region = remat(f)
    for _ in range(7):
        x, _ = leaves(X, W)
        given = x * 1
        loss = region(given).sum() + o.b[0].sum()
        assert o.a is o.b is o.c[0] is o.c[1]
        assert o.a[0] is given
        loss.backward()
        assert_same(x.grad, X.cos() + 1)
