"""Where a body keeps a number that its hooks read, and how they reach it.

Each state gives what holds the number, how to read it and how to write it.
"""

import array
import collections
import dataclasses
import functools
import types
from typing import NamedTuple

import numpy as np
import torch


class Slots:
    __slots__ = ("k",)


@dataclasses.dataclass
class Data:
    k: float


class Counter(dict):
    """Of a class of the user's."""


def in_a_list(k):
    s = [k]
    return s, lambda s: s[0], lambda s, k: s.__setitem__(0, k)


def in_a_longer_list(k):
    s = [0.5, k]
    return s, lambda s: s[-1], lambda s, k: s.append(k)


def at_the_front(k):
    s = collections.deque([k])
    return s, lambda s: s[0], lambda s, k: s.appendleft(k)


def in_a_dict(k):
    s = {"k": k}
    return s, lambda s: s["k"], lambda s, k: s.update(k=k)


def in_an_ordered_dict(k):
    s = collections.OrderedDict(a=1.0, k=k)

    def write(s, k):
        s["k"] = k
        s.move_to_end("a")

    return s, lambda s: s["k"] + (0.5 if next(iter(s)) == "a" else 0.0), write


def in_a_default_dict(k):
    s = collections.defaultdict(lambda: k)
    return s, lambda s: s["k"], lambda s, k: s.update(k=k)


def in_a_dict_of_the_users(k):
    return Counter(k=k), lambda s: s["k"], lambda s, k: s.update(k=k)


def in_a_set(k):
    def write(s, k):
        s.clear()
        s.add(k)

    return {k}, lambda s: next(iter(s)), write


def in_a_dict_in_a_list(k):
    s = [0, {"k": [k]}]
    return s, lambda s: s[1]["k"][0], lambda s, k: s[1]["k"].__setitem__(0, k)


def in_a_list_that_is_exchanged(k):
    s = [0, [k]]
    return s, lambda s: s[1][0], lambda s, k: s.__setitem__(1, [k])


def in_an_attribute(k):
    s = Data(k)
    return s, lambda s: s.k, lambda s, k: setattr(s, "k", k)


def in_a_slot(k):
    s = Slots()
    s.k = k
    return s, lambda s: s.k, lambda s, k: setattr(s, "k", k)


def in_a_namespace(k):
    s = types.SimpleNamespace(inner=Data(k))
    return s, lambda s: s.inner.k, lambda s, k: setattr(s.inner, "k", k)


def in_a_module(k):
    s = torch.nn.Module()
    s.k = k
    return s, lambda s: s.k, lambda s, k: setattr(s, "k", k)


def in_an_array(k):
    s = np.array([float(k)])
    return s, lambda s: float(s[0]), lambda s, k: s.fill(float(k))


def in_a_buffer(k):
    s = array.array("d", [k])
    return s, lambda s: s[0], lambda s, k: s.__setitem__(0, k)


def in_bytes(k):
    s = bytearray([int(k)])
    return s, lambda s: float(s[0]), lambda s, k: s.__setitem__(0, int(k) % 256)


def in_a_tensor(k):
    s = torch.as_tensor(k).double()
    return s, lambda s: s.clone(), lambda s, k: s.copy_(torch.as_tensor(k))


class Pair(NamedTuple):
    k: list
    name: str = "pair"


def in_a_named_tuple(k):
    return Pair([k]), lambda s: s.k[0], lambda s, k: s.k.__setitem__(0, k)


def in_a_class(k):
    class Settings:
        pass

    Settings.k = k
    return Settings, lambda s: s.k, lambda s, k: setattr(s, "k", k)


def in_an_attribute_of_a_function(k):
    def s():
        pass

    s.k = k
    return s, lambda s: s.k, lambda s, k: setattr(s, "k", k)


STATES = [
    in_a_list,
    in_a_longer_list,
    at_the_front,
    in_a_dict,
    in_an_ordered_dict,
    in_a_default_dict,
    in_a_dict_of_the_users,
    in_a_set,
    in_a_dict_in_a_list,
    in_a_list_that_is_exchanged,
    in_an_attribute,
    in_a_slot,
    in_a_namespace,
    in_a_module,
    in_an_array,
    in_a_buffer,
    in_bytes,
    in_a_tensor,
    in_a_named_tuple,
    in_a_class,
    in_an_attribute_of_a_function,
]


MEMORY = [in_an_array, in_a_tensor]


def closure(s, f):
    return lambda g: f(s, g)


def default(s, f):
    return lambda g, s=s: f(s, g)


def partial(s, f):
    return functools.partial(f, s)


def through_a_function(s, f):
    def helper(g):
        return f(s, g)

    return lambda g: helper(g)


class Called:
    def __init__(self, s, f):
        self.s, self.f = s, f

    def __call__(self, g):
        return self.f(self.s, g)


class WithAMethod(Called):
    def hook(self, g):
        return self.f(self.s, g)


def a_method(s, f):
    return WithAMethod(s, f).hook


HOOKS = [closure, default, partial, through_a_function, Called, a_method]
PAIRS = [
    *((state, closure) for state in STATES),
    *((in_a_dict, hook) for hook in HOOKS[1:]),
    *((in_an_attribute, hook) for hook in HOOKS[1:]),
]
