"""Random numbers: every generator is replayed as it was drawn from, and left where it was."""

import functools
import random

import numpy as np
import pytest
import torch
from cases import DTYPE, numbers
from programs import identity
from references import assert_same
from right import WAYS, X, check, run
from torch.nn.functional import dropout

import functx

pytestmark = pytest.mark.usefixtures("no_hooks")


def noisy(x):
    return dropout(x.sin(), 0.3) * torch.randn_like(x).exp()


def check_generators(f, ways=WAYS, x=X, **options):
    """As `check`, with the states of Python's and numpy's generators."""

    def each(remat):
        random.seed(3)
        np.random.seed(3)
        wrapped = functools.partial(remat, **options)
        results = [run(lambda _: f(wrapped), identity, way, x) for way in ways]
        return results, random.getstate(), [repr(s) for s in np.random.get_state()]

    expected, actual = each(identity), each(functx.remat)
    for ours, plain in zip(actual[0], expected[0], strict=True):
        assert_same((ours[0], ours[2:]), (plain[0], plain[2:]))
        assert_same(ours[1], plain[1], eps=8)
    assert actual[1:] == expected[1:]


@pytest.mark.parametrize("depth", [2, 3])
def test_a_generator_of_nested_regions(depth):
    """A replay of the outer region finds it where it was, not where the inner one left it."""

    def f(remat):
        generator = torch.Generator().manual_seed(5)

        def draw(x):
            return (x * torch.rand(4, generator=generator, dtype=DTYPE)).sin()

        for _ in range(depth):
            draw = remat(lambda x, inner=draw: inner(inner(x)))
        return draw

    check_generators(f)


