"""Loops that go on while a condition holds: right, within twice the least recompute."""

import pytest
import torch
from cases import DTYPE, apply, numbers
from references import Operations, assert_same, count, no_garbage_collection, peak, total
from torch import nn
from torch.nn import functional as F

import functx
from functx import _schedules

pytestmark = pytest.mark.usefixtures("no_hooks")

ROUNDINGS = 64.0
WEIGHT = numbers(4, 4) / 2
X = numbers(64, 4)
STATE = X.numel() * X.element_size()


def body(state):
    i, x = state
    return i + 1, torch.tanh(x @ WEIGHT)


def loop(x, n, **options):
    return functx.remat_loop(body, (0, x), lambda s: s[0] < n, **options)[1].sum()


def gradient(x, n, **options):
    return functx.grad(lambda x: loop(x, n, **options))(x)


def plain(body, state, cond, **_):
    while bool(cond(state)):
        state = body(state)
    return state


def masked(body, state, cond, **_):
    """What a loop does to each example of a ``vmap``, for states of one tensor."""
    for _ in range(12):
        state = torch.where(cond(state), body(state), state)
    return state


class TestRecompute:
    @pytest.mark.parametrize("slots", [3, 4, 6, 10, None])
    def test_at_most_twice_the_least(self, slots):
        for n in (*range(5, 14), 40):
            counts = count(gradient, X[:2], n, slots=slots)
            own = _schedules.default_slots(n) if slots is None else slots
            least = _schedules.recomputed(n, own)
            assert counts["tanh"] - n <= 2 * least
            # All steps once more than the least for one slot less, which the first step has.
            taken = 0 if slots == 3 else 1
            assert counts["tanh"] - n == n + _schedules.recomputed(n - taken, own - taken)

    def test_a_thousand_steps(self):
        with Operations() as operations:
            x = X[:2].detach().requires_grad_()
            y = loop(x, 1024, slots=10)
            assert operations.counts["tanh"] == 1024
            y.backward()
        assert 3755 < operations.counts["tanh"] - 1024 <= 2 * 3755

    def test_forward_mode_recomputes_nothing(self):
        assert count(functx.jvp, lambda x: loop(x, 33), (X,), (X,))["tanh"] == 33
        assert count(loop, X, 33)["tanh"] == 33

    def test_without_a_derivative_of_it_nothing_is_recomputed(self):
        assert count(functx.grad(lambda y: (y * loop(X, 33)).sum()), X)["tanh"] == 33


class TestMemory:
    @pytest.mark.parametrize(("n", "slots"), [(40, 4), (100, 5), (100, 10)])
    @pytest.mark.parametrize("way", [functx.grad, lambda f: functx.vmap(functx.grad(f))])
    def test_peak(self, n, slots, way):
        depth = _schedules.depth(n, slots - 1)
        states = peak(way(lambda x: loop(x, n, slots=slots)), X) / STATE
        assert states <= (slots - 1) + 1 + depth + 1 + 2.2

    def test_the_forward_keeps_two_states(self):
        with no_garbage_collection(), Operations() as operations:
            x = X.detach().requires_grad_()
            y = loop(x, 100, slots=10)
            assert operations.live <= 1.1 * STATE  # the second; the first is the caller's
            assert operations.peak <= 5.1 * STATE
            y.backward()
            x.grad = None
            del y
        assert operations.live == 0


def recurrence(x, loop):
    weight = x[:, None] * numbers(2, 2)
    first = (torch.zeros((), dtype=DTYPE), x)

    def body(state):
        i, h = state
        return i + 1, torch.tanh(h @ weight + x)

    return loop(body, first, lambda state: state[0] < 9, slots=3)[1]


STACKS = [
    *[(name,) for name in ("grad", "vjp", "jvp", "jacrev", "jacfwd", "hessian", "vmap")],
    *[("vmap", "grad"), ("grad", "vmap"), ("jvp", "grad"), ("jvp", "vmap"), ("grad", "grad")],
    *[("grad", "vmap", "grad"), ("vmap", "grad", "vmap"), ("jvp", "grad", "vmap")],
]


@pytest.mark.parametrize("stack", STACKS, ids="(".join)
def test_under_transforms(stack):
    def run(loop):
        f = lambda x: recurrence(x, loop)  # noqa: E731
        for name in reversed(stack):
            f = apply(functx, name, f)
        x = numbers(*(2,) * stack.count("vmap"), 2).requires_grad_()
        out = f(x)
        return out, torch.autograd.grad(total(out), x, allow_unused=True, materialize_grads=True)

    assert_same(run(functx.remat_loop), run(plain), eps=ROUNDINGS)


