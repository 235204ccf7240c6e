"""Hooks whose functions a library has wrapped, and hooks of modules. See `_reached_by_hooks`."""

import contextlib
import functools
import gc
import weakref

import pytest
import torch
from bound import DEPTHS, identity
from cases import numbers
from references import assert_same
from torch.autograd import grad
from torch.autograd.graph import register_multi_grad_hook

import functx


class Nothing(contextlib.ContextDecorator):
    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass


@contextlib.contextmanager
def nothing():
    yield


def wrapped(hook):
    @functools.wraps(hook)
    def wrapper(g):
        return hook(g)

    return wrapper


def in_a_list(hook):
    hooks = {"all": [hook]}
    return lambda g: hooks["all"][0](g)


WRAPPERS = {
    "no_grad": torch.no_grad(),
    "two decorators": lambda hook: torch.enable_grad()(torch.no_grad()(hook)),
    "autocast": torch.autocast("cpu", enabled=False),
    "record_function": torch.profiler.record_function("hook"),
    "dynamo.disable": torch._dynamo.disable,
    "vmap": torch.func.vmap,
    "remat": functx.remat,
    "ContextDecorator": Nothing(),
    "contextmanager": lambda hook: nothing()(hook),
    "lru_cache": functools.lru_cache(maxsize=0),
    "staticmethod": staticmethod,
    "singledispatch": functools.singledispatch,
    "wraps": wrapped,
    "in a list": in_a_list,
}


def on_a_tensor(h, hook):
    h.register_hook(hook)


def on_a_node(h, hook):
    h.grad_fn.register_hook(lambda gi, go: (hook(gi[0]),))


def before_a_node(h, hook):
    h.grad_fn.register_prehook(lambda go: (hook(go[0]),))


def of_several(h, hook):
    def called(gs):
        hook(gs[0])

    register_multi_grad_hook([h, h * 1], called)


def of_any(h, hook):
    def called(g):
        hook(g)

    register_multi_grad_hook([h, h * 1], called, mode="any")


def by(wrapper):
    def hang(h, hook):
        h.register_hook(wrapper(hook))

    return hang


HOW = {
    **{name: by(wrapper) for name, wrapper in WRAPPERS.items()},
    **{f.__name__: f for f in (on_a_tensor, on_a_node, before_a_node, of_several, of_any)},
}
KINDS = ["list", "variable", "handed out"]


def counting(handed_out, kind):
    """A hook that counts its calls in what a region makes, or multiplies with what is there."""
    n, k = [0.0], 1.0
    handed_out.append(n)

    def hook(g):
        nonlocal k
        if kind == "variable":
            k += 1
            return g * k
        if kind == "list":
            n[0] += 1
        return g * n[0]

    return hook, lambda g: g * (n[0] + k)


def found(remat, f, kind):
    handed_out = []
    x = numbers(3).requires_grad_()
    y = remat(lambda x: f(x, *counting(handed_out, kind)))(x).sum()
    if kind == "handed out":
        handed_out[0][0] = 3.0
    gradients = [grad(y, x, retain_graph=True) for _ in range(3)]
    return gradients, torch.tensor(handed_out[0][0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", HOW)
def test_a_function_that_is_wrapped(how, kind):
    def f(x, hook, other):
        h = x.sin()
        HOW[how](h, hook)
        h.register_hook(other)
        return h.exp()

    assert_same(found(functx.remat, f, kind), found(identity, f, kind), eps=64)


@pytest.mark.parametrize("how", sorted({*WRAPPERS} - {"singledispatch"}))
def test_what_it_closes_over_is_not_held(how):
    """Nobody but the hook has it. (What ``singledispatch`` makes is a cycle of its own.)"""
    refs = []

    def f(x):
        h = x.sin()
        c, n = h.detach() * 2, [0.0]
        refs.append(weakref.ref(c))

        def hook(g):
            n[0] += 1
            return g * c.sum() * n[0]

        HOW[how](h, hook)
        return h.exp()

    gc.disable()
    try:
        y = functx.remat(f)(numbers(3).requires_grad_())
        assert refs[0]() is None
    finally:
        gc.enable()
    y.sum().backward()


def after(module, hook):
    return [module.register_full_backward_hook(lambda module, gi, go: (hook(gi[0]),))]


def before(module, hook):
    return [module.register_full_backward_pre_hook(lambda module, go: (hook(go[0]),))]


def around(module, hook):
    return before(module, hook) + after(module, hook)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.parametrize("whose", ["region's", "program's"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", [after, before, around])
def test_hooks_that_a_region_hangs_on_a_module(how, kind, whose, removed, depth):
    """A replay hangs its own; on a module of the program's there is one when all is done."""

    def program(remat):
        torch.manual_seed(0)
        theirs = torch.nn.Linear(3, 3, dtype=torch.float64)

        def f(x, hook, other):
            h = x.sin()
            module = theirs
            if whose == "region's":
                module = torch.nn.Linear(3, 3, dtype=torch.float64)
            handles = how(module, hook)
            y = module(h)
            if removed:
                for handle in handles:
                    handle.remove()
            return y.exp()

        hooks = theirs._backward_hooks, theirs._backward_pre_hooks
        gradients = found(lambda f: depth(f)(remat), f, kind)
        return gradients, [torch.tensor(len(d)) for d in hooks]

    assert_same(program(functx.remat), program(identity), eps=64)
