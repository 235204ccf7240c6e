"""apply_remat: submodules of an existing model become regions, and nothing else changes."""

import copy
import functools
import inspect
import io
import pickle

import pytest
import torch
from cases import DTYPE, identity, numbers, seeded
from references import assert_same, count
from torch import nn

import functx

pytestmark = pytest.mark.usefixtures("hooks")


class Block(nn.Module):
    """A block with a parameter, a buffer, a submodule and an attribute."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3, dtype=DTYPE)
        self.scale = nn.Parameter(numbers(3))
        self.register_buffer("shift", numbers(3, start=1.0))
        self.factor = 2.0

    def forward(self, x):
        return torch.tanh(self.linear(x)) * self.scale + self.shift * self.factor


class Net(nn.Module):
    def __init__(self, remat=functx.remat):
        super().__init__()
        self.first = remat(Block())
        self.blocks = nn.ModuleList(remat(Block()) for _ in range(2))
        self.head = nn.Linear(3, 1, dtype=DTYPE)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def plain():
    return seeded(Net, identity)


def ours(where="blocks.*", **options):
    return functx.apply_remat(plain(), where, **options)


def step(net, x=None):
    x = numbers(4, 3) if x is None else x
    out = net(x)
    out.square().mean().backward()
    gradients = [p.grad for p in net.parameters()]
    net.zero_grad()
    return out.detach(), gradients


def tanhs(net):
    """How many regions compute their tanh again."""
    return count(lambda: step(net))["tanh"] - 3


def test_values_and_gradients_are_those_of_the_model():
    assert_same(step(ours()), step(plain()))
    assert tanhs(ours()) == 2


def test_the_model_works_under_transforms():
    def gradients(net):
        parameters = {k: v.detach() for k, v in net.named_parameters()}

        def loss(parameters, x):
            return functx.functional_call(net, parameters, (x,)).square().mean()

        return functx.vmap(functx.grad(loss), (None, 0))(parameters, numbers(5, 4, 3))

    assert_same(gradients(ours()), gradients(plain()))


class TestNothingElseChanges:
    def test_types_do_not(self):
        assert [type(m) for m in ours().modules()] == [type(m) for m in plain().modules()]

    def test_names_and_state_do_not(self):
        a, b = ours(), plain()
        for names in ("named_parameters", "named_buffers", "named_modules"):
            assert [n for n, _ in getattr(a, names)()] == [n for n, _ in getattr(b, names)()]
        assert_same(a.state_dict(), b.state_dict())
        b.load_state_dict(a.state_dict())
        assert repr(a) == repr(b)

    def test_signatures_do_not(self):
        net = ours()
        assert inspect.signature(net.blocks[0].forward) == inspect.signature(plain().first.forward)
        assert net.blocks[0].forward.__self__ is net.blocks[0]
        assert net.blocks[0].forward.__func__ is type(net.blocks[0]).forward
        assert "blocks.0 (Block)" in repr(net.blocks[0].forward)
        mine, theirs = net.blocks[0].forward, plain().blocks[0].forward
        assert inspect.getfullargspec(mine).args == [
            a for a in inspect.getfullargspec(theirs).args if a != "self"
        ]
        for name in ("__name__", "__qualname__", "__doc__"):
            assert getattr(mine, name) == getattr(theirs, name)

    def test_hooks_run_once_and_outside(self):
        calls, net = [], ours()
        block = net.blocks[0]
        block.register_forward_pre_hook(lambda *_: calls.append("pre"))
        block.register_forward_hook(lambda *_: calls.append("post"))
        block.register_full_backward_hook(lambda *_: calls.append("backward"))
        step(net)
        assert calls == ["pre", "post", "backward"]

    def test_it_can_be_undone(self):
        net = plain()
        before = [dict(vars(m)) for m in net.modules()]
        functx.remove_remat(functx.apply_remat(net, "**"))
        assert [dict(vars(m)) for m in net.modules()] == before
        assert tanhs(net) == 0


class TestCopies:
    @pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
    def test_a_copy_has_regions_of_its_own(self, way):
        net, buffer = ours(), io.BytesIO()
        if way == "torch.save":
            torch.save(net, buffer)
            buffer.seek(0)
            other = torch.load(buffer, weights_only=False)
        else:
            other = copy.deepcopy(net) if way == "deepcopy" else pickle.loads(pickle.dumps(net))
        assert [type(m) for m in other.modules()] == [type(m) for m in net.modules()]
        assert_same(step(other), step(net))
        assert tanhs(other) == 2
        assert all(block.forward.__self__ is block for block in other.blocks)
        with torch.no_grad():
            other.blocks[0].scale.zero_()
        assert not torch.equal(other(numbers(4, 3)), net(numbers(4, 3)))

    def test_replicas_of_data_parallel_run_themselves(self):
        block = ours().blocks[0]
        replica = block._replicate_for_data_parallel()
        replica._parameters["scale"] = block.scale * 0
        assert_same(replica(numbers(2, 3)), (block.shift * block.factor).expand(2, 3))


class TestAgain:
    def test_applied_twice_is_applied_once(self):
        net = functx.apply_remat(ours(), "blocks.*")
        assert tanhs(net) == 2
        functx.remove_remat(net)
        assert tanhs(net) == 0

    def test_other_options_replace_the_first(self):
        net = ours(determinism_check="none")
        assert net.blocks[0].forward.options.determinism_check == "none"
        functx.apply_remat(net, "blocks.0")
        assert net.blocks[0].forward.options.determinism_check == "default"
        assert net.blocks[1].forward.options.determinism_check == "none"

    def test_a_module_in_two_places_is_one_region(self):
        def build(apply):
            net = plain()
            net.blocks[1] = net.blocks[0]
            return apply(net)

        shared = build(lambda net: functx.apply_remat(net, "blocks.1"))
        assert_same(step(shared), step(build(identity)))
        assert tanhs(shared) == 2  # it runs twice

    def test_what_remat_made_is_refused(self):
        with pytest.raises(ValueError, match="is a region already"):
            functx.apply_remat(seeded(Net), "blocks.*")

    def test_nothing_happens_where_one_can_not_be(self):
        net = plain()
        net.blocks[1] = functx.remat(net.blocks[1])
        with pytest.raises(ValueError, match="region already"):
            functx.apply_remat(net, "blocks.*")
        assert "forward" not in vars(net.blocks[0])


@pytest.mark.parametrize("before", [False, True])
def test_a_forward_that_was_set_on_the_instance_is_called(before):
    """As accelerate does, for one."""

    def wrap(block):
        inner = block.forward
        block.forward = functools.partial(lambda x: 2 * inner(x))

    net, expected = plain(), plain()
    wrap(expected.blocks[0])
    if before:
        wrap(net.blocks[0])
    own = net.blocks[0].forward
    functx.apply_remat(net, "blocks.*")
    if not before:
        wrap(net.blocks[0])
    assert_same(step(net), step(expected))
    assert tanhs(net) == 2
    if before:
        functx.remove_remat(net)
        assert net.blocks[0].forward is own


@pytest.mark.parametrize(
    "option",
    [{"determinism_check": "sometimes"}, {"preserve_rng_state": "sometimes"}, {"policy": 3}],
)
def test_options_that_are_not_known_are_an_error(option):
    net = plain()
    with pytest.raises((ValueError, TypeError), match="remat"):
        functx.apply_remat(net, "blocks.*", **option)
    assert "forward" not in vars(net.blocks[0])


def test_an_error_names_the_module():
    net = ours()
    net.blocks[1].flag = True
    original = type(net.blocks[1]).forward

    class Fickle(type(net.blocks[1])):
        def forward(self, x):
            return original(self, x) if self.flag else torch.sin(x)

    net.blocks[1].__class__ = Fickle
    out = net(numbers(2, 3))
    net.blocks[1].flag = False
    with pytest.raises(functx.ReplayError, match=r"blocks\.1 \(Block\)"):
        out.sum().backward()
