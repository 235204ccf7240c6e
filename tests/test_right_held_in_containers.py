"""Containers that a region closes over, whatever is in them: each region changes them once."""

import collections
import dataclasses
import functools
import weakref
from types import SimpleNamespace

import pytest
import torch
from cases import DTYPE, numbers
from programs import identity
from torch import nn
from torch.distributions import Normal

import functx

pytestmark = pytest.mark.usefixtures("no_hooks", "forgotten")

Pair = collections.namedtuple("Pair", "value other")
STATE = {}


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: torch.Tensor


def in_a_module(v):
    module = nn.Module()
    module.register_buffer("value", v)
    return module


# What is in a container, made of a tensor and asked for it.
ENTRIES = {
    "tensor": (lambda v: v, lambda e: e),
    "tuple": (lambda v: (v, None), lambda e: e[0]),
    "tuple in tuple": (lambda v: ((1, (v,)), None), lambda e: e[0][1][0]),
    "list": (lambda v: [v], lambda e: e[0]),
    "dict": (lambda v: {"b": v}, lambda e: e["b"]),
    "namedtuple": (lambda v: Pair(v, 1), lambda e: e.value),
    "frozen dataclass": (Frozen, lambda e: e.value),
    "object": (lambda v: SimpleNamespace(value=v), lambda e: e.value),
    "array": (lambda v: v.numpy().copy(), lambda e: torch.from_numpy(e.copy())),
    "function": (lambda v: lambda: v, lambda e: e()),
    "module": (in_a_module, lambda e: e.value),
    "distribution": (lambda v: Normal(v, 1.0), lambda e: e.loc),
    "frozenset": (lambda v: frozenset([v]), lambda e: next(iter(e))),
}


def of_a_dict(entry):
    held = {"a": entry}
    return lambda: held["a"], lambda e: held.__setitem__("a", e)


def of_a_list(entry):
    held = [entry]
    return lambda: held[0], lambda e: held.__setitem__(0, e)


def of_a_deque(entry):
    held = collections.deque([entry], maxlen=2)
    return lambda: held[-1], held.append


def of_a_default(entry):
    def found(held={"a": entry}):  # noqa: B006
        return held["a"]

    held = found.__defaults__[0]
    return found, lambda e: held.__setitem__("a", e)


def of_a_global(entry):
    STATE["a"] = entry
    return lambda: STATE["a"], lambda e: STATE.__setitem__("a", e)


@pytest.mark.parametrize("make", ENTRIES)
@pytest.mark.parametrize("holder", [of_a_dict, of_a_list, of_a_deque, of_a_default, of_a_global])
def test_a_region_that_runs_twice_changes_what_is_held_twice(holder, make):
    entry, tensor = ENTRIES[make]

    def trained(remat):
        found, put = holder(entry(torch.zeros((), dtype=DTYPE)))
        w = torch.tensor(0.5, dtype=DTYPE, requires_grad=True)

        def body(x):
            put(entry(tensor(found()) * 0.9 + x.detach().mean()))
            return (x * w).sin() * (1 + tensor(found()))

        region, values = remat(body), []
        for step in range(4):
            x = numbers(3) + step
            loss = (region(x) + region(x + 1)).sum()
            loss.backward()  # the first of them is replayed last
            values.append(loss.item())
        return values, w.grad.item(), tensor(found()).item()

    assert trained(functx.remat) == trained(identity)


@pytest.mark.parametrize("holder", [of_a_dict, of_a_global])
def test_what_a_body_computes_once_and_holds(holder):
    def trained(remat):
        found, put = holder(())
        w = numbers(3, 3).requires_grad_()

        def body(x):
            if not found():
                put((torch.ones(3, 3, dtype=DTYPE).tril(), None))
            return ((x @ w) @ found()[0]).sin()

        region = remat(body)
        return [torch.autograd.grad(region(numbers(2, 3)).sum(), w)[0] for _ in range(2)]

    for got, expected in zip(trained(functx.remat), trained(identity), strict=True):
        assert torch.equal(got, expected)


def test_numbers_and_names_say_how_often_a_body_ran():
    runs = []

    def body(x):
        runs.append({"name": ["body", x.shape, x.dtype, type(x), weakref.ref(x)]})
        return x.sin()

    x = numbers(3).requires_grad_()
    functx.remat(body)(x).sum().backward()
    assert [run["name"][:2] for run in runs] == [["body", x.shape]] * 2


class Cached(nn.Module):
    @functools.cache  # noqa: B019
    def mask(self, n):
        return torch.ones(n, n, dtype=DTYPE).tril()

    def forward(self, x):
        return (x @ self.mask(3)).sin()


def with_a_cache():
    @functools.lru_cache
    def mask(n):
        return torch.ones(n, n, dtype=DTYPE).tril()

    return lambda x: (x @ mask(3)).sin()


@pytest.mark.parametrize("make", [with_a_cache, Cached])
def test_a_cache_that_a_forward_fills_is_named(make):
    x, body = numbers(2, 3).requires_grad_(), make()
    region = functx.remat(body)
    with pytest.raises(functx.ReplayError, match=r"function with a cache, '.*mask'.*once before"):
        region(x).sum().backward()
    x.grad = None
    region(x).sum().backward()  # it is full now
    (expected,) = torch.autograd.grad(body(x).sum(), x)
    assert torch.equal(x.grad, expected)
