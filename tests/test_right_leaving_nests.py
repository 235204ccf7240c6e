"""What leaves a region in a nest, and shares a node with what the region around it returns."""

import pytest
import torch
from cases import numbers
from known import KNOWN
from programs import identity
from references import assert_same, no_garbage_collection
from right import right_or_raises

import functx
from functx import checkpoint_policies as cp
from functx._remat import _escape

pytestmark = pytest.mark.usefixtures("no_hooks")

X = numbers(4)


def everything(f):
    return functx.remat(f, policy=cp.everything_saveable)


REMATS = (functx.remat, everything)


def wrapped(remat, f, depth):
    for _ in range(depth):
        f = remat(lambda x, f=f: f(x))
    return f


def left_inside(remat, depth):
    """The inner region stores what it computes its result from; those around hand that on."""
    box = []

    def inner(x):
        h = x.tanh()
        box.append(h)
        return (h * h).sum()

    return wrapped(remat, remat(inner), depth), box


def left_around(remat, depth):
    """The inner region returns both; the one around it stores one of them."""
    box = []

    def inner(x):
        h = x.tanh()
        return h, (h * h).sum()

    inside = remat(inner)

    def outer(x):
        h, y = inside(x)
        box.append(h)
        return y

    return wrapped(remat, remat(outer), depth - 1), box


def left_twice(remat, depth):
    """Two regions inside, of which the second one reads what the first one has stored."""
    box = []

    def first(x):
        box.append(x.tanh())
        return box[-1] * 2

    second = remat(lambda h: (h * h).sum())
    first = remat(first)

    def outer(x):
        y = first(x)
        return second(box[-1]) + y.sum()

    return wrapped(remat, remat(outer), depth - 1), box


KINDS = (left_inside, left_around, left_twice)


def hooked(x, y, h):
    h.register_hook(lambda g: g * 3)
    y.backward()
    return x.grad


def hooked_and_used(x, y, h):
    h.register_hook(lambda g: g * 3)
    (y + h.sum()).backward()
    return x.grad


def asked(x, y, h):
    return torch.autograd.grad(y, h, allow_unused=True)


def created(x, y, h):
    return torch.autograd.grad(y + (h**3).sum(), h, create_graph=True)


def retained(x, y, h):
    h.retain_grad()
    y.backward()
    return h.grad


LOOKS = (hooked, hooked_and_used, asked, created, retained)


@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("look", LOOKS)
def test_a_part_of_its_gradient_is_an_error(look, kind, depth, remat):
    def run(f, box):
        x = X.clone().requires_grad_()
        box.clear()
        y = f(x)
        return look(x, y, box[0])

    run(*kind(identity, depth))
    f, box = kind(remat, depth)
    for _ in range(KNOWN + 1):
        with pytest.raises(functx.RematError, match="a further region"):
            run(f, box)


@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transform", ["grad", "torch's grad", "vmap of grad"])
def test_under_transforms(transform, kind, remat):
    def program(remat, hook):
        f, box = kind(remat, 1)

        def loss(x):
            box.clear()
            y = f(x)
            if hook:
                box[0].register_hook(lambda g: g * 3)
            return y + (box[0] ** 3).sum()

        if transform == "vmap of grad":
            return functx.vmap(functx.grad(loss))(torch.stack([X, -X]))
        return (functx if transform == "grad" else torch.func).grad(loss)(X)

    assert_same(program(remat, False), program(identity, False), eps=4)
    assert right_or_raises(lambda r: program(identity if r is identity else remat, True))


def siblings(remat, look):
    """Two that leave, neither computed from the other."""
    box = []

    def inner(x):
        box.append(x.tanh())
        box.append(x.exp())
        return x.sin().sum()

    x = X.clone().requires_grad_()
    y = wrapped(remat, remat(inner), 1)(x)
    if look is created:
        y = y + box[1].sum()
    return look(x, y, box[0]) if look is not asked else None


@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("look", LOOKS)
def test_what_is_whole_is_right(look, remat):
    """No result is computed from it, though they share a node."""
    assert_same(siblings(remat, look), siblings(identity, look), eps=4)


