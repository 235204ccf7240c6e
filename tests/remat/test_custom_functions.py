"""Rule 1: a replay gives custom Functions what the forward gave them, by whatever name they go."""

import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from cases import numbers, unchanged
from references import assert_same
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

import functx

from .refusals import refused

RUNS = 4  # the second and later ones may follow what an earlier one has left


def kernel(x, w):
    """``x * w**3``, by code that no mode sees."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        return x * w**3


class Old(torch.autograd.Function):
    """Its forward has a context; ``scale`` and the list are no tensors."""

    @staticmethod
    def forward(ctx, x, w, scale=1.0, names=()):
        ctx.save_for_backward(x, w)
        ctx.scale = scale
        return kernel(x, w) * scale

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w**3 * ctx.scale, g * x * 3 * w**2 * ctx.scale, None, None


class Once(Old):
    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return Old.backward(ctx, g)


class New(torch.autograd.Function):
    """With a context of its own, and rules for all transforms."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, w, scale=1.0):
        return x * w**3 * scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])
        ctx.save_for_forward(*inputs[:2])
        ctx.scale = inputs[2]

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w**3 * ctx.scale, g * x * 3 * w**2 * ctx.scale, None

    @staticmethod
    def jvp(ctx, dx, dw, _):
        x, w = ctx.saved_tensors
        return (dx * w**3 + x * 3 * w**2 * dw) * ctx.scale


class Mapped(New):
    """With a rule for ``vmap`` of its own."""

    generate_vmap_rule = False

    @staticmethod
    def vmap(info, dims, x, w, scale=1.0):
        x, w = (
            t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip((x, w), dims)
        )
        return New.apply(x, w, scale), 0


class Nested(torch.autograd.Function):
    """Applies another Function in its forward and in its backward."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return Old.apply(x, w)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return Old.apply(g, w), Old.apply(g, w) * x * 3 / w


class Dirty(torch.autograd.Function):
    """Writes to its first argument."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x.clone(), w)
        ctx.mark_dirty(x)
        return x.mul_(w.detach() ** 3)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w**3, g * x * 3 * w**2


class DirtyUnseen(Dirty):
    """Its kernel is one that no mode sees."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x.clone(), w)
        ctx.mark_dirty(x)
        x.data.copy_(kernel(x, w.detach()))
        return x


class WithRegions(torch.autograd.Function):
    """Its forward and its backward run regions."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        with torch.enable_grad():
            return functx.remat(lambda x, w: x * w**3)(x, w).detach()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        with torch.enable_grad():
            x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
            out = functx.remat(lambda x, w: x * w**3)(x, w)
        return torch.autograd.grad(out, (x, w), g)


OF_DEFAULTS = New.apply  # a name bound to it
FUNCTIONS = {
    "old": lambda x, w: Old.apply(x, w),
    "with numbers": lambda x, w: Old.apply(x, w, 2.0, ["a", None]),
    "once differentiable": lambda x, w: Once.apply(x, w),
    "new": lambda x, w: New.apply(x, w, 2.0),
    "by a name": lambda x, w: OF_DEFAULTS(x, w),
    "by keywords": lambda x, w: New.apply(x, w=w, scale=0.5),
    "with a rule for vmap": lambda x, w: Mapped.apply(x, w),
    "nested": lambda x, w: Nested.apply(x, w),
    "dirty": lambda x, w: Dirty.apply(x * 1, w),
    "dirty, unseen": lambda x, w: DirtyUnseen.apply(x * 1, w),
    "with regions": lambda x, w: WithRegions.apply(x, w),
    "two in a row": lambda x, w: New.apply(Old.apply(x, w).cos(), w),
    "in a checkpoint": lambda x, w: functx.checkpoint(lambda x: Old.apply(x, w), x),
    "in a region": lambda x, w: functx.remat(lambda x: Old.apply(x, w))(x),
    "in vmap": lambda x, w: functx.vmap(lambda a: New.apply(a, w))(torch.stack([x, x + 1])).sum(0),
    "in grad": lambda x, w: functx.grad(lambda a: New.apply(a, w).sin().sum())(x),
    "in jvp": lambda x, w: functx.jvp(lambda a: New.apply(a, w).sin(), (x,), (x.cos(),))[1],
}
C = SimpleNamespace(w=None, function=None)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(numbers(3, start=1.0))
        self.register_buffer("scale", numbers(3, start=2.0))

    def forward(self, x):
        h = FUNCTIONS[C.function](x.sin(), self.weight)
        return FUNCTIONS[C.function](h.cos(), self.scale).exp()


def swapped(call):
    """Parameters and buffers of a functional call, which are gone by the backward."""

    def program(x, w, remat):
        layer, scale = Layer(), numbers(3, start=3.0)
        return call(remat(layer), {"weight": w, "scale": scale}, (x,)), lambda: None

    return program


