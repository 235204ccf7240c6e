"""apply_remat: submodules of an existing model become regions, and nothing else changes."""

import copy
import functools
import gc
import inspect
import io
import pickle
import weakref

import pytest
import torch
from cases import DTYPE, numbers
from nets import Net, seeded
from programs import identity
from references import assert_same, count, peak
from torch import nn

import functx

pytestmark = pytest.mark.usefixtures("hooks")


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


def test_values_and_gradients():
    assert_same(step(ours()), step(plain()))
    assert tanhs(ours()) == 2


def test_under_transforms():
    def gradients(net):
        parameters = {k: v.detach() for k, v in net.named_parameters()}

        def loss(parameters, x):
            return functx.functional_call(net, parameters, (x,)).square().mean()

        return functx.vmap(functx.grad(loss), (None, 0))(parameters, numbers(5, 4, 3))

    assert_same(gradients(ours()), gradients(plain()))


def test_it_saves_memory():
    def deep(where):
        net = nn.Sequential(
            *(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Sigmoid()) for _ in range(8))
        )
        if where:
            functx.apply_remat(net, where)
        return peak(lambda: net(torch.ones(64, 16)).sum().backward())

    assert deep("*") < 0.7 * deep(None)


class TestNothingElseChanges:
    def test_types(self):
        assert [type(m) for m in ours().modules()] == [type(m) for m in plain().modules()]

    def test_names_and_state(self):
        a, b = ours(), plain()
        for names in ("named_parameters", "named_buffers", "named_modules"):
            assert [n for n, _ in getattr(a, names)()] == [n for n, _ in getattr(b, names)()]
        assert_same(a.state_dict(), b.state_dict())
        b.load_state_dict(a.state_dict())
        assert repr(a) == repr(b)

    def test_signature(self):
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

    @pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")
    def test_traced(self):
        """A trace of torch.jit has no regions, as one of a model with torch's checkpoint."""
        x = numbers(4, 3)
        assert_same(torch.jit.trace(ours(), x)(x), plain()(x))

    def test_hooks_run_once_and_outside(self):
        calls, net = [], ours()
        block = net.blocks[0]
        block.register_forward_pre_hook(lambda *_: calls.append("pre"))
        block.register_forward_hook(lambda *_: calls.append("post"))
        block.register_full_backward_hook(lambda *_: calls.append("backward"))
        step(net)
        assert calls == ["pre", "post", "backward"]

    def test_training_mode_and_casting(self):
        net = ours().to(torch.float32).eval()
        assert net.blocks[0].training is False
        assert net(numbers(2, 3).float()).dtype == torch.float32

    def test_undo(self):
        net = plain()
        before = [dict(vars(m)) for m in net.modules()]
        functx.remove_remat(functx.apply_remat(net, "**"))
        assert [dict(vars(m)) for m in net.modules()] == before
        assert tanhs(net) == 0


class TestCopies:
    def check(self, other, original):
        assert [type(m) for m in other.modules()] == [type(m) for m in original.modules()]
        assert_same(step(other), step(original))
        assert tanhs(other) == 2
        for block in other.blocks:
            assert block.forward.__self__ is block
        with torch.no_grad():
            other.blocks[0].scale.zero_()
        assert not torch.equal(other(numbers(4, 3)), original(numbers(4, 3)))

    def test_deepcopy(self):
        net = ours()
        self.check(copy.deepcopy(net), net)

    def test_pickle(self):
        net = ours()
        self.check(pickle.loads(pickle.dumps(net)), net)

    def test_pickle_of_one_region(self):
        block = ours().blocks[0]
        forward = pickle.loads(pickle.dumps(block.forward))
        assert_same(forward(numbers(2, 3)), block(numbers(2, 3)))

    def test_torch_save(self):
        net, buffer = ours(), io.BytesIO()
        torch.save(net, buffer)
        buffer.seek(0)
        self.check(torch.load(buffer, weights_only=False), net)

    def test_shallow_copies_run_themselves(self):
        block = ours().blocks[0]
        other = copy.copy(block)
        other.factor = 5.0  # of the copy alone
        expected = copy.copy(plain().blocks[0])
        expected.factor = 5.0
        x = numbers(2, 3).requires_grad_()
        assert_same(other(x), expected(x))
        assert_same(block(x), plain().blocks[0](x))

    def test_replicas_of_data_parallel_run_themselves(self):
        block = ours().blocks[0]
        replica = block._replicate_for_data_parallel()
        replica._parameters["scale"] = block.scale * 0
        assert_same(replica(numbers(2, 3)), (block.shift * block.factor).expand(2, 3))

    def test_nothing_is_kept_alive(self):
        net = ours()
        step(net)
        block = weakref.ref(net.blocks[0])
        del net
        gc.collect()
        assert block() is None


