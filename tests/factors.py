"""Losses of which gradients are, or are not, products of few terms."""

import torch
from cases import numbers
from torch.nn import functional as F

from functx.per_sample import _pull

B, IN, OUT, T, VOCAB = 3, 40, 50, 2, 60


def weight(rows=OUT, columns=IN):
    return numbers(rows, columns, start=0.5) / 7


def tokens(*shape):
    return (numbers(*shape).mul(1000).long() % VOCAB).abs()


def embed(w, i):
    return F.embedding(i, w)


# name: (loss of one example, parameters, batch, whether the gradients are known by factors)
CASES = {
    "linear of a vector": (lambda p, x: F.linear(x, p[0], p[1]).sin().sum(), "wb", "v", True),
    "linear of a batch of one": (lambda p, x: F.linear(x[None], p[0]).sin().sum(), "w", "v", True),
    "linear of tokens": (lambda p, x: F.linear(x, p[0], p[1]).sin().sum(), "wb", "t", True),
    "linear of one sequence": (lambda p, x: F.linear(x[None], *p).sin().sum(), "wb", "t", True),
    "matmul": (lambda p, x: (x @ p[0].T).sin().sum(), "w", "t", True),
    "matmul from the left": (lambda p, x: (p[0] @ x.T).sin().sum(), "w", "t", True),
    "vector from the left": (lambda p, x: (p[0] @ x).sin().sum(), "w", "v", True),
    "einsum": (lambda p, x: torch.einsum("ti,oi->to", x, p[0]).sin().sum(), "w", "t", True),
    "einsum over heads": (
        lambda p, x: torch.einsum("ti,hoi->hto", x, p[0].view(2, 25, IN)).sin().sum(),
        "w",
        "t",
        True,
    ),
    "a weight of another shape": (
        lambda p, x: (x @ p[0].reshape(5, 10, IN).permute(2, 0, 1).reshape(IN, OUT)).sin().sum(),
        "w",
        "t",
        None,
    ),
    "used twice": (lambda p, x: ((x @ p[0].T).sin() @ p[0]).sin().sum(), "w", "t", True),
    "used twice, once otherwise": (
        lambda p, x: (x @ p[0].T).sin().sum() + (p[0] * p[0]).sum(),
        "w",
        "t",
        False,
    ),
    "through a mask": (lambda p, x: (x @ (p[0] * p[0].sign()).T).sin().sum(), "w", "t", False),
    "embedding": (lambda p, i: embed(p[0], i).sin().sum(), "e", "i", True),
    "embedding of one sequence": (lambda p, i: embed(p[0], i[None]).sin().sum(), "e", "i", True),
    "padded embedding": (
        lambda p, i: F.embedding(i, p[0], padding_idx=7).sin().sum(),
        "e",
        "i",
        True,
    ),
    "padded, looked up twice": (
        lambda p, i: (F.embedding(i, p[0], padding_idx=7).sin() * embed(p[0], i)).sum(),
        "e",
        "i",
        True,
    ),
    "padded, tied": (
        lambda p, i: (F.embedding(i, p[0], padding_idx=-1).sin() @ p[0].T).sin().sum(),
        "e",
        "i",
        True,
    ),
    "frequencies": (
        lambda p, i: F.embedding(i, p[0], scale_grad_by_freq=False).sin().sum(),
        "e",
        "i",
        True,
    ),
    "tied": (lambda p, i: (embed(p[0], i).sin() @ p[0].T).sin().sum(), "e", "i", True),
    "tied, a batch of one": (
        lambda p, i: (embed(p[0], i[None]).sin() @ p[0].T).sin().sum(),
        "e",
        "i",
        True,
    ),
    "looked up twice": (
        lambda p, i: embed(p[0], i).sin().sum() + embed(p[0], i.flip(0) // 2).cos().sum(),
        "e",
        "i",
        True,
    ),
    "indexed": (lambda p, i: p[0][i].sin().sum(), "e", "i", False),
    "many terms": (lambda p, x: F.linear(x, p[0], p[1]).sin().sum(), "wb", "long", False),
    "equal sizes": (lambda p, x: (x @ p[0][:, :OUT] @ p[1]).sin().sum(), "ss", "square", None),
    "a sum of examples' own": (lambda p, x: (x @ p[0].T).sum(), "w", "v", True),
    "of no example": (lambda p, x: p[0].square().sum() + x.sum(), "w", "v", False),
}


def arguments(params, batch):
    make = {
        "w": lambda: weight(),
        "b": lambda: numbers(OUT, start=2.0),
        "e": lambda: weight(VOCAB, IN),
        "s": lambda: weight(OUT, OUT),
    }
    inputs = {
        "v": lambda: numbers(B, IN),
        "t": lambda: numbers(B, T, IN),
        "i": lambda: tokens(B, T),
        "long": lambda: numbers(B, 30, IN),
        "square": lambda: numbers(B, T, OUT),
    }
    return [make[kind]() for kind in params], inputs[batch]()


def watch(monkeypatch):
    """What arrives: for each gradient whether it is known by factors."""
    seen = []
    factored = _pull._factored

    def look(rows):
        found = factored(rows)
        seen.append(not isinstance(found, torch.Tensor))
        return found

    monkeypatch.setattr(_pull, "_factored", look)
    return seen
