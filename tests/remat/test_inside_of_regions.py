"""Transforms, names and regions inside of a region give what they give without one."""

from functools import partial

import pytest
import torch
from cases import custom_function, judged_by, numbers, saves_inputs, unchanged
from torch.nn.functional import linear

import functx
from functx import checkpoint_policies as cp

from .programs import STACKS, identity, same

X, Y = numbers(3), numbers(3, 3)


Product = custom_function(
    lambda a, b: a * b,
    lambda ctx, g: (g * ctx.saved_tensors[1], g * ctx.saved_tensors[0]),
    saves_inputs,
)


def gradients(f, *inputs):
    leaves = [t.clone().requires_grad_() for t in inputs]
    out = f(*leaves)
    total = sum(t.sin().sum() for t in ([out] if isinstance(out, torch.Tensor) else out))
    return [out, torch.autograd.grad(total, leaves, allow_unused=True)]


@pytest.mark.parametrize("policy", [None, cp.dots_saveable, cp.everything_saveable])
@pytest.mark.parametrize("transform", [functx.jacrev, functx.jacfwd, functx.hessian])
def test_what_a_function_hands_through_is_pulled_back(transform, policy):
    def f(x, y):
        return transform(lambda a: a, 0)(x) + 1, transform(lambda a: y, 0)(x), y.sin()

    torch.testing.assert_close(
        gradients(functx.remat(f, policy=policy), X, Y), gradients(f, X, Y), rtol=0, atol=0
    )


@judged_by(unchanged, eps=8)
def test_a_captured_tensor_that_is_named_and_given_to_a_custom_function_keeps_its_gradient(remat):
    def f(x):
        m = x.t()
        return remat(lambda k: Product(functx.checkpoint_name(m, "m"), k))(x * 2)

    return gradients(f, Y)


@judged_by(unchanged, eps=8)
def test_a_constant_that_is_an_argument_twice_and_an_attribute_is_one_operand(remat):
    class Box:
        t = X

    def f(x, constant):
        inner = functx.remat(lambda a, b, c: a * b + c.sin())
        return inner(constant, Box.t, x) + inner(Box.t, constant, x * constant)

    leaf = X.clone().requires_grad_()
    return torch.autograd.grad(remat(f)(leaf, X).sum(), leaf)


@judged_by(unchanged, eps=8)
def test_a_leaf_of_the_level_below_may_be_an_argument_and_captured(remat):
    inner = lambda w, x: remat(lambda v: remat(lambda a, b: x * a * b)(w, v) * v)(w)
    return gradients(lambda w: functx.jacrev(partial(inner, w))(X), X + 1)


def test_what_a_region_around_keeps_is_handed_to_the_operation_that_made_it():
    """A region inside leaves out more in one run than in another: entries are told by operands."""
    weight, bias = numbers(3, 3).requires_grad_(), numbers(3).requires_grad_()

    def f(wrap, m):
        def cast(k, m):
            return linear(m.float(), weight.float(), bias.float()).double() * k, m

        made, same = wrap(cast, policy=[torch.ops.aten.mul.Tensor])(2.0, m)
        return made, same, torch.sin(made @ weight)

    def jacobian(wrap):
        whole = wrap(functx.jacrev(lambda m: f(wrap, m)), policy=cp.dots_saveable)
        leaf = Y.clone().requires_grad_()
        out = whole(leaf)
        total = sum(t.sin().sum() for t in out)
        return out, torch.autograd.grad(total, [leaf, weight, bias])

    torch.testing.assert_close(jacobian(functx.remat), jacobian(lambda f, policy: f))


@pytest.mark.parametrize("stack", ["backward", "grad", "vmap(grad)", "grad(grad)"])
def test_a_transform_in_a_nest_may_hand_a_captured_tensor_through(stack):
    """It becomes an input where it is returned, in the replay of the region around as well."""

    def loss(remat):
        def of_weight(w):
            def inner(x):
                return functx.vmap(lambda a: w * 1, out_dims=None)(x), x.sin()

            def same_one(x):
                return functx.vmap(lambda a: w, out_dims=None)(x) * x.sin()

            whole = remat(lambda x: remat(same_one)(x).sum() + (inner(x)[0] * inner(x)[1]).sum())
            return whole(w * 2)

        return of_weight

    for _ in range(3):
        same(STACKS[stack](loss(functx.remat), X.clone()), STACKS[stack](loss(identity), X.clone()))
