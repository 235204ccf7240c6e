"""What hooks and backwards of custom Functions read, changed since they ran: an error.

A derivative that is taken again, or a replay of a body that takes one itself, runs them again;
torch differentiates what they did. See `_lenient` and `_parts`.
"""

import pytest
import torch
from cases import numbers
from references import assert_same
from torch.autograd import grad

import functx


class Reads:
    """What a hook reads, and how."""

    def __init__(self):
        self.factor, self.flag, self.part = 2.0, True, slice(0, 2)

    def change(self):
        self.factor, self.flag, self.part = 5.0, False, slice(1, 3)

    def number(self, g):
        return g * self.factor

    def constant(self, g):
        return g * torch.tensor(self.factor, dtype=g.dtype)

    def other(self, g):
        return g * 2 if self.flag else g.clone()

    def fewer(self, g):
        return g * 2 if self.flag else g

    def more(self, g):
        return g if self.flag else g * 2

    def indices(self, g):
        mask = torch.zeros_like(g)
        mask[self.part] = 1.0
        return g * mask


class Old(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, hook):
        ctx._hook = hook
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return ctx._hook(g), None


class New(torch.autograd.Function):
    @staticmethod
    def forward(x, hook):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx._hook = inputs[1]

    @staticmethod
    def backward(ctx, g):
        return ctx._hook(g), None


def on_tensor(h, hook):
    h.register_hook(hook)
    return h


def after_node(h, hook):
    h.grad_fn.register_hook(lambda inputs, _: (hook(inputs[0]),))
    return h


def before_node(h, hook):
    h.grad_fn.register_prehook(lambda outputs: (hook(outputs[0]),))
    return h


WAYS = {
    "tensor": on_tensor,
    "after": after_node,
    "before": before_node,
    "old": Old.apply,
    "new": New.apply,
}
READS = ["number", "constant", "other", "fewer", "more", "indices"]


def between_derivatives(remat, body, x, change):
    g = grad(remat(body)(x).sum(), x, create_graph=True)[0]
    change()
    return grad(g.sum(), x)[0]


def between_derivatives_of_a_nest(remat, body, x, change):
    return between_derivatives(remat, lambda x: remat(body)(x * 2).cos(), x, change)


def before_the_third(remat, body, x, change):
    g = grad(remat(body)(x).sum(), x, create_graph=True)[0]
    g = grad(g.sum(), x, create_graph=True)[0]
    change()
    return grad(g.sum(), x)[0]


def before_the_backward(remat, body, x, change):
    y = remat(body)(x).sum()
    change()
    return grad(y, x)[0]


def taken(body, x):
    return grad(body(x).sum(), x, create_graph=True)[0]


def taken_inside(remat, body, x, change):
    return before_the_backward(remat, lambda x: taken(body, x), x, change)


def taken_inside_a_nest(remat, body, x, change):
    inner = remat(lambda x: taken(body, x))
    return before_the_backward(remat, lambda x: inner(x * 1), x, change)


def taken_of_a_region(remat, body, x, change):
    return before_the_backward(remat, lambda x: taken(remat(body), x), x, change)


def taken_twice(remat, body, x, change):
    return before_the_backward(remat, lambda x: taken(lambda x: taken(body, x), x), x, change)


def by_torch_func(remat, body, x, change):
    inner = torch.func.grad(lambda x: body(x).sum())
    return before_the_backward(remat, inner, x, change)


def by_functx(remat, body, x, change):
    inner = functx.grad(lambda x: body(x).sum())
    return before_the_backward(remat, inner, x, change)


def by_functx_of_a_region(remat, body, x, change):
    inner = functx.grad(lambda x: remat(body)(x).sum())
    return before_the_backward(remat, inner, x, change)


def by_vjp(remat, body, x, change):
    def inner(x):
        y, pull_back = torch.func.vjp(body, x)
        return pull_back(torch.ones_like(y))[0]

    return before_the_backward(remat, inner, x, change)


PROGRAMS = [
    between_derivatives,
    between_derivatives_of_a_nest,
    before_the_third,
    taken_inside,
    taken_inside_a_nest,
    taken_of_a_region,
    taken_twice,
    by_torch_func,
    by_functx,
    by_functx_of_a_region,
    by_vjp,
]
BY_TRANSFORMS = [by_torch_func, by_functx, by_functx_of_a_region, by_vjp]


def identity(f):
    return f


