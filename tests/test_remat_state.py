"""State that a region changes or is given: buffers that advance, functional_call."""

import pytest
import torch
from cases import DTYPE, numbers
from nets import Block, Net, pair, seeded
from programs import identity
from references import assert_same
from torch import nn
from torch.func import functional_call

import functx

pytestmark = pytest.mark.usefixtures("hooks")


class TestBuffers:
    @pytest.mark.parametrize("steps", [1, 3])
    def test_batch_norm_statistics_are_updated_once(self, steps):
        results = []
        for module in pair(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh())):
            for step in range(steps):
                x = numbers(6, 3, start=float(step)).float().requires_grad_()
                module(x).square().sum().backward()
            results.append((module.state_dict(), x.grad, [p.grad for p in module.parameters()]))
        assert_same(*results)
        assert results[0][0]["1.num_batches_tracked"] == steps

    def test_batch_norm_without_a_backward_pass(self):
        ours, plain = pair(lambda: nn.BatchNorm1d(3))
        x = numbers(6, 3).float().requires_grad_()
        assert_same((ours(x), ours.state_dict()), (plain(x), plain.state_dict()))

    def test_batch_norm_pulled_back_twice(self):
        results = []
        for module in pair(lambda: nn.BatchNorm1d(3)):
            x = numbers(6, 3).float().requires_grad_()
            value = module(x).square().sum()
            first = torch.autograd.grad(value, x, retain_graph=True)
            results.append((first, torch.autograd.grad(value, x), module.state_dict()))
        assert_same(*results)

    def test_spectral_norm(self):
        def build():
            return nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4, dtype=DTYPE))

        results = []
        for module in pair(build):
            x = numbers(2, 3).requires_grad_()
            out = [module(x), module(x)]
            results.append((out, torch.autograd.grad(out[0].sum() + 2 * out[1].sum(), x)))
        assert_same(*results)


class TestFunctionalCall:
    def parameters(self, module):
        return {name: p.detach() * 0.5 for name, p in module.named_parameters()}

    @pytest.mark.parametrize("library", [functx, torch.func])
    def test_gradients_to_the_parameters_given(self, library):
        results = []
        for net in (seeded(Net), seeded(Net, identity)):
            parameters = self.parameters(net)

            def loss(parameters, x, net=net):
                return functional_call(net, parameters, (x,)).square().sum()

            results.append(
                (
                    library.grad(loss)(parameters, numbers(4, 3)),
                    library.vmap(library.grad(loss), (None, 0))(parameters, numbers(4, 3)),
                )
            )
            assert all(p.grad is None for p in net.parameters())
        assert_same(*results, eps=8)

    def test_on_a_region_itself(self):
        results = []
        for module in pair(Block):

            def loss(parameters, module=module):
                return functional_call(module, parameters, (numbers(3),)).sum()

            results.append(functx.grad(loss)(self.parameters(module)))
        assert_same(*results)

    def test_backward_outside_the_call(self):
        """The replay runs when the module has its own parameters back."""
        results = []
        for net in (seeded(Net), seeded(Net, identity)):
            parameters = {n: p.requires_grad_() for n, p in self.parameters(net).items()}
            value = functional_call(net, parameters, (numbers(4, 3),)).square().sum()
            results.append((value, torch.autograd.grad(value, list(parameters.values()))))
            assert all(p.grad is None for p in net.parameters())
        assert_same(*results)

    def test_stacked_parameters(self):
        nets = [seeded(Net), Net()]
        parameters, buffers = functx.stack_module_state(nets)
        x = numbers(4, 3)

        def call(p, b):
            return functional_call(nets[0], (p, b), (x,)).square().sum()

        ours = functx.vmap(functx.grad(call))(parameters, buffers)
        for index, net in enumerate(nets):
            net(x).square().sum().backward()
            own = {name: p.grad for name, p in net.named_parameters()}
            assert_same({name: g[index] for name, g in ours.items()}, own, eps=64)


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return torch.sin(x)


IN_A_GLOBAL = [Counting()]


class Owner:
    def __init__(self, modules):
        self.modules = modules

    def run(self, x):
        return self.modules[0](x)


@pytest.mark.parametrize("held", ["list", "dict of tuples", "owner", "global"])
def test_modules_are_found_where_functions_keep_them(held):
    """So that a replay does not count a second time."""
    module = IN_A_GLOBAL[0] if held == "global" else Counting()
    module.calls = 0
    listed, named = [module], {"all": (module,)}
    f = {
        "list": lambda x: listed[0](x),
        "dict of tuples": lambda x: named["all"][0](x),
        "owner": Owner([module]).run,
        "global": lambda x: IN_A_GLOBAL[0](x),
    }[held]
    functx.remat(f)(numbers(3).requires_grad_()).sum().backward()
    assert module.calls == 1


class Counted:
    """An object of the user's."""

    def __init__(self):
        self.calls, self.last = 0, None


@pytest.mark.parametrize("container", [list, tuple, lambda all_of: dict(enumerate(all_of))])
def test_many_objects(container):
    """One of hundreds counts, and one keeps what it has computed last."""

    def program(remat):
        many = container([Counted() for _ in range(600)])

        def f(x, at):
            one = many[at]
            one.calls += 1
            one.last = x.detach().cos()
            return (x * one.last).sin()

        f = remat(f)
        x = numbers(4).requires_grad_()
        gradient = torch.autograd.grad(f(f(x, 3), 599).sum(), x)
        gradient += torch.autograd.grad(f(f(x, 3), 3).sum(), x)
        return gradient, [(many[at].calls, many[at].last) for at in (3, 599)]

    assert_same(program(functx.remat), program(identity))
