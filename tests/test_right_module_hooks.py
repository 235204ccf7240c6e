"""Hooks of modules in a region: those of its forward are those of its replay, and count once."""

import functools

import pytest
import torch
from bound import DEPTHS
from cases import DTYPE, numbers
from nets import seeded
from programs import identity
from references import assert_same
from torch import nn
from torch.autograd import grad
from torch.nn.modules import module as modules
from torch.utils.flop_counter import FlopCounterMode

import functx

X = numbers(2, 4)


def layers():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()).to(DTYPE)


def nested(remat, net):
    net[0] = remat(net[0])
    return nn.Sequential(remat(net), nn.Linear(4, 2, dtype=DTYPE))


@pytest.mark.parametrize("where", ["forward", "backward", "both"])
@pytest.mark.parametrize("build", [lambda remat, net: remat(net), nested], ids=["flat", "nested"])
def test_flops_of_one_pass(where, build):
    """The counter hangs hooks on all modules; it counts while it is entered and no longer."""

    def program(remat):
        net = seeded(lambda: build(remat, layers()))
        found = []
        for _ in range(6):
            x = X.clone().requires_grad_()
            net.zero_grad()
            counter = FlopCounterMode(display=False)
            if where == "backward":
                y = net(x)
                with counter:
                    y.square().sum().backward()
            else:
                with counter:
                    y = net(x)
                    if where == "both":
                        y.square().sum().backward()
                if where == "forward":
                    y.square().sum().backward()
                    found.append(counter.get_total_flops())
            found += [y, x.grad, *(p.grad.clone() for p in net.parameters())]
        assert not any(modules._global_forward_pre_hooks), "hooks were put back that had gone"
        return found

    assert_same(program(functx.remat), program(identity))


@pytest.mark.parametrize("removed", [True, False])
def test_a_hook_of_all_modules_that_computes(removed):
    """It is part of the region, whether or not it is there in the backward pass."""

    def program(remat):
        net = seeded(lambda: remat(layers()))

        def hook(module, args, out):
            return out * 1.5 if isinstance(module, nn.Linear) else None

        found = []
        for step in range(6):
            x = X.clone().requires_grad_()
            handle = modules.register_module_forward_hook(hook) if step % 2 == 0 else None
            loss = net(x).sum()
            if removed and handle is not None:
                handle.remove()
            found += [loss, *torch.autograd.grad(loss, [x, *net.parameters()])]
            if not removed and handle is not None:
                handle.remove()
        return found

    assert_same(program(functx.remat), program(identity))


def test_a_hook_that_comes_after_the_forward_is_none_of_a_replay():
    def program(remat):
        net = seeded(lambda: remat(layers()))
        x = X.clone().requires_grad_()
        loss = net(x).sum()
        handle = modules.register_module_forward_pre_hook(lambda module, args: (args[0] * 2,))
        try:
            gradient = torch.autograd.grad(loss, x)
        finally:
            handle.remove()
        return gradient

    assert_same(program(functx.remat), program(identity))


class Features:
    """What a hook that is a method saves."""

    def __init__(self):
        self.kept = []

    def hook(self, module, args, out):
        self.kept.append(out)


def a_list(net):
    kept = []
    net[0].register_forward_hook(lambda module, args, out: kept.append(out))
    return kept


def of_values(net):
    kept = []
    net[0].register_forward_hook(lambda module, args, out: kept.append(out.detach().mean()))
    return kept


def a_method(net):
    features = Features()
    net[2].register_forward_hook(features.hook)
    return features.kept


def a_dict(net):
    kept = {}

    def save(name):
        return lambda module, args: kept.__setitem__(name, args[0])

    for name, module in net.named_children():
        module.register_forward_pre_hook(save(name))
    return kept


def of_all(net):
    kept = []

    def hook(module, args, out):
        if any(module is m for m in net):
            kept.append(out)

    hung.append(modules.register_module_forward_hook(hook))
    return kept


hung = []


@pytest.fixture
def taken_down():
    yield
    while hung:
        hung.pop().remove()


@pytest.mark.usefixtures("taken_down")
@pytest.mark.parametrize("hang", [a_list, of_values, a_method, a_dict, of_all])
@pytest.mark.parametrize("fn", [identity, functools.partial(nn.Sequential)])
def test_what_a_hook_saves_it_saves_once(hang, fn):
    """A replay's own features do not come to be beside those of the forward, or in their place."""

    def program(remat):
        net = seeded(layers)
        kept = hang(net)
        region = remat(fn(net))
        found = []
        for _ in range(6):
            kept.clear()
            x = X.clone().requires_grad_()
            y = region(x)
            saved = [*kept.values()] if isinstance(kept, dict) else [*kept]
            loss = y.sum() + sum(t.square().sum() for t in saved)
            found += torch.autograd.grad(loss, [x, *net.parameters()])
            now = [*kept.values()] if isinstance(kept, dict) else [*kept]
            assert [*map(id, now)] == [*map(id, saved)]
            found += saved
        return found

    assert_same(program(functx.remat), program(identity))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    ("register", "hook"),
    [
        ("register_forward_hook", lambda module, args, y: y * 2),
        ("register_forward_pre_hook", lambda module, args: (args[0] * 2,)),
        ("register_full_backward_hook", lambda module, gi, go: (gi[0] * 2,)),
        ("register_full_backward_pre_hook", lambda module, go: (go[0] * 2,)),
    ],
)
def test_each_run_hangs_one_on_a_module(register, hook, depth):
    """As it is without remat: two calls of the region have hung two."""

    def program(remat):
        torch.manual_seed(0)
        module = torch.nn.Linear(3, 3, dtype=torch.float64)

        def f(x):
            getattr(module, register)(hook)
            return module(x.sin()).exp()

        x = numbers(3).requires_grad_()
        g = depth(f)(remat)
        y, z = g(x).sum(), g(x).sum()
        gradients = [grad(y, x, retain_graph=True), grad(z, x, retain_graph=True), grad(y, x)]
        dicts = [d for name, d in vars(module).items() if "_hooks" in name]
        return gradients, [torch.tensor(len(d)) for d in dicts]

    assert_same(program(functx.remat), program(identity), eps=64)
