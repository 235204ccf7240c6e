"""Hooks on several results of a region: called in the order in which they are without remat."""

import gc
import weakref

import pytest
import torch
from cases import numbers
from programs import identity
from references import assert_same
from torch.autograd.graph import register_multi_grad_hook

import functx

pytestmark = pytest.mark.usefixtures("no_hooks")


class Two(torch.autograd.Function):
    """Two results of one node of Python."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * 1, x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def jvp(ctx, t):
        return t * 1, t * 2

    @staticmethod
    def backward(ctx, a, b):
        return a + 2 * b


def inner(x, remat):
    return x.sin(), *remat(lambda x: (x.cos(), x.exp(), x.tanh()))(x), x * 3


def nest(x, remat):
    def within(x):
        return x.cos(), *remat(lambda x: (x.exp(), *x.square().unbind()))(x)

    return x.sin(), *remat(within)(x), x * 3


def permuted(x, remat):
    a, b, c = x.sin(), x.cos(), x.exp()
    return c, a, b


def views(x, remat):
    h = x.sin()
    return h[0], h.view(-1), h.mT, x.cos()


def twice(x, remat):
    a, b = x.sin(), x.cos()
    return a, b, a


BODIES = {
    "in sequence": lambda x, remat: (x.sin(), x.cos(), x.exp()),
    "permuted": permuted,
    "of one operation": lambda x, remat: (x * 2).unbind(),
    "some of one operation": lambda x, remat: (x.sin(), *(x * 2).unbind(), x.cos()),
    "of one custom Function": lambda x, remat: (*Two.apply(x)[::-1], x.sin()),
    "of a region inside": inner,
    "of a nest": nest,
    "of regions inside": lambda x, remat: (*(remat(f)(x) for f in (torch.sin, torch.cos)), x * 3),
    "views of one another": views,
    "returned twice": twice,
    "a view of the input first": lambda x, remat: (x[0], x.sin(), x.cos()),
    "a view of the input last": lambda x, remat: (x.sin(), x.cos(), x.view(-1)),
    "the input": lambda x, remat: (x.sin(), x, x.cos()),
    "without history": lambda x, remat: (x.sin(), x.detach(), x.cos(), x > 0),
}


def logs(called, name, factor=None):
    """A hook of results of `unbind`, which torch calls with ``None`` without remat."""

    def hook(g):
        if g is not None:
            called.append(name)
        return None if g is None or factor is None else g * factor

    return hook


WAYS = {
    "plain": lambda loss, x: torch.autograd.grad(loss(x.requires_grad_()), x),
    "grad": lambda loss, x: functx.grad(loss)(x),
    "vmap(grad)": lambda loss, x: functx.vmap(functx.grad(loss))(torch.stack([x, x])),
    "grad(grad)": lambda loss, x: functx.grad(lambda x: functx.grad(loss)(x).sin().sum())(x),
    "jvp(grad)": lambda loss, x: functx.jvp(functx.grad(loss), (x,), (x,)),
}


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("dropped", [None, 1])
def test_hooks_on_results_are_called_in_order(body, way, backwards, dropped):
    """Those of what was made last first; of one operation, as they were hung. In known runs too."""

    def called(remat):
        def loss(x):
            ys = remat(lambda x: BODIES[body](x, remat))(x * 1)
            those = [(i, y) for i, y in enumerate(ys) if y.requires_grad]
            for i, y in those[::-1] if backwards else those:
                y.register_hook(logs(called, i, factor=i + 2))
                y.register_hook(logs(called, "removed")).remove()
                y.register_hook(logs(called, (i, "again")))
            return sum((y * (i + 1)).sum() for i, y in those if i != dropped)

        for _ in range(7 if way in ("plain", "grad") else 1):
            called = []
            gradients = WAYS[way](loss, numbers(3, 3))
        return called, gradients

    (ours, gradients), (expected, right) = called(functx.remat), called(identity)
    assert ours == expected
    assert len(ours) > 2
    assert_same(gradients, right, eps=128)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("mode", ["all", "any"])
@pytest.mark.parametrize("dropped", [None, 1])
def test_a_hook_on_several_results_is_called_once(body, mode, dropped):
    """With all gradients when the last is there, or with the one that comes first."""

    def called(remat):
        x, called = numbers(3, 3).requires_grad_(), []
        ys = [y for y in remat(lambda x: BODIES[body](x, remat))(x * 1) if y.requires_grad]
        register_multi_grad_hook(ys, called.append, mode=mode)
        sum((y * (i + 1)).sum() for i, y in enumerate(ys) if i != dropped).backward()
        (seen,) = called
        return [torch.zeros(()) if g is None else g for g in seen] if mode == "all" else seen

    assert_same(called(functx.remat), called(identity), eps=8)


def test_a_hook_on_several_results_is_called_by_passes_that_reach_some_of_them():
    """Of a power, the gradient of the base does not read the result; it reads nothing of it."""

    def called(remat):
        a, x, called = numbers(3).exp().requires_grad_(), numbers(3).requires_grad_(), []
        y = remat(torch.pow)(a, x)
        z = a * 3

        def hook(gradients):
            called.append([0.0 if g is None else g.sum().item() for g in gradients])

        register_multi_grad_hook([y, z], hook)
        register_multi_grad_hook([y], hook)
        gradient, _ = torch.autograd.grad(y.sum(), (a, x), create_graph=True)
        (gradient.sum() + z.sum()).backward()
        return called

    assert called(functx.remat) == called(identity)


def sines(remat):
    x = numbers(3).requires_grad_()
    return x, list(remat(lambda x: (x.sin(), x.cos(), x.tan(), x * 2))(x))


def left_behind(remat):
    """Results and what leaves otherwise, in turns."""
    called = []

    def loss(x):
        left = []

        def body(x):
            left.append(x.sin())
            y = x.cos()
            left.append(x.exp())
            return y, x * 2

        ys = [*remat(body)(x), *left]
        for i, y in enumerate(ys):
            y.register_hook(logs(called, i))
        return sum(y.sum() for y in ys)

    loss(numbers(3).requires_grad_()).backward()
    functx.grad(loss)(numbers(3))
    return called


def gone(remat):
    """Some that nobody holds."""
    called = []
    x, ys = sines(remat)
    total = ys[1].sum() + ys[2].sum()
    del ys[1], ys[1]
    for i, y in enumerate(ys):
        y.register_hook(logs(called, i))
    (total + sum(y.sum() for y in ys)).backward()
    return called, x.grad


def written_to(remat):
    """Hooks hung before a write see the gradient of what it was, those after that of what it is."""
    called = []
    x, ys = sines(remat)

    def hook(name):
        return lambda g: called.append((name, g.sum().item()))

    ys[1].register_hook(hook("1"))
    ys[0].register_hook(hook("0"))
    for i in (0, 3):
        ys[i].mul_(3)
        ys[i].register_hook(hook(f"{i} after"))
    sum(y.sum() for y in ys).backward()
    return called, x.grad


def after_an_error(remat):
    """A hook that raises, once."""
    called, fails = [], [True]
    x, ys = sines(remat)

    def hook(g):
        if fails:
            raise ValueError(fails.pop())
        called.append("right")

    for i in (0, 2):
        ys[i].register_hook(logs(called, i, factor=2))
    ys[1].register_hook(hook)
    loss = sum(y.sum() for y in ys)
    with pytest.raises(ValueError, match="True"):
        loss.backward(retain_graph=True)
    loss.backward()
    return called, x.grad


def begins_another(remat):
    """A hook that begins a backward pass through the same node."""
    called = []
    x, ys = sines(remat)

    def hook(g):
        if len(called) < 4:
            called.append("begins")
            with torch.enable_grad():
                again = ys[0].sum() + ys[2].sum()
            again.backward(retain_graph=True)

    for i in (0, 2):
        ys[i].register_hook(logs(called, i, factor=2))
    ys[1].register_hook(hook)
    sum(y.sum() for y in ys).backward(retain_graph=True)
    return called, x.grad


def asked_for(remat):
    """Where only gradients of results are asked for, others are not reached."""
    called = []
    _, ys = sines(remat)
    for i, y in enumerate(ys):
        y.register_hook(logs(called, i, factor=2))
    loss = sum(y.sum() for y in ys)
    gradients = torch.autograd.grad(loss, [ys[1], ys[2]])
    return called, *gradients


def retained(remat):
    """A retained gradient is what hooks have made of it."""
    called = []
    _, ys = sines(remat)
    for i, y in enumerate(ys):
        y.retain_grad()
        y.register_hook(logs(called, i, factor=2))
    sum(y.sum() for y in ys).backward()
    return called, *(y.grad for y in ys)


def apart(remat):
    """Nodes of their own: the inputs have hooks, and no result depends on both."""
    called = []
    a, b = (numbers(3, start=n).requires_grad_() * 1 for n in (0.0, 1.0))
    for name, t in (("a", a), ("b", b)):
        t.register_hook(logs(called, name))
    ys = remat(lambda a, b: (lambda c, d, e: (e, c, d))(a.sin(), a.exp(), b.cos()))(a, b)
    for i, y in enumerate(ys):
        y.register_hook(logs(called, i))
    sum(y.sum() for y in ys).backward()
    return called


PROGRAMS = (
    *(left_behind, gone, written_to, after_an_error, begins_another, asked_for, retained, apart),
)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_programs(program):
    assert_same(program(functx.remat), program(identity), eps=8)


@pytest.mark.parametrize(
    "hook", [lambda g: 5, lambda g: g[:1], lambda g: g.float()], ids=["int", "shape", "dtype"]
)
def test_what_hooks_give_is_looked_at(hook):
    """As torch does, in its words."""

    def said(remat):
        _, ys = sines(remat)
        ys[0].register_hook(lambda g: g)
        ys[1].register_hook(hook)
        with pytest.raises((TypeError, RuntimeError)) as error:
            sum(y.sum() for y in ys).backward()
        return str(error.value)

    assert said(functx.remat) == said(identity)
    assert "hook" in said(identity)


def test_hooks_go_with_the_tape():
    """Not when the collector of cycles comes by."""

    class Held:
        pass

    gc.disable()
    try:
        _, ys = sines(functx.remat)
        held = Held()
        for y in ys:
            y.register_hook(lambda g, held=held: None)
        held = weakref.ref(held)
        del ys, y
        assert held() is None
    finally:
        gc.enable()


def test_gradients_go_when_a_hook_has_raised():
    gradients = []
    _, ys = sines(functx.remat)

    def hook(g):
        gradients.append(weakref.ref(g))
        raise ValueError("on purpose")

    ys[0].register_hook(hook)
    for y in ys[1:]:
        y.register_hook(lambda g: None)
    with pytest.raises(ValueError, match="on purpose"):
        sum((y * 2).sum() for y in ys).backward()
    gc.collect()
    (gradient,) = gradients
    assert gradient() is None


def test_one_result_has_torch_s_own_hooks():
    """What hangs on the node is what torch hangs there."""
    x = numbers(3).requires_grad_()
    y = functx.remat(torch.sin)(x)
    y.register_hook(lambda g: g)
    assert y.grad_fn.payload.in_turn is None
    _, ys = sines(functx.remat)
    assert ys[0].grad_fn.payload.in_turn is None
    ys[0].register_hook(lambda g: g)
    assert ys[1].grad_fn.payload.in_turn() is not None
