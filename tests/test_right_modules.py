"""Modules: buffers that advance, functional_call, tied, parametrized and frozen parameters."""

import contextlib

import pytest
import torch
from cases import DTYPE, numbers
from nets import seeded
from programs import identity
from references import assert_same, count
from right import check
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize

import functx

pytestmark = pytest.mark.usefixtures("no_hooks")

X = numbers(6, 3)


class Power(nn.Module):
    """One power iteration a call, and a counter: buffers that advance in ways of their own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(numbers(3, 3))
        self.register_buffer("u", torch.ones(3, dtype=DTYPE))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        with torch.no_grad():
            u = self.weight @ self.u
            self.u = u / u.norm()  # rebinds
            self.calls += 1  # writes
        return torch.tanh(x @ (self.weight / (self.u @ self.weight @ self.u)))


ADVANCING = {
    "batch norm": lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh()).double(),
    "cumulative batch norm": lambda: nn.Sequential(
        nn.BatchNorm1d(3, momentum=None), nn.Tanh()
    ).double(),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(0, (2, 3)), nn.InstanceNorm1d(3, track_running_stats=True), nn.Tanh()
    ).double(),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 4, dtype=DTYPE)),
    "power iteration": Power,
}


class TestBuffersThatAdvance:
    @pytest.mark.parametrize("name", ADVANCING)
    def test_once_a_call(self, name):
        """Two calls of one module, then both backwards, then a third call."""

        def program(remat):
            module = remat(seeded(ADVANCING[name]))
            states = []
            x = X.clone().requires_grad_()
            values = [module(x).square().sum(), module(x + 1).square().sum()]
            states.append({k: v.clone() for k, v in module.state_dict().items()})
            gradients = torch.autograd.grad(values[0] + 2 * values[1], (x, *module.parameters()))
            states.append({k: v.clone() for k, v in module.state_dict().items()})
            return values, gradients, states, module(x), module.state_dict()

        assert_same(program(functx.remat), program(identity), eps=8)

    def test_below_grad(self):
        check(lambda remat: remat(seeded(ADVANCING["spectral norm"])), X, ["backward", "grad"], 16)

    @pytest.mark.parametrize("name", ["batch norm", "power iteration"])
    @pytest.mark.parametrize("transform", ["grad", "jacrev", "vmap(grad)"])
    def test_buffers_given_to_a_transform(self, name, transform):
        """Writes to a tensor of the level itself are the ones torch allows there."""

        def program(remat):
            module = remat(seeded(ADVANCING[name]))
            parameters = {n: p.detach() for n, p in module.named_parameters()}
            buffers = {n: b.clone() for n, b in module.named_buffers()}

            def loss(parameters, buffers, x):
                out = functional_call(module, (parameters, buffers), (x,)).square().sum()
                return out, buffers

            take = functx.jacrev if transform == "jacrev" else functx.grad
            f = take(loss, has_aux=True)
            if transform == "vmap(grad)":
                buffers = {n: torch.stack([b, b]) for n, b in buffers.items()}
                return functx.vmap(f, (None, 0, 0))(parameters, buffers, torch.stack([X, X + 1]))
            return f(parameters, buffers, X), buffers

        assert_same(program(functx.remat), program(identity), eps=64)

    @pytest.mark.parametrize("name", ["batch norm", "power iteration"])
    def test_functional_call_with_the_backward_outside(self, name):
        def program(remat):
            module = remat(seeded(ADVANCING[name]))
            parameters = {
                n: (p.detach() * 1.5).requires_grad_() for n, p in module.named_parameters()
            }
            buffers = {n: b.clone() for n, b in module.named_buffers()}
            value = functional_call(module, (parameters, buffers), (X,)).square().sum()
            kept = {n: b.clone() for n, b in buffers.items()}
            gradients = torch.autograd.grad(value, list(parameters.values()))
            return value, gradients, kept, buffers, module.state_dict()

        assert_same(program(functx.remat), program(identity), eps=8)

    def test_below_vmap_with_batched_statistics(self):
        """A stack of models, each with statistics of its own."""

        def program(remat):
            models = [seeded(ADVANCING["batch norm"]), ADVANCING["batch norm"]()]
            models = [remat(m) for m in models]
            parameters, buffers = functx.stack_module_state(models)

            def loss(p, b, x):
                return functional_call(models[0], (p, b), (x,)).square().sum()

            gradients = functx.vmap(functx.grad(loss), (0, 0, None))(parameters, buffers, X)
            return gradients, buffers

        torch.manual_seed(2)
        ours = program(functx.remat)
        torch.manual_seed(2)
        assert_same(ours, program(identity), eps=64)

    def test_below_vmap_without_running_statistics(self):
        def build(remat):
            net = seeded(ADVANCING["batch norm"])
            functx.replace_all_batch_norm_modules_(net)
            return remat(net)

        check(build, X, eps=64)


class Inside(nn.Module):
    """A model that has its regions inside, one of them with tied weights."""

    def __init__(self, remat):
        super().__init__()
        self.first = remat(nn.Linear(3, 3, dtype=DTYPE))
        self.second = remat(nn.Sequential(nn.Linear(3, 3, dtype=DTYPE), nn.Tanh()))
        self.second[0].weight = self.first.weight
        self.remat = remat

    def forward(self, x):
        x = self.second(self.first(x).sin())
        return self.remat(lambda x: torch.exp(x @ self.first.weight))(x)


class TestFunctionalCall:
    @pytest.mark.parametrize("where", ["inside", "outside"])
    @pytest.mark.parametrize("tie", [True, False])
    def test_the_backward_inside_and_outside(self, where, tie):
        def program(remat):
            net = seeded(Inside, remat)
            named = dict(net.named_parameters(remove_duplicate=tie))
            given = {n: (p.detach() * 1.5).requires_grad_() for n, p in named.items()}
            if where == "inside":

                class Stepper(nn.Module):
                    def __init__(self):
                        super().__init__()
                        self.net = net

                    def forward(self, x):
                        value = self.net(x).sum()
                        return value, torch.autograd.grad(value, list(self.net.parameters()))

                return functional_call(
                    Stepper(), {f"net.{n}": p for n, p in given.items()}, (X,), tie_weights=tie
                )
            value = functional_call(net, given, (X,), tie_weights=tie).sum()
            gradients = torch.autograd.grad(value, list(given.values()), allow_unused=True)
            assert all(p.grad is None for p in net.parameters())
            return value, gradients

        assert_same(program(functx.remat), program(identity), eps=16)

    def test_swapped_for_other_parameters_before_the_backward(self):
        """Two calls with different parameters, pulled back in the order of the calls."""

        def program(remat):
            net = seeded(Inside, remat)
            given = [
                {n: (p.detach() * s).requires_grad_() for n, p in net.named_parameters()}
                for s in (1.5, 0.5)
            ]
            values = [functional_call(net, g, (X,)).sum() for g in given]
            return [torch.autograd.grad(v, list(g.values())) for v, g in zip(values, given)]

        assert_same(program(functx.remat), program(identity), eps=16)

    def test_under_transforms(self):
        def program(remat):
            net = seeded(Inside, remat)
            given = {n: p.detach() * 1.5 for n, p in net.named_parameters()}

            def loss(given, x):
                return functional_call(net, given, (x,)).sum()

            return (
                functx.grad(loss)(given, X),
                functx.vmap(functx.grad(loss), (None, 0))(given, X[:, None]),
                functx.jacrev(functx.grad(loss))({**given}, X),
            )

        assert_same(program(functx.remat), program(identity), eps=64)


class TestParameters:
    def test_tied_weights(self):
        check(lambda remat: seeded(Inside, remat), X, eps=32)

    @pytest.mark.parametrize("cached", [True, False])
    def test_parametrizations(self, cached):
        class Symmetric(nn.Module):
            def forward(self, w):
                return w.triu() + w.triu(1).mT

        def program(remat):
            linear = seeded(nn.Linear, 3, 3).double()
            parametrize.register_parametrization(linear, "weight", Symmetric())
            net = remat(nn.Sequential(linear, nn.Tanh(), linear))
            x = X.clone().requires_grad_()
            if cached:
                with parametrize.cached():
                    value = net(x).square().sum()
            else:
                value = net(x).square().sum()
            return value, torch.autograd.grad(value, (x, *net.parameters()))

        assert_same(program(functx.remat), program(identity), eps=16)

    @pytest.mark.parametrize("way", ["around both", "between", "backward only", "two regions"])
    def test_a_cache_of_parametrizations(self, way):
        class Symmetric(nn.Module):
            def forward(self, w):
                return w.triu() + w.triu(1).mT

        def program(remat):
            linear = seeded(nn.Linear, 3, 3).double()
            parametrize.register_parametrization(linear, "weight", Symmetric())
            net = remat(nn.Sequential(linear, nn.Tanh(), linear))
            x = X.clone().requires_grad_()
            cached = parametrize.cached if way != "backward only" else contextlib.nullcontext
            with cached():
                before = linear.weight.sin().sum() if way == "between" else 0
                value = net(x).square().sum() + before
                if way == "two regions":
                    value = value + net(x.sin()).sum() + linear.weight.sum()
                if way == "around both":
                    return value, torch.autograd.grad(value, (x, *net.parameters()))
            again = parametrize.cached if way == "backward only" else contextlib.nullcontext
            with again():
                gradients = torch.autograd.grad(value, (x, *net.parameters()))
                return value, gradients, linear.weight

        assert_same(program(functx.remat), program(identity), eps=32)

    @pytest.mark.parametrize("name", ["weight_norm", "orthogonal", "spectral_norm"])
    def test_parametrizations_of_torch(self, name):
        def build(remat):
            linear = seeded(nn.Linear, 3, 3).double()
            return remat(nn.Sequential(getattr(parametrizations, name)(linear), nn.Tanh()))

        check(build, X, ways=["backward", "grad"], eps=32)

    def test_frozen_parameters_keep_no_gradient(self):
        def build(remat):
            net = seeded(Inside, remat)
            net.second[0].bias.requires_grad_(False)
            net.first.weight.requires_grad_(False)
            return net

        check(build, X, eps=16)
        net = build(functx.remat)
        net(X).sum().backward()
        assert net.second[0].bias.grad is None
        assert net.first.weight.grad is None
        assert net.first.bias.grad is not None

    def test_nothing_is_replayed_for_frozen_parameters(self):
        frozen = functx.remat(seeded(lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh())).double())
        frozen.requires_grad_(False)
        head = nn.Linear(3, 1, dtype=DTYPE)
        assert count(lambda: head(frozen(X)).sum().backward())["tanh"] == 1

    def test_gradients_of_frozen_parameters_are_not_computed(self):
        def mms(remat):
            net = seeded(lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh())).double()
            net = remat(net.requires_grad_(False))
            x = X.clone().requires_grad_()
            counts = count(lambda: net(x).sum().backward())
            return counts["mm"], counts["addmm"]

        products, forward = mms(functx.remat)
        plain_products, plain_forward = mms(identity)
        assert products == plain_products
        assert forward <= plain_forward + 1


@pytest.mark.parametrize("lazy", [nn.LazyLinear, lambda n: nn.LazyBatchNorm1d()])
def test_lazy_modules_are_called_once_before(lazy):
    torch.manual_seed(0)
    layer = lazy(4).double()
    with pytest.raises(functx.RematError, match="lazy module"):
        functx.remat(layer)
    net = nn.Sequential(layer, nn.Tanh())
    with pytest.raises(functx.RematError, match="Call it once outside of regions"):
        functx.remat(net)(numbers(3, 4))
    expected = net(numbers(3, 4))
    assert_same(functx.remat(net)(numbers(3, 4)).detach(), expected.detach())
