"""Code that runs in a pullback, and inputs of which Python or a kernel sees more than values."""

import types

import numpy as np
import torch

from .collected import Programs, gradients, values

PROGRAMS = Programs()
program, refused, in_eager = PROGRAMS.right, PROGRAMS.refused, PROGRAMS.in_eager
X = values(3)
SCALE = 1.0


class Reversed(torch.autograd.Function):
    """The gradient is multiplied by a class attribute, a global, and what a forward has noted."""

    by = 1.0

    @staticmethod
    def forward(ctx, x):
        ctx.noted = SCALE
        return x * SCALE

    @staticmethod
    def backward(ctx, g):
        return -g * Reversed.by * ctx.noted * SCALE


@program
def what_a_backward_reads(jit):
    global SCALE
    w = values(3).requires_grad_()
    f = jit(lambda x: Reversed.apply(w * x))
    out = [f(X), *gradients(f(X), w)]
    try:
        Reversed.by = 3.0
        out += [f(X), *gradients(f(X), w)]
        SCALE = 5.0
        return [*out, f(X), *gradients(f(X), w)]
    finally:
        SCALE = Reversed.by = 1.0


@program
def a_backward_that_is_replaced(jit):
    class Plain(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    w = values(3).requires_grad_()
    f = jit(lambda x: Plain.apply(w * x))
    out = [*gradients(f(X), w)]
    Plain.backward = staticmethod(lambda ctx, g: g * 7)
    out += gradients(f(X), w)
    Plain.forward = staticmethod(lambda ctx, x: x * 3)
    return [*out, f(X), *gradients(f(X), w)]


@program
def a_backward_that_is_wrapped(jit):
    o = types.SimpleNamespace(k=1.0)

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, g):
            return g * o.k

    w = values(3).requires_grad_()
    f = jit(lambda x: Once.apply(w * x))
    out = [*gradients(f(X), w)]
    o.k = 3.0
    return [*out, *gradients(f(X), w)]


@program
def what_a_setup_context_reads(jit):
    o = types.SimpleNamespace(k=2.0, m=values(3))

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x * 1

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.k, ctx.m = o.k, o.m

        @staticmethod
        def backward(ctx, g):
            return g * ctx.k * ctx.m

    w = values(3).requires_grad_()
    f = jit(lambda x: Noted.apply(w * x))
    out = [*gradients(f(X), w)]
    o.k = 3.0
    out += gradients(f(X), w)
    o.m = values(3, start=5.0)
    return [*out, *gradients(f(X), w)]


@program
def what_a_hook_inside_reads(jit):
    global SCALE
    w = values(3).requires_grad_()

    def g(x):
        y = w * x
        y.register_hook(lambda gradient: gradient * SCALE)
        return y * 2

    f = jit(g)
    out = [*gradients(f(X), w)]
    try:
        SCALE = 3.0
        return [*out, *gradients(f(X), w)]
    finally:
        SCALE = 1.0


LOG = []


@refused("is kept by")
def a_backward_that_keeps_a_tensor(jit):
    class Logged(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, g):
            LOG.append(g.detach())
            return g

    w = values(3).requires_grad_()
    return gradients(jit(lambda x: Logged.apply(w * x))(X), w)


@program
def anomaly_mode_around(jit):
    x = values(3).requires_grad_()
    f = jit(lambda x: x.sin())
    with torch.autograd.set_detect_anomaly(True):
        out = f(x)
        return [out, *gradients(out, x)]


# -- what is asked of a tensor


@program
def gradient_of_an_argument_that_comes_later(jit):
    def g(x):
        return x * 2 if x.grad is None else x * 3

    f, x = jit(g), values(3).requires_grad_()
    return [f(x), f(x)]


@refused("reads .grad of a tensor")
def gradient_of_an_argument_that_is_read(jit):
    f = jit(lambda x: x * 2 if x.grad is None else x.grad * 3)
    x = values(3).requires_grad_()
    f(x)
    x.grad = values(3)
    return [f(x)]


@refused("reads _version of a tensor")
def version_of_a_tensor(jit):
    w = values(3)
    w.add_(1)
    return [jit(lambda x: x * w._version)(X)]


@program
def identity_of_an_argument_with_history(jit):
    w = values(3).requires_grad_()
    f = jit(lambda x: (x, x * 2))
    x, e = w * 1, (w * 1).expand(2, 3)
    return [f(x)[0] is x, f(e)[0] is e, *gradients(f(x)[0] + f(x)[1], w)]


# -- pending conjugation and negation


def conjugated():
    return torch.complex(values(3), values(3, start=4.0)).conj()


def negated():
    return conjugated().imag


def real(*tensors):
    return [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors]


@program
def conjugated_views_as_results(jit):
    z, out = torch.complex(values(3), values(3, start=4.0)), []
    for g in (
        lambda x: x.conj(),
        lambda x: (x.conj(), x * 2),
        lambda x: (y := x * 2, y.conj()),
        lambda x: x.conj()[1:],
        lambda x: torch._neg_view(x),
    ):
        found = jit(g)(z)
        found = found if isinstance(found, tuple) else (found,)
        out += real(*found) + [(t.is_conj(), t.is_neg()) for t in found]
    view = jit(lambda x: x.conj())(z)
    z.mul_(2)
    return [*out, *real(view)]


@program
def writes_to_views_with_bits(jit):
    out = []
    for make in (conjugated, negated):
        for g in (
            lambda x: x.add_(1),
            lambda x: x.add_(1).sum(),
            lambda x: x.mul_(2) * 2,
            lambda x: (x, x * 2),
        ):
            x, f = make(), jit(g)
            found = f(x), f(x)
            out += real(x, *(t for t in found if isinstance(t, torch.Tensor)))
            out.append([t is x for t in found])
    z, n = conjugated(), negated()
    jit(lambda x: x.real.mul_(2))(z)
    jit(lambda x: n.mul_(3) * x)(X)
    return [*out, *real(z, n)]


@program
def writes_with_history_to_a_conjugated_view(jit):
    w = torch.complex(values(3), values(3)).requires_grad_()
    z = (w * (1 + 2j)).conj()
    out = jit(lambda z: z.mul_(2j).sum())(z)
    return real(z, *torch.autograd.grad(out.abs() + z.real.sum(), w))


# -- writes that a graph can't do


@refused("elements share memory")
def write_to_a_tensor_that_overlaps_itself(jit):
    return [jit(lambda x: x.mul_(2))(values(6).unfold(0, 2, 1))]


@program
def write_to_a_tensor_with_gaps(jit):
    x = values(4, 6)
    return [jit(lambda x: x.mul_(2))(x[::2, 1::2]), jit(lambda x: x.add_(1))(x.t()[1:]), x]


@refused("resizes a tensor of shape (0,) by out=")
def out_that_is_resized(jit):
    total = torch.empty(0).double()
    return [jit(lambda x: torch.add(x, 1, out=total))(X)]


@refused("writes to the memory of an array")
def write_to_an_array(jit):
    a = np.ones(3)
    return [jit(lambda x: torch.from_numpy(a).add_(1) * x)(X)]


@refused("exponential_ with a torch.Generator")
def exponential_numbers_of_a_generator(jit):
    g = torch.Generator().manual_seed(0)
    return [jit(lambda: torch.empty(2).exponential_(generator=g))()]
