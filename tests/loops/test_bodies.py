"""A loop's body may be whatever the body of a plain loop may be, of given steps or until a test."""

import pytest
import torch
from cases import DTYPE, numbers
from references import assert_same, total
from torch import nn
from torch.nn import functional as F

import functx

from . import plain

pytestmark = pytest.mark.usefixtures("no_hooks")

ROUNDINGS = 64.0


def gradients(y, *leaves):
    return y, torch.autograd.grad(total(y), leaves)


def of_a_module(loop):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3, dtype=DTYPE), nn.Tanh())
    x = numbers(4, 3).requires_grad_()
    return gradients(loop(module, x, 11), x, *module.parameters())


def of_a_module_with_other_parameters(loop):
    """The backward runs when the module has its own again."""

    class Looped(nn.Module):
        def __init__(self):
            super().__init__()
            self.step = nn.Sequential(nn.Linear(3, 3, dtype=DTYPE), nn.Tanh())

        def forward(self, x):
            return loop(lambda x: self.step(x), x, 9)

    torch.manual_seed(0)
    module = Looped()
    other = {k: (v * 0.5 + 0.1).detach().requires_grad_() for k, v in module.named_parameters()}
    y = functx.functional_call(module, other, (numbers(3),))
    return gradients(y, *other.values())


def that_draws(loop):
    torch.manual_seed(3)
    own = torch.Generator().manual_seed(4)

    def body(x):
        x = F.dropout(torch.sin(x), 0.3) + torch.rand(3, generator=own, dtype=DTYPE)
        return x * torch.empty_like(x).normal_(generator=own)

    x = numbers(3).requires_grad_()
    return *gradients(loop(body, x, 13), x), torch.rand(1), own.get_state()


def that_draws_for_each_example(loop):
    def found(randomness):
        def value(x):
            return loop(lambda x: F.dropout(torch.sin(x), 0.5), x, 9).sum()

        torch.manual_seed(3)
        return functx.vmap(functx.grad(value), randomness=randomness)(numbers(4, 3))

    return found("same"), found("different")


def that_counts_itself(loop):
    def body(state):
        i, x, seen = state
        return i + 1, torch.sin(x * (i + 1)), (*seen, i)

    x = numbers(3).requires_grad_()
    i, y, seen = loop(body, (0, x, ()), 10)
    assert (i, seen) == (10, tuple(range(10)))
    return gradients(y, x)


def with_batch_norm(loop):
    norm, x = nn.BatchNorm1d(3, dtype=DTYPE), numbers(4, 3).requires_grad_()
    y = loop(lambda x: norm(x).sin(), x, 9)
    return gradients(y, x, *norm.parameters()), dict(norm.named_buffers())


def with_loops_and_regions_inside(loop):
    def outer(x):
        return loop(lambda x: loop(torch.sin, x * 1.1, 4), x, 3)

    x = numbers(3).requires_grad_()
    y = (outer if loop is plain.of_steps else functx.remat(outer))(x)
    return y, torch.autograd.grad(y.sum(), x, create_graph=True)


def that_differentiates(loop):
    """Gradient descent, and the gradient of that with respect to its rate."""

    def trained(rate):
        def loss(w):
            return (torch.sin(w * numbers(3)) - numbers(3, start=1.0)).square().sum()

        return loss(loop(lambda w: w - rate * functx.grad(loss)(w), numbers(3), 9))

    return functx.grad(trained)(torch.tensor(0.1, dtype=DTYPE))


def that_passes_an_input_through(loop):
    x, w = numbers(3).requires_grad_(), numbers(3, start=1.0).requires_grad_()
    y, v = loop(lambda s: (torch.sin(s[0] * s[1]), s[1]), (x, w), 7)
    return gradients((y, v * v), x, w)


def that_records(loop):
    """What a step records is on the tape."""
    seen, x = [], numbers(4).requires_grad_()

    def step(x):
        seen.append(x.sin())
        return seen[-1]

    loop(step, x, 9)
    return torch.autograd.grad(seen[5].sum(), x)


BODIES = [
    of_a_module,
    of_a_module_with_other_parameters,
    that_draws,
    that_draws_for_each_example,
    that_counts_itself,
    with_batch_norm,
    with_loops_and_regions_inside,
    that_differentiates,
    that_passes_an_input_through,
    that_records,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
@pytest.mark.parametrize("loop", [plain.counted, plain.until], ids=["steps", "condition"])
def test_a_loop_with_this_body_is_the_plain_loop(body, loop):
    assert_same(body(loop), body(plain.of_steps), ROUNDINGS)


def draws_in_the_condition(loop):
    torch.manual_seed(3)
    x = numbers(4).requires_grad_()
    i, y = loop(
        lambda s: (s[0] + 1, F.dropout(s[1].sin(), 0.3)),
        (0, x),
        lambda s: s[0] < 4 or torch.rand(()) < 0.9,
    )
    assert 4 <= i < 100
    return i, gradients(y, x), torch.rand(1)


def reads_what_the_body_does_not(loop):
    w, bound = numbers(3).requires_grad_(), torch.tensor(6.0).requires_grad_()
    y = loop(lambda x: x + w * w, numbers(3), lambda x: x.norm() * bound < 30.0)
    return gradients(y, w)


def ends_early(loop):
    def found(n):
        x = numbers(3).requires_grad_()
        i, y = loop(lambda s: (s[0] + 1, s[1].sin()), (0, x), lambda s: s[0] < n)
        return i, gradients(y, x)

    return [found(n) for n in range(4)]


CONDITIONS = [draws_in_the_condition, reads_what_the_body_does_not, ends_early]


@pytest.mark.parametrize("program", CONDITIONS, ids=lambda p: p.__name__)
def test_a_condition_is_asked_as_in_the_plain_loop(program):
    assert_same(program(functx.remat_loop), program(plain.while_it_holds), 8)


def test_a_bound_ends_a_loop_that_a_condition_would_go_on_with():
    def steps(x, bound):
        body = lambda s: (s[0] + 1, s[1].sin())  # noqa: E731
        return functx.remat_loop(body, (0, x), bound, cond=lambda s: s[0] < 7)[0]

    for bound, ran in ((5, 5), (0, 0), (50, 7)):
        assert steps(numbers(3), bound) == steps(numbers(3).requires_grad_(), bound) == ran
