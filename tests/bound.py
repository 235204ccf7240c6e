"""Functions that are bound to a number, in all ways, and regions to call them in."""

import functools

import torch


def identity(f):
    return f


def once(f):
    return lambda remat: remat(f)


def nested(f):
    return lambda remat: remat(lambda x: remat(f)(x * 1))


def deeply_nested(f):
    return lambda remat: remat(lambda x: remat(lambda x: remat(f)(x * 1))(x * 1))


DEPTHS = [once, nested, deeply_nested]


class Factor:
    def __init__(self, k):
        self.k = k

    def __call__(self, g):
        return g * self.k


def made_by(k):
    return lambda g: g * k


def times(k, g):
    return g * k


def cell(settings):
    k = settings.k
    return lambda g: g * k


def default(settings):
    return lambda g, k=settings.k: g * k


def keyword(settings):
    return lambda g, *, k=settings.k: g * k


def factory(settings):
    return made_by(settings.k)


def partial(settings):
    return functools.partial(times, settings.k)


def partial_named(settings):
    return functools.partial(lambda g, k: g * k, k=settings.k)


def called_object(settings):
    return Factor(settings.k)


def method_of_an_object(settings):
    return Factor(settings.k).__call__


def in_a_tuple(settings):
    limits = (settings.k, "k")
    return lambda g: g * limits[0]


def in_a_function(settings):
    k = settings.k

    def scaled(g):
        return g * k

    return lambda g: scaled(g)


def read_when_called(settings):
    return lambda g: g * settings.k


def a_method(settings):
    return settings.hook


OBJECTS = [called_object, method_of_an_object]

BOUND = [
    cell,
    default,
    keyword,
    factory,
    partial,
    partial_named,
    in_a_tuple,
    in_a_function,
    read_when_called,
    a_method,
]


class Settings:
    def __init__(self):
        self.set(2.0)

    def set(self, k):
        self.k, self.w = k, torch.tensor(k, dtype=torch.float64)

    def hook(self, g):
        return g * self.k


class SinByTerms(torch.autograd.Function):
    """Its backward keeps what it computes."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.terms = []
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        ctx.terms.append(ctx.saved_tensors[0].cos())
        return g * ctx.terms[0]
