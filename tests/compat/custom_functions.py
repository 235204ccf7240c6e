"""Custom ``autograd.Function`` classes, and functions of a vector that apply them.

Most rules are not the derivatives of their forwards, so that a dropped rule shows.
"""

import torch
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import functx

X = torch.linspace(0.1, 1.0, 4)
W = torch.linspace(-1.0, 1.0, 20).reshape(4, 5)
INDEX = torch.tensor([0, 2, 2])
SCALE = torch.tensor(3.0)


class Round(Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g


class Square(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, g):
        return 5 * g * ctx.saved_tensors[0]


class Clamp(Function):
    """Arguments that are no tensors, and a backward that writes."""

    @staticmethod
    def forward(ctx, x, low, high):
        ctx.low, ctx.high = low, high
        ctx.save_for_backward(x)
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        g = g.clone()
        g[x < ctx.low] = 0
        g[x > ctx.high] = 0
        return g, None, None


class Needs(Function):
    @staticmethod
    def forward(ctx, x, w, index):
        ctx.save_for_backward(x, w, index)
        return (x @ w)[index]

    @staticmethod
    def backward(ctx, g):
        x, w, index = ctx.saved_tensors
        full = torch.zeros(w.shape[1]).index_add(0, index, g)
        assert not ctx.needs_input_grad[2]
        gx = 2 * full @ w.T if ctx.needs_input_grad[0] else None
        gw = 3 * torch.outer(x, full) if ctx.needs_input_grad[1] else None
        return gx, gw, None


class Sort(Function):
    """An integer result, and gradients that are not materialized."""

    @staticmethod
    def forward(ctx, x):
        index = x.argsort()
        ctx.mark_non_differentiable(index)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(index)
        return x[index], index

    @staticmethod
    def backward(ctx, g, g_index):
        assert g_index is None
        return torch.zeros_like(g).scatter(0, ctx.saved_tensors[0], g)


class Unlike(Function):
    """A floating-point result without a gradient."""

    @staticmethod
    def forward(ctx, x):
        y, z = x * 2, x * 3
        ctx.mark_non_differentiable(z)
        ctx.save_for_backward(x)
        return y, z

    @staticmethod
    def backward(ctx, gy, gz):
        return gy * ctx.saved_tensors[0]


class Saves(Function):
    """Saves an input, a result and an intermediate."""

    @staticmethod
    def forward(ctx, x):
        y = torch.exp(x)
        ctx.middle = torch.sin(x)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return 3 * g * y + g * ctx.middle * x


class Writes(Function):
    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        y.mul_(x)
        ctx.middle = y * 1
        ctx.middle.add_(1)
        y[0] = 0.0
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        g = g.clone()
        g.mul_(x * 2)
        g[0] = 0.0
        g *= ctx.middle
        return g * y


class Exp(Function):
    """Its backward is a custom Function too."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, g):
        return ExpBackward.apply(g, *ctx.saved_tensors)


class ExpBackward(Function):
    @staticmethod
    def forward(ctx, g, x, y):
        ctx.save_for_backward(g, x, y)
        return g * y * 2

    @staticmethod
    def backward(ctx, h):
        g, _, y = ctx.saved_tensors
        return 3 * h * y, 7 * h * g, 11 * h * g


class Complex(Function):
    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z * z

    @staticmethod
    def backward(ctx, g):
        return g * 3 * ctx.saved_tensors[0].conj()


class HandsBack(Function):
    @staticmethod
    def forward(ctx, x, y):
        return x, y.view(2, 2), None, "s"

    @staticmethod
    def backward(ctx, a, b, *_):
        return -a, -2 * b.view(4)


class Many(Function):
    @staticmethod
    def forward(ctx, *xs):
        ctx.save_for_backward(*xs)
        return sum(xs)

    @staticmethod
    def backward(ctx, g):
        return tuple(g * x for x in ctx.saved_tensors)


class ClosesOver(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * SCALE

    @staticmethod
    def backward(ctx, g):
        return g * SCALE * W[:, 0] * ctx.saved_tensors[0]


class Both(Function):
    """A backward and a jvp, which do not agree."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, w):
        return x * w, x + 1

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output[0])
        ctx.save_for_forward(*inputs, output[0])

    @staticmethod
    def backward(ctx, g, h):
        x, w, y = ctx.saved_tensors
        return 5 * g * w + h, 7 * g * x + y * g

    @staticmethod
    def jvp(ctx, t, u):
        x, w, y = ctx.saved_tensors
        return 11 * t * w + 13 * u * x * y, 17 * t


def closes_over_a_traced_value(x):
    u = x * x

    class Inner(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * u

        @staticmethod
        def backward(ctx, g):
            return g * u * ctx.saved_tensors[0]

    return Inner.apply(x).sum()


def _pair(fn, f):
    return lambda x: f(*fn(x))


CASES = {
    "straight through": lambda x: (Round.apply(x * 3) * x).sum(),
    "setup_context": lambda x: (Square.apply(x) * x).sum(),
    "plain arguments": lambda x: (Clamp.apply(x * 2, 0.3, 1.0) ** 2).sum(),
    "needs_input_grad": lambda x: (Needs.apply(x, W, INDEX) ** 2).sum(),
    "integer result": _pair(lambda x: Sort.apply(torch.sin(5 * x)), lambda s, i: (s**2 * i).sum()),
    "mark_non_differentiable": _pair(Unlike.apply, lambda y, z: (y**2 * z).sum()),
    "saves": lambda x: Saves.apply(x * x).sum(),
    "writes": lambda x: Writes.apply(torch.sin(x)).sum(),
    "a Function in the backward": lambda x: (Exp.apply(x) ** 2).sum(),
    "a Function in the forward": lambda x: (Exp.apply(x * Round.apply(x)) ** 2).sum(),
    "complex": lambda x: torch.view_as_real(Complex.apply(torch.complex(x, 2 * x))).pow(2).sum(),
    "hands back": _pair(
        lambda x: HandsBack.apply(x, x * x), lambda a, b, *_: (a * b.flatten()).sum()
    ),
    "many arguments": lambda x: Many.apply(x, x * 2, x).sum(),
    "closes over tensors": lambda x: ClosesOver.apply(x).sin().sum(),
    "in no_grad": lambda x: (torch.no_grad()(Saves.apply)(x) * x).sum(),
    "in a region": lambda x: functx.remat(lambda x: torch.sin(x) * Exp.apply(x))(x).sum(),
    "in torch's checkpoint": lambda x: checkpoint(
        lambda x: torch.sin(x) * Exp.apply(x), x, use_reentrant=False
    ).sum(),
}


def write_around(x):
    y = x * 1
    y[1:].mul_(2)
    z = Saves.apply(y).clone()
    z[0] = y[1]
    return (z * Both.apply(z, y)[0]).sum()


CASES["writes around it"] = write_around