class Recurrent(torch.nn.Module):
    """Stores its state, from which the next call goes on."""

    def forward(self, x):
        self.state = x.tanh() + self.state
        return self.state.sin().sum()


def as_an_attribute(remat):
    module = Recurrent()
    f = wrapped(remat, remat(module), 1)

    def loss(x):
        module.state = 0
        return sum(f(x * i) for i in range(1, 4)) + module.state.sum()

    return loss


def in_a_dict_of_a_list(remat):
    log = []

    def inner(x):
        log.append({"h": (x.sin(), 1)})
        return log[-1]["h"][0].exp().sum()

    f = wrapped(remat, remat(inner), 2)

    def loss(x):
        log.clear()
        return sum(f(x * i) for i in range(1, 4)) + sum(one["h"][0].sum() for one in log)

    return loss


@pytest.mark.parametrize("transformed", [False, True])
@pytest.mark.parametrize("kind", [as_an_attribute, in_a_dict_of_a_list])
def test_what_is_found_where_it_was_stored_is_not_looked_for_in_cycles(
    kind, transformed, monkeypatch
):
    """The garbage collector takes as long as thousands of operations."""
    collected = []
    monkeypatch.setattr(_escape.gc, "collect", lambda *a: collected.append(a))

    def program(remat):
        loss = kind(remat)
        if transformed:
            return functx.vmap(functx.grad(loss))(torch.stack([X, -X]))
        x = X.clone().requires_grad_()
        return torch.autograd.grad(loss(x), x)

    assert_same(program(functx.remat), program(identity), eps=8)
    assert collected == []


def test_garbage_in_a_cycle_is_still_told_from_what_left(monkeypatch):
    """What is in no attribute or container may be held by nobody."""
    collected = []
    collect = _escape.gc.collect
    monkeypatch.setattr(_escape.gc, "collect", lambda *a: collected.append(a) or collect(*a))

    def inner(x):
        cycle = [x.sin()]
        cycle.append(cycle)
        return cycle[0].exp().sum()

    def program(remat):
        x = X.clone().requires_grad_()
        return torch.autograd.grad(wrapped(remat, remat(inner), 1)(x), x)

    with no_garbage_collection():
        assert_same(program(functx.remat), program(identity), eps=4)
    assert collected


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("how", ["argument", "capture"])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("transform", [False, True])
def test_an_argument_that_is_written_to_and_stored(depth, how, first, read, transform):
    """What is computed from what was stored has a derivative, also around a nest."""

    def run(remat):
        def loss(x, v):
            box, h = [], x * 3

            def body(v, h=h):
                if first:
                    box.append(h)
                h.mul_(2)
                if not first:
                    box.append(h)
                return v * h if read else v * 1

            f = remat(body)
            for _ in range(depth - 1):
                f = remat(lambda *a, f=f: f(*a))
            y = f(v, h) if how == "argument" else f(v)
            return y.sum() + box[0].square().sum()

        x, v = numbers(3), numbers(3, start=1.0)
        if transform:
            return functx.grad(loss, (0, 1))(x, v)
        x, v = x.requires_grad_(), v.requires_grad_()
        for _ in range(5):
            loss(x, v).backward()
        return x.grad, v.grad

    if transform and how == "argument":
        with pytest.raises(functx.RematError, match="leaves behind"):
            run(functx.remat)
        return
    assert_same(run(functx.remat), run(identity), eps=16)


@pytest.mark.parametrize(
    "transform", [identity, functx.grad, lambda f: functx.vmap(functx.grad(f))]
)
def test_a_view_that_a_stored_node_has_saved_is_refused(transform):
    """What a tape holds can't become a result, and must not be a constant."""

    def loss(x):
        box, nodes = [], []

        def body(x):
            h = x * 2
            box.append(h[:1])
            nodes.append(box[0].sin().grad_fn)
            return h.cos()

        return functx.remat(body)(x).sum() + box[0].sum()

    x = X.reshape(2, 2).requires_grad_(transform is identity)
    with pytest.raises(functx.RematError, match=r"something beside Python holds.*its \.detach"):
        transform(loss)(x)
