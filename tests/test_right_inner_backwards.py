"""What code reads that a backward inside of a region runs: hooks, custom Functions, unpacking."""

import pytest
import torch
from cases import numbers
from programs import identity
from references import assert_same
from torch import nn
from torch.autograd import Function
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks

import functx
from functx import _torch
from functx._errors import ReplayError

X = numbers(3)


def scaled(read):
    """A custom Function whose backward multiplies by what ``read`` gives."""

    class Scaled(Function):
        @staticmethod
        def forward(x):
            return x * 1

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, g):
            return g * read()

    return Scaled.apply


def hook(z, read):
    h = z.sin()
    h.register_hook(lambda g: g * read())
    return h


def node_hook(z, read):
    h = z.sin()
    h.grad_fn.register_hook(lambda inputs, outputs: (inputs[0] * read(),))
    return h


def node_prehook(z, read):
    h = z.sin()
    h.grad_fn.register_prehook(lambda outputs: (outputs[0] * read(),))
    return h


def function(z, read):
    return scaled(read)(z.sin())


def module_hook(z, read):
    layer = nn.Tanh()
    layer.register_full_backward_hook(lambda m, inputs, outputs: (inputs[0] * read(),))
    return layer(z)


def many(z, read):
    h, k, found = z.sin(), z.cos(), []
    register_multi_grad_hook((h, k), lambda gs: found.append(gs[0] * read()))
    k.register_hook(lambda g: g * 1)
    z.register_hook(lambda g: g + found[0])
    return h * k


def unpacked(z, read):
    with saved_tensors_hooks(lambda t: t, lambda t: t * read()):
        return z.sin()


def accumulated(z, read):
    def double(t):
        t.grad = t.grad * read()

    z.register_post_accumulate_grad_hook(double)
    return z.sin()


READERS = (hook, node_hook, node_prehook, function, module_hook, many, unpacked)


def by_grad(f, x):
    z = x.detach().requires_grad_()
    (g,) = torch.autograd.grad((f(z) ** 2).sum(), z)
    return g


def by_backward(f, x):
    z = x.detach().requires_grad_()
    (f(z) ** 2).sum().backward()
    return z.grad


def by_functx(f, x):
    return functx.grad(lambda z: (f(z) ** 2).sum())(x.detach())


def by_torch_func(f, x):
    return torch.func.grad(lambda z: (f(z) ** 2).sum())(x.detach())


INSIDE = (by_grad, by_backward, by_functx, by_torch_func)
# What transforms of torch.func do not run, or not as plain autograd does, without remat either.
PAIRS = [
    (reader, inside)
    for reader in (*READERS, accumulated)
    for inside in INSIDE
    if (inside in (by_grad, by_backward) or reader in (hook, function))
    and (reader is not accumulated or inside is by_backward)
]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("reader", "inside"), PAIRS)
def test_a_constant_that_changes_is_an_error(reader, inside, nested):
    c = torch.tensor([2.0, 3.0, 4.0])
    inner = functx.remat(lambda x: inside(lambda z: reader(z, lambda: c), x) * x)
    region = functx.remat(lambda x: inner(x)) if nested else inner
    x = X.clone().requires_grad_()
    y = region(x).sum()
    c.mul_(2)
    with pytest.raises(ReplayError, match="modified in place between its forward and its replay"):
        y.backward()


def both(build, *args):
    """The same program with and without remat."""
    assert_same(build(functx.remat, *args), build(identity, *args))


def with_a_weight(remat, reader, create_graph):
    x, w = X.clone().requires_grad_(), numbers(3, start=2.0).requires_grad_()

    def body(x):
        z = x.detach().requires_grad_()
        (g,) = torch.autograd.grad((reader(z, lambda: w) ** 2).sum(), z, create_graph=create_graph)
        return g * x

    return torch.autograd.grad(remat(body)(x).sum(), (x, w), allow_unused=True)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("reader", [hook, node_prehook, function, module_hook])
def test_gradients_of_what_is_read_there(reader, create_graph):
    both(with_a_weight, reader, create_graph)


def counted(remat, reader, nested):
    x, n, m = X.clone().requires_grad_(), torch.zeros(()), nn.Module()
    m.calls = 0

    def read():
        n.add_(1)
        m.calls += 1
        return n * m.calls

    def body(x):
        return by_grad(lambda z: reader(z, read), x) * x

    region = remat(lambda x: remat(body)(x)) if nested else remat(body)
    found = [torch.autograd.grad(region(x).sum(), x)[0] for _ in range(2)]
    return *found, n, torch.tensor(m.calls)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("reader", READERS)
