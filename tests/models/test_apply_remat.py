"""apply_remat: the submodules that it means become regions, and nothing else changes."""

import functools
import inspect
import re
from typing import Any, NamedTuple

import pytest
import torch
from cases import COPIES, DTYPE, Block, identity, numbers, seeded
from references import assert_same, count
from torch import nn

import functx

pytestmark = pytest.mark.usefixtures("hooks")


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


plain = lambda: seeded(Net, identity)
ours = lambda where="blocks.*", **options: functx.apply_remat(plain(), where, **options)


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


class TestNothingElseChanges:
    def test_types_names_and_state_do_not(self):
        a, b = ours(), plain()
        assert [type(m) for m in a.modules()] == [type(m) for m in b.modules()]
        for names in ("named_parameters", "named_buffers", "named_modules"):
            assert [n for n, _ in getattr(a, names)()] == [n for n, _ in getattr(b, names)()]
        assert_same(a.state_dict(), b.state_dict())
        b.load_state_dict(a.state_dict())
        assert repr(a) == repr(b)

    def test_signatures_do_not(self):
        net = ours()
        mine, theirs = net.blocks[0].forward, plain().blocks[0].forward
        args = [a for a in inspect.getfullargspec(theirs).args if a != "self"]
        assert inspect.getfullargspec(mine).args == args
        assert inspect.signature(mine) == inspect.signature(theirs)
        assert mine.__func__ is type(net.blocks[0]).forward
        assert "blocks.0 (Block)" in repr(mine)
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
    @pytest.mark.parametrize("way", COPIES)
    def test_a_copy_has_regions_of_its_own(self, way):
        net = ours()
        other = COPIES[way](net)
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
    def test_applied_twice_is_applied_once_with_the_new_options(self):
        net = functx.apply_remat(ours(determinism_check="none"), "blocks.0")
        checks = [block.forward.options.determinism_check for block in net.blocks]
        assert checks == ["default", "none"]
        assert tanhs(net) == 2
        functx.remove_remat(net)
        assert tanhs(net) == 0

    def test_a_module_in_two_places_is_one_region(self):
        def build(apply):
            net = plain()
            net.blocks[1] = net.blocks[0]
            return apply(net)

        shared = build(lambda net: functx.apply_remat(net, "blocks.1"))
        assert_same(step(shared), step(build(identity)))
        assert tanhs(shared) == 2  # it runs twice

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


def test_an_error_names_the_module():
    class Fickle(Block):
        flag = True

        def forward(self, x):
            return super().forward(x) if self.flag else torch.sin(x)

    net = ours()
    net.blocks[1].__class__ = Fickle
    out = net(numbers(2, 3))
    net.blocks[1].flag = False
    with pytest.raises(functx.ReplayError, match=r"blocks\.1 \(Block\)"):
        out.sum().backward()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(3)
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return x + self.linear(self.norm(x))


class Special(Layer):
    pass


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 3)
        self.layers = nn.ModuleList(Special() if i == 2 else Layer() for i in range(4))
        self.shared = self.layers[1]
        self.experts = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def chosen(where, **options):
    model = Model()
    where = where.of(model) if isinstance(where, Part) else where
    assert functx.apply_remat(model, where, **options) is model
    found = functx.remat_regions(model)
    assert functx.remove_remat(model) is model
    assert not functx.remat_regions(model)
    return found


class Part(NamedTuple):
    of: Any  # a function of the model


