"""Rule 1: a replay finds the arguments of the call, and every tensor that it read.

Each loss changes what the region reads after the call, and is differentiated when it has returned.
"""

import pytest
import torch
from torch import nn

import functx

from .programs import STACKS, X, Y, check, identity, naive, numbers, right_or_raises, same

SETTINGS = {"scale": Y, "weights": [Y]}
QUICK = ("backward", "grad(grad)", "vmap(grad)", "vjp")
every_stack = pytest.mark.parametrize(
    "stack", [pytest.param(s, marks=() if s in QUICK else pytest.mark.sweep) for s in STACKS]
)


def check_loss(stack, build, **options):
    """``build(remat)`` is a loss of one vector."""
    check(lambda remat: STACKS[stack](build(remat), X), **options)


class Holder:
    def __init__(self, w=Y):
        self.w = w

    def __call__(self, x):
        return (x * self.w).sin()


@every_stack
class TestCells:
    def test_rebound_after_the_call(self, stack):
        def build(remat):
            def loss(x):
                w, number, f = Y, 2.0, torch.sin
                y = remat(lambda x: f(x * w) * number * x)(x)
                w, number, f = 5 * Y, 7.0, torch.cos
                return y.sum()

            return loss

        check_loss(stack, build)

    def test_rebound_tensor_of_a_function_that_the_region_calls(self, stack):
        def build(remat):
            def loss(x):
                w = Y

                def scaled(x):
                    return x * w

                y = remat(lambda x: scaled(x).sin() * scaled(x))(x)
                w = 5 * Y
                return y.sum()

            return loss

        check_loss(stack, build)


@every_stack
class TestArguments:
    def test_containers_that_the_caller_changes_after_the_call(self, stack):
        def build(remat):
            def f(tensors, named, *, last):
                x = tensors[0] * named["w"]["y"] * tensors[1]
                return (x * last[0]).sin() * x

            def loss(x):
                tensors, named, last = [x, 3.0], {"w": {"y": Y}}, [2.0]
                y = remat(f)(tensors, named, last=last)
                tensors.clear()
                named["w"]["y"], last[0] = 5 * Y, 7.0
                return y.sum()

            return loss

        check_loss(stack, build)

    def test_requires_grad_says_what_it_says_without_remat(self, stack):
        """Of an argument and of a constant, in the forward and in the replay."""

        def build(remat):
            def f(x, c):
                x = x.sin() * x if x.requires_grad else x.cos().exp()
                return x * (c.exp() if c.requires_grad else c)

            return lambda x: remat(f)(x, Y).sum()

        check_loss(stack, build)


@every_stack
class TestAttributesAndGlobals:
    def test_a_rebound_attribute(self, stack):
        def build(remat):
            def loss(x):
                holder = Holder()
                y = remat(lambda x: holder(x) * x)(x)
                holder.w = 5 * Y
                return y.sum()

            return loss

        check_loss(stack, build)

    def test_a_constant_argument_also_reached_by_an_attribute_that_is_rebound(self, stack):
        def build(remat):
            def loss(x):
                holder = Holder()
                y = remat(lambda x, w: holder(x) * (w + x))(x, holder.w)
                holder.w = 5 * Y
                return y.sum()

            return loss

        right_or_raises(lambda remat: STACKS[stack](build(remat), X))


class Net(nn.Module):
    """Two layers; ``remat`` goes around the second, or the whole."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("scale", Y.clone())
        self.double()

    def tail(self, x):
        return torch.sin(self.second(x) * self.scale)

    def forward(self, x, remat):
        return remat(self.tail)(torch.sin(self.first(x)))


class TestModules:
    @every_stack
    def test_parameters_and_buffers_replaced_after_the_call(self, stack):
        def build(remat):
            net = Net()

            def loss(x):
                y = net(x, remat)
                net.second.weight, net.scale = nn.Parameter(numbers(3, 3)), 5 * Y
                return y.sum()

            return loss

        check_loss(stack, build)

    @pytest.mark.parametrize(
        ("around", "stack"),
        [
            ("inside", "grad"),
            ("whole", "vmap(grad)"),
            ("functional_call", "backward"),
            ("inside", "backward(vmap)"),
            ("functional_call", "vmap(grad)"),
            ("whole", "backward"),
        ],
    )
    def test_parameters_that_functional_call_had_swapped_in(self, stack, around):
        """The pullback runs when the module has its own parameters again."""

        def program(remat):
            net = Net()

            def call(tree, x):
                inner = remat if around != "whole" else identity
                return functx.functional_call(net, tree, (x, inner)).square().sum()

            loss = call if around == "inside" else remat(call)
            tree = {name: t.detach() * 0.5 for name, t in net.state_dict().items()}
            if stack == "grad":
                found = functx.grad(loss)(tree, X)
            elif stack == "vmap(grad)":
                found = functx.vmap(functx.grad(loss), (None, 0))(tree, numbers(4, 3))
            else:
                tree = {name: t.requires_grad_() for name, t in tree.items()}
                if stack == "backward":
                    value = loss(tree, X)
                else:
                    value = functx.vmap(loss, (None, 0))(tree, numbers(4, 3)).sum()
                found = torch.autograd.grad(value, list(tree.values()))
            assert all(p.grad is None for p in net.parameters())
            return found

        check(program)


def test_the_comparison_can_fail():
    """A recompute that reads what is there at the time of the backward is seen."""

    def program(remat):
        holder, x = Holder(), X.clone().requires_grad_()
        y = remat(lambda x: holder(x) * x)(x)
        holder.w = 5 * Y
        return torch.autograd.grad(y.sum(), x)

    with pytest.raises(AssertionError):
        same(program(naive), program(identity))
