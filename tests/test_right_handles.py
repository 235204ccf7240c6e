"""Handles of hooks that a body hangs: where they are, and what uses them. See `_taken_off`."""

import copy
import pickle
import weakref

import pytest
import torch
from cases import numbers
from programs import identity
from references import assert_same
from right import freed

import functx


def both(run):
    """What ``run(remat)`` gives, with remat and without."""
    assert_same(run(functx.remat), run(identity), eps=256)


@pytest.mark.parametrize("differentiated", [False, True])
def test_in_the_body(differentiated):
    """By a context, or right away: each replay does it by itself, and a gradient there has it."""

    def run(remat):
        called = []

        def body(x):
            h = x.sin()
            h.register_hook(lambda g: called.append("removed") or g * 5).remove()
            with h.register_hook(lambda g: called.append("within") or g * 2):
                if differentiated:
                    (g,) = torch.autograd.grad(h.exp().sum(), x, create_graph=True)
            h.register_hook(lambda g: g * 3)
            return h.exp() * g if differentiated else h.exp()

        x = numbers(4).requires_grad_()
        y = remat(body)(x * 1).sum()
        first = torch.autograd.grad(y, x, retain_graph=True)
        return first, torch.autograd.grad(y, x), called if not differentiated else []

    both(run)


class Watched(torch.nn.Module):
    """It looks at one activation, that of its last call."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(numbers(4))
        self.handle = None
        self.seen = []

    def forward(self, x):
        h = (x * self.weight).sin()
        if self.handle is not None:
            self.handle.remove()
        self.handle = h.register_hook(lambda g: self.seen.append(g.clone()) or g * 2)
        return h.exp()


@pytest.mark.parametrize("nested", [False, True])
def test_by_a_later_call(nested):
    def run(remat):
        model = Watched()
        f = remat(model)
        if nested:
            f = remat(lambda x, inner=f: inner(x).cos())
        xs = [(numbers(4) * k).requires_grad_() for k in (1, 2, 3)]
        gradients = [torch.autograd.grad(f(x).sum(), x)[0] for x in xs]
        ys = [f(x).sum() for x in xs]
        gradients += torch.autograd.grad(sum(ys), xs, retain_graph=True)
        model.handle.remove()
        return gradients, torch.autograd.grad(sum(ys), xs), model.seen

    both(run)


@pytest.mark.parametrize("removed", [False, True])
def test_on_a_leaf_of_the_body(removed):
    def run(remat):
        called, handles = [], []

        def body(x):
            p = torch.ones(4, dtype=torch.float64).requires_grad_()
            handles.append(p.register_hook(lambda g: called.append(g)))
            return (p * x).sin()

        x = numbers(4).requires_grad_()
        y = remat(body)(x).sum()
        y.backward(retain_graph=True)
        if removed:
            handles[0].remove()
        y.backward()
        return x.grad, called

    both(run)


@pytest.mark.parametrize("loop", ["scan", "while"])
@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize("which", [(), (0,), (2, 5), range(7)])
def test_in_a_loop(loop, slots, which):
    def run(functions):
        scan, repeat = functions
        called, handles = [], {}

        def step(state):
            n, c = state
            h = c.sin()
            hook = lambda g: called.append(n) or g * (n + 2)  # noqa: E731
            handles.setdefault(n, h.register_hook(hook))
            return n + 1, h * 1.5

        x = numbers(3).requires_grad_()
        y = (scan if loop == "scan" else repeat)(step, (0, x), 7)[1].sum()
        for n in which:
            handles[n].remove()
        return torch.autograd.grad(y, x), called

    def plain(step, state, n):
        for _ in range(n):
            state = step(state)
        return state

    def scan(step, state, n):
        return functx.remat_loop(step, state, n, slots=slots)

    def repeat(step, state, n):
        return functx.remat_loop(step, state, cond=lambda s: s[0] < n, slots=slots)

    assert_same(run((scan, repeat)), run((plain, plain)), eps=64)


@pytest.mark.parametrize("how", ["register_hook", "register_prehook"])
@pytest.mark.parametrize("nested", [False, True])
def test_on_a_node_from_outside(how, nested):
    """It hangs there from the first run on, and replays hang it no further time."""

    def run(remat):
        called = []
        x = numbers(3).requires_grad_()
        t = x.cos()
        node = t.grad_fn

        def body(t):
            h = t.sin()
            getattr(h.grad_fn, how)(lambda *_: called.append("h"))
            getattr(h.grad_fn, how)(lambda *_: called.append("h again"))
            getattr(node, how)(lambda *_: called.append("t"))
            return h

        y = remat((lambda t: remat(body)(t) * 1) if nested else body)(t).sum()
        for _ in range(3):
            y.backward(retain_graph=True)
        return x.grad, called

    both(run)


def test_copies_of_handles():
    """They take off what hangs nowhere, but for ``copy.copy``, which is the same handle again."""

    def run(remat):
        model, x = Watched(), numbers(4).requires_grad_()
        y = remat(model)(x).sum()
        for _ in range(2):
            other = copy.deepcopy(copy.deepcopy(model.handle))
            other = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(other))))
            other.remove()
            gradients = torch.autograd.grad(y, x, retain_graph=True)
        if remat is not identity:  # where the dict of hooks is there, which copies copy
            copy.copy(model.handle).remove()
            assert_same(torch.autograd.grad(y, x, retain_graph=True)[0] * 2, gradients[0], eps=4)
        del y
        copy.deepcopy(copy.deepcopy(model.handle))
        return gradients

    both(run)


def test_after_a_gradient_is_accumulated_is_refused():
    """A replay is pulled back to the leaf, and accumulates nothing."""

    def body(x):
        p = torch.ones(4, dtype=torch.float64).requires_grad_()
        p.register_post_accumulate_grad_hook(lambda p: None)
        return (p * x).sin()

    x = numbers(4).requires_grad_()
    for f in (body, lambda x: functx.remat(body)(x) * 1):
        with pytest.raises(functx.RematError, match=r"register_post_accumulate_grad_hook"):
            functx.remat(f)(x)


def test_after_a_gradient_is_accumulated_in_the_body():
    def run(remat):
        called, handles = [], []

        def body(x):
            p = torch.ones(4, dtype=torch.float64).requires_grad_()
            hook = lambda p: called.append(p.grad.tolist())  # noqa: E731
            handles.append(p.register_post_accumulate_grad_hook(hook))
            p.square().sum().backward()
            return x.sin() * p.grad

        x = numbers(4).requires_grad_()
        y = remat(body)(x).sum()
        handles[0].remove()
        return torch.autograd.grad(y, x), torch.tensor(called[:1])

    both(run)


@pytest.mark.parametrize("nested", [False, True])
def test_nothing_is_left_behind(nested):
    """Neither after the forward, of what hooks close over, nor after the last backward."""

    def run(held):
        x, handles = numbers(3).requires_grad_(), {}

        def body(x):
            h = x.sin()
            kept = h.detach().exp()
            held.append(weakref.ref(kept))
            handles.setdefault("h", h.register_hook(lambda g: g * kept))
            return h.exp()

        y = functx.remat((lambda x: functx.remat(body)(x) * 2) if nested else body)(x)
        assert held[-1]() is None
        (hook,) = (d() for d in handles["h"].extra_dict_ref[-1:])
        for _ in range(5):
            torch.autograd.grad(y.sum(), x, retain_graph=True)
            assert len(hook) <= 2 + nested  # the first handle, and those of the latest replay
        assert not any(ref() is not None for ref in held)
        held += [weakref.ref(y.grad_fn), weakref.ref(hook)]

    refs = []
    freed(lambda: run(refs), refs)
