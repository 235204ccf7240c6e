"""Random numbers and autocast in a region: a replay sees what the forward saw, and leaves no trace.

The reference is always the same program without remat, from the same seed: equal values mean that
the forward drew the same numbers, equal gradients that the replay did, and equal generator states
that nothing else moved.
"""

import pytest
import torch
from cases import DTYPE, numbers
from programs import identity
from references import assert_same
from torch.nn.functional import dropout

import functx

pytestmark = pytest.mark.usefixtures("hooks")

RANDOMNESS = ["different", "same"]


def noisy(x):
    """Dropout, and noise that multiplies: the gradient holds both."""
    return dropout(torch.sin(x), 0.5) * torch.randn_like(x).exp()


def seeded(program, remat):
    """What ``program(remat)`` returns, and the state of the default generator afterwards."""
    torch.manual_seed(3)
    result = program(remat)
    return result, torch.get_rng_state(), torch.rand(2)


def check(program, eps=0.0):
    ours, expected = (seeded(program, remat) for remat in (functx.remat, identity))
    assert_same(ours[0], expected[0], eps)
    assert_same(ours[1:], expected[1:])


def value_and_gradient(f, x):
    x = x.detach().requires_grad_()
    out = f(x)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    return out, gradient


class TestDefaultGenerator:
    def test_plain_autograd(self):
        check(lambda remat: value_and_gradient(remat(noisy), numbers(8)))

    def test_several_regions_replay_in_reverse_order(self):
        def program(remat):
            def f(x):
                for _ in range(3):
                    x = remat(noisy)(x)
                return x

            return value_and_gradient(f, numbers(8))

        check(program)

    @pytest.mark.parametrize("name", ["grad", "jacfwd", "vjp", "jvp", "grad of grad"])
    def test_transforms(self, name):
        def program(remat):
            f, x = remat(noisy), numbers(4)
            if name == "grad of grad":
                return functx.grad(lambda x: functx.grad(lambda x: f(x).sum())(x).sum())(x)
            if name == "vjp":
                out, pullback = functx.vjp(f, x)
                return out, pullback(x), pullback(2 * x)
            if name == "jvp":
                return functx.jvp(f, (x,), (x,))
            if name == "jacfwd":
                return functx.jacfwd(f, randomness="same")(x)
            return functx.grad(lambda x: f(x).sum())(x)

        check(program, eps=8 if name == "grad of grad" else 0)

    def test_jacrev(self):
        """All rows are pulled back through the mask of the one forward, though under vmap."""
        check(lambda remat: functx.jacrev(remat(noisy))(numbers(4)))

    @pytest.mark.parametrize("randomness", RANDOMNESS)
    @pytest.mark.parametrize("batched", [True, False])
    def test_vmap(self, randomness, batched):
        def program(remat):
            x = numbers(3, 4) if batched else numbers(4)

            def f(i, x):
                return remat(noisy)(x) * i

            dims = (0, 0 if batched else None)
            return functx.vmap(f, dims, randomness=randomness)(torch.ones(3, dtype=DTYPE), x)

        check(program)

    @pytest.mark.parametrize("randomness", RANDOMNESS)
    @pytest.mark.parametrize("batched", [True, False])
    def test_vmap_of_grad(self, randomness, batched):
        """Also where the region has no batched input: its random numbers may still be batched."""

        def program(remat):
            def loss(w, x):
                return (remat(noisy)(w) * x).sum()

            w = numbers(3, 4) if batched else numbers(4)
            per_example = functx.vmap(
                functx.grad(loss), (0 if batched else None, 0), randomness=randomness
            )
            return per_example(w, numbers(3, 4, start=1.0))

        check(program)

    @pytest.mark.parametrize("randomness", RANDOMNESS)
    def test_grad_of_vmap(self, randomness):
        def program(remat):
            return functx.grad(lambda x: functx.vmap(remat(noisy), randomness=randomness)(x).sum())(
                numbers(3, 4)
            )

        check(program)

    @pytest.mark.parametrize("randomness", RANDOMNESS)
    def test_vmap_inside_backward_outside(self, randomness):
        def program(remat):
            return value_and_gradient(
                functx.vmap(remat(noisy), randomness=randomness), numbers(3, 4)
            )

        check(program)

    def test_different_masks_differ_and_same_masks_do_not(self):
        x = torch.ones(4, 64, dtype=DTYPE)
        for randomness, distinct in (("different", 4), ("same", 1)):
            gradient = functx.vmap(
                functx.grad(lambda x: functx.remat(noisy)(x).sum()), randomness=randomness
            )(x)
            assert len(torch.unique(gradient, dim=0)) == distinct

    @pytest.mark.parametrize("remat", [functx.remat, identity])
    def test_randomness_error_raises_as_without_remat(self, remat):
        for f in (remat(noisy), functx.grad(lambda x: remat(noisy)(x).sum())):
            with pytest.raises(RuntimeError, match="randomness"):
                functx.vmap(f, randomness="error")(numbers(3, 4))
        with pytest.raises(RuntimeError, match="randomness"):
            functx.vmap(lambda i: i * remat(lambda: torch.rand(2))())(torch.ones(3))

    def test_nested_regions(self):
        def program(remat):
            def inner(x):
                return remat(noisy)(x) + noisy(x)

            def f(x):
                return noisy(remat(inner)(noisy(x)))

            plain = value_and_gradient(remat(f), numbers(8))
            per_example = functx.vmap(
                functx.grad(lambda x: remat(f)(x).sum()), randomness="different"
            )(numbers(3, 4))
            return plain, per_example

        check(program)

    def test_pulled_back_twice(self):
        def program(remat):
            x = numbers(8).requires_grad_()
            value = remat(noisy)(x).sum()
            first = torch.autograd.grad(value, x, retain_graph=True)
            return first, torch.autograd.grad(value, x)

        check(program)
        first, second = seeded(program, functx.remat)[0]
        assert_same(first, second)

    def test_double_backward(self):
        def program(remat):
            x = numbers(8).requires_grad_()
            value = remat(noisy)(x).sum()
            (first,) = torch.autograd.grad(value, x, create_graph=True)
            return torch.autograd.grad(first.square().sum(), x)

        check(program, eps=8)

    def test_numbers_drawn_between_forward_and_backward_stay(self):
        """The backward pass neither repeats them nor is disturbed by them."""

        def program(remat):
            x = numbers(8).requires_grad_()
            out = remat(noisy)(x)
            between = torch.rand(3)
            gradient = torch.autograd.grad(out.sum(), x)
            return gradient, between, torch.rand(3)

        check(program)

    def test_a_seed_set_inside_a_region(self):
        def program(remat):
            def f(x):
                torch.manual_seed(11)
                return noisy(x)

            return value_and_gradient(remat(f), numbers(8))

        check(program)

    @pytest.mark.parametrize("check", ["default", "none"])
    def test_another_seed_in_the_replay_is_an_error(self, check):
        """Nothing that is compared need draw from it."""

        def f(x):
            torch.seed()
            return noisy(x) if check == "none" else x.sin()

        y = functx.remat(f, determinism_check=check)(numbers(8).requires_grad_())
        with pytest.raises(functx.ReplayError, match="another seed than its forward"):
            y.sum().backward()

    def test_an_exception_leaves_the_generator_where_it_was(self):
        def program(remat):
            def f(x):
                noisy(x)
                raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):
                remat(f)(numbers(4).requires_grad_())
            return torch.rand(3)

        check(program)

    def test_modules(self):
        def program(remat):
            net = torch.nn.Sequential(
                torch.nn.Linear(4, 4), torch.nn.Dropout(0.3), torch.nn.Tanh(), torch.nn.Dropout(0.3)
            )
            net = remat(net)
            net(torch.ones(5, 4)).sum().backward()
            return [p.grad for p in net.parameters()]

        check(program)


