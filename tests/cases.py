"""Numbers, transforms by name, a network to measure, and modules built from one seed."""

import copy
import functools
import inspect
import io
import pickle

import torch
from references import assert_same, total
from torch import nn
from torch.utils import _pytree as pytree

import functx

DTYPE = torch.float64


def numbers(*shape, start=0.0):
    """Fixed numbers of some irregularity in [-1, 1]: the same in every place they are made."""
    count = 1
    for size in shape:
        count *= size
    return torch.cos(torch.arange(count, dtype=DTYPE) * 1.7 + start).reshape(shape)


def apply(library, name, f):
    """``f``, a function of one pytree, under a transform of ``library``, again of one pytree.

    A function that returns several numbers has ``grad`` of their sum; products have fixed vectors,
    and come with the output.
    """

    like = lambda tree, start: pytree.tree_map(lambda leaf: numbers(*leaf.shape, start=start), tree)

    def vjp(x):
        output, pullback = library.vjp(f, x)
        return output, pullback(like(output, 0.7))

    if name == "grad":
        return library.grad(lambda x: total(f(x)))
    if name in ("jvp", "vjp"):
        return {"jvp": lambda x: library.jvp(f, (x,), (like(x, 0.5),)), "vjp": vjp}[name]
    return getattr(library, name)(f)


def dense(weights, x):
    """Layers whose derivatives read their results."""
    for w in weights:
        x = torch.tanh(x @ w)
    return x


def deep_mlp(layers=24, batch=64, width=16):
    """Weights, an input, and the loss of a plain deep network of square layers."""
    weights = [numbers(width, width, start=float(i)) / 2 for i in range(layers)]

    return weights, numbers(batch, width), lambda weights, x: dense(weights, x).square().sum()


def seeded(build, *args):
    torch.manual_seed(1)
    return build(*args)


def identity(f, **options):
    """What stands for ``functx.remat`` in the reference."""
    return f


def unchanged(program, eps=0.0):
    """``program(remat)`` gives what it gives without remat."""
    assert_same(program(functx.remat), program(identity), eps)


def judged_by(judge, *args, **options):
    """A test of a program of ``remat`` and what else the test is given, by `unchanged` say."""

    def test_of(program):
        @functools.wraps(program)
        def test(*this, **given):
            judge(lambda remat: program(*this, remat=remat, **given), *args, **options)

        signature = inspect.signature(program)
        known = [p for name, p in signature.parameters.items() if name != "remat"]
        test.__signature__ = signature.replace(parameters=known)
        return test

    return test_of


class Block(nn.Module):
    """A parameter, a buffer, a submodule, an attribute, a method."""

    def __init__(self, width=3):
        super().__init__()
        self.linear = nn.Linear(width, width, dtype=DTYPE)
        self.scale = nn.Parameter(numbers(width))
        self.register_buffer("shift", numbers(width, start=1.0))
        self.factor = 2.0

    def forward(self, x, power=1):
        return torch.tanh(self.linear(x)) ** power * self.scale + self.shift * self.factor

    def helper(self):
        return self.factor


def roundtrip_by_torch(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "torch.save": roundtrip_by_torch,
    "deepcopy": copy.deepcopy,
}


def custom_function(forward, backward, setup=None, jvp=None):
    """The ``apply`` of a Function of these rules; without ``setup``, forward has a context."""
    rules = {"forward": forward, "backward": backward, "setup_context": setup, "jvp": jvp}
    members = {rule: staticmethod(f) for rule, f in rules.items() if f}
    return type("Custom", (torch.autograd.Function,), {"generate_vmap_rule": True, **members}).apply


def saves_inputs(ctx, inputs, output):
    """What a Function usually does with its context."""
    ctx.save_for_backward(*inputs)
    ctx.save_for_forward(*inputs)


# Programs whose counts and residuals JAX gives too: three layers, and two named sines.
WEIGHTS = [numbers(5, 5, start=float(i)) / 2 for i in range(3)]
X = numbers(4, 5)


def layers(weights, x):
    for w in weights:
        x = torch.sin(x @ w)
    return x


def named(x):
    inner = functx.checkpoint_name(torch.sin(x), "a")
    return functx.checkpoint_name(torch.sin(inner), "b")
