"""Hooks that a body hangs on what it makes, taken off by their handles later. See `_taken_off`."""

import pytest
import torch
from cases import numbers
from programs import identity
from references import assert_same
from torch.autograd.graph import register_multi_grad_hook

import functx


def on_tensor(h, hook):
    return h.register_hook(hook)


def on_several(h, hook):
    def called(gradients):
        for g in gradients:
            hook(g)

    return register_multi_grad_hook([h.clone(), h], called)


def on_any(h, hook):
    return register_multi_grad_hook([h], hook, mode="any")


def after_node(h, hook):
    def called(given, _):
        changed = hook(given[0])
        return None if changed is None else (changed, *given[1:])

    return h.grad_fn.register_hook(called)


def before_node(h, hook):
    def called(given):
        changed = hook(given[0])
        return None if changed is None else (changed, *given[1:])

    return h.grad_fn.register_prehook(called)


HANG = {f.__name__: f for f in (on_tensor, on_several, on_any, after_node, before_node)}


def plain(x, hang, remat):
    h = x.sin()
    hang(h, 0)
    hang(h, 1)
    return h.exp()


def on_the_result(x, hang, remat):
    h = x.sin()
    y = h.exp()
    hang(y, 0)
    hang(h, 1)
    return y


def inside(x, hang, remat):
    def inner(x):
        h = x.sin()
        hang(h, 0)
        return h.exp()

    y = remat(inner)(x * 2)
    hang(y, 1)
    return y.cos()


def deep(x, hang, remat):
    def innermost(x):
        h = x.sin()
        hang(h, 0)
        return h * h

    def inner(x):
        y = remat(innermost)(x * 3)
        hang(y, 1)
        return y.exp()

    return remat(inner)(x).cos()


def differentiated(x, hang, remat):
    """It takes a gradient itself, by way of the hooks."""
    h = x.sin()
    hang(h, 0)
    hang(h, 1)
    (g,) = torch.autograd.grad(h.exp().sum(), x, create_graph=True)
    return g * h.square()


def handed_on(x, hang, remat):
    """The region inside hangs one on what that around it has made."""

    def inner(h):
        hang(h, 0)
        return h.exp()

    h = x.sin()
    y = remat(inner)(h)
    hang(h, 1)
    return y * h


BODIES = {f.__name__: f for f in (plain, on_the_result, inside, deep, differentiated, handed_on)}
# (The node of a region has other inputs than that of what it gives.)
NOT = {"inside": ["after_node"], "deep": ["after_node"], "handed_on": [*HANG][1:]}
PAIRS = [(body, how) for body in BODIES for how in HANG if how not in NOT.get(body, ())]
REMOVED = {"none": (), "first": (0,), "second": (1,), "both": (0, 1)}


class Program:
    """A region whose handles leave it, each under its number, as the first run has hung them."""

    def __init__(self, remat, body, how, *, most=3):
        self.called, self.handles = [], {}
        self._remat, self._body, self._how, self._most = remat, BODIES[body], HANG[how], most

    def hook(self, n):
        def hook(g):
            if g is None:  # a result of the region is cut off there: `_read_results`
                return None
            self.called.append(n)
            if self._how in (on_several, on_any):
                return None
            return g.clamp(-self._most, self._most) * (n + 2)

        return hook

    def hang(self, h, n):
        handle = self._how(h, self.hook(n))
        self.handles.setdefault(n, handle)

    def __call__(self, x):
        y = self._remat(lambda x: self._body(x, self.hang, self._remat))(x * 1)
        return (y * y).sum()

    def remove(self, which):
        for n in which:
            self.handles[n].remove()


def both(run, eps=256):
    """What ``run(remat)`` gives, with remat and without."""
    assert_same(run(functx.remat), run(identity), eps)


@pytest.mark.parametrize("which", REMOVED)
@pytest.mark.parametrize(("body", "how"), PAIRS)
def test_between_forward_and_backward(body, how, which):
    """And between two backward passes, once all, and once the code could be known."""

    def run(remat, times):
        for _ in range(times):
            program, x = Program(remat, body, how), numbers(4).requires_grad_()
            y = program(x)
            forward = len(program.called)
            gradients = [torch.autograd.grad(y, x, retain_graph=True)]
            program.remove(REMOVED[which])
            gradients.append(torch.autograd.grad(y, x, retain_graph=True))
            before = len(program.called)
            program.remove((0, 1))
            gradients.append(torch.autograd.grad(y, x))
            called = program.called if body != "differentiated" else []
        return gradients, called, (before > forward)

    for times in (1, 6):
        both(lambda remat, times=times: run(remat, times))


WAYS = {
    "grad": lambda f, x: functx.grad(f)(x),
    "vmap(grad)": lambda f, x: functx.vmap(functx.grad(f))(torch.stack([x, x * 2])),
    "grad(grad)": lambda f, x: functx.grad(lambda x: functx.grad(f)(x).sin().sum())(x),
    "jvp(grad)": lambda f, x: functx.jvp(functx.grad(f), (x,), (x.cos(),)),
}


