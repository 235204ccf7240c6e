"""Hooks inside a region that a derivative of a gradient hands its gradient in parts."""

import pytest
import torch
from cases import numbers
from references import assert_same

import functx
from functx._remat._in_parts import Parts

ROUNDINGS = 64  # of sums of parts
X, W = numbers(5, start=-1.0), numbers(5, start=1.0)


def clamped(g):
    return g.clamp(-0.5, 0.5)


def shifted(g):
    return g + 0.25


def normed(g):
    """It changes only what is large, as the whole may be where no part is."""
    return g / g.norm() if g.norm() > 1 else None


def doubled(g):
    return g * 2


def seen(g):
    return None


def on_tensor(h, hook):
    h.register_hook(hook)


def before_node(h, hook):
    def one(gs):
        made = hook(gs[0])
        return None if made is None else (made,)

    h.grad_fn.register_prehook(one)


def after_node(h, hook):
    def one(inputs, outputs):
        made = hook(inputs[0])
        return None if made is None else (made, *inputs[1:])

    h.grad_fn.register_hook(one)


def body_of(hook, hang=on_tensor):
    def body(x, w):
        h = (x * w).sin()
        hang(h, hook)
        return h * h * x + h.exp()

    return body


def second(f, create_graph=False):
    """What flows to `h` comes from the result, and from the gradient."""
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    y = f(x, w)
    g = torch.autograd.grad(y.sin().sum(), [x, w], create_graph=True)
    z = sum((a * (i + 1)).sin().sum() for i, a in enumerate(g)) + (y * y).sum()
    return [*g, *torch.autograd.grad(z, [x, w], create_graph=create_graph)]


def third(f):
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    y = f(x, w).sum()
    found = []
    for _ in range(3):
        g = torch.autograd.grad(y, [x, w], create_graph=True)
        found += g
        y = sum((a * (i + 1)).sin().sum() for i, a in enumerate(g))
    return found


def batched(f):
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    y = f(x, w)
    g = torch.autograd.grad(y.sin().sum(), [x, w], create_graph=True)
    z = torch.stack([(a.sin().sum() + (y * y).sum()) for a in g])
    rows = torch.eye(2, dtype=z.dtype)
    return torch.autograd.grad(z, [x, w], rows, is_grads_batched=True)


def mapped(f):
    """By functorch's vmap over cotangents."""
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    y = f(x, w)
    g = torch.autograd.grad(y.sin().sum(), [x, w], create_graph=True)
    z = torch.stack([(a.sin().sum() + (y * y).sum()) for a in g])

    def pulled_back(row):
        return torch.autograd.grad(z, [x, w], row, retain_graph=True)

    return torch.func.vmap(pulled_back)(torch.eye(2, dtype=z.dtype))


WAYS = [second, third, batched, mapped]
NESTED = {
    "one": functx.remat,
    "inside": lambda f: functx.remat(lambda x, w: functx.remat(f)(x, w) + x),
    "deep": lambda f: functx.remat(lambda x, w: functx.remat(functx.remat(f))(x, w * 2)),
}
PLAIN = {
    "one": lambda f: f,
    "inside": lambda f: lambda x, w: f(x, w) + x,
    "deep": lambda f: lambda x, w: f(x, w * 2),
}


@pytest.mark.parametrize("nested", NESTED)
@pytest.mark.parametrize("hang", [on_tensor, before_node, after_node])
@pytest.mark.parametrize("hook", [clamped, shifted, normed])
def test_what_does_not_add_up_is_an_error(hook, hang, nested):
    body = body_of(hook, hang)
    for _ in range(3):
        with pytest.raises(functx.RematError, match="in parts"):
            second(NESTED[nested](body))


@pytest.mark.parametrize("nested", NESTED)
@pytest.mark.parametrize("hook", [clamped, doubled, seen])
@pytest.mark.parametrize("way", WAYS)
def test_other_ways(way, hook, nested):
    body = body_of(hook)
    if hook is clamped:
        with pytest.raises(functx.RematError, match="in parts"):
            way(NESTED[nested](body))
    else:
        assert_same(way(NESTED[nested](body)), way(PLAIN[nested](body)), ROUNDINGS)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("hang", [on_tensor, before_node, after_node])
@pytest.mark.parametrize("hook", [doubled, seen, torch.neg])
def test_what_adds_up_is_right(hook, hang, create_graph):
    body = body_of(hook, hang)
    assert_same(second(functx.remat(body), create_graph), second(body, create_graph), ROUNDINGS)


@pytest.mark.parametrize("hook", [clamped, shifted, normed])
def test_what_comes_in_one_piece_is_right(hook):
    """Nothing that the gradient is computed from leads to the result."""

    def once(f):
        x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
        g = torch.autograd.grad(f(x, w).sum(), [x, w], create_graph=True)
        return [*g, *torch.autograd.grad(sum(a.sin().sum() for a in g), [x, w])]

    assert_same(once(functx.remat(body_of(hook))), once(body_of(hook)))


def test_several_passes_are_no_parts():
    """As when a pass is repeated, or a body takes gradients inside."""

    def inner(f):
        def body(x, w):
            y = f(x, w)
            a, b = (torch.autograd.grad(y.sum(), [x], retain_graph=True)[0] for _ in range(2))
            return y * a * b

        return body

    region = functx.remat(body_of(clamped))
    ways = ((region, body_of(clamped)), (functx.remat(inner(region)), inner(body_of(clamped))))
    for pair in ways:
        found = []
        for one in pair:
            x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
            y = one(x, w).sum()
            found.append([torch.autograd.grad(y, [x, w], retain_graph=True) for _ in range(3)])
        for again, expected in zip(*found):
            assert_same(again, expected, ROUNDINGS)


def test_who_looks_sees_the_whole_last():
    whole, looked = [], []
    second(body_of(whole.append))
    second(functx.remat(body_of(looked.append)))
    assert_same(looked[-1], whole[-1], ROUNDINGS)


@pytest.mark.parametrize("nested", NESTED)
def test_nothing_is_kept_after_the_pass(nested):
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    y = NESTED[nested](body_of(doubled))(x, w)
    g = torch.autograd.grad(y.sin().sum(), [x, w], create_graph=True)
    seen = []
    add = Parts.add

    def adding(parts, *args):
        add(parts, *args)
        seen.append(parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parts, "add", adding)
        torch.autograd.grad(sum(a.sin().sum() for a in g), [x, w], retain_graph=True)
    assert len(seen) > 1
    assert all(not parts.outermost().so_far for parts in seen)