LAYERS = ["layers.0", "layers.1", "layers.2", "layers.3"]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (Layer, LAYERS),
        (Special, ["layers.2"]),
        ((Special, nn.LayerNorm), sorted(["layers.2", *(f"layers.{i}.norm" for i in range(4))])),
        ("layers.0", ["layers.0"]),
        ("layers.*", LAYERS),
        ("layers.[02]", ["layers.0", "layers.2"]),
        ("layers.[!02]", ["layers.1", "layers.3"]),
        ("layers.?.norm", [f"layers.{i}.norm" for i in range(4)]),
        ("**.norm", [f"layers.{i}.norm" for i in range(4)]),
        ("shared", ["layers.1"]),
        ("shared.norm", ["layers.1.norm"]),
        ("Special", ["layers.2"]),
        ("Layer", LAYERS),
        (re.compile(r"layers\.\d"), LAYERS),
        (re.compile(r"shared"), ["layers.1"]),
        (lambda name, module: name.endswith(("1", "3")), ["layers.1", "layers.3"]),
        (lambda module: isinstance(module, Special), ["layers.2"]),
        (lambda name, *rest: name == "embed", ["embed"]),
        (["layers.3", "embed"], ["embed", "layers.3"]),
        ([Special, "embed", re.compile("layers.0")], ["embed", "layers.0", "layers.2"]),
        (Part(lambda model: model.layers[3]), ["layers.3"]),
        (Part(lambda model: model.layers), LAYERS),
        (Part(lambda model: model.layers[::2]), ["layers.0", "layers.2"]),
        (Part(lambda model: list(model.layers)[1:3]), ["layers.1", "layers.2"]),
        (Part(lambda model: model.experts), ["experts.a", "experts.b"]),
        ("", [""]),
        (["", "embed"], ["", "embed"]),
    ],
)
def test_where_means(where, expected):
    assert chosen(where) == expected


def test_every_takes_one_of_some():
    assert chosen(Layer, every=2) == ["layers.0", "layers.2"]
    assert chosen("layers.*", every=3) == ["layers.0", "layers.3"]
    assert chosen("layers.*", every=9) == ["layers.0"]
    for every, error in ((0, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match="every"):
            functx.apply_remat(Model(), Layer, every=every)


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("layer.0", r"'layers\.0'"),
        ("layers.7", r"'layers\.0'"),
        ("Layr", r"'Layer'"),
        ("nothing.*", r"The submodules are 'embed'"),
        (nn.Conv2d, "'Conv2d' matches no submodule"),
        (re.compile("layers"), "Name the modules in it"),
        (re.compile("ayers.*"), "by its whole name"),
        (lambda name, module: False, "<lambda>"),
        (["layers.0", "layer.1"], r"'layers\.1'"),
        ([], "where is empty"),
        ("layers", r"ModuleList.*'layers\.\*'"),
        (Model, r"functx\.remat\(model\)"),
        ("gradient_checkpointing", "no layer of Model is marked"),
        (nn.Linear(3, 3), "not a part of the model"),
    ],
)
def test_what_matches_nothing_is_an_error_that_says_what_there_is(where, says):
    model = Model()
    with pytest.raises(ValueError, match=says):
        functx.apply_remat(model, where)
    assert not functx.remat_regions(model)


NO_MODULES = [
    *((lambda w=w: functx.apply_remat(Model(), w), "where must be") for w in (3, None, [3])),
    (lambda: functx.apply_remat(lambda x: x, "layers.*"), r"nn\.Module"),
    (lambda: functx.remove_remat(lambda x: x, "layers.*"), r"nn\.Module"),
    (lambda: functx.apply_remat(nn.Linear(2, 2), "weight"), r"functx\.remat\(model\)"),
]


@pytest.mark.parametrize(("call", "says"), NO_MODULES)
def test_what_can_mean_no_module_is_an_error(call, says):
    with pytest.raises((TypeError, ValueError), match=says):
        call()


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
def test_a_model_with_regions_that_is_scripted_is_an_error_that_names_remove_remat():
    with pytest.raises(AttributeError, match=r"remove_remat\(model\)"):
        torch.jit.script(functx.apply_remat(Model(), "layers.*"))


def test_regions_are_listed():
    model = Model()
    assert functx.remat_regions(model) == []
    functx.apply_remat(model, ["layers.0", "layers.2"])
    model.layers[1] = functx.remat(nn.Linear(3, 3))
    assert functx.remat_regions(model) == ["layers.0", "layers.1", "layers.2"]
    assert functx.remat_regions(functx.remat(nn.Linear(3, 3))) == [""]
    with pytest.raises(TypeError, match=r"remat_regions.*nn\.Module"):
        functx.remat_regions(functx.remat(torch.sin))


def test_some_can_be_removed():
    model = functx.apply_remat(Model(), Layer)
    functx.remove_remat(model, ["layers.0", "layers.2"])
    assert functx.remat_regions(model) == ["layers.1", "layers.3"]
    functx.remove_remat(model, "layers.0")
    assert functx.remat_regions(model) == ["layers.1", "layers.3"]
    with pytest.raises(ValueError, match="remove_remat"):
        functx.remove_remat(model, "nothing")