def bound_again(get):
    """A tensor that the region finds in ``C``, where another one lies by the backward."""

    def program(x, w, remat):
        C.w = get(w)
        region = remat(lambda x: FUNCTIONS[C.function](x.sin(), C.w).exp())
        return region(x), lambda: setattr(C, "w", numbers(3, start=9.0))

    return program


def buffer_bound_again(x, w, remat):
    layer = Layer()
    layer.scale = w.detach()
    return remat(layer)(x), lambda: setattr(layer, "scale", numbers(3, start=9.0))


SOURCES = {
    "torch's functional_call": swapped(torch.func.functional_call),
    "functional_call": swapped(functx.functional_call),
    "a buffer": buffer_bound_again,
    "a constant": bound_again(torch.Tensor.detach),
    "a leaf": bound_again(lambda w: w),
    "no leaf": bound_again(torch.sin),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("source", SOURCES)
def test_what_a_function_is_given_is_what_the_forward_gave_it(source, name):
    C.function = name

    def program(remat):
        found = []
        for run in range(RUNS):
            x, w = numbers(3, start=run).requires_grad_(), numbers(3, start=4.0 + run)
            w.requires_grad_()
            out, then = SOURCES[source](x, w, remat)
            then()
            found += [out, torch.autograd.grad(out.sum(), (x, w), allow_unused=True)]
        return found

    unchanged(program, eps=8)


@pytest.mark.parametrize("name", ["new", "with a rule for vmap", "two in a row", "in grad"])
@pytest.mark.parametrize("library", [functx, torch.func], ids=["functx", "torch.func"])
@pytest.mark.parametrize("way", ["grad", "vmap(grad)", "jacrev(grad)", "jvp", "a level outside"])
def test_under_transforms_too(name, library, way):
    if (name, way) == ("two in a row", "jvp"):
        name = "new"  # the old one has no rule
    if name == "two in a row":
        pair = lambda x, w: New.apply(New.apply(x, w).cos(), w)
    else:
        pair = FUNCTIONS[name]

    def program(remat):
        region, found = remat(lambda x: pair(x.sin(), C.w).exp()), []
        f = program.f = lambda x: region(x).sum()
        for run in range(RUNS):
            x, C.w = numbers(3, start=run), numbers(3, start=4.0 + run)
            gradient = library.grad(f)
            if way == "grad":
                found.append(gradient(x))
            elif way == "vmap(grad)":
                found.append(library.vmap(gradient)(torch.stack([x, x.cos()])))
            elif way == "jacrev(grad)":
                found.append(library.jacrev(gradient)(x))
            elif way == "jvp":
                found.append(library.jvp(f, (x,), (x.cos(),)))
            else:  # the backward comes when the transform has ended, and finds another tensor
                found.append(library.grad(partial(outer, x))(C.w))
        return found

    def outer(x, w):
        C.w = w.sin()
        out, pullback = library.vjp(lambda x: program.f(x), x)
        C.w = numbers(3, start=9.0)
        return out + pullback(torch.ones_like(out))[0].sum()

    unchanged(program, eps=64)


def test_in_torchs_checkpoint_inside_of_a_region():
    """(It reads what its function closes over by itself, and at the backward.)"""
    inner = lambda x: checkpoint(Old.apply, x.sin(), C.w, use_reentrant=False)

    def program(remat):
        region, found = remat(lambda x: inner(x).exp()), []
        for run in range(RUNS):
            x, w = numbers(3, start=run).requires_grad_(), numbers(3, start=4.0 + run)
            w.requires_grad_()
            C.w = w
            out = region(x)
            found.append(torch.autograd.grad(out.sum(), (x, w)))
        return found

    unchanged(program, eps=8)


BOUND_BEFORE = """
import torch
{cube}
cube = Cube.apply
import functx

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.register_buffer("scale", torch.ones(3, dtype=torch.float64))
    def forward(self, x):
        return cube(cube(x.sin(), self.weight), self.scale).exp()

def run(layer, seed):
    torch.manual_seed(seed)
    x, w, scale = torch.rand(3, 3, dtype=torch.float64).unbind()
    x, w = x.requires_grad_(), w.requires_grad_()
    out = torch.func.functional_call(layer, {{"weight": w, "scale": scale}}, (x,))
    return torch.autograd.grad(out.sum(), (x, w))

region = functx.remat(Layer())
for seed in range(4):
    torch.testing.assert_close(run(region, seed), run(Layer(), seed), rtol=1e-14, atol=1e-14)
"""
CUBE = """
class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        with torch._C.DisableTorchFunction():
            return x * w**3
    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w**3, g * x * 3 * w**2
"""


def test_also_where_the_name_was_bound_before_functx_was_imported():
    code = BOUND_BEFORE.format(cube=CUBE)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# -- what it is given is compared (rule 3)

DEPARTURES = {
    "a number": (lambda x: Old.apply(x, x, C.first), lambda x: Old.apply(x, x, C.then), "Old"),
    "a list": (lambda x: Old.apply(x, x, 1.0, ["a"]), lambda x: Old.apply(x, x, 1.0, ["b"]), "Old"),
    "an operand": (
        lambda x: Old.apply(x, x.cos()),
        lambda x: Old.apply(x, x),
        r"Old, result 1, result 1",
    ),
    "the Function": (lambda x: Old.apply(x, x), lambda x: Nested.apply(x, x), "Nested"),
    "one less": (lambda x: Old.apply(x, x), lambda x: x * 1, "Old"),
    "one more": (lambda x: x * 1, lambda x: Old.apply(x, x), "Old"),
}


@pytest.mark.parametrize("runs", [0, 2])
@pytest.mark.parametrize("way", ["backward", "grad"])
@pytest.mark.parametrize("name", DEPARTURES)
def test_a_replay_that_gives_it_something_else_is_an_error(name, way, runs):
    first, then, said = DEPARTURES[name]
    if way == "grad":
        as_new = lambda f: lambda x: f(x)
        first, then = as_new(first), as_new(then)
    C.first, C.then, C.second = 2.0, 3.0, False
    region = functx.remat(lambda x: (then if C.second else first)(x.sin()).exp())
    x = numbers(3).requires_grad_()
    for _ in range(runs):
        torch.autograd.grad(region(x).sum(), x)
    out = region(x).sum()
    C.second = True
    with pytest.raises(functx.ReplayError, match=said):
        torch.autograd.grad(out, x)


def test_a_function_of_a_class_that_is_made_anew_is_the_same():
    def f(x):
        class Sine(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x.sin()

            @staticmethod
            def backward(ctx, g):
                return g * ctx.saved_tensors[0].cos()

        return Sine.apply(x * 2).exp()

    x = numbers(3).requires_grad_()
    region = functx.remat(f)
    for _ in range(RUNS):
        assert_same(torch.autograd.grad(region(x).sum(), x), torch.autograd.grad(f(x).sum(), x), 4)


@pytest.mark.parametrize("runs", [0, 2])
@pytest.mark.parametrize("function", ["Dirty", "DirtyUnseen"])
def test_a_write_to_an_argument_with_history_is_refused(function, runs):
    """Rule 4."""
    function = globals()[function]
    region = functx.remat(lambda x: function.apply(x, C.w).sin())
    x, C.w = numbers(3).requires_grad_(), numbers(3, start=1.0)
    for _ in range(runs + 1):
        with refused("region(x * 1)", "clone"):
            region(x * 1)


def test_objects_in_containers_that_it_is_given_are_the_programs_own():
    class Collects(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, found):
            found.append("ran")
            return x.sin()

        @staticmethod
        def backward(ctx, g):
            return g, None

    found = []
    functx.remat(lambda x: Collects.apply(x, found))(numbers(3).requires_grad_())
    assert found == ["ran"]


# -- outside of regions nothing changes


def test_outside_of_regions_a_function_is_given_its_own_arguments():
    given = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            given[:] = [x, w]
            return x * w

        @staticmethod
        def backward(ctx, g):
            return g, g

    x, w = numbers(3).requires_grad_(), numbers(3)
    with torch.device("cpu"):  # a function mode
        Looks.apply(x, w)
    assert given[0] is x
    assert given[1] is w


class Plain(torch.autograd.Function):
    """One that the compiler can trace."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w**3

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w**3, g * x * 3 * w**2


class WithContextOfItsOwn(Plain):
    @staticmethod
    def forward(x, w):
        return x * w**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's
@pytest.mark.parametrize("function", [Plain, WithContextOfItsOwn])
def test_functions_are_compiled_in_one_graph(function):
    f = lambda x, w: function.apply(x.sin(), w).exp()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    x, w = numbers(3).requires_grad_(), numbers(3, start=1.0).requires_grad_()
    found = [torch.autograd.grad(g(x, w).sum(), (x, w)) for g in (compiled, f)]
    assert_same(*found, 4)


# -- what no mode sees, and no Function is given: compared by the leaves on the tape


def hidden(x):
    """As an extension's operator of C++ that finds its parameter by itself."""
    with torch._C.DisableTorchFunction():
        return x * C.w


@pytest.mark.parametrize("runs", [0, 2])
@pytest.mark.parametrize("then", ["a leaf", "a constant"])
@pytest.mark.parametrize("order", ["first", "second", "a level"])
def test_another_leaf_that_only_unseen_code_reads_is_an_error(order, then, runs):
    region = functx.remat(lambda x: hidden(x.sin()).exp())
    x = numbers(3).requires_grad_()
    other = numbers(3, start=5.0).requires_grad_(then == "a leaf")

    def run(bind_again):
        C.w = w = numbers(3, start=1.0).requires_grad_()
        loss = lambda x: region(x).sum()
        out = functx.grad(loss)(x) if order == "a level" else region(x)
        if order == "second":
            (out,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        if bind_again:
            C.w = other
        return torch.autograd.grad(out.sum(), (x, w))

    for _ in range(runs):
        run(False)
    with pytest.raises(functx.ReplayError, match=r"no mode sees.*\(3,\).*as an argument"):
        run(True)
