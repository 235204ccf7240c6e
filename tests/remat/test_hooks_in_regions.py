"""Hooks on arguments go to these (rule 4); hooks on a region's node must not run it again."""

import weakref

import pytest
import torch
from cases import DTYPE, numbers
from references import assert_same
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.module_tracker import ModuleTracker

import functx

X = numbers(4)


def of_another_gradient(x, seen):
    x.register_hook(lambda g: (seen.append(g.clone()), g * 2)[1])
    return x.sin() * x


def of_several_tensors(pair, seen):
    x, y = pair
    register_multi_grad_hook([x, y], lambda grads: seen.extend(g.clone() for g in grads))
    return x * y.sin()


def retained(x, seen):
    x.retain_grad()
    return x.sin()


def removed(x, seen):
    x.register_hook(lambda g: seen.append(g.clone())).remove()
    return x.sin()


def in_a_region_inside(x, seen):
    return functx.remat(lambda x: of_another_gradient(x, seen))(x) * x


def on_what_a_region_inside_is_given(x, seen):
    return functx.remat(lambda y: of_another_gradient(y, seen))(x.exp()) * x


BODIES = [of_another_gradient, retained, removed]
NESTED = [in_a_region_inside, on_what_a_region_inside_is_given]


@pytest.mark.parametrize("body", [*BODIES, *NESTED], ids=lambda body: body.__name__)
@pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "no leaf"])
def test_a_hook_on_an_argument_is_called_as_without_remat(body, leaf):
    def found(region):
        results, seen = [], []  # (a list among the arguments would be another one in the region)
        f = region(lambda x: body(x, seen))
        for _ in range(3):
            seen.clear()
            x = numbers(4).requires_grad_()
            h = x if leaf else x * 3
            (f(h) * h).sum().backward()
            results.append((x.grad, *seen, h.grad if h.is_leaf or h.retains_grad else None))
        return results

    assert_same(found(functx.remat), found(lambda f: f), eps=8)


def test_a_hook_on_several_arguments_is_called_once_with_all():
    def found(region):
        results, seen = [], []
        f = region(lambda pair: of_several_tensors(pair, seen))
        for _ in range(3):
            seen.clear()
            x = numbers(4).requires_grad_()
            (f((x, x * 2)) + x).sum().backward()
            results.append((x.grad, *seen))
        return results

    assert_same(found(functx.remat), found(lambda f: f), eps=8)


def test_a_hook_on_an_argument_of_a_level_is_called_as_without_remat():
    def found(region):
        f = region(lambda x: of_another_gradient(x, []).sum())
        return functx.grad(lambda x: f(x * 2) + x.sum())(X), functx.hessian(f)(X)

    assert_same(found(functx.remat), found(lambda f: f), eps=8)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4, dtype=DTYPE), nn.Linear(4, 4, dtype=DTYPE)

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x)))


def test_a_tool_that_hangs_hooks_on_arguments_of_modules_works():
    """As those do that say in which module a backward is (CommDebugMode is built on this one)."""

    def found(region):
        torch.manual_seed(0)
        net = Net()
        f, x, seen = region(net), numbers(3, 4).requires_grad_(), []
        with ModuleTracker() as tracker:
            y = f(f(x * 2))
            y.register_hook(lambda g: seen.append(tracker.is_bw))
            y.sum().backward()
        return x.grad, [p.grad for p in net.parameters()], seen

    assert_same(found(functx.remat), found(lambda f: f), eps=8)


REGISTERS = {
    "on the node": lambda y, hook: y.grad_fn.register_hook(hook),
    "before the node": lambda y, hook: y.grad_fn.register_prehook(hook),
    "on the result": lambda y, hook: y.register_hook(hook),
}


@pytest.mark.parametrize("kind", REGISTERS)
def test_a_hook_that_pulls_back_through_its_own_node_is_an_error(kind):
    """Without it the pass never ends, in threads that no interrupt reaches."""
    x = numbers(4).requires_grad_()
    y, z = functx.remat(lambda x: (x.sin(), x.cos()))(x)

    def hook(*_):
        torch.autograd.grad(z, x, torch.ones_like(z), retain_graph=True)

    handle = REGISTERS[kind](y, hook)
    with pytest.raises(functx.RematError, match="share one node"):
        y.sum().backward(retain_graph=True)
    handle.remove()
    y.sum().backward()
    assert_same(x.grad, torch.cos(X), eps=4)


@pytest.mark.parametrize("kind", REGISTERS)
def test_a_hook_does_not_keep_its_node_alive(kind):
    x = numbers(4).requires_grad_()
    y = functx.remat(torch.sin)(x * 2)
    REGISTERS[kind](y, lambda *_: None)
    node = weakref.ref(y.grad_fn)
    del y
    assert node() is None


@pytest.mark.parametrize("kind", REGISTERS)
def test_a_hook_may_pull_back_something_else(kind):
    x, seen = numbers(4).requires_grad_(), []
    y, z = functx.remat(torch.sin)(x), functx.remat(torch.cos)(x)

    def hook(*_):
        seen.extend(torch.autograd.grad(z, x, torch.ones_like(z), retain_graph=True))

    REGISTERS[kind](y, hook)
    for _ in range(2):
        y.sum().backward(retain_graph=True)
    assert_same(seen, [-torch.sin(X)] * 2, eps=4)
    assert_same(x.grad, 2 * torch.cos(X), eps=4)
