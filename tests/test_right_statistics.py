"""A replay advances running statistics for what it runs that reads them, and runs no norm else."""

import pytest
import torch
from cases import numbers
from programs import check_program
from references import Operations, no_garbage_collection
from torch import nn

import functx
from functx._remat._whole import Whole

pytestmark = pytest.mark.usefixtures("hooks")

X = numbers(4, 3)


def norm(training=True):
    n = nn.BatchNorm1d(3).double().train(training)
    n.running_mean += numbers(3, start=1.0)
    return n


def dropped(n, x):
    n(x.square())
    return x.sin()


def dropped_twice(n, x):
    n(x.square())
    n(x)
    return x.sin()


def read_afterwards(n, x):
    n(x.square())
    return x * n.running_mean


def read_through_a_view(n, x):
    n(x.square())
    return x * n.running_mean[1:].sum()


def read_by_a_norm(n, x):
    n(x.square())
    return x * n.eval()(x.detach())


def written_afterwards(n, x):
    n(x.square())
    n.running_mean.mul_(2)
    return x * n.running_mean


def read_by_python(n, x):
    n(x.square())
    return x * float(n.running_mean[1])


def read_in_memory(n, x):
    memory = n.running_mean.numpy()
    n(x.square())
    return x * float(memory[1])


def read_by_a_custom_function(n, x):
    n(x.square())
    return Scaled.apply(x, n.running_mean)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(x, by):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0], None


def made_inside(n, x):
    mean, var = torch.zeros(3, dtype=x.dtype), torch.ones(3, dtype=x.dtype)
    nn.functional.batch_norm(x.square(), mean, var, training=True)
    return x * mean


BODIES = [
    *(dropped, dropped_twice, read_afterwards, read_through_a_view, read_by_a_norm),
    *(written_afterwards, read_by_python, read_in_memory, read_by_a_custom_function, made_inside),
]
POLICIES = [None, functx.checkpoint_policies.everything_saveable]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("inside", [None, "all of it", "the read"])
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("training", [True, False])
def test_values(body, inside, policy, training):
    """Of gradients and statistics, as they are without remat."""

    def program(remat):
        n, x = norm(training), X.clone().requires_grad_()

        def region(x):
            if inside == "the read":
                n(x.square())
                return remat(lambda x: (x * n.running_mean).sin())(x)
            if inside == "all of it":
                return remat(lambda x: body(n, x))(x).sin()
            return body(n, x).sin()

        options = {} if policy is None else {"policy": policy}
        gradients = torch.autograd.grad(remat(region, **options)(x).sum(), x)
        return *gradients, n.running_mean, n.running_var

    check_program(program, eps=8)


@pytest.mark.parametrize("training", [True, False])
def test_a_norm_that_no_pullback_reads_does_not_run_again(training):
    n, x = norm(training), X.clone().requires_grad_()
    for _ in range(6):  # also of runs that are known
        out = functx.remat(lambda x: dropped(n, x))(x)
        with Operations() as operations:
            out.sum().backward()
        assert operations.counts["native_batch_norm"] == 0


def test_a_norm_that_a_pullback_reads_does():
    n, x = norm(), X.clone().requires_grad_()
    out = functx.remat(lambda x: read_afterwards(n, x))(x)
    with Operations() as operations:
        out.sum().backward()
    assert operations.counts["native_batch_norm"] == 1


def test_nothing_is_kept_for_a_norm_that_no_pullback_reads():
    """Where a policy may keep everything: but what the statistics were."""
    n, x = norm(), X.clone().requires_grad_()
    policy = functx.checkpoint_policies.everything_saveable
    with no_garbage_collection(), Operations() as operations:
        out = functx.remat(lambda x: dropped(n, x) + 1, policy=policy)(x)
        assert operations.live == x.nbytes + sum(b.nbytes for b in n.buffers())
        out.sum().backward()


def test_a_replay_that_begins_again_runs_no_norm_on_what_was_not_kept():
    """It is no departure where nobody reads its statistics."""
    absent, mean, var = X.clone(), torch.zeros(3, dtype=X.dtype), torch.ones(3, dtype=X.dtype)
    whole = Whole([absent], [False])
    with Operations() as operations, whole:
        nn.functional.batch_norm(absent, mean, var, training=True)
        out = var.numel() * X.cos()
    whole.check([out])
    assert operations.counts["native_batch_norm"] == 0
    assert torch.equal(mean, torch.zeros(3, dtype=X.dtype))
    torch.testing.assert_close(out, 3 * X.cos())


def test_second_derivatives():
    def program(remat):
        n = norm()

        def loss(x):
            h = remat(lambda x: dropped(n, x) * read_afterwards(n, x))(x)
            return h.square().sum()

        x = X.clone().requires_grad_()
        (first,) = torch.autograd.grad(loss(x), x, create_graph=True)
        return torch.autograd.grad(first.sin().sum(), x)

    check_program(program, eps=64)
