"""Loops that go on while a condition holds: right, with few states and steps run again."""

import pytest
import torch
from cases import DTYPE, apply, numbers
from references import Operations, assert_same, count, no_garbage_collection, peak, total
from torch import nn
from torch.nn import functional as F

import functx

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


def around(step, steps):
    """The regions around a step of a block, outermost first: it, its first half, and so on."""
    start, found = 0, [(0, steps)]
    while steps > 1:
        half = steps // 2
        if step < start + half:
            found, steps = [*found, (start, half)], half
        else:
            start, steps = start + half, steps - half
    return found


def again(n):
    """Steps that run again: each once a region around it.

    But where a region ends with another, which is so around the last step, only that is needed.
    """
    steps = [((1 << k), i) for k in range(12) for i in range(1 << k)][:n]
    last, found = around(steps[-1][1], steps[-1][0]), 0
    for block, i in steps:
        regions = around(i, block)
        common = [a == b for a, b in zip(regions, last)] if block == steps[-1][0] else []
        found += len(regions) - max(0, sum(common) - 1)
    return found


class TestRecompute:
    def test_steps_run_again_as_the_blocks_have_it(self):
        for n in (*range(1, 14), 40):
            assert count(gradient, X[:2], n)["tanh"] == n + again(n)

    def test_a_thousand_steps(self):
        """The least for ten states is 3,755."""
        with Operations() as operations:
            x = X[:2].detach().requires_grad_()
            y = loop(x, 1024)
            assert operations.counts["tanh"] == 1024
            y.backward()
        assert operations.counts["tanh"] - 1024 == again(1024) < 2 * 3755

    def test_forward_mode_recomputes_nothing(self):
        assert count(functx.jvp, lambda x: loop(x, 33), (X,), (X,))["tanh"] == 33
        assert count(loop, X, 33)["tanh"] == 33

    def test_without_a_derivative_of_it_nothing_is_recomputed(self):
        assert count(functx.grad(lambda y: (y * loop(X, 33)).sum()), X)["tanh"] == 33


class TestMemory:
    @pytest.mark.parametrize("n", [40, 100, 400])
    @pytest.mark.parametrize("way", [functx.grad, lambda f: functx.vmap(functx.grad(f))])
    def test_peak(self, n, way):
        states = peak(way(lambda x: loop(x, n)), X) / STATE
        assert states <= 2 * n.bit_length() + 4

    def test_between_the_passes_it_keeps_a_state_a_block(self):
        with no_garbage_collection(), Operations() as operations:
            x = X.detach().requires_grad_()
            y = loop(x, 100)
            assert operations.live <= 7.1 * STATE  # before blocks 2, 4, ..., 64, and the last
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

    return loop(body, first, lambda state: state[0] < 9)[1]


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


@pytest.mark.parametrize(
    "stack", [("vmap",), ("vmap", "grad"), ("grad", "vmap"), ("vmap", "hessian")]
)
def test_examples_that_end_at_different_steps(stack):
    def run(loop):
        def f(x):
            return loop(lambda y: y * (1.5 + x * x), x, lambda y: y.abs() < 9)

        for name in reversed(stack):
            f = apply(functx, name, f)
        x = (numbers(5) + 1.3).requires_grad_()
        out = f(x)
        return out, torch.autograd.grad(total(out), x)

    assert_same(run(functx.remat_loop), run(masked), eps=ROUNDINGS)