class TestTorch:
    @pytest.mark.parametrize(
        "draw",
        [
            torch.rand_like,
            torch.randn_like,
            lambda x: torch.bernoulli(x.detach().sigmoid()),
            lambda x: torch.randperm(4).to(x.dtype),
            lambda x: torch.multinomial(x.detach().exp(), 4, replacement=True).to(x.dtype),
            lambda x: torch.normal(x, 1.0),
            lambda x: torch.empty(4, dtype=DTYPE).uniform_(1, 2),
            lambda x: torch.distributions.Normal(x, x.exp()).rsample(),
            lambda x: torch.poisson(x.detach().exp() * 4),
            lambda x: dropout(x, 0.3),
            lambda x: torch.nn.functional.gumbel_softmax(x),
            lambda x: torch.nn.functional.rrelu(x, training=True),
        ],
        ids=[
            "rand",
            "randn",
            "bernoulli",
            "randperm",
            "multinomial",
            "normal",
            "uniform_",
            "rsample",
            "poisson",
            "dropout",
            "gumbel",
            "rrelu",
        ],
    )
    def test_default_generator(self, draw):
        check(lambda remat: remat(lambda x: x.sin() * draw(x)), ways=["backward", "grad"])

    @pytest.mark.parametrize("captured", [True, False])
    @pytest.mark.parametrize("way", ["backward", "grad"])
    def test_generator_arguments(self, captured, way):
        """A generator moves on once a forward, and not in a replay."""

        def program(remat):
            generator = torch.Generator().manual_seed(4)

            def f(x, generator=generator):
                noise = torch.randn(4, generator=generator, dtype=DTYPE)
                return x.sin() * noise * torch.empty(4, dtype=DTYPE).normal_(generator=generator)

            region = remat(f)

            def loss(x):
                first = region(x) if captured else region(x, generator)
                between = torch.rand(1, generator=generator, dtype=DTYPE)
                return (first * between * region(x, generator)).sum()

            if way == "grad":
                gradient = functx.grad(loss)(X)
            else:
                x = X.clone().requires_grad_()
                (gradient,) = torch.autograd.grad(loss(x), x)
            return gradient, generator.get_state()

        assert_same(program(functx.remat), program(identity), eps=8)

    def test_generators_of_a_device_where_no_input_is(self, monkeypatch):
        """Two stand in for CUDA's: that of the current device, and one the region never met."""
        here, elsewhere = torch.Generator(), torch.Generator()
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "default_generators", (here, elsewhere))

        @torch.library.custom_op("functx_tests::draw", mutates_args=())
        def draw(x: torch.Tensor) -> torch.Tensor:
            elsewhere.set_state(torch.Generator().manual_seed(1).get_state())  # another thread does
            return torch.rand(x.shape, generator=here, dtype=x.dtype)

        def program(remat):
            here.manual_seed(3)
            elsewhere.manual_seed(3)
            x = X.clone().requires_grad_()
            out = remat(lambda x: x.sin() * draw(x.detach()))(x).sum()
            elsewhere.manual_seed(4)
            (gradient,) = torch.autograd.grad(out, x)
            return gradient, here.get_state()

        assert_same(program(functx.remat), program(identity), eps=8)

    def test_a_generator_of_a_module(self):
        class Noise(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.generator = torch.Generator().manual_seed(4)

            def forward(self, x):
                return x.sin() * torch.randn(x.shape, generator=self.generator, dtype=x.dtype)

        def program(remat):
            module = remat(Noise())
            x = X.clone().requires_grad_()
            value = (module(x) * module(x)).sum()
            return torch.autograd.grad(value, x), module.generator.get_state()

        assert_same(program(functx.remat), program(identity), eps=8)

    def test_forked_inside(self):
        def build(remat):
            def f(x):
                with torch.random.fork_rng():
                    torch.manual_seed(5)
                    fixed = torch.rand(4, dtype=DTYPE)
                return noisy(x) * fixed

            return remat(f)

        check(build, ways=["backward", "grad"])


def helper(x):
    return x * random.random() * np.random.rand()


class Jitter(torch.nn.Module):
    def forward(self, x):
        if random.random() < 0.5:
            x = x.exp()
        return x.sin() * random.gauss(0.0, 1.0)


class Methods(torch.nn.Module):
    def forward(self, x):
        return self._masked(x.sin()) * self.factor

    def _masked(self, x):
        return helper(x)

    @property
    def factor(self):
        return random.random()


class TestPythonAndNumpy:
    @pytest.mark.parametrize(
        "f",
        [
            lambda x: x.sin() * random.random(),
            lambda x: x.sin() * random.choice([1.0, 2.0, 3.0]) + random.randint(0, 9) * x,
            lambda x: x.sin() * np.random.rand(),
            lambda x: x.sin() * torch.from_numpy(np.random.randn(4)),
            lambda x: helper(x).sin(),
            lambda x: [helper(x) for _ in range(3)][2].sin(),
            functools.partial(lambda scale, x: helper(x) * scale, 2.0),
        ],
        ids=["random", "choice", "numpy", "from numpy", "helper", "comprehension", "partial"],
    )
    def test_named_in_code_that_the_region_reaches(self, f):
        check_generators(lambda remat: remat(f))

    def test_in_the_forward_of_a_module(self):
        check_generators(lambda remat: remat(torch.nn.Sequential(Jitter(), Jitter())))

    @pytest.mark.parametrize("outer", [torch.nn.Sequential, lambda module: module])
    def test_in_a_method_that_a_forward_calls(self, outer):
        check_generators(lambda remat: remat(outer(Methods())))

    def test_layer_drop(self):
        """Whole layers are left out at random: the pattern is the forward's."""

        def build(remat):
            def f(x):
                for i in range(8):
                    if random.random() < 0.5:
                        x = (x * (i + 1)).sin()
                return x * random.random()

            return remat(f)

        check_generators(build)

    def test_nested_regions(self):
        def build(remat):
            def f(x):
                return helper(remat(lambda x: helper(x).sin())(x)).exp()

            return remat(f)

        check_generators(build)

    @pytest.mark.parametrize("module", [random, np.random], ids=["random", "numpy"])
    def test_hidden_and_asked_for(self, module):
        name = "".join(["ran", "dom"]) if module is random else "ra" + "nd"

        def build(remat):
            return remat(lambda x: x.sin() * getattr(module, name)())

        check_generators(build, preserve_rng_state="all")


class TestDropoutInNests:
    X = numbers(64)

    @pytest.mark.parametrize("depth", [2, 3])
    def test_depth(self, depth):
        def build(remat):
            f = noisy
            for _ in range(depth):
                f = remat(lambda x, f=f: noisy(f(noisy(x))))
            return f

        check(build, self.X, eps=32)

    def test_siblings(self):
        def build(remat):
            f = remat(noisy)
            return remat(lambda x: f(f(x)) * remat(lambda x: f(x) + noisy(x))(x))

        check(build, self.X, eps=32)


class TestSeveralPullbacks:
    def test_vjp_called_twice(self):
        def build(remat):
            def f(x):
                out, pullback = functx.vjp(remat(noisy), x)
                return out, pullback(X), torch.rand(1), pullback(X), pullback(2 * X)

            return f

        check(build, eps=16)

    def test_retain_graph(self):
        def program(remat):
            torch.manual_seed(4)
            x = X.clone().requires_grad_()
            value = remat(noisy)(x).sum()
            first = torch.autograd.grad(value, x, retain_graph=True)
            between = torch.rand(3)
            return first, between, torch.autograd.grad(value, x), torch.get_rng_state()

        assert_same(program(functx.remat), program(identity))

    @pytest.mark.parametrize("chunk", [None, 1, 3])
    def test_jacrev(self, chunk):
        def program(remat):
            torch.manual_seed(4)
            return functx.jacrev(remat(noisy), chunk_size=chunk)(X), torch.get_rng_state()

        assert_same(program(functx.remat), program(identity))

    @pytest.mark.parametrize("order", [2, 3])
    def test_higher_orders_by_backward(self, order):
        def program(remat):
            torch.manual_seed(4)
            x = X.clone().requires_grad_()
            value = remat(lambda x: noisy(x).exp())(x)
            for _ in range(order):
                (value,) = torch.autograd.grad(value.sum(), x, create_graph=True)
            return value, torch.get_rng_state()

        assert_same(program(functx.remat), program(identity), eps=64)

    @pytest.mark.parametrize("stack", ["grad(grad)", "hessian", "jacfwd(grad)", "jacrev(grad)"])
    def test_higher_orders_by_transforms(self, stack):
        def program(remat):
            torch.manual_seed(4)

            def loss(x):
                return remat(lambda x: noisy(x).exp())(x).sum()

            if stack == "grad(grad)":
                f = functx.grad(lambda x: functx.grad(loss)(x).square().sum())
            elif stack == "jacfwd(grad)":
                f = functx.jacfwd(functx.grad(loss), randomness="same")
            elif stack == "jacrev(grad)":
                f = functx.jacrev(functx.grad(loss))
            else:
                f = functx.jacrev(functx.jacrev(loss))
            return f(X), torch.get_rng_state()

        assert_same(program(functx.remat), program(identity), eps=64)


class TestUnderVmap:
    """Random operations in a region that has no batched input."""

    @pytest.mark.parametrize("randomness", ["different", "same"])
    @pytest.mark.parametrize("stack", ["vmap", "vmap(grad)", "grad(vmap)", "vmap(vmap)"])
    def test_no_batched_input(self, randomness, stack):
        def program(remat):
            torch.manual_seed(4)

            def f(w, x):
                return remat(noisy)(w).sum() * x

            inner = functx.grad(f) if stack == "vmap(grad)" else f
            x = numbers(3, start=1.0)
            if stack == "vmap(vmap)":
                inner = functx.vmap(f, (None, 0), randomness=randomness)
                x = numbers(2, 3, start=1.0)
            mapped = functx.vmap(inner, (None, 0), randomness=randomness)
            if stack == "grad(vmap)":
                mapped = functx.grad(
                    lambda w, x: functx.vmap(f, (None, 0), randomness=randomness)(w, x).sum()
                )
            return mapped(X, x), torch.get_rng_state()

        assert_same(program(functx.remat), program(identity), eps=8)

    @pytest.mark.parametrize("own", [False, True])
    @pytest.mark.parametrize("randomness", ["different", "same"])
    def test_a_policy_is_asked_without_drawing(self, randomness, own):
        """It sees one example of each operation, on another device."""

        def program(remat):
            torch.manual_seed(4)
            generator = torch.Generator().manual_seed(5) if own else torch.default_generator

            def f(x):
                return remat(
                    lambda x: (x * torch.rand(3, generator=generator, device="cpu")).sin().sum()
                )(x)

            out = functx.vmap(functx.grad(f), randomness=randomness)(numbers(2, 3))
            return out, torch.rand(3, generator=generator), torch.rand(3)

        policy = functx.checkpoint_policies.dots_saveable
        assert_same(program(functools.partial(functx.remat, policy=policy)), program(identity))

    @pytest.mark.parametrize("remat", [functx.remat, identity])
    @pytest.mark.parametrize("batched", [True, False])
    def test_error(self, remat, batched):
        def f(x):
            return remat(lambda y: noisy(y).sum())(x if batched else X) * x.sum()

        with pytest.raises(RuntimeError, match="randomness"):
            functx.vmap(f, randomness="error")(numbers(3, 4))
        with pytest.raises(RuntimeError, match="randomness"):
            functx.vmap(functx.grad(f), randomness="error")(numbers(3, 4))
