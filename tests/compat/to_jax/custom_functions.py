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


def function(backward=None, forward=None, name="F", saves=True):
    """``apply`` of a Function; by default it doubles its argument and saves it."""

    def doubles(ctx, x):
        if saves:
            ctx.save_for_backward(x)
        return x * 2

    rules = {"forward": forward or doubles, **({"backward": backward} if backward else {})}
    return type(name, (Function,), {k: staticmethod(rule) for k, rule in rules.items()}).apply


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


class Rich(Function):
    """Arguments that need no gradient or are no tensors; a forward and a backward that write."""

    @staticmethod
    def forward(ctx, x, w, index, low):
        ctx.low, ctx.middle = low, x * 1
        ctx.middle.mul_(x).add_(1)
        ctx.save_for_backward(x, w, index)
        return (x @ w)[index]

    @staticmethod
    def backward(ctx, g):
        x, w, index = ctx.saved_tensors
        full = torch.zeros(w.shape[1]).index_add(0, index, g)
        full[w[0] < ctx.low] = 0
        full *= 2
        assert not ctx.needs_input_grad[2]
        gx = (full @ w.T).mul_(ctx.middle) if ctx.needs_input_grad[0] else None
        gw = 3 * torch.outer(x, full) if ctx.needs_input_grad[1] else None
        return gx, gw, None, None


class Sort(Function):
    """Results without a gradient, and gradients that are not materialized."""

    @staticmethod
    def forward(ctx, x):
        index, tripled = x.argsort(), x * 3
        ctx.mark_non_differentiable(index, tripled)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(index)
        return x[index], index, tripled

    @staticmethod
    def backward(ctx, g, g_index, g_tripled):
        assert g_index is None
        return torch.zeros_like(g).scatter(0, ctx.saved_tensors[0], g)


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


class HandsBack(Function):
    @staticmethod
    def forward(ctx, x, y):
        return x, y.view(2, 2), None, "s"

    @staticmethod
    def backward(ctx, a, b, *_):
        return -a, -2 * b.view(4)


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

    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * u

    return function(lambda ctx, g: g * u * ctx.saved_tensors[0], forward)(x).sum()


def write_around(x):
    y = x * 1
    y[1:].mul_(2)
    z = Saves.apply(y).clone()
    z[0] = y[1]
    return (z * Both.apply(z, y)[0]).sum()


def squares_complex(x):
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z * z

    square = function(lambda ctx, g: g * 3 * ctx.saved_tensors[0].conj(), forward)
    return torch.view_as_real(square(torch.complex(x, 2 * x))).pow(2).sum()


CASES = {
    "straight through": lambda x: (
        function(lambda ctx, g: g, lambda ctx, x: x.round())(x * 3) * x
    ).sum(),
    "setup_context": lambda x: (Square.apply(x) * x).sum(),
    "rich": lambda x: (Rich.apply(x, W, INDEX, -0.5) ** 2).sum(),
    "mark_non_differentiable": lambda x: (lambda s, i, tripled: (s**2 * i * tripled).sum())(
        *Sort.apply(torch.sin(5 * x))
    ),
    "saves": lambda x: Saves.apply(x * x).sum(),
    "writes around it": write_around,
    "a Function in the backward": lambda x: (Exp.apply(x) ** 2).sum(),
    "complex": squares_complex,
    "hands back": lambda x: (lambda a, b, *_: (a * b.flatten()).sum())(*HandsBack.apply(x, x * x)),
    "closes over a traced value": closes_over_a_traced_value,
    "in a region": lambda x: functx.remat(lambda x: torch.sin(x) * Exp.apply(x))(x).sum(),
    "in torch's checkpoint": lambda x: checkpoint(
        lambda x: torch.sin(x) * Exp.apply(x), x, use_reentrant=False
    ).sum(),
}
