"""Losses of which gradients are, or are not, products of few terms, and the slow reference."""

import torch
from cases import numbers
from torch.nn import functional as F

B, IN, OUT, T, VOCAB = 3, 40, 50, 2, 60


weight = lambda rows=OUT, columns=IN: numbers(rows, columns, start=0.5) / 7
tokens = lambda *shape: (numbers(*shape).mul(1000).long() % VOCAB).abs()


embed = lambda w, i: F.embedding(i, w)
linear = lambda p, x: F.linear(x, *p).sin().sum()
heads = lambda p, x: torch.einsum("ti,hoi->hto", x, p[0].view(2, 25, IN)).sin().sum()
padded = lambda p, i: F.embedding(i, p[0], padding_idx=7).sin()


def reshaped(p, x):
    return (x @ p[0].reshape(5, 10, IN).permute(2, 0, 1).reshape(IN, OUT)).sin().sum()


# name: (loss of one example, parameters, batch, whether the gradients are known by factors)
CASES = {
    "linear of a vector": (linear, "wb", "v", True),
    "linear of tokens": (linear, "wb", "t", True),
    "linear of one sequence": (lambda p, x: linear(p, x[None]), "wb", "t", True),
    "matmul": (lambda p, x: (x @ p[0].T).sin().sum(), "w", "t", True),
    "matmul from the left": (lambda p, x: (p[0] @ x.T).sin().sum(), "w", "t", True),
    "vector from the left": (lambda p, x: (p[0] @ x).sin().sum(), "w", "v", True),
    "einsum over heads": (heads, "w", "t", True),
    "a weight of another shape": (reshaped, "w", "t", None),
    "used twice": (lambda p, x: ((x @ p[0].T).sin() @ p[0]).sin().sum(), "w", "t", True),
    "used twice, once otherwise": (
        lambda p, x: linear(p, x) + p[0].square().sum(),
        *("w", "t", False),
    ),
    "through a mask": (lambda p, x: (x @ (p[0] * p[0].sign()).T).sin().sum(), "w", "t", False),
    "embedding": (lambda p, i: embed(p[0], i).sin().sum(), "e", "i", True),
    "embedding of one sequence": (lambda p, i: embed(p[0], i[None]).sin().sum(), "e", "i", True),
    "embedding by frequency": (
        lambda p, i: F.embedding(i, p[0], scale_grad_by_freq=True).sin().sum(),
        *("e", "i", False),
    ),
    "padded embedding": (lambda p, i: padded(p, i).sum(), "e", "i", True),
    "padded, looked up twice": (
        lambda p, i: (padded(p, i) * embed(p[0], i)).sum(),
        *("e", "i", True),
    ),
    "padded, tied": (lambda p, i: (padded(p, i) @ p[0].T).sin().sum(), "e", "i", True),
    "tied": (lambda p, i: (embed(p[0], i).sin() @ p[0].T).sin().sum(), "e", "i", True),
    "looked up twice": (
        lambda p, i: embed(p[0], i).sin().sum() + embed(p[0], i.flip(0) // 2).cos().sum(),
        *("e", "i", True),
    ),
    "indexed": (lambda p, i: p[0][i].sin().sum(), "e", "i", False),
    "many terms": (linear, "wb", "long", False),
    "equal sizes": (lambda p, x: (x @ p[0][:, :OUT] @ p[1]).sin().sum(), "ss", "square", None),
    "of no example": (lambda p, x: p[0].square().sum() + x.sum(), "w", "v", False),
}


def arguments(params, batch):
    make = {
        "w": lambda: weight(),
        "b": lambda: numbers(OUT, start=2.0),
        "e": lambda: weight(VOCAB, IN),
        "s": lambda: weight(OUT, OUT),
    }
    x = {
        "v": lambda: numbers(B, IN),
        "t": lambda: numbers(B, T, IN),
        "i": lambda: tokens(B, T),
        "long": lambda: numbers(B, 30, IN),
        "square": lambda: numbers(B, T, OUT),
    }[batch]()
    if batch == "i":
        x[0, 0], x[1, 1], x[2, 0] = 7, 7, VOCAB - 1  # the first is padding in some cases
    return [make[kind]() for kind in params], x


def slow(loss, params, *batch):
    """One gradient after the other, in plain autograd: a list of flat lists of tensors."""
    found = []
    for one in zip(*batch):
        leaves, spec = torch.utils._pytree.tree_flatten(params)
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        value = loss(torch.utils._pytree.tree_unflatten(leaves, spec), *one)
        found.append(torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True))
    return found


def slow_norms(gradients):
    return torch.stack([torch.cat([g.flatten() for g in one]).norm() for one in gradients])


def slow_sum(gradients, factors):
    return [sum(f * g for f, g in zip(factors, leaf)) for leaf in zip(*gradients)]