def run(program, remat, way, read, changes=True):
    reads = Reads()
    x = numbers(3).requires_grad_()
    hook = getattr(reads, read)
    body = lambda x: WAYS[way](x.sin(), hook).exp()  # noqa: E731
    return program(remat, body, x, reads.change if changes else lambda: None)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_what_they_read_has_changed(program, way, read):
    if way == "old" and program in BY_TRANSFORMS:
        with pytest.raises(RuntimeError):  # of torch's
            run(program, identity, way, read)
        return
    run(program, identity, way, read)
    with pytest.raises(functx.ReplayError, match=r"has changed|changed between|other numbers"):
        run(program, functx.remat, way, read)
    assert_same(
        run(program, functx.remat, way, read, changes=False),
        run(program, identity, way, read, changes=False),
        eps=64,
    )


@pytest.mark.parametrize("program", [between_derivatives, taken_inside])
@pytest.mark.parametrize(("read", "was", "now"), [("number", "2.0", "5.0"), ("fewer", "2", "")])
def test_the_error_says_what_and_where(program, read, was, now):
    with pytest.raises(functx.ReplayError) as caught:
        run(program, functx.remat, "tensor", read)
    message = str(caught.value)
    assert f"Tensor.mul({was})" in message
    assert f"Tensor.mul({now})" in message if now else True
    assert "test_right_read_in_backwards.py" in message if now else True
    assert "A hook" in message or "hooks and backwards of custom Functions" in message


@pytest.mark.parametrize("read", READS)
def test_with_no_check_they_are_not_compared(read):
    run(between_derivatives, lambda f: functx.remat(f, determinism_check="none"), "tensor", read)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda g: torch.ones(len(g), dtype=g.dtype).cumsum(0),
        lambda g: torch.ones_like(g) * 3,
        lambda g: g.new_zeros(len(g)) + 2,
    ],
)
def test_what_is_made_once_may_be_kept(make, nested):
    """A mask that the first backward makes, and that the others find."""
    kept = {}

    def masked(g):
        if len(g) not in kept:
            kept[len(g)] = make(g)
        return g * kept[len(g)]

    def program(remat):
        kept.clear()
        x = numbers(3).requires_grad_()
        body = lambda x: Old.apply(x.sin(), masked).exp()  # noqa: E731
        whole = (lambda x: remat(body)(x * 2).cos()) if nested else body
        return between_derivatives(remat, whole, x, lambda: None)

    assert_same(program(functx.remat), program(identity), eps=64)


@pytest.mark.parametrize("nested", [False, True])
def test_a_hook_that_counts_its_calls(nested):
    """It is called once more by a replay, and so would make something else of the gradient."""
    calls = []

    def counted(g):
        calls.append(1)
        return g * len(calls)

    x = numbers(3).requires_grad_()
    body = lambda x: on_tensor(x.sin(), counted).exp()  # noqa: E731
    program = between_derivatives_of_a_nest if nested else between_derivatives
    with pytest.raises(functx.ReplayError, match="has changed"):
        program(functx.remat, body, x, lambda: None)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_a_hook_that_writes_to_what_is_outside(nested, view):
    """Once a backward pass; a replay of the pullback would write once more."""
    found = []
    for remat in (identity, functx.remat):
        count = torch.zeros(2, dtype=torch.float64)

        def counted(g, count=count):
            (count[:1] if view else count).add_(1)

        inner = remat(lambda x, hook=counted: on_tensor(x.sin(), hook).exp())
        f = remat(lambda x, inner=inner: inner(x * 2).cos()) if nested else inner
        x = numbers(3).requires_grad_()
        y = f(x).sum()
        grad(y, x, retain_graph=True)
        g = grad(y, x, create_graph=True)[0]
        if remat is identity:
            grad(g.sum(), x)
        else:
            with pytest.raises(functx.RematError, match="would be written to once more"):
                grad(g.sum(), x)
        found.append(count)
    assert_same(found[0] - torch.tensor([1.0, 0.0 if view else 1.0]), found[1])


def test_a_gradient_that_a_hook_takes():
    """In the pullback of a region: likewise what the Function that it is taken of reads."""
    reads = Reads()

    def hook(g):
        with torch.enable_grad():
            z = g.detach().requires_grad_()
            found = grad(Old.apply(z.sin(), reads.number).sum(), z)[0]
            z.register_hook(lambda g: g)
            return g * found

    def program(remat, changes):
        reads.__init__()
        body = lambda x: on_tensor(x.sin(), hook).exp()  # noqa: E731
        change = reads.change if changes else lambda: None
        return between_derivatives(remat, body, numbers(3).requires_grad_(), change)

    assert_same(program(functx.remat, False), program(identity, False), eps=64)
    with pytest.raises(functx.ReplayError, match=r"in torch\.autograd\.grad: at"):
        program(functx.remat, True)
