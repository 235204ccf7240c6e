"""Containers that a region is given and changes: the caller's own are changed as without remat."""

import collections
import dataclasses

import pytest
import torch
from programs import identity
from references import assert_same
from sweeping import swept_but
from test_right_leaving import WAYS, W, X

import functx
from functx import checkpoint_policies as policies

pytestmark = pytest.mark.usefixtures("no_hooks")


@dataclasses.dataclass
class Box:
    log: list
    last: torch.Tensor


@dataclasses.dataclass(slots=True)
class Slots:
    log: list
    last: torch.Tensor


torch.utils._pytree.register_dataclass(Box)
torch.utils._pytree.register_dataclass(Slots)


def appends(x, w, c):
    c.append((x @ w).sin())
    return c[-1].exp()


def sets(x, w, c):
    c["new"] = (x @ w).sin()
    return c["new"].exp() * len(c)


def replaces(x, w, c):
    c[0] = c[0] * (x @ w).sin()
    return c[0].exp()


def shuffles(x, w, c):
    first = c.pop(0)
    c.insert(1, first * x)
    c.reverse()
    return (c[0] @ w) * first


def updates(x, w, c):
    c.update(a=(x @ w).sin(), b=c["a"] * 2)
    return c["b"] * x


def empties(x, w, c):
    total = sum(c)
    c.clear()
    c += [total, (x @ w).sin()]
    return total * x


def removes(x, w, c):
    del c["a"]
    return (x @ w).sin()


def counts(x, w, c):
    c["calls"] = c.get("calls", 0) + 1
    return (x @ w).sin() * c["calls"]


def nests(x, w, c):
    c["log"].append({"of": (x @ w).sin(), "more": ((x.exp(), 3), [x.cos()])})
    return c["log"][-1]["of"].exp()


def leaves_what_it_was_given(x, w, c):
    c += [x, x[..., :2], w]
    return (x @ w).sin()


def leaves_views(x, w, c):
    h = (x @ w).sin()
    c += [h.mT, h[..., :2], h]
    return h.exp()


def leaves_no_history(x, w, c):
    h = (x @ w).sin()
    c += [h.detach(), h > 0, 3, None]
    return h.exp()


def leaves_itself(x, w, c):
    c.append(c)
    c.append((x @ w).sin())
    return c[-1].exp()


def returns_it(x, w, c):
    c.append((x @ w).sin())
    return c[-1].exp(), c, {"too": c}


def writes(x, w, c):
    c[0].mul_(2)
    c.append((x @ w).sin() * c[0])
    return x * c[0]


def caches(x, w, c):
    for _ in range(2):
        k, v = c[0] or (x * 2, x)
        c[0] = k, v = torch.cat([k, x @ w]), torch.cat([v, k])[: len(k) + len(x)]
    return (k * v).exp().sum(0)


def keeps(x, w, c):
    c.last = (x @ w).sin() * c.last
    c.log.append(c.last.exp())
    return c.last


def leaves_objects(x, w, c):
    c.append(Box([(x @ w).sin()], x.exp()))
    return c[0].log[0] * c[0].last


CASES = {
    "list": (appends, list),
    "deque": (appends, lambda: collections.deque([X * 2, X * 3], maxlen=2)),
    "dict": (sets, dict),
    "ordered": (sets, lambda: collections.OrderedDict(new=X * 2)),
    "default": (lambda x, w, c: appends(x, w, c["new"]), lambda: collections.defaultdict(list)),
    "replaces": (replaces, lambda: [X * 2]),
    "shuffles": (shuffles, lambda: [X * 2, X * 3, X * 4]),
    "updates": (updates, lambda: {"a": X * 2}),
    "empties": (empties, lambda: [X * 2, X * 3]),
    "removes": (removes, lambda: {"a": X * 2, "b": 3}),
    "counts": (counts, dict),
    "nests": (nests, lambda: {"log": []}),
    "what it was given": (leaves_what_it_was_given, list),
    "views": (leaves_views, list),
    "no history": (leaves_no_history, list),
    "itself": (leaves_itself, list),
    "returns it": (returns_it, list),
    "writes": (writes, lambda: [X * 2]),
    "a cache": (caches, lambda: [None]),
    "an object": (keeps, lambda: Box([X * 2], X * 3)),
    "an object of slots": (keeps, lambda: Slots([X * 2], X * 3)),
    "of objects": (leaves_objects, list),
}


def tensors_in(x, around=()):
    if isinstance(x, torch.Tensor):
        return [x]
    if any(x is c for c in around):
        return []
    parts = x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else ()
    if isinstance(x, collections.deque):
        parts = [*x]
    if isinstance(x, (Box, Slots)):
        parts = [x.log, x.last]
    return [t for part in parts for t in tensors_in(part, (*around, x))]


def shape_of(x, around=()):
    """The container without its tensors."""
    if isinstance(x, torch.Tensor):
        return "tensor"
    if any(x is c for c in around):
        return "itself"
    if isinstance(x, dict):
        return type(x), {k: shape_of(v, (*around, x)) for k, v in x.items()}
    if isinstance(x, (list, tuple, collections.deque)):
        return type(x), [shape_of(part, (*around, x)) for part in x]
    if isinstance(x, (Box, Slots)):
        return type(x), shape_of(x.log), shape_of(x.last)
    return x


