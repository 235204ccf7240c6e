"""Python's and numpy's generators, however the code that draws is reached: as without ``remat``.

A replay draws what its forward drew, and the program after it goes on where it would.
"""

import functools
import importlib
import random

import drawing
import numpy as np
import pytest
import torch
from drawing import Drawn, Noise, coin, noise, noisy

import functx
from functx._remat import _within_reach

DTYPE = torch.float64
TABLE, FUNCTIONS, NOISE = {"noise": noise}, [noise], functools.partial(noise)
cached = functools.lru_cache(coin)
from_class = noisy.method


class Space:
    static = staticmethod(noise)
    function = noise


class Layer(torch.nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.object, self.function, self.table = noisy, noise, {"noise": noise}
        self.now = forward

    def helper(self, x):
        return noise(x)

    def forward(self, x):
        return self.now(self, x)


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        m = torch.from_numpy(np.random.rand(*x.shape))
        ctx.save_for_backward(m)
        return x * m

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]


class SavesAside(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x * 1

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.k = random.random()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.k


@torch.library.custom_op("functx_tests::mask_of_numpy", mutates_args=())
def mask(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.random.rand(*x.shape))


@torch.library.custom_op("functx_tests::mask_by_device", mutates_args=(), device_types="cuda")
def mask_by_device(x: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError


@mask_by_device.register_kernel("cpu")
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.random.rand(*x.shape))


overload = torch.ops.functx_tests.mask_of_numpy.default


def local_import(x):
    from drawing import noise as local

    return local(x)


def local_module(x):
    import drawing as local

    return local.noise(x)


def local_numpy(x):
    from numpy.random import rand

    return x * torch.from_numpy(rand(*x.shape))


def patched():
    layer = torch.nn.Linear(3, 3, dtype=DTYPE)
    layer.forward = noise
    return layer


def with_closure(module):
    return lambda x: x * torch.from_numpy(module.rand(*x.shape))


BODIES = {
    "function": lambda: lambda x: noise(x),
    "module": lambda: lambda x: drawing.noise(x),
    "module, as numbers": lambda: lambda x: drawing.noise_of_numbers(x),
    "module, branches": lambda: lambda x: drawing.coin(x),
    "module's object": lambda: lambda x: drawing.noisy.method(x),
    "object": lambda: lambda x: noisy(x),
    "method": lambda: lambda x: noisy.method(x),
    "property": lambda: lambda x: noisy.factor * x,
    "bound": lambda: lambda x: from_class(x),
    "static": lambda: lambda x: Noise.static(x),
    "of a class": lambda: lambda x: Noise.of_class(x),
    "made": lambda: lambda x: x * Drawn().factor,
    "partial": lambda: lambda x: NOISE(x),
    "lru_cache": lambda: lambda x: cached.__wrapped__(x),
    "in a dict": lambda: lambda x: TABLE["noise"](x),
    "in a list": lambda: lambda x: FUNCTIONS[0](x),
    "space, static": lambda: lambda x: Space.static(x),
    "space": lambda: lambda x: Space.function(x),
    "attribute object": lambda: Layer(lambda self, x: self.object(x)),
    "attribute function": lambda: Layer(lambda self, x: self.function(x)),
    "attribute table": lambda: Layer(lambda self, x: self.table["noise"](x)),
    "helper": lambda: Layer(Layer.helper),
    "helper, from outside": lambda: (lambda m: lambda x: m.helper(x))(Layer(None)),
    "layer of torch's": patched,
    "local import": lambda: local_import,
    "local module": lambda: local_module,
    "local numpy": lambda: local_numpy,
    "closure of a module": lambda: with_closure(np.random),
    "Function": lambda: lambda x: Saves.apply(x).sin(),
    "Function's apply": lambda: (lambda apply: lambda x: apply(x).sin())(Saves.apply),
    "Function, setup_context": lambda: lambda x: SavesAside.apply(x).sin(),
    "operator": lambda: lambda x: (x * mask(x.detach())).sin(),
    "operator by device": lambda: lambda x: (x * mask_by_device(x.detach())).sin(),
    "operator by name": lambda: (
        lambda x: (x * torch.ops.functx_tests.mask_of_numpy(x.detach())).sin()
    ),
    "overload": lambda: lambda x: (x * overload(x.detach())).sin(),
    "generator, closed over": lambda: (lambda g: lambda x: x * torch.tensor(g.random(3)))(
        np.random.default_rng(0)
    ),
    "RandomState": lambda: (lambda g: lambda x: x * torch.tensor(g.rand(3)))(
        np.random.RandomState(0)
    ),
    "Random": lambda: (lambda g: lambda x: x * g.random())(random.Random(0)),
    "method of a generator": lambda: (lambda draw: lambda x: x * draw())(random.Random(0).random),
    "generator in a list": lambda: (lambda held: lambda x: x * held[0].random())(
        [random.Random(0)]
    ),
}


def run(remat, make):
    """Three steps, their gradients, and what is drawn after them."""
    np.random.seed(0), random.seed(0)
    w = torch.linspace(-1, 1, 9, dtype=DTYPE).view(3, 3).requires_grad_()
    x = torch.linspace(0.1, 1, 6, dtype=DTYPE).view(2, 3)
    region = remat(make())
    out = []
    for _ in range(3):
        y = region(x @ w)
        out += [y.detach(), *torch.autograd.grad(y.sin().sum(), w)]
    return [*out, torch.tensor([np.random.rand(), random.random()])]


def assert_same(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("options", [{}, {"determinism_check": "values"}], ids=["", "values"])
def test_as_without(name, options):
    expected = run(lambda f: f, BODIES[name])
    assert_same(run(lambda f: functx.remat(f, **options), BODIES[name]), expected)


@pytest.mark.parametrize("way", ["argument", "attribute", "class", "global"])
@pytest.mark.parametrize("make", [np.random.default_rng, np.random.RandomState, random.Random])
def test_a_generator_of_the_programs(make, way):
    """It is where it would be when the region has been replayed, and is read nowhere else."""

    def program(remat):
        g = noisy.generator = Space.generator = drawing.generator = make(1)
        region = remat(
            {
                "argument": lambda x, g: x.sin() * torch.tensor(_draw(g), dtype=DTYPE),
                "attribute": lambda x: x.sin() * torch.tensor(_draw(noisy.generator), dtype=DTYPE),
                "class": lambda x: x.sin() * torch.tensor(_draw(Space.generator), dtype=DTYPE),
                "global": lambda x: x.sin() * torch.tensor(_draw(drawing.generator), dtype=DTYPE),
            }[way]
        )
        inputs = (g,) if way == "argument" else ()
        out = []
        for _ in range(3):
            x = torch.linspace(0.1, 1, 3, dtype=DTYPE).requires_grad_()
            out += torch.autograd.grad(region(x, *inputs).sum(), x)
        return [*out, torch.tensor(_draw(g))]

    assert_same(program(functx.remat), program(lambda f: f))


def _draw(g):
    return g.random() if isinstance(g, random.Random) else g.uniform()


def test_no_code_of_the_users_runs_to_find_it_out():
    """Attributes are looked at where they are, not asked for."""
    asked = []

    class Asked:
        @property
        def noise(self):
            asked.append(1)
            return noise

        def __getattr__(self, name):
            asked.append(name)
            raise AttributeError(name)

    one = Asked()
    x = torch.ones(3, dtype=DTYPE, requires_grad=True)
    functx.remat(lambda x: x.sin() if one is None else (x.sin() if x is None else x.cos()))(x)
    assert asked == []
    functx.remat(lambda x: one.noise(x.view(1, 3)))(x)
    assert asked == [1]


def test_global_generators_are_read_only_where_code_names_them(monkeypatch):
    """Else a region is dearer: and a method that draws counts where code names it."""
    read = []
    state = np.random.get_state
    monkeypatch.setattr(np.random, "get_state", lambda *a, **k: read.append(1) or state(*a, **k))
    x = torch.ones(3, dtype=DTYPE, requires_grad=True)
    functx.remat(lambda x: x * len(noisy.__class__.__name__))(x)
    before = len(read)
    layer = torch.nn.Linear(3, 3, dtype=DTYPE)
    functx.remat(lambda x: layer(x).sin())(x)
    assert len(read) == before
    functx.remat(lambda x: noisy.method(x.view(1, 3)))(x)
    assert len(read) > before


def test_left_to_the_caller_where_the_caller_says_so():
    g = random.Random(0)
    x = torch.ones(3, dtype=DTYPE, requires_grad=True)
    y = functx.remat(lambda x: x.sin() * g.random(), preserve_rng_state=False)(x)
    with pytest.raises(functx.ReplayError, match="called with"):
        y.sum().backward()


def test_functions_of_installed_packages_are_not_all_looked_into(tmp_path, monkeypatch):
    """A library has thousands, of which a body may name many."""
    library = tmp_path / "site-packages" / "functx_library"
    library.mkdir(parents=True)
    helpers = "".join(f"def helper{i}(x):\n    return other{i}(x)\n" for i in range(200))
    others = "".join(f"def other{i}(x):\n    return x\n" for i in range(200))
    (library / "__init__.py").write_text(helpers + others)
    monkeypatch.syspath_prepend(str(library.parent))
    module = importlib.import_module("functx_library")
    names = " + ".join(f"module.helper{i}(x)" for i in range(200))
    body = eval(f"lambda x: {names}", {"module": module})
    assert len(_within_reach.reach(body, []).named) == 1
    x = torch.ones(3, dtype=DTYPE)
    assert torch.equal(functx.remat(body)(x), body(x))


def test_what_a_class_holds_is_looked_at_once(monkeypatch):
    """A method that calls the next that calls the next; and a tensor that all of them name."""
    looked = []
    inside = _within_reach._inside
    monkeypatch.setattr(_within_reach, "_inside", lambda x, s: looked.append(x) or inside(x, s))
    space = {"weight": torch.rand(3, dtype=DTYPE, generator=torch.Generator().manual_seed(0))}
    for i in range(200):
        then = f"self.method{i + 1}(x)" if i < 199 else "self.weight.sin()"
        exec(f"def method{i}(self, x):\n    return {then} * self.weight * x", space)
    thing = type("Thing", (), {**space, "__module__": __name__})()

    def reached(x):
        return thing.method0(x).sum()

    for f in (reached, lambda x: x * type(thing).weight):
        looked.clear()
        _within_reach.reach(f, [])
        assert len(looked) == len(set(map(id, looked))) <= 201, f
    x = torch.ones(3, dtype=DTYPE, requires_grad=True)
    (gradient,) = torch.autograd.grad(functx.remat(reached)(x), x)
    (expected,) = torch.autograd.grad(reached(x), x)
    assert torch.equal(gradient, expected)