class TestWithoutPreserving:
    def test_the_forward_is_the_same(self):
        def program(remat):
            return remat(noisy, preserve_rng_state=False)(numbers(8))

        check(program)

    def test_deterministic_functions_are_not_affected(self):
        region = functx.remat(lambda x: x.sin().exp(), preserve_rng_state=False)
        assert_same(
            value_and_gradient(region, numbers(4)),
            value_and_gradient(lambda x: x.sin().exp(), numbers(4)),
        )

    def test_a_replay_draws_anew(self):
        """Documented: right only for functions without random numbers."""
        x = torch.ones(64, dtype=DTYPE).requires_grad_()
        out = functx.remat(lambda x: x.sin() * torch.rand_like(x), preserve_rng_state=False)(x)
        before = torch.get_rng_state()
        (gradient,) = torch.autograd.grad(out.sum(), x)
        assert not torch.allclose(gradient, out.detach() / torch.tan(x.detach()))
        assert not torch.equal(before, torch.get_rng_state())


class TestAutocast:
    @staticmethod
    def program(remat, inside=False, **options):
        def f(x, w):
            if inside:
                with torch.autocast("cpu", **options):
                    return torch.tanh(x @ w) @ w
            return torch.tanh(x @ w) @ w

        x, w = numbers(8, 8).float().requires_grad_(), numbers(8, 8, start=1.0).float()
        w.requires_grad_()
        region = remat(f)
        if inside:
            out = region(x, w)
        else:
            with torch.autocast("cpu", **options):
                out = region(x, w)
        return out, torch.autograd.grad(out.float().sum(), (x, w))

    @pytest.mark.parametrize("inside", [True, False])
    @pytest.mark.parametrize("cache", [True, False])
    def test_restored_in_the_replay(self, inside, cache):
        options = {"dtype": torch.bfloat16, "cache_enabled": cache}
        ours, expected = (
            self.program(remat, inside, **options) for remat in (functx.remat, identity)
        )
        assert ours[0].dtype == torch.bfloat16
        assert_same(ours, expected)

    def test_backward_in_another_autocast_state(self):
        def program(remat):
            x, w = numbers(8, 8).float().requires_grad_(), numbers(8, 8, start=1.0).float()
            out = remat(lambda x: torch.tanh(x @ w) @ w)(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return out, torch.autograd.grad(out.sum(), x)

        assert_same(program(functx.remat), program(identity))

    def test_state_afterwards(self):
        self.program(functx.remat, dtype=torch.bfloat16)
        assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_cache_enabled()

    def test_under_transforms(self):
        def program(remat):
            w = numbers(8, 8).float()
            f = remat(lambda x: torch.tanh(x @ w) @ w)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return functx.vmap(functx.grad(lambda x: f(x).float().sum()))(numbers(3, 8).float())

        assert_same(program(functx.remat), program(identity))


def test_the_check_can_fail():
    """A replay with another mask, or a generator that moves, is seen."""

    def unseeded(f):
        class Redrawn(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return f(x)

            @staticmethod
            def backward(ctx, cotangent):
                (x,) = ctx.saved_tensors
                with torch.enable_grad():
                    x = x.detach().requires_grad_()
                    return torch.autograd.grad(f(x), x, cotangent)

        return Redrawn.apply

    def program(remat):
        return value_and_gradient(remat(noisy), numbers(8))

    ours, expected = (seeded(program, remat) for remat in (unseeded, identity))
    for a, b in zip((ours[0][1], *ours[1:]), (expected[0][1], *expected[1:]), strict=True):
        assert not torch.equal(a, b)
