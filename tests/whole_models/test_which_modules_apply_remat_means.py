"""Which submodules apply_remat means: by class, name, pattern, predicate or the module itself."""

import re

import pytest
from torch import nn

import functx
from functx._apply import RegionForward


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(3)
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return x + self.linear(self.norm(x))


class Special(Block):
    pass


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 3)
        self.layers = nn.ModuleList(Special() if i == 2 else Block() for i in range(4))
        self.shared = self.layers[1]
        self.experts = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def regions(model):
    return [
        n for n, m in model.named_modules() if isinstance(vars(m).get("forward"), RegionForward)
    ]


def chosen(where, **options):
    model = Model()
    where = where(model) if getattr(where, "__name__", "") == "of" else where
    assert functx.apply_remat(model, where, **options) is model
    found = regions(model)
    assert functx.remove_remat(model) is model
    assert not regions(model)
    return found


LAYERS = ["layers.0", "layers.1", "layers.2", "layers.3"]


def of(function):
    function.__name__ = "of"
    return function


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (Block, LAYERS),
        (Special, ["layers.2"]),
        ((Special, nn.LayerNorm), [f"layers.{i}.norm" for i in range(2)]),
        ("layers.0", ["layers.0"]),
        ("layers.*", LAYERS),
        ("layers.[02]", ["layers.0", "layers.2"]),
        ("layers.[!02]", ["layers.1", "layers.3"]),
        ("layers.?.norm", [f"layers.{i}.norm" for i in range(4)]),
        ("**.norm", [f"layers.{i}.norm" for i in range(4)]),
        ("shared", ["layers.1"]),
        ("shared.norm", ["layers.1.norm"]),
        ("Special", ["layers.2"]),
        ("Block", LAYERS),
        (re.compile(r"layers\.\d"), LAYERS),
        (re.compile(r"shared"), ["layers.1"]),
        (lambda name, module: name.endswith(("1", "3")), ["layers.1", "layers.3"]),
        (lambda module: isinstance(module, Special), ["layers.2"]),
        (lambda name, *rest: name == "embed", ["embed"]),
        (["layers.3", "embed"], ["embed", "layers.3"]),
        ([Special, "embed", re.compile("layers.0")], ["embed", "layers.0", "layers.2"]),
        (of(lambda model: model.layers[3]), ["layers.3"]),
        (of(lambda model: model.layers), LAYERS),
        (of(lambda model: model.layers[::2]), ["layers.0", "layers.2"]),
        (of(lambda model: list(model.layers)[1:3]), ["layers.1", "layers.2"]),
        (of(lambda model: model.experts), ["experts.a", "experts.b"]),
        ("", [""]),
        (["", "embed"], ["", "embed"]),
    ],
)
def test_where_means(where, expected):
    found = chosen(where)
    if where == (Special, nn.LayerNorm):
        assert set(found) == {"layers.2", *(f"layers.{i}.norm" for i in range(4))}
    else:
        assert found == expected


def test_every_takes_one_of_some():
    assert chosen(Block, every=2) == ["layers.0", "layers.2"]
    assert chosen("layers.*", every=3) == ["layers.0", "layers.3"]
    assert chosen("layers.*", every=9) == ["layers.0"]


@pytest.mark.parametrize(("every", "error"), [(0, ValueError), (1.5, TypeError), (True, TypeError)])
def test_every_that_is_no_number_is_an_error(every, error):
    with pytest.raises(error, match="every"):
        functx.apply_remat(Model(), Block, every=every)


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("layer.0", r"'layers\.0'"),
        ("layers.7", r"'layers\.0'"),
        ("Blok", r"'Block'"),
        ("nothing.*", r"There are 'embed'"),
        (nn.Conv2d, r"the class Conv2d matches no submodule"),
        (re.compile("layers"), "Name what is in it"),
        (re.compile("ayers.*"), "match a whole name"),
        (lambda name, module: False, "the predicate"),
        (["layers.0", "layer.1"], r"'layers\.1'"),
        ([], "where is empty"),
        ("layers", r"ModuleList.*'layers\.\*'"),
        (Model, r"functx\.remat\(model\)"),
        ("gradient_checkpointing", "no layer of Model is marked"),
        (nn.Linear(3, 3), "no part of the model"),
    ],
)
def test_what_matches_nothing_is_an_error_that_says_what_there_is(where, says):
    model = Model()
    with pytest.raises(ValueError, match=says):
        functx.apply_remat(model, where)
    assert not regions(model)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        *(
            (lambda w=w: functx.apply_remat(Model(), w), "where holds")
            for w in (3, None, [3], ["layers.0", None])
        ),
        *(
            (lambda f=f: f(lambda x: x, "layers.*"), r"nn\.Module")
            for f in (functx.apply_remat, functx.remove_remat)
        ),
        (lambda: functx.apply_remat(nn.Linear(2, 2), "weight"), r"functx\.remat\(model\)"),
    ],
)
def test_what_can_mean_no_module_is_an_error(call, says):
    with pytest.raises((TypeError, ValueError), match=says):
        call()


def test_some_can_be_removed():
    model = functx.apply_remat(Model(), Block)
    functx.remove_remat(model, ["layers.0", "layers.2"])
    assert regions(model) == ["layers.1", "layers.3"]
    functx.remove_remat(model, "layers.0")
    assert regions(model) == ["layers.1", "layers.3"]
    with pytest.raises(ValueError, match="remove_remat"):
        functx.remove_remat(model, "nothing")
