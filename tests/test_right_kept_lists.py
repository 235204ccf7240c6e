"""Lists that a custom Function or a hook keeps, and changes in the backward pass."""

import pytest
import torch
from cases import numbers
from programs import identity
from references import assert_same
from torch import nn

import functx

pytestmark = pytest.mark.usefixtures("no_hooks")

X = numbers(3)


class Counts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, log):
        ctx.log = log
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        ctx.log.append(len(ctx.log))
        return g * ctx.saved_tensors[0].cos() * len(ctx.log), None


class CountsInADict(torch.autograd.Function):
    @staticmethod
    def forward(x, log):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.log = inputs[1]
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, g):
        ctx.log["n"] = ctx.log.get("n", 0) + 1
        return g * ctx.saved_tensors[0].cos() * ctx.log["n"], None


class Pushes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, stack):
        stack.append(x.detach().clone())
        ctx.stack = stack
        return x * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.stack.pop(), None


class Logs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, log):
        log.append(x.detach().mean())
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2, None


class Module(nn.Module):
    def __init__(self, function, log):
        super().__init__()
        self.function, self.log = function, log

    def forward(self, x):
        return self.function.apply(x, self.log) * 2


def closure(function, log):
    return lambda x: function.apply(x, log) * 2


def inside_a_list(function, log):
    both = [log, 1]
    return lambda x: function.apply(x, both[0]) * 2


FUNCTIONS = [(Counts, list), (CountsInADict, dict), (Pushes, list), (Logs, list)]


@pytest.mark.parametrize("reach", [closure, Module, inside_a_list])
@pytest.mark.parametrize(("function", "container"), FUNCTIONS)
def test_it_is_the_users(reach, function, container):
    """One list for all runs, as without a region."""

    def program(remat):
        log, gradients = container(), []
        f = remat(reach(function, log))
        for _ in range(5):
            x = X.clone().requires_grad_()
            gradients += torch.autograd.grad(f(x).sum(), x)
        return gradients, log

    assert_same(program(functx.remat), program(identity))


def test_one_that_is_given_and_changed_forward():
    def program(remat):
        log, gradients = [], []
        f = remat(lambda x, log: Logs.apply(x, log).sin())
        for _ in range(5):
            x = X.clone().requires_grad_()
            gradients += torch.autograd.grad(f(x, log).sum(), x)
        return gradients, log

    assert_same(program(functx.remat), program(identity))


def hooked(x, log):
    h = x.sin()
    h.register_hook(lambda g: log.append(1))
    return h * 2


FUNCTIONS_GIVEN = [lambda x, log, f=f: f.apply(x, log) * 2 for f, _ in FUNCTIONS[:3]]


@pytest.mark.parametrize(
    ("f", "container"),
    [
        (hooked, list),
        *zip(FUNCTIONS_GIVEN, [list, dict, list]),
        (lambda x, log: Counts.apply(x, log[0]) * 2, lambda: [[]]),
    ],
)
def test_one_that_is_given_and_changed_backward(f, container):
    """A replay has its own; what is left there is put in the caller's."""

    def program(remat):
        x, log = X.clone().requires_grad_(), container()
        out = remat(f)(x, log).sum()
        passes = 1 if f is FUNCTIONS_GIVEN[2] else 3  # it pops what it has pushed
        return [torch.autograd.grad(out, x, retain_graph=True) for _ in range(passes)], log

    assert_same(program(functx.remat), program(identity))


def test_one_that_is_given_and_changed_backward_out_of_sight_is_an_error():
    """Too far away to be found: the caller's would not change."""

    def f(x, log):
        h, far = x.sin(), [[[[[log]]]]]
        h.register_hook(lambda g: far[0][0][0][0][0].append(1))
        return h * 2

    x = X.clone().requires_grad_()
    with pytest.raises(functx.RematError, match="keeps and changes in a backward pass"):
        functx.remat(f)(x, []).sum().backward()


def test_one_that_is_given_and_not_changed():
    x = X.clone().requires_grad_()
    out = functx.remat(lambda x, log: hooked(x, []) * len(log))(x, [1, 2])
    out.sum().backward()