@pytest.mark.parametrize("slots", [1, 4, None])
@pytest.mark.parametrize(
    "stack", [("vmap",), ("vmap", "grad"), ("grad", "vmap"), ("vmap", "hessian")]
)
def test_examples_that_end_at_different_steps(stack, slots):
    def run(loop):
        def f(x):
            return loop(lambda y: y * (1.5 + x * x), x, lambda y: y.abs() < 9, slots=slots)

        for name in reversed(stack):
            f = apply(functx, name, f)
        x = (numbers(5) + 1.3).requires_grad_()
        out = f(x)
        return out, torch.autograd.grad(total(out), x)

    assert_same(run(functx.remat_loop), run(masked), eps=ROUNDINGS)


@pytest.mark.parametrize("slots", [1, 5])
class TestBodies:
    def check(self, program, slots, eps=0.0):
        ours, expected = program(functx.remat_loop), program(plain)
        assert_same(ours, expected, eps)

    def test_random_numbers(self, slots):
        """Drawn by the body and by the condition."""

        def program(loop):
            torch.manual_seed(3)
            generator = torch.Generator().manual_seed(4)
            x = numbers(4).requires_grad_()
            i, y = loop(
                lambda s: (
                    s[0] + 1,
                    F.dropout(s[1].sin(), 0.3) + torch.rand(4, generator=generator),
                ),
                (0, x),
                lambda s: s[0] < 4 or torch.rand(()) < 0.9,
                slots=slots,
            )
            assert 4 <= i < 100
            return i, y, torch.autograd.grad(y.sum(), x), torch.rand(1)

        self.check(program, slots)

    def test_what_passes_through_keeps_its_gradient(self, slots):
        def program(loop):
            x, w = numbers(3).requires_grad_(), numbers(3, start=1.0).requires_grad_()
            _, y, v = loop(
                lambda s: (s[0] + 1, torch.sin(s[1] * s[2]), s[2]), (0, x, w), lambda s: s[0] < 7
            )
            return y, torch.autograd.grad(y.sum() + (v * v).sum(), (x, w))

        self.check(program, slots, 8)

    def test_the_condition_reads_what_the_body_does_not(self, slots):
        def program(loop):
            w, bound = numbers(3).requires_grad_(), torch.tensor(6.0).requires_grad_()
            y = loop(
                lambda x: x + w * w, numbers(3), lambda x: x.norm() * bound < 30.0, slots=slots
            )
            return y, torch.autograd.grad(y.sum(), w)

        self.check(program, slots, 8)

    @pytest.mark.parametrize("n", [0, 1, 2, 3])
    def test_short(self, slots, n):
        def program(loop):
            x = numbers(3).requires_grad_()
            i, y = loop(lambda s: (s[0] + 1, s[1].sin()), (0, x), lambda s: s[0] < n, slots=slots)
            return i, y, torch.autograd.grad(y.sum(), x)

        self.check(program, slots)

    def test_batch_norm_counts_every_step_once(self, slots):
        def program(loop):
            norm = nn.BatchNorm1d(3, dtype=DTYPE)
            x = numbers(4, 3).requires_grad_()
            _, y = loop(lambda s: (s[0] + 1, norm(s[1]).sin()), (0, x), lambda s: s[0] < 9)
            gradients = torch.autograd.grad(y.square().sum(), [x, *norm.parameters()])
            return y, gradients, dict(norm.named_buffers())

        self.check(program, slots, ROUNDINGS)

    def test_a_module_called_with_other_parameters(self, slots):
        """The backward runs when the module has its own again."""

        def program(loop):
            module = nn.Sequential(
                nn.Linear(3, 3, dtype=DTYPE), nn.Tanh(), nn.Linear(3, 3, dtype=DTYPE)
            )
            with torch.no_grad():
                for i, p in enumerate(module.parameters()):
                    p.copy_(numbers(*p.shape, start=float(i)))

            class Looped(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.step = module

                def forward(self, x):
                    return loop(lambda s: (s[0] + 1, self.step(s[1])), (0, x), lambda s: s[0] < 9)[
                        1
                    ]

            other = {
                f"step.{k}": (v * 0.5 + 0.1).detach().requires_grad_()
                for k, v in module.named_parameters()
            }
            x = numbers(3)
            y = functx.functional_call(Looped(), other, (x,))
            return y, torch.autograd.grad(y.sum(), list(other.values()))

        self.check(program, slots, ROUNDINGS)

    def test_in_loops_and_regions(self, slots):
        def program(loop):
            def inner(state):
                i, x = state
                return i + 1, loop(
                    lambda s: (s[0] + 1, s[1].sin()), (0, x * 1.1), lambda s: s[0] < 4
                )[1]

            def outer(x):
                return loop(inner, (0, x), lambda s: s[0] < 3, slots=slots)[1]

            x = numbers(3).requires_grad_()
            y = (functx.remat(outer) if loop is functx.remat_loop else outer)(x)
            return y, torch.autograd.grad(y.sum(), x, create_graph=True)

        self.check(program, slots)

    def test_a_loop_that_differentiates(self, slots):
        def program(loop):
            def trained(rate):
                def loss(w):
                    return (torch.sin(w * numbers(3)) - numbers(3, start=1.0)).square().sum()

                state = (0, numbers(3))
                step = lambda s: (s[0] + 1, s[1] - rate * functx.grad(loss)(s[1]))  # noqa: E731
                return loss(loop(step, state, lambda s: s[0] < 6, slots=slots)[1])

            return functx.grad(trained)(torch.tensor(0.1, dtype=DTYPE))

        self.check(program, slots, ROUNDINGS)


class TestRefused:
    def test_arguments(self):
        with pytest.raises(TypeError, match="give the number of steps, or a condition"):
            functx.remat_loop(torch.sin, X)
        with pytest.raises(TypeError, match="expected a callable"):
            functx.remat_loop(torch.sin, X, cond=True)
        with pytest.raises(ValueError, match="slots is 0"):
            functx.remat_loop(torch.sin, X, cond=bool, slots=0)
        with pytest.raises(ValueError, match="must be one boolean"):
            functx.remat_loop(torch.sin, X, lambda x: x > 0)

    def test_more_steps_than_slots_serve(self):
        with pytest.raises(functx.RematError, match="1 slots serve no more than 31 steps"):
            gradient(X[:1], 40, slots=1)
        assert torch.isfinite(loop(X, 40, slots=1))

    def test_a_bound(self):
        for bound, ran in ((5, 5), (0, 0), (50, 7)):
            i, _ = functx.remat_loop(body, (0, X), bound, cond=lambda s: s[0] < 7)
            assert i == ran
            y = X.detach().requires_grad_()
            assert functx.remat_loop(body, (0, y), bound, cond=lambda s: s[0] < 7)[0] == ran

    def test_states_that_vmap_cannot_mask(self):
        with pytest.raises(TypeError, match="must be tensors; got 0 and then 1"):
            functx.vmap(lambda x: functx.remat_loop(body, (0, x), lambda s: s[1].sum() > 0)[1])(X)

    def test_a_step_that_changes_is_seen(self):
        """Tensors of other shapes, or other tensors, than the forward met."""
        for change in ("shape", "more", "fewer"):
            w, v = numbers(3).requires_grad_(), numbers(1, start=1.0).requires_grad_()
            now = {"w": w, "more": False, "both": True}

            def step(x, now=now, w=w, v=v):
                y = torch.sin(x * now["w"])
                y = y * v if now["both"] else y
                return y * torch.ones(3).mul_(2).requires_grad_() if now["more"] else y

            extra = numbers(3, start=2.0).requires_grad_()

            def more(x, now=now, extra=extra, step=step):
                return step(x) * extra if now["more"] else step(x)

            x = numbers(3).requires_grad_()
            _, y = functx.remat_loop(
                lambda s, f=more: (s[0] + 1, f(s[1])), (0, x), lambda s: s[0] < 5, slots=1
            )
            now["w"] = v if change == "shape" else w
            now["more"] = change == "more"
            now["both"] = change != "fewer"
            with pytest.raises(functx.ReplayError, match="departed"):
                y.sum().backward()

    def test_a_state_of_another_structure_under_vmap(self):
        with pytest.raises(TypeError, match="body must return a state of the structure"):
            functx.vmap(
                lambda x: functx.remat_loop(lambda s: (s[0] * 2, s[0]), (x,), lambda s: s[0] < 9)
            )(numbers(3, start=1.0))

    def test_a_condition_that_ends_a_replay_early_is_seen(self):
        most = [9]
        x = numbers(3).requires_grad_()
        _, y = functx.remat_loop(
            lambda s: (s[0] + 1, s[1].sin()), (0, x), lambda s: s[0] < most[0], slots=1
        )
        most[0] = 4
        with pytest.raises(functx.ReplayError, match="ends a replay before the step"):
            y.sum().backward()

    def test_an_escape_is_seen(self):
        seen = []

        def step(state):
            y = state[1].sin()
            seen.append(y)
            return state[0] + 1, y

        with pytest.raises(functx.RematError, match="leaves behind"):
            functx.remat_loop(step, (0, X.detach().requires_grad_()), lambda s: s[0] < 9, slots=1)
