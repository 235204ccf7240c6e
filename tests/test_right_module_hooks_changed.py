"""Hooks of modules that come and go between forward and backward. See `_module_hooks`."""

import functools
import gc
import os
import threading
import weakref
from collections import OrderedDict

import pytest
import torch
from bound import DEPTHS, identity
from module_hooks import BACKWARD, REGISTER, after, count, dicts, forward, net, ones
from references import assert_same
from torch.autograd import grad

import functx


def gradients(remat, depth, module, *changes):
    """Of three backward passes, with changes after the forward, and in between."""
    x = ones()
    y = depth(lambda x: module(x.sin()).exp())(remat)(x).sum()
    found = []
    for change in [*changes, *[lambda: None] * 3][:3]:
        change()
        found.append(grad(y, [x, module.weight], retain_graph=True))
    return found


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("there", [0, 1, 2])
@pytest.mark.parametrize("register", REGISTER)
def test_hung_since(register, there, depth):
    def program(remat):
        module = net()
        hang = getattr(module, register)
        for _ in range(there):
            hang(REGISTER[register](2))
        found = gradients(remat, depth, module, lambda: hang(REGISTER[register](5)))
        return found, count(module)

    assert_same(program(functx.remat), program(identity), eps=64)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("there", [1, 2])
@pytest.mark.parametrize("register", REGISTER)
def test_removed_since(register, there, depth):
    """Who has the function still, has nothing to mind: a module calls those of its forward."""

    def program(remat):
        module = net()
        hooks = [REGISTER[register](k) for k in (2, 3)[:there]]
        handles = [getattr(module, register)(hook) for hook in hooks]
        found = gradients(remat, depth, module, handles[0].remove, handles[-1].remove)
        return found, count(module)

    assert_same(program(functx.remat), program(identity), eps=64)


class Doubles:
    def register_full_backward_hook(self, module, gi, go):
        return (gi[0] * 2,)

    def register_forward_hook(self, module, args, y):
        return y * 2


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_forward_hook"])
def test_a_method_that_was_removed(register, depth):
    def program(remat):
        module, one = net(), Doubles()
        module.register_full_backward_hook(after(3))
        handle = getattr(module, register)(getattr(one, register))
        return gradients(remat, depth, module, handle.remove)

    assert_same(program(functx.remat), program(identity), eps=64)


def times(k, module, gradients, *_):
    return (gradients[0] * k,)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("register", BACKWARD)
def test_a_backward_hook_that_nobody_else_has(register, depth):
    def program(remat):
        module = net()
        hang = getattr(module, register)
        hang(REGISTER[register](2))
        handle = hang(functools.partial(times, 3))
        return gradients(remat, depth, module, handle.remove)

    assert_same(program(functx.remat), program(identity), eps=64)


def test_a_forward_hook_that_nobody_else_has():
    """It may have what has left the region, so that does not hold it."""
    module = net()
    handle = module.register_forward_hook(forward(2))
    with pytest.raises(functx.ReplayError, match="departed from its forward"):
        gradients(functx.remat, lambda f: lambda remat: remat(f), module, handle.remove)


def test_a_forward_hook_that_only_looks():
    """Feature extraction: it is called once, and gone before the backward."""

    def program(remat):
        module, seen = net(), []
        handle = module.register_forward_hook(lambda module, args, y: seen.append(y.shape))
        found = gradients(remat, lambda f: lambda remat: remat(f), module, handle.remove)
        return found, torch.tensor([[*shape] for shape in seen])

    assert_same(program(functx.remat), program(identity), eps=64)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("always_call", [False, True])
def test_with_keywords(always_call, depth):
    def program(remat):
        module = net()

        def hook(module, args, kwargs, y):
            return y * (2 + len(kwargs))

        handle = module.register_forward_hook(hook, with_kwargs=True, always_call=always_call)
        found = gradients(remat, depth, module, handle.remove)
        return found, count(module)

    assert_same(program(functx.remat), program(identity), eps=64)