class TestAgain:
    def test_twice_is_once(self):
        net = functx.apply_remat(ours(), "blocks.*")
        assert tanhs(net) == 2
        functx.remove_remat(net)
        assert tanhs(net) == 0

    def test_with_other_options(self):
        net = ours(determinism_check="none")
        assert net.blocks[0].forward.options.determinism_check == "none"
        functx.apply_remat(net, "blocks.0")
        assert net.blocks[0].forward.options.determinism_check == "default"
        assert net.blocks[1].forward.options.determinism_check == "none"

    def test_regions_in_regions(self):
        net = functx.apply_remat(ours(), "**")
        assert_same(step(net), step(plain()))

    def test_a_module_in_two_places(self):
        def build(apply):
            net = plain()
            net.blocks[1] = net.blocks[0]
            return apply(net)

        shared = build(lambda net: functx.apply_remat(net, "blocks.1"))
        assert_same(step(shared), step(build(identity)))
        assert tanhs(shared) == 2  # it runs twice

    def test_of_what_remat_made(self):
        with pytest.raises(ValueError, match="is a region already"):
            functx.apply_remat(seeded(Net), "blocks.*")

    def test_nothing_happens_where_one_can_not_be(self):
        net = plain()
        net.blocks[1] = functx.remat(net.blocks[1])
        with pytest.raises(ValueError, match="region already"):
            functx.apply_remat(net, "blocks.*")
        assert "forward" not in vars(net.blocks[0])


class TestForwardsOfInstances:
    """Libraries replace ``forward`` on instances too (accelerate, for one)."""

    @staticmethod
    def wrap(block):
        inner = block.forward
        block.forward = functools.partial(lambda x: 2 * inner(x))

    def test_before(self):
        net, expected = plain(), plain()
        self.wrap(net.blocks[0])
        self.wrap(expected.blocks[0])
        own = net.blocks[0].forward
        functx.apply_remat(net, "blocks.*")
        assert_same(step(net), step(expected))
        assert tanhs(net) == 2
        functx.remove_remat(net)
        assert net.blocks[0].forward is own

    def test_after(self):
        net, expected = ours(), plain()
        self.wrap(net.blocks[0])
        self.wrap(expected.blocks[0])
        assert_same(step(net), step(expected))
        assert tanhs(net) == 2


@pytest.mark.parametrize(
    "option",
    [{"determinism_check": "sometimes"}, {"preserve_rng_state": "sometimes"}, {"policy": 3}],
)
def test_options_that_are_not_known(option):
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


def test_buffers_that_advance_do_so_once():
    def build(apply):
        torch.manual_seed(0)
        return apply(
            nn.Sequential(nn.Sequential(nn.Linear(3, 3, dtype=DTYPE), nn.BatchNorm1d(3).double()))
        )

    net, expected = build(lambda net: functx.apply_remat(net, "0")), build(identity)
    assert_same(step(net), step(expected))
    assert_same(net.state_dict(), expected.state_dict())
