"""remat of an nn.Module is an nn.Module: the same state, hooks, copies, and training."""

import copy
import io
import pickle

import pytest
import torch
from cases import DTYPE, numbers
from nets import Block, Net, pair, seeded
from programs import identity
from references import assert_same, count
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import functx

pytestmark = pytest.mark.usefixtures("hooks")


def train(net, steps=3):
    """Losses, gradients of the last step, and the state after some steps of gradient descent."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = net(numbers(4, 3, start=float(step))).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, [p.grad for p in net.parameters()], net.state_dict()


class TestIdentity:
    def test_it_is_a_module_of_the_same_class(self):
        ours, plain = pair(Block)
        assert isinstance(ours, nn.Module)
        assert isinstance(ours, type(plain))

    def test_state(self):
        ours, plain = pair(Block)
        for names in ("named_parameters", "named_buffers", "named_modules"):
            ours_names = [name for name, _ in getattr(ours, names)()]
            assert ours_names == [name for name, _ in getattr(plain, names)()]
        assert list(ours.state_dict()) == list(plain.state_dict())
        assert_same(ours.state_dict(), plain.state_dict())

    def test_parameters_are_shared_with_the_original(self):
        block = Block()
        region = functx.remat(block)
        originals, shared = list(block.parameters()), list(region.parameters())
        assert len(originals) == len(shared)
        assert all(a is b for a, b in zip(originals, shared, strict=True))
        block.linear.weight.data.zero_()
        assert region.linear.weight.abs().sum() == 0

    def test_state_dicts_are_interchangeable(self):
        ours, plain = seeded(Net), Net(identity)
        assert list(ours.state_dict()) == list(plain.state_dict())
        plain.load_state_dict(ours.state_dict())
        x = numbers(2, 3)
        assert_same(ours(x), plain(x))

    def test_attributes_and_methods(self):
        region = functx.remat(Block())
        assert region.factor == 2.0
        assert region.helper() == 2.0
        region.factor = 3.0
        assert region.helper() == 3.0
        assert_same(region(numbers(3)), region.forward(numbers(3)))
        with pytest.raises(AttributeError, match="nothing"):
            _ = region.nothing

    def test_repr_names_the_block(self):
        text = repr(functx.remat(Block()))
        assert "Block" in text
        assert "Linear" in text

    def test_train_and_eval(self):
        net = nn.Sequential(functx.remat(nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 3))))
        assert net[0].training
        net.eval()
        assert not any(m.training for m in net.modules())
        x = torch.ones(2, 3)
        assert_same(net(x), net(x))
        net.train()
        assert all(m.training for m in net.modules())

    def test_moving_and_casting(self):
        region = functx.remat(Block()).to(torch.float32)
        assert {p.dtype for p in region.parameters()} == {torch.float32}
        assert region(numbers(3).float()).dtype == torch.float32
        assert next(functx.remat(Block()).to("meta").parameters()).is_meta
        region.requires_grad_(False)
        assert not any(p.requires_grad for p in region.parameters())

    def test_containers_of_torch(self):
        net = nn.Sequential(functx.remat(nn.Linear(3, 4)), nn.ReLU(), functx.remat(nn.Linear(4, 2)))
        assert net(torch.ones(5, 3)).shape == (5, 2)
        assert functx.remat(net)[0] is net[0]
        assert len(functx.remat(net)) == 3

    def test_new_submodules_and_parameters_are_registered(self):
        region = functx.remat(Block())
        region.extra = nn.Parameter(numbers(3))
        region.child = nn.Linear(2, 2)
        assert {"extra", "child.weight", "child.bias"} <= {n for n, _ in region.named_parameters()}


class TestCopies:
    def test_pickle(self):
        region = functx.remat(Block())
        loaded = pickle.loads(pickle.dumps(region))
        x = numbers(2, 3).requires_grad_()
        assert_same(loaded(x), region(x))
        assert is_remat(loaded)

    def test_torch_save(self):
        region, buffer = functx.remat(Block()), io.BytesIO()
        torch.save(region, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        assert_same(loaded(numbers(3)), region(numbers(3)))

    def test_deepcopy(self):
        region = functx.remat(Block())
        other = copy.deepcopy(region)
        assert_same(other(numbers(3)), region(numbers(3)))
        assert other.scale is not region.scale
        other.scale.data.zero_()
        assert region.scale.abs().sum() > 0
        assert is_remat(other)

    def test_deepcopy_of_a_net(self):
        net = seeded(Net)
        other = copy.deepcopy(net)
        train(other)
        assert_same(net.state_dict(), seeded(Net).state_dict())


def is_remat(module):
    """Whether the module computes its ``tanh`` again in the backward pass."""
    x = numbers(2, 3).requires_grad_()
    return count(lambda: module(x).sum().backward())["tanh"] == 2


class TestHooks:
    def test_forward_hooks_run_once_and_change_the_result(self):
        calls = []

        def pre(module, args):
            calls.append("pre")
            return (args[0] * 2,)

        def post(module, args, output):
            calls.append("post")
            return output * 3

        results = []
        for module in pair(Block):
            calls.clear()
            module.register_forward_pre_hook(pre)
            module.register_forward_hook(post)
            x = numbers(2, 3).requires_grad_()
            out = module(x)
            results.append((out, torch.autograd.grad(out.sum(), [x, *module.parameters()])))
            assert calls == ["pre", "post"]
        assert_same(*results)

    def test_backward_hooks(self):
        results = []
        for module in pair(Block):
            seen = []
            module.register_full_backward_hook(
                lambda m, gi, go, seen=seen: seen.extend(g.clone() for g in (*gi, *go))
            )
            module.register_full_backward_pre_hook(
                lambda m, go, seen=seen: seen.extend(g.clone() for g in go)
            )
            x = numbers(2, 3).requires_grad_()
            module(x).square().sum().backward()
            results.append((seen, x.grad))
            assert len(seen) == 3
        assert_same(*results)

    def test_hooks_of_submodules(self):
        results = []
        for module in pair(Block):
            module.linear.register_forward_hook(lambda m, a, out: out * 2)
            x = numbers(2, 3).requires_grad_()
            out = module(x)
            results.append((out, torch.autograd.grad(out.sum(), x)))
        assert_same(*results)

    def test_gradient_hooks_of_parameters_run_once(self):
        results = []
        for module in pair(Block):
            calls = []
            module.scale.register_hook(lambda g, calls=calls: calls.append(1) or g * 2)
            module.linear.weight.register_post_accumulate_grad_hook(
                lambda p, calls=calls: calls.append(2)
            )
            module(numbers(2, 3)).sum().backward()
            results.append([p.grad for p in module.parameters()])
            assert sorted(calls) == [1, 2]
        assert_same(*results)


class TestTraining:
    def test_a_net_of_regions_trains_bit_by_bit_as_without(self):
        assert_same(train(seeded(Net)), train(seeded(Net, identity)))

    def test_a_region_around_a_net_of_regions(self):
        assert_same(train(functx.remat(seeded(Net))), train(seeded(Net, identity)))

    def test_frozen_parameters(self):
        results = []
        for net in (seeded(Net), seeded(Net, identity)):
            net.first.linear.weight.requires_grad_(False)
            net.blocks[0].requires_grad_(False)
            net(numbers(4, 3)).sum().backward()
            results.append([p.grad for p in net.parameters()])
        assert_same(*results)
        assert results[0][1] is None

    def test_a_fully_frozen_region_is_not_recomputed(self):
        region = functx.remat(Block()).requires_grad_(False)
        head = nn.Linear(3, 1, dtype=DTYPE)
        assert count(lambda: head(region(numbers(2, 3))).sum().backward())["tanh"] == 1

    def test_tied_weights(self):
        class Tied(nn.Module):
            def __init__(self, remat):
                super().__init__()
                self.encode = remat(Block())
                self.decode = remat(Block())
                self.decode.linear.weight = self.encode.linear.weight

            def forward(self, x):
                return self.decode(self.encode(x)) @ self.encode.linear.weight

        results = []
        for net in (seeded(Tied, functx.remat), seeded(Tied, identity)):
            assert len(list(net.parameters())) == 5
            net(numbers(4, 3)).sum().backward()
            results.append([p.grad for p in net.parameters()])
        ours, theirs = results
        assert_same(ours, theirs, eps=4)

    def test_a_module_used_twice(self):
        results = []
        for module in pair(Block):
            x = numbers(2, 3).requires_grad_()
            module(module(x)).sum().backward()
            results.append((x.grad, [p.grad for p in module.parameters()]))
        assert_same(*results)

    def test_keyword_arguments(self):
        results = []
        for module in pair(Block):
            x = numbers(2, 3).requires_grad_()
            results.append(torch.autograd.grad(module(x, power=3).sum(), x))
        assert_same(*results)

    def test_a_method_of_a_module_as_a_region(self):
        block, plain = seeded(Block), seeded(Block)
        functx.remat(block.forward)(numbers(2, 3)).sum().backward()
        plain(numbers(2, 3)).sum().backward()
        assert_same([p.grad for p in block.parameters()], [p.grad for p in plain.parameters()])

    @pytest.mark.parametrize(
        "layer",
        [
            lambda: nn.MultiheadAttention(8, 2, batch_first=True),
            lambda: nn.GRU(8, 8, batch_first=True),
            lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
            lambda: nn.LayerNorm(8),
            lambda: nn.Conv1d(5, 5, 3),
        ],
        ids=["attention", "gru", "encoder", "layer norm", "convolution"],
    )
    @pytest.mark.parametrize("training", [True, False])
    def test_layers_of_torch_bit_by_bit(self, layer, training):
        results = []
        for module in pair(layer):
            module.train(training)
            x = numbers(2, 5, 8).float().requires_grad_()
            out = module(x, x, x) if isinstance(module, nn.MultiheadAttention) else module(x)
            out = out[0] if isinstance(out, tuple) else out
            gradients = torch.autograd.grad(out.square().sum(), [x, *module.parameters()])
            results.append((out, gradients))
        assert_same(*results)


class Doubled(nn.Module):
    def forward(self, w):
        return w * 2


class Tripled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 3


CLASSES = {
    "a parametrization": lambda m: parametrize.register_parametrization(m, "weight", Doubled()),
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "another class": lambda m: setattr(m, "__class__", Tripled),
}


@pytest.mark.parametrize("before", [0, 6])
@pytest.mark.parametrize("change", CLASSES)
def test_the_original_comes_to_be_of_another_class(change, before):
    """Its forward is the region's, from then on; and what it was again, when that is taken off."""

    def program(remat):
        torch.manual_seed(0)
        m = nn.Linear(4, 4, dtype=DTYPE)
        region, outs = remat(m), []
        for step in range(before + 8):
            if step == before:
                CLASSES[change](m)
            if step == before + 6 and parametrize.is_parametrized(m):
                parametrize.remove_parametrizations(m, "weight")
            x = numbers(3, 4).requires_grad_()
            y = region(x)
            outs += [y, *torch.autograd.grad(y.sum(), [x, *m.parameters()])]
        return outs, region

    ours, region = program(functx.remat)
    assert_same(ours, program(identity)[0])
    assert_same(copy.deepcopy(region).weight, region.weight)


def test_a_module_with_slots():
    class Slotted(nn.Linear):
        __slots__ = ("unused",)

    region = functx.remat(Slotted(4, 4))
    assert isinstance(copy.deepcopy(region), Slotted)
    region(torch.ones(3, 4)).sum().backward()
    assert region.weight.grad is not None