@pytest.mark.parametrize("depth", DEPTHS)
def test_in_order(depth):
    """One that is put before others (``prepend``), and one of those in between is removed."""

    def program(remat):
        module = net()
        hooks = [lambda m, gi, go, k=k: (gi[0] * k + 1,) for k in (2, 3, 5)]
        handles = [module.register_full_backward_hook(hook, prepend=True) for hook in hooks]
        found = gradients(remat, depth, module, handles[1].remove)
        return found, torch.tensor([*module._backward_hooks]) - handles[0].id

    assert_same(program(functx.remat), program(identity), eps=64)


def test_hooks_are_not_held():
    """One that has the result of the region is in no cycle with it."""

    class Extractor:
        def hook(self, module, args, y):
            self.y = y

    module, one = net(), Extractor()
    gc.disable()
    try:
        handle = module.register_forward_hook(one.hook)
        x = ones()
        functx.remat(lambda x: module(x.sin()))(x)
        handle.remove()
        held = weakref.ref(one)
        del one
        assert held() is None
    finally:
        gc.enable()


def test_after_an_error_they_are_what_they_were(monkeypatch):
    module = net()
    module.register_full_backward_hook(after(2))

    def f(x):
        y = module(x.sin()).exp()
        if "FAILS" in os.environ:
            raise RuntimeError("fails")
        return y

    x = ones()
    y = functx.remat(f)(x).sum()
    module.register_full_backward_hook(after(5))
    hooks = [dict(d) for d in dicts(module)]
    monkeypatch.setenv("FAILS", "1")
    with pytest.raises(RuntimeError, match="fails"):
        grad(y, x)
    assert [dict(d) for d in dicts(module)] == hooks
    assert torch.utils.hooks.RemovableHandle.__init__.__qualname__ == "RemovableHandle.__init__"


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("register", BACKWARD)
@pytest.mark.parametrize("how", ["under its number", "with all of the dict"])
def test_exchanged(how, register, depth):
    def program(remat):
        module = net()
        handle = getattr(module, register)(REGISTER[register](2))

        def change():
            if how == "under its number":
                handle.hooks_dict_ref()[handle.id] = lambda module, g, *_: (g[0] * 7,)
            else:
                module._backward_hooks = OrderedDict()
                module._backward_pre_hooks = OrderedDict()

        found = gradients(remat, depth, module, change)
        return found, count(module)

    assert_same(program(functx.remat), program(identity), eps=64)


@pytest.mark.parametrize("depth", DEPTHS)
def test_modules_and_hooks_that_did_not_run_are_not_held(depth):
    """A tape would not hold them."""

    def hook(module, gi, go):
        pass

    modules = [net(), net(), net()]
    handle = modules[1].register_full_backward_hook(hook)
    refs = [weakref.ref(modules[2]), weakref.ref(hook)]
    x = ones()
    gc.disable()
    try:
        y = depth(lambda x: modules[0](x.sin()))(functx.remat)(x)
        del modules[2]
        handle.remove()
        del hook
        assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()
    y.sum().backward()


def test_what_another_thread_does_meanwhile(monkeypatch):
    module = net()
    kept = module.register_full_backward_hook(after(2))
    module.register_full_backward_hook(after(3))
    new = []

    def other():
        kept.remove()
        new.append(module.register_full_backward_hook(after(5)))

    def f(x):
        if "OTHER" in os.environ:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
        return module(x.sin()).exp()

    x = ones()
    y = functx.remat(f)(x).sum()
    handle = module.register_forward_hook(forward(2))
    monkeypatch.setenv("OTHER", "1")
    grad(y, x)
    assert kept.id not in module._backward_hooks
    assert [*module._backward_hooks][-1] == new[0].id
    assert len(module._backward_hooks) == 2
    assert [*module._forward_hooks] == [handle.id]