def test_what_is_counted_there_is_counted_once(reader, nested):
    both(counted, reader, nested)


def drawn(remat, reader, whose):
    x, own = X.clone().requires_grad_(), torch.Generator().manual_seed(3)
    torch.manual_seed(5)
    generator = own if whose else None

    def body(x):
        return by_grad(lambda z: reader(z, lambda: torch.rand(3, generator=generator)), x) * x

    (g,) = torch.autograd.grad(remat(body)(x).sum(), x)
    return g, torch.rand(3, generator=generator)


@pytest.mark.parametrize("whose", [False, True])
@pytest.mark.parametrize("reader", READERS)
def test_numbers_drawn_there(reader, whose):
    both(drawn, reader, whose)


@pytest.mark.parametrize("reader", READERS)
def test_a_number_that_changes_is_an_error(reader):
    m = nn.Module()
    m.scale = 2.0
    region = functx.remat(lambda x: by_grad(lambda z: reader(z, lambda: m.scale), x) * x)
    y = region(x := X.clone().requires_grad_()).sum()
    m.scale = 3.0
    with pytest.raises(ReplayError, match="departed from its forward"):
        torch.autograd.grad(y, x)


def inside_of_a_region(remat):
    x, w = X.clone().requires_grad_(), numbers(3, start=2.0).requires_grad_()
    inner = remat(lambda z: hook(z, lambda: w) ** 2)

    def body(x):
        z = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(inner(z).sum(), z, create_graph=True)
        return g * x

    return torch.autograd.grad(remat(body)(x).sum(), (x, w))


def test_the_hook_of_a_region_inside():
    both(inside_of_a_region)


@pytest.mark.parametrize("way", [hook, function])
def test_a_pullback_that_is_differentiated_reads_what_it_read(way):
    x, c = X.clone().requires_grad_(), torch.tensor([2.0])
    y = functx.remat(lambda x: way(x, lambda: c) ** 2)(x).sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    c.mul_(3)
    with pytest.raises(ReplayError, match="modified in place between"):
        torch.autograd.grad(g.sum(), x)


def twice(remat, way):
    x, c = X.clone().requires_grad_(), torch.zeros(3)

    def read():
        c.add_(1)
        return c

    body = remat(lambda x: way(x, read) ** 2)
    (g,) = torch.autograd.grad(body(x).sum(), x, create_graph=True)
    return *torch.autograd.grad(g.sum(), x), c


@pytest.mark.parametrize("way", [hook, function])
def test_a_pullback_that_is_differentiated_writes_once(way):
    both(twice, way)


def test_without_comparison_a_body_still_writes_once():
    def program(remat):
        x, c = X.clone().requires_grad_(), torch.zeros(3)
        y = remat(lambda x: (x.sin() * c.add_(1)).sin())(x).sum()
        return *torch.autograd.grad(y, x), c

    unchecked = functx.remat(determinism_check="none")
    assert_same(program(unchecked), program(identity))


@pytest.mark.parametrize("in_replay", [False, True])
def test_nothing_is_left_of_a_run_in_which_a_hook_raises(in_replay):
    failing, generator = [not in_replay], torch.Generator().manual_seed(1)
    torch.manual_seed(2)

    def fails():
        if failing[0]:
            raise KeyError("mine")
        return 2

    def body(x):
        s = torch.rand(3) * torch.rand(3, generator=generator)
        return by_grad(lambda z: hook(z, fails), x) * x * s

    def around():
        states = torch.get_rng_state(), generator.get_state()
        depths = _torch.function_mode_depth(), _torch.dispatch_mode_depth()
        return *states, torch.tensor(depths)

    x = X.clone().requires_grad_()
    region = functx.remat(body)
    y = region(x) if in_replay else None
    failing[0] = True
    before = around()
    with pytest.raises(KeyError, match="mine"):
        (region(x) if y is None else y).sum().backward(retain_graph=True)
    assert x.grad is None
    assert_same(around()[2], before[2])
    if y is not None:
        assert_same(around(), before)
    failing[0] = False
    y = region(x) if y is None else y
    before = around()
    (g,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(g * x.detach(), y.detach())
    assert_same(around(), before)
