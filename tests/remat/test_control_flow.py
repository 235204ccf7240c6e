"""Control-flow operators of torch in regions are the Python that they stand for."""

import pytest
import torch
from cases import DTYPE, apply, numbers
from references import assert_same, total
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention

import functx

WEIGHT = numbers(3, start=2.0).requires_grad_()


def branches(x, weight):
    """One example takes the one branch, the other the other; both close over a weight."""
    one, other = lambda x: {"a": (x.sin() * weight, x)}, lambda x: {"a": (x.cos() + weight, x * 2)}
    return torch.cond(x.sum() > 0, one, other, (x,))


def branches_in_python(x, weight):
    one, other = (x.sin() * weight, x), (x.cos() + weight, x * 2)
    return {"a": tuple(torch.where(x.sum() > 0, a, b) for a, b in zip(one, other, strict=True))}


def nested_branches(x, weight):
    inner = lambda x: torch.cond(x[0] > 0.5, lambda x: (x * weight,), lambda x: (x.exp(),), (x,))
    return torch.cond(x.sum() > 0, inner, lambda x: (x * x - weight,), (x,))


def nested_branches_in_python(x, weight):
    inner = torch.where(x[0] > 0.5, x * weight, x.exp())
    return (torch.where(x.sum() > 0, inner, x * x - weight),)


def rows(x, weight):
    return map_(
        lambda row, w: {"b": row["c"].sin() * w, "d": row["c"] * x}, {"c": x[:, None]}, weight
    )


def rows_in_python(x, weight):
    return {"b": x[:, None].sin() * weight, "d": x[:, None] * x}


def steps(x, weight):
    def step(carry, row):
        return {"n": carry["n"] * row.sin() + weight}, (carry["n"] + row, row)

    return scan(step, {"n": weight * 1.0}, x, reverse=True)


def steps_in_python(x, weight):
    carry, outputs = weight * 1.0, []
    for row in x.flip(0):
        outputs.append((carry + row, row))
        carry = carry * row.sin() + weight
    return {"n": carry}, tuple(torch.stack(ys).flip(0) for ys in zip(*outputs, strict=True))


def products(x, weight):
    return associative_scan(lambda a, b: a * b, x * weight, 0, combine_mode="generic")


def products_in_python(x, weight):
    return torch.cumprod(x * weight, 0)


def until(x, weight):
    body = lambda i, state: (i + 1, {"y": (state["y"] * weight).sin()})
    return while_loop(lambda i, state: i < 3, body, (torch.tensor(0), {"y": x}))[1]["y"]


def until_in_python(x, weight):
    for _ in range(3):
        x = (x * weight).sin()
    return x


PROGRAMS = {
    "cond": (branches, branches_in_python),
    "nested cond": (nested_branches, nested_branches_in_python),
    "map": (rows, rows_in_python),
    "scan": (steps, steps_in_python),
    "associative_scan": (products, products_in_python),
    "while_loop": (until, until_in_python),
}
STACKS = [("grad",), ("vmap",), ("jvp",), ("vmap", "grad"), ("grad", "vmap"), ("vmap", "hessian")]


def found(f, stack, region):
    """The values of a stack of transforms, and the gradients of their sum, twice."""
    weight = WEIGHT.detach().clone().requires_grad_()
    x = numbers(*(2,) * stack.count("vmap"), 3, start=0.4).requires_grad_()
    results = []
    for _ in range(2):  # (the second run follows the script of the first)
        g = region(lambda x: f(x, weight))
        for name in reversed(stack):
            g = apply(functx if region is functx.remat else torch.func, name, g)
        y = g(x)
        results.append((y, torch.autograd.grad(total(y), (x, weight), materialize_grads=True)))
    return results


@pytest.mark.parametrize("stack", [(), *STACKS], ids="(".join)
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_operator_in_a_region_is_its_python(name, stack):
    operator, python = PROGRAMS[name]
    expected = found(python, stack, lambda f: f)
    assert_same(found(operator, stack, functx.remat), expected, eps=64)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_attention_of_mapped_inputs():
    def attention(q, k, v):
        bias = numbers(4, 4, start=1.0)
        return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + bias[i, j])

    def plain(q, k, v):
        scores = q @ k.mT / q.shape[-1] ** 0.5 + numbers(4, 4, start=1.0)
        return scores.softmax(-1) @ v

    q, k, v = (numbers(2, 1, 1, 4, 8, start=float(i)) for i in range(3))
    loss = lambda f: lambda *args: functx.vmap(f)(*args).square().sum()
    gradients = functx.grad(loss(functx.remat(attention)), (0, 1, 2))(q, k, v)
    assert_same(gradients, torch.func.grad(loss(plain), (0, 1, 2))(q, k, v), eps=64)


def test_regions_leave_the_compiler_as_it_was():
    """Outside, an operator compiles itself before and after it has run in a region."""
    f = lambda x: torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))
    x = numbers(3, start=0.4)
    functx.vmap(functx.remat(f))(numbers(2, 3))
    y = x.clone().requires_grad_()
    functx.remat(f)(y).sum().backward()
    assert torch.equal(y.grad, x.cos() if x.sum() > 0 else -x.sin())
    assert torch.equal(f(x), x.sin() if x.sum() > 0 else x.cos())
    assert torch.func.vmap(f)(numbers(2, 3)).shape == (2, 3)

    def compiled(x):
        return functx.remat(lambda x: x.sin())(x) if x.dtype == DTYPE else f(x)

    assert torch.equal(torch.compile(compiled, backend="eager")(x), x.sin())


def test_a_replay_takes_the_branch_of_the_forward():
    """A predicate that is a captured tensor is an input (rule 1)."""
    flag = [torch.tensor(True)]
    f = lambda x: torch.cond(flag[0], lambda x: x.sin(), lambda x: x.cos(), (x,))
    x = numbers(3).requires_grad_()
    y = functx.remat(f)(x)
    flag[0] = torch.tensor(False)
    assert_same(torch.autograd.grad(y.sum(), x)[0], x.cos(), eps=4)


def test_an_exception_in_a_branch_leaves_nothing_behind():
    def fails(x):
        raise KeyError("mine")

    f = functx.remat(lambda x: torch.cond(x.sum() > -9, fails, lambda x: x.cos(), (x,)))
    with pytest.raises(KeyError, match="mine"):
        f(numbers(3).requires_grad_())
    x = numbers(3, start=0.4)
    y = torch.cond(x.sum() > -9, lambda x: x.sin(), lambda x: x.cos(), (x,))
    assert torch.equal(y, x.sin())