@pytest.mark.parametrize("which", REMOVED)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("body", BODIES)
def test_in_transforms(body, way, which):
    def run(remat):
        program = Program(remat, body, "on_tensor")

        def loss(x):
            y = program(x)
            program.remove(REMOVED[which])
            program.handles.clear()
            return y

        return WAYS[way](loss, numbers(4))

    both(run)


@pytest.mark.parametrize("then", REMOVED)
@pytest.mark.parametrize("which", REMOVED)
@pytest.mark.parametrize("body", BODIES)
def test_a_further_derivative(body, which, then):
    """What was hung in the first backward pass has changed its result, taken off later or not.

    (What comes to a tensor inside of a region from several passes comes in parts: hooks add up.)
    """

    def run(remat):
        program, x = Program(remat, body, "on_tensor", most=1e9), numbers(4).requires_grad_()
        y = program(x)
        program.remove(REMOVED[which])
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        program.remove(REMOVED[then])
        (second,) = torch.autograd.grad(g.sin().sum(), x, create_graph=True)
        program.remove((0,))
        third = torch.autograd.grad(second.sin().sum(), x, retain_graph=True)
        program.remove((1,))
        last = torch.autograd.grad(second.sin().sum(), x, retain_graph=True)
        return g, second, third, last, torch.autograd.grad(y, x)

    both(run, eps=1e6)


@pytest.mark.parametrize("how", ["on_tensor", "before_node"])
@pytest.mark.parametrize("by", ["itself", "an earlier one", "the forward's"])
@pytest.mark.parametrize("nested", [False, True])
def test_during_a_backward_pass(how, by, nested):
    """By a hook: itself, or another one that would be called later in the same pass."""

    def run(remat, create_graph=False):
        called, first = [], {}

        def body(x):
            h = x.sin()
            y = h.exp()

            def hook(g):
                called.append("h")
                if by == "itself":
                    handle.remove()
                return g * 2

            def earlier(g):
                called.append("y")
                if by == "an earlier one":
                    handle.remove()
                elif by == "the forward's":
                    first["h"].remove()

            handle = HANG[how](h, hook)
            first.setdefault("h", handle)
            HANG[how](y, earlier)
            return y.cos()

        f = (lambda x: remat(body)(x * 1).cos()) if nested else body
        x = numbers(4).requires_grad_()
        y = remat(f)(x * 1).sum()
        passes = []
        for _ in range(3):
            passes += torch.autograd.grad(y, x, retain_graph=True, create_graph=create_graph)
        if not create_graph:
            return passes, called
        return passes, [torch.autograd.grad(g.sum(), x, retain_graph=True) for g in passes]

    both(run)
    both(lambda remat: run(remat, create_graph=True))


@pytest.mark.parametrize("kept", ["checkpoint", "policy", "values", "debug"])
@pytest.mark.parametrize("which", REMOVED)
def test_other_kinds_of_regions(kept, which):
    options = {
        "policy": {"policy": functx.checkpoint_policies.dots_saveable},
        "values": {"determinism_check": "values"},
        "debug": {"debug": True},
    }

    def region(f):
        if kept == "checkpoint":
            return lambda x: functx.checkpoint(f, x, use_reentrant=False)
        return functx.remat(f, **options[kept])

    def run(remat):
        program, x = Program(remat, "inside", "on_tensor"), numbers(4).requires_grad_()
        y = program(x)
        program.remove(REMOVED[which])
        return torch.autograd.grad(y, x), program.called

    assert_same(run(region), run(identity), eps=64)


def test_another_number_of_hooks_is_an_error():
    """With ``determinism_check="none"`` nobody else compares what a replay does."""
    x, handles, more = numbers(3).requires_grad_(), [], []

    def body(x):
        h = x.sin()
        hung = [h.register_hook(lambda g: g * 2) for _ in range(2 + len(more))]
        if not more:
            handles.extend(hung)
        return h.exp()

    y = functx.remat(body, determinism_check="none")(x).sum()
    more.append(1)
    torch.autograd.grad(y, x, retain_graph=True)
    handles[0].remove()
    with pytest.raises(functx.RematError, match="hangs 3 hooks where the forward hung 2"):
        torch.autograd.grad(y, x)


@pytest.mark.parametrize("hang", [after_node, before_node])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_hooks_on_nodes_are_counted(nested, before, hang):
    """Those on nodes are no operations: their number tells."""
    x, hangs = numbers(3).requires_grad_(), [before]

    def body(x):
        h = x.sin()
        if hangs[0]:
            hang(h, lambda g: g * 2)
        return h.exp()

    y = functx.remat((lambda x: functx.remat(body)(x) * 2) if nested else body)(x)
    hangs[0] = not before
    with pytest.raises(functx.ReplayError, match=f"hangs {2 - before - 1} hooks where"):
        torch.autograd.grad(y.sum(), x)
