"""Rule 1: transforms of torch.func inside of a region, over tensors that it is not given.

torch wraps them in C++, where no mode sees it. What ``vmap`` has wrapped can be exchanged in a
replay. What a transform differentiates it knows as a leaf, so that another tensor is an error.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cases import identity, numbers, unchanged
from references import assert_same
from torch import func, nn

import functx

from .refusals import refused

RUNS = 3  # the later ones may follow what the first one has left
C = SimpleNamespace(v=None)
EXCHANGED = {
    "vmap": lambda x: torch.vmap(lambda a: a * x)(C.v).sum(0),
    "vmap, and nothing mapped is returned": lambda x: torch.vmap(lambda a, b: (a.sum(), b))(
        C.v[:, None], x
    )[1],
    "vmap, of two": lambda x: torch.vmap(lambda a, b: a * b * x)(C.v, C.v).sum(0),
    "vmap, another dimension": lambda x: torch.vmap(lambda a: (a * x).sin(), 1)(C.m).sum(0),
    "vmap, results elsewhere": lambda x: torch.vmap(lambda a: a * x, 1, 1)(C.m).sum(1),
    "vmap of one of two": lambda x: torch.vmap(lambda a, b: a * b, (0, None))(x, C.v).sum(0),
    "vmap, of what it closes over": lambda x: torch.vmap(lambda a: a * C.v)(x[:, None]).sum(0),
    "vmap in vmap": lambda x: torch.vmap(torch.vmap(lambda a: a * x.sum()))(C.m).sum(0),
    "vmap in vmap, of what it closes over": lambda x: torch.vmap(
        lambda b: torch.vmap(lambda a: a * b * x.sum())(C.v)
    )(C.v).sum(0),
    "vmap in chunks": lambda x: torch.vmap(lambda a: a * x, chunk_size=2)(C.v).sum(0),
    "vmap of a dict": lambda x: torch.vmap(lambda d: d["a"] * x)({"a": C.v}).sum(0),
    "grad, of what it closes over": lambda x: func.grad(lambda a: (a * C.v).sin().sum())(x),
    "jvp": lambda x: func.jvp(lambda a: (a * x).sin(), (C.v,), (x,))[1],
    "jvp along it": lambda x: func.jvp(lambda a: (a * a).sin(), (x,), (C.v,))[1],
    "jacfwd": lambda x: func.jacfwd(lambda a: (a * x).sin())(C.v).sum(0),
    "a cotangent": lambda x: func.vjp(lambda a: (a * a * x).sin(), x)[1](C.v)[0],
}
DIFFERENTIATED = {
    "vmap(grad)": lambda x: torch.vmap(func.grad(lambda a: (a * x).sin().sum()))(C.m).sum(0),
    "grad": lambda x: func.grad(lambda a: (a * x).sin().sum())(C.v),
    "grad(grad)": lambda x: func.grad(
        lambda a: func.grad(lambda b: (b * b * x).sin().sum())(a).sum()
    )(C.v),
    "grad of one of two": lambda x: func.grad(lambda a, b: (a * b).sin().sum(), 1)(x, C.v),
    "jacrev": lambda x: func.jacrev(lambda a: (a * x).sin())(C.v).sum(0),
    "vjp": lambda x: func.vjp(lambda a: (a * x).sin(), C.v)[1](x)[0],
    "functionalize": lambda x: func.functionalize(lambda a: (a * x).sin())(C.v),
}


def run(f, step, then=None):
    x, C.v, C.m = (numbers(*shape, start=step + i) for i, shape in enumerate([(3,), (3,), (2, 3)]))
    C.m = C.m.new_tensor([*C.m.tolist(), [0.5, 0.25, 2.0]])
    x.requires_grad_()
    out = f(x).sum()
    if then is not None:
        then()
    return torch.autograd.grad(out, x)


def bound_again():
    C.v, C.m = numbers(3, start=8.0), numbers(3, 3, start=9.0)


def of_another_shape():
    C.v, C.m = numbers(5, start=8.0), numbers(5, 7, start=9.0)


@pytest.mark.parametrize("then", [bound_again, of_another_shape])
@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("name", EXCHANGED)
def test_a_constant_that_is_bound_again_is_what_it_was_in_the_forward(name, around, then):
    if then is of_another_shape and name in {"vmap in chunks", "jacfwd"}:
        then = bound_again  # Python is asked how often to call

    def program(remat):
        region = remat(lambda x: EXCHANGED[name](x.sin()).exp())
        f = remat(lambda x: region(x.cos()).exp()) if around else region
        return [run(f, step, then if remat is functx.remat else None) for step in range(RUNS)]

    unchanged(program, eps=16)


@pytest.mark.parametrize("name", DIFFERENTIATED)
@pytest.mark.parametrize("runs", [0, 2])
def test_a_constant_that_torch_differentiates_and_is_bound_again_is_an_error(name, runs):
    f = lambda x: DIFFERENTIATED[name](x.sin()).exp()
    region = functx.remat(f)
    for step in range(runs):
        assert_same(run(region, step), run(f, step), eps=16)
    with refused(
        "lambda x: ",
        "Use functx's",
        shape=None if "vmap" in name else (3,),
        error=functx.ReplayError,
    ):
        run(region, runs, bound_again)


@pytest.mark.parametrize("way", ["grad", "vmap(grad)", "jacrev(grad)", "jvp"])
@pytest.mark.parametrize("name", ["vmap", "vmap in vmap", "jvp along it", "grad", "vjp"])
def test_under_transforms_too(way, name):
    """A vjp whose backward comes later is where a constant could be bound again meanwhile."""
    f = {**EXCHANGED, **DIFFERENTIATED}[name]

    def program(remat):
        region, found = remat(lambda x: f(x.sin()).exp()), []
        loss = lambda x: region(x).sum()
        gradient = functx.grad(loss)
        for step in range(RUNS):
            x, C.v, C.m = numbers(3, start=step), numbers(3, start=4.0), numbers(3, 3, start=step)
            if way == "grad":
                out, pullback = functx.vjp(loss, x)
                if name in EXCHANGED and remat is functx.remat:
                    bound_again()
                found.append((out, pullback(torch.ones_like(out))))
            elif way == "vmap(grad)":
                found.append(functx.vmap(gradient)(torch.stack([x, x.cos()])))
            elif way == "jacrev(grad)":
                found.append(functx.jacrev(gradient)(x))
            else:
                found.append(functx.jvp(loss, (x,), (x.cos(),)))
        return found

    unchanged(program, eps=64)


class Layer(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part
        self.weight = nn.Parameter(numbers(3, start=1.0))
        self.register_buffer("scale", numbers(3, start=2.0))

    def forward(self, x):
        return torch.vmap(lambda a: a * x)(getattr(self, self.part)).sin().sum(0)


@pytest.mark.parametrize("call", [func.functional_call, functx.functional_call])
@pytest.mark.parametrize("part", ["weight", "scale"])
@pytest.mark.parametrize("frozen", [True, False])
def test_parameters_and_buffers_of_a_functional_call(part, call, frozen):
    def program(remat):
        layer, found = remat(Layer(part)), []
        for step in range(RUNS):
            x, w = numbers(3, start=step).requires_grad_(), numbers(3, start=4.0 + step)
            out = call(layer, {part: w.requires_grad_(not frozen)}, (x,))
            found.append(torch.autograd.grad(out.sum(), x))
        return found

    if frozen:
        unchanged(program, eps=8)
    else:
        with refused("torch.vmap", "Use functx's", shape=(3,)):
            program(functx.remat)
        program(identity)


@pytest.mark.parametrize("name", ["vmap", "grad"])
def test_an_array_that_becomes_a_tensor_at_each_call_is_the_same(name):
    """`torch.from_numpy` is shown to nobody: a tensor of its own each time, of one memory."""
    array = numbers(3, start=2.0).numpy()
    transforms = {
        "vmap": lambda x, v: torch.vmap(lambda a: a * x)(v).sum(0),
        "grad": lambda x, v: func.grad(lambda a: (a * x).sin().sum())(v),
    }
    f = lambda x: transforms[name](x.sin(), torch.from_numpy(array)).exp()
    assert isinstance(array, np.ndarray)
    region = functx.remat(f)
    for step in range(RUNS):
        assert_same(run(region, step), run(f, step), eps=16)


@pytest.mark.parametrize("name", ["vmap", "grad"])
def test_what_an_argument_or_a_result_is_wrapped_as_is_no_constant(name):
    f = lambda x: {
        "vmap": lambda: torch.vmap(lambda a: a * x)(x.detach()).sum(0),
        "grad": lambda: func.grad(lambda a: (a * x).sin().sum())(x.detach().cos()),
    }[name]()
    region = functx.remat(f)
    for step in range(RUNS):
        assert_same(run(region, step, bound_again), run(f, step), eps=16)


def test_a_write_to_a_mapped_buffer_happens_once():
    """Rule 2."""

    def f(x):
        return torch.vmap(lambda a: a.add_(1).clone() * x)(C.v).sin().sum(0)

    def program(remat):
        region, found = remat(f), []
        C.v = numbers(3)
        for step in range(RUNS):
            x = numbers(3, start=step).requires_grad_()
            found += [torch.autograd.grad(region(x).sum(), x), C.v.clone()]
        return found

    unchanged(program, eps=8)
