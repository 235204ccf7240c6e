"""Hooks that a region hangs on modules: its replays hang them anew. See `_module_hooks`."""

import copy

import pytest
from bound import DEPTHS, identity
from module_hooks import REGISTER, after, count, net, ones
from references import assert_same
from torch.autograd import grad

import functx


def three_steps(f, module):
    """Gradients of each, and how many hooks the module has then."""
    x = ones()
    return [(grad(f(x).sum(), x), count(module)) for _ in range(3)]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("copied", [lambda h: h, copy.copy, copy.deepcopy])
def test_that_takes_itself_off(copied, depth):
    """A region hangs it, and its first call removes it: the next forward does not find it."""

    def program(remat):
        module = net()

        def f(x):
            def hook(module, gi, go):
                copied(handle).remove()
                handle.remove()
                return (gi[0] * 2,)

            other = module.register_full_backward_hook(after(3))
            handle = module.register_full_backward_hook(hook)
            other.remove()
            return module(x.sin()).exp()

        return three_steps(depth(f)(remat), module)

    assert_same(program(functx.remat), program(identity), eps=64)


@pytest.mark.parametrize("depth", DEPTHS)
def test_hung_by_the_region_itself_where_others_are(depth):
    def program(remat):
        module, found = net(), []
        module.register_full_backward_hook(after(3))

        def f(x):
            module.register_full_backward_hook(after(2))
            return module(x.sin()).exp()

        g = depth(f)(remat)
        x = ones()
        ys = [g(x).sum() for _ in range(3)]
        for y in (ys[1], ys[0], ys[2], ys[1]):
            found += grad(y, x, retain_graph=True)
        return found, count(module)

    assert_same(program(functx.remat), program(identity), eps=64)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("register", REGISTER)
def test_hung_by_the_region_and_removed_by_the_program(register, depth):
    """What a replay hangs is gone with it."""

    def program(remat):
        module, handles = net(), []

        def f(x):
            handles.append(getattr(module, register)(REGISTER[register](2)))
            return module(x.sin()).exp()

        x = ones()
        y = depth(f)(remat)(x).sum()
        handles[0].remove()
        found = [grad(y, x, retain_graph=True) for _ in range(2)]
        return found, count(module)

    assert_same(program(functx.remat), program(identity), eps=64)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("register", REGISTER)
def test_installed_by_the_first_call(register, depth):
    """And a flag of the module says so, as in transformers."""

    def program(remat):
        module = net()

        def f(x):
            if not hasattr(module, "_output_capturing_hooks_installed"):
                getattr(module, register)(REGISTER[register](2))
                module._output_capturing_hooks_installed = True
            return module(x.sin()).exp()

        return three_steps(depth(f)(remat), module)

    assert_same(program(functx.remat), program(identity), eps=64)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("prepend", [(False, True), (True, True), (True, False)])
def test_which_one_takes_itself_off(prepend, depth):
    def program(remat):
        module = net()

        def f(x):
            if not module._backward_hooks:

                def hook(module, gi, go):
                    handle.remove()
                    return (gi[0] * 2,)

                first, second = prepend
                handle = module.register_full_backward_hook(hook, prepend=first)
                module.register_full_backward_hook(after(3), prepend=second)
            return module(x.sin()).exp()

        return three_steps(depth(f)(remat), module)

    assert_same(program(functx.remat), program(identity), eps=64)