class TestBodies:
    def check(self, program, eps=0.0):
        ours, expected = program(functx.remat_loop), program(plain)
        assert_same(ours, expected, eps)

    def test_random_numbers(self):
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
            )
            assert 4 <= i < 100
            return i, y, torch.autograd.grad(y.sum(), x), torch.rand(1)

        self.check(program)

    def test_what_passes_through_keeps_its_gradient(self):
        def program(loop):
            x, w = numbers(3).requires_grad_(), numbers(3, start=1.0).requires_grad_()
            _, y, v = loop(
                lambda s: (s[0] + 1, torch.sin(s[1] * s[2]), s[2]), (0, x, w), lambda s: s[0] < 7
            )
            return y, torch.autograd.grad(y.sum() + (v * v).sum(), (x, w))

        self.check(program, 8)

    def test_the_condition_reads_what_the_body_does_not(self):
        def program(loop):
            w, bound = numbers(3).requires_grad_(), torch.tensor(6.0).requires_grad_()
            y = loop(lambda x: x + w * w, numbers(3), lambda x: x.norm() * bound < 30.0)
            return y, torch.autograd.grad(y.sum(), w)

        self.check(program, 8)

    @pytest.mark.parametrize("n", [0, 1, 2, 3])
    def test_short(self, n):
        def program(loop):
            x = numbers(3).requires_grad_()
            i, y = loop(lambda s: (s[0] + 1, s[1].sin()), (0, x), lambda s: s[0] < n)
            return i, y, torch.autograd.grad(y.sum(), x)

        self.check(program)

    def test_batch_norm_counts_every_step_once(self):
        def program(loop):
            norm = nn.BatchNorm1d(3, dtype=DTYPE)
            x = numbers(4, 3).requires_grad_()
            _, y = loop(lambda s: (s[0] + 1, norm(s[1]).sin()), (0, x), lambda s: s[0] < 9)
            gradients = torch.autograd.grad(y.square().sum(), [x, *norm.parameters()])
            return y, gradients, dict(norm.named_buffers())

        self.check(program, ROUNDINGS)

    def test_a_module_called_with_other_parameters(self):
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

        self.check(program, ROUNDINGS)

    def test_in_loops_and_regions(self):
        def program(loop):
            def inner(state):
                i, x = state
                return i + 1, loop(
                    lambda s: (s[0] + 1, s[1].sin()), (0, x * 1.1), lambda s: s[0] < 4
                )[1]

            def outer(x):
                return loop(inner, (0, x), lambda s: s[0] < 3)[1]

            x = numbers(3).requires_grad_()
            y = (functx.remat(outer) if loop is functx.remat_loop else outer)(x)
            return y, torch.autograd.grad(y.sum(), x, create_graph=True)

        self.check(program)

    def test_a_loop_that_differentiates(self):
        def program(loop):
            def trained(rate):
                def loss(w):
                    return (torch.sin(w * numbers(3)) - numbers(3, start=1.0)).square().sum()

                state = (0, numbers(3))
                step = lambda s: (s[0] + 1, s[1] - rate * functx.grad(loss)(s[1]))  # noqa: E731
                return loss(loop(step, state, lambda s: s[0] < 6)[1])

            return functx.grad(trained)(torch.tensor(0.1, dtype=DTYPE))

        self.check(program, ROUNDINGS)


class TestRefused:
    def test_arguments(self):
        with pytest.raises(TypeError, match="give the number of steps, or a condition"):
            functx.remat_loop(torch.sin, X)
        with pytest.raises(TypeError, match="expected a callable"):
            functx.remat_loop(torch.sin, X, cond=True)
        with pytest.raises(ValueError, match="slots are for loops of a given number of steps"):
            functx.remat_loop(torch.sin, X, cond=bool, slots=4)
        with pytest.raises(ValueError, match="must be one boolean"):
            functx.remat_loop(torch.sin, X, lambda x: x > 0)

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
        for change in ("more", "fewer"):
            w, v = numbers(3).requires_grad_(), numbers(3, start=1.0).requires_grad_()
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
                lambda s, f=more: (s[0] + 1, f(s[1])), (0, x), lambda s: s[0] < 5
            )
            now["more"] = change == "more"
            now["both"] = change != "fewer"
            with pytest.raises(functx.ReplayError, match="rule 3"):
                y.sum().backward()

    def test_a_state_of_another_structure_under_vmap(self):
        with pytest.raises(TypeError, match="body must return a state of the structure"):
            functx.vmap(
                lambda x: functx.remat_loop(lambda s: (s[0] * 2, s[0]), (x,), lambda s: s[0] < 9)
            )(numbers(3, start=1.0))

    def test_a_condition_that_ends_a_replay_early_is_seen(self):
        most = [9]
        x = numbers(3).requires_grad_()
        _, y = functx.remat_loop(lambda s: (s[0] + 1, s[1].sin()), (0, x), lambda s: s[0] < most[0])
        most[0] = 4
        with pytest.raises(functx.ReplayError, match="rule 3"):
            y.sum().backward()


def test_what_a_step_records_is_on_the_tape():
    def run(loop):
        seen, x = [], X.detach().requires_grad_()

        def step(state):
            seen.append(state[1].sin())
            return state[0] + 1, seen[-1]

        loop(step, (0, x), lambda s: s[0] < 9)
        return torch.autograd.grad(seen[5].sum(), x)

    assert_same(run(functx.remat_loop), run(plain), eps=8)
