"""Where a region leaves tensors, each replay finds it as the forward did; beside writes, too."""

import collections

import pytest
import torch
from cases import DTYPE
from programs import identity
from references import assert_same
from right import right_or_raises
from test_right_leaving import WAYS, X

import functx

pytestmark = pytest.mark.usefixtures("no_hooks")


def gradients(program, times=2):
    """What each of some backwards gives."""
    x = X.clone().requires_grad_()
    loss = program(x * 1.0)
    return [torch.autograd.grad(loss, x, retain_graph=True) for _ in range(times)]


def reached_in_two_ways(remat):
    def program(x):
        aux = []
        held = {"aux": aux, "both": (aux, [aux])}

        def f(x):
            aux.append(x.sin())
            held["both"][1][0].append(x.exp())
            return held["aux"][-2].cos() * held["both"][0][-1] * len(aux)

        return remat(f)(x).sum() + sum(a.sum() for a in aux)

    return program


def in_itself(remat):
    def program(x):
        aux = []
        aux.append(aux)
        parent = {"log": aux}
        parent["child"] = {"parent": parent}

        def f(x):
            parent["child"]["parent"]["log"].append(x.sin())
            assert aux[0] is aux
            assert parent["child"]["parent"] is parent
            return aux[-1].cos() * len(aux)

        return remat(f)(x).sum() + aux[1].sum()

    return program


def beside_a_history(remat):
    def program(x):
        aux, c = [], torch.ones(3, 4, dtype=DTYPE)

        def f(x, c):
            c.mul_(x.sum())
            aux.append(x.sin())
            return x * len(aux)

        return remat(f)(x, c).sum() + aux[0].sum() + c.sum()

    return program


def in_a_default(remat):
    def program(x):
        aux = []

        def f(x, aux=aux):
            aux.append(x.sin())
            return x * len(aux)

        return remat(f)(x).sum() + aux[0].sum()

    return program


def in_a_named_default(remat):
    def program(x):
        aux, rest = [], (2.0, 3.0)

        def f(x, scale=rest[0], *, by=rest[1], aux=aux):
            aux.append(x.sin())
            return x * len(aux) * scale * by

        return remat(f)(x).sum() + aux[0].sum()

    return program


def in_every_container(remat):
    def program(x):
        held = {
            "list": [],
            "deque": collections.deque(maxlen=2),
            "default": collections.defaultdict(list),
            "ordered": collections.OrderedDict(),
            "set": set(),
        }
        held["pair"] = (held["list"], 3)

        def f(x):
            first = not held["list"]
            held["pair"][0].append(x.sin())
            held["deque"].append(x.cos())
            held["default"]["new"].append(x.exp())
            held["ordered"]["new"] = x.square()
            held["set"].add(x.tanh())
            assert len(held["list"]) == len(held["deque"]) == len(held["set"]) == 1
            return held["default"]["new"][0] * held["deque"][0] * (2 if first else 3)

        y = remat(f)(x).sum() + held["list"][0].sum() + held["deque"][0].sum()
        y = y + held["default"]["new"][0].sum() + held["ordered"]["new"].sum()
        return y + held["set"].pop().sum()

    return program


CONTAINERS = {
    "reached in two ways": reached_in_two_ways,
    "in itself": in_itself,
    "beside a history": beside_a_history,
    "in a default": in_a_default,
    "in a named default": in_a_named_default,
    "in every container": in_every_container,
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_what_it_was_left_in_is_as_before_for_each_replay(kind):
    program = CONTAINERS[kind]
    assert_same(gradients(program(functx.remat)), gradients(program(identity)), eps=64)


# Of an argument that is written in place: what is left behind, and what is returned.
WRITTEN = {
    "after": lambda h: (h.mul_(2).sin(), h * h),
    "before": lambda h: ((left := h.exp()), h.mul_(2) * left),
    "before and after": lambda h: ((left := h.exp()), left * h.mul_(2).cos()),
    "nothing else": lambda h: (h.mul_(2).sin(), h.detach().exp()),
    "itself": lambda h: (h.mul_(2), h.sin()),
    "a part of it": lambda h: (h.mul_(2)[..., :2], h.sin()),
}


@pytest.mark.parametrize("way", [*WAYS])
@pytest.mark.parametrize("left", WRITTEN)
def test_beside_a_write_in_place(left, way):
    def program(remat):
        def f(x, w):
            aux = []

            def block(h):
                left_behind, y = WRITTEN[left](h)
                aux.append(left_behind)
                return y

            h = x @ w
            y = remat(block)(h)
            return y.sin().sum() + (aux[0] * aux[0].detach().cos()).sum() + h.exp().sum()

        return WAYS[way](f)

    if way in ("jvp", "jvp of grad", "hessian") or "it" in left.split() or left == "itself":
        right_or_raises(program, match="otherwise than by return", eps=256)
    else:
        assert_same(program(functx.remat), program(identity), eps=256)