def number_of(*trees):
    found = [t for tree in trees for t in tensors_in(tree)]
    return sum(((i + 1) * t.double().sin()).sum() for i, t in enumerate(found))


def program_of(case, way, seen):
    """A loss of what the region returns, and of what it leaves in the container."""
    f, make = CASES[case]

    def program(remat):
        def loss(x, w):
            c = make()
            out = remat(f)(x, w, c)
            if case == "returns it":
                assert out[1] is out[2]["too"] is c
            if case == "itself":
                assert c[0] is c
            seen.append(shape_of(c))
            return number_of(out, c)

        return WAYS[way](loss)

    return program


QUICK = ("backward", "vmap of grad", "jvp of grad", "in a region", "hessian")


@pytest.mark.parametrize("way", swept_but(QUICK, WAYS))
@pytest.mark.parametrize("case", CASES)
def test_it_is_changed_as_without_remat(case, way):
    theirs, ours = [], []
    expected = program_of(case, way, theirs)(identity)
    assert_same(program_of(case, way, ours)(functx.remat), expected, eps=512)
    assert ours[0] == theirs[0]
    assert len(ours) == len(theirs)


@pytest.mark.parametrize("case", CASES)
def test_once(case):
    f, make = CASES[case]

    def program(remat):
        c, x = make(), X.clone().requires_grad_()
        loss = number_of(remat(f)(x, W, c), c)
        gradients = [torch.autograd.grad(loss, x, retain_graph=True) for _ in range(3)]
        return gradients, tensors_in(c), shape_of(c) if case != "itself" else None

    (g, t, shape), (expected, tensors, as_it_was) = program(functx.remat), program(identity)
    assert_same((g, t), (expected, tensors), eps=64)
    assert shape == as_it_was


@pytest.mark.parametrize("policy", ["everything_saveable", "dots_saveable"])
@pytest.mark.parametrize("case", CASES)
def test_with_a_policy(case, policy):
    f, make = CASES[case]

    def program(remat, **options):
        c, x = make(), X.clone().requires_grad_()
        loss = number_of(remat(f, **options)(x, W, c), c)
        return torch.autograd.grad(loss, x, create_graph=True)[0].sin().sum(), loss

    actual = program(functx.remat, policy=getattr(policies, policy))
    assert_same(actual, program(identity), eps=64)


@pytest.mark.parametrize("case", ["list", "replaces", "nests", "a cache", "an object"])
def test_through_nested_regions(case):
    f, make = CASES[case]

    def program(remat):
        def inner(x, w, c):
            out = remat(f)(x.cos(), w, c)
            return remat(f)(out, w, c) if case == "list" else out

        c, x = make(), X.clone().requires_grad_()
        loss = number_of(remat(inner)(x, W, c), c)
        return [torch.autograd.grad(loss, x, retain_graph=True) for _ in range(2)], tensors_in(c)

    assert_same(program(functx.remat), program(identity), eps=64)


def program_with_gradients(f):
    """Of what ``f(remat, x, w)`` gives, with respect to tensors that are in the container too."""

    def program(remat):
        x, w = X.clone().requires_grad_(), (X + 1).requires_grad_()
        outs = f(remat, x, w)
        return outs, torch.autograd.grad(number_of(outs), (x, w))

    return program


def test_a_list_with_what_wants_a_gradient():
    def f(remat, x, w):
        def layer(x, aux):
            aux[0] = aux[0] * x
            aux.append(aux[0].exp())
            return x.sin()

        aux = [w]
        return [remat(layer)(x, aux), *aux]

    program = program_with_gradients(f)
    assert_same(program(functx.remat), program(identity), eps=8)


def test_dicts_in_dicts_and_lists():
    def f(remat, x, w):
        def layer(x, state, *, log):
            state["layers"]["h"] = x * state["w"]
            state["old"] = state.pop("w")
            state["given"] = (x, state["layers"])
            log.append(state["layers"]["h"].sin())
            return x.cos()

        state = collections.OrderedDict(w=w, layers={})
        log = collections.deque([w], maxlen=1)
        y = remat(layer)(x, state, log=log)
        assert [*state] == ["layers", "old", "given"]
        assert state["old"] is w
        assert state["given"][0] is x
        assert state["given"][1] is state["layers"]
        return [y, state["layers"]["h"], log[0]]

    program = program_with_gradients(f)
    assert_same(program(functx.remat), program(identity), eps=8)


def test_what_was_written_before_an_error():
    def layer(x, state):
        state["w"] = 1
        raise KeyError("mine")

    x = X.clone().requires_grad_()
    state = {"x": x}
    with pytest.raises(KeyError, match="mine"):
        functx.remat(layer)(x, state)
    assert state == {"x": x, "w": 1}


def test_what_is_not_written_to_stays_as_it_is():
    x = X.clone().requires_grad_()
    tree = {"a": [x, x], "b": (1, {"c": x})}
    functx.remat(lambda tree: tree["a"][0] * tree["b"][1]["c"])(tree)
    assert all(t is x for t in (*tree["a"], tree["b"][1]["c"]))
