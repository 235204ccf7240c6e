"""State that hooks share with others of a run: it is one in a replay, too. See `_bound`."""

import collections
import functools
import gc
import queue
import types
import weakref

import pytest
import torch
from bound import DEPTHS, SinByTerms, identity
from cases import numbers
from references import assert_same
from torch.autograd import Function, grad

import functx


class State:
    extra = index = k = None


class Dispatch(Function):
    @staticmethod
    def forward(ctx, x, state):
        ctx.state = state
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return (g if ctx.state.extra is None else g + ctx.state.extra), None


class Combine(Function):
    @staticmethod
    def forward(ctx, x, state):
        ctx.state = state
        return x * state.index

    @staticmethod
    def backward(ctx, g):
        ctx.state.extra = g * 3
        return g * ctx.state.index, None


def two_functions(x):
    """One keeps it before it is filled, the other one afterwards."""
    state = State()
    h = Dispatch.apply(x, state)
    state.index = (h.detach() > 0).double() + 1
    return Combine.apply(h.sin(), state)


def two_hooks(x):
    """One reaches it alone, the other one beside a tensor of the region."""
    flags, y = {"k": 1.0}, x.sin()
    z = y.exp()
    both = types.SimpleNamespace(flags=flags, y=y)
    z.register_hook(lambda g: flags.update(k=2.0))
    y.register_hook(lambda g: g * both.flags["k"])
    return z * 1


def a_hook_and_a_function(x):
    k = 1.0

    class Scale(Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g * k

    def hook(g):
        nonlocal k
        k = 2.0

    z = Scale.apply(x).exp()
    z.register_hook(hook)
    return z * 1


def counted(f):
    @functools.wraps(f)
    def wrapped(g):
        wrapped.calls += 1
        return f(g)

    wrapped.calls = 0
    return wrapped


def a_wrapper_that_counts(x):
    @counted
    def hook(g):
        return g * hook.calls

    y = x.sin()
    y.register_hook(hook)
    return y * 1


def a_gradient_of_its_own(x):
    y = SinByTerms.apply(x)
    return y * grad(y.sum(), x, create_graph=True)[0]


class Scaled(Function):
    @staticmethod
    def forward(ctx, x, held):
        ctx.held = held
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.held.k, None


def a_class_of_its_own(x):
    named = collections.namedtuple("Named", "k")
    return Scaled.apply(x, named(2.0)).sin()


def a_hook_of_a_class_of_its_own(x):
    class Double:
        def __call__(self, g):
            return g * 2

    y = x.sin()
    y.register_hook(Double())
    return y * 1


TABLE = {}


class Tabled(Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        if "t" not in TABLE:
            TABLE["t"] = torch.arange(1, 4).to(g)
        return g * TABLE["t"]


def a_table_that_is_made_once(x):
    y = Tabled.apply(x).sin()
    return x * grad(y.sum(), x, create_graph=True)[0]


BODIES = [
    two_functions,
    two_hooks,
    a_hook_and_a_function,
    a_wrapper_that_counts,
    a_gradient_of_its_own,
    a_class_of_its_own,
    a_hook_of_a_class_of_its_own,
    a_table_that_is_made_once,
]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("body", BODIES)
def test_the_same_as_without_remat(body, depth):
    def program(remat):
        TABLE.clear()
        x = numbers(3).requires_grad_()
        return grad(depth(body)(remat)(x).sum(), x)

    assert_same(program(functx.remat), program(identity), eps=64)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_list_that_the_region_puts_in_a_dict_of_the_programs(depth):
    def program(remat):
        captured = {}

        def f(x):
            h = x.sin()
            captured["h"] = []
            h.register_hook(captured["h"].append)
            return h.exp()

        depth(f)(remat)(numbers(3).requires_grad_()).sum().backward()
        return captured["h"]

    assert_same(program(functx.remat), program(identity), eps=64)


class Cached(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.cache = {}

    @staticmethod
    def backward(ctx, g):
        if "c" not in ctx.cache:
            ctx.cache["c"] = ctx.saved_tensors[0].cos()
        return g * ctx.cache["c"]


def recorded(f, x):
    return grad(grad(f(x), x, create_graph=True)[0].sum(), x)


@pytest.mark.parametrize(
    "way",
    [
        recorded,
        lambda f, x: functx.grad(lambda x: functx.grad(f)(x).sum())(x.detach()),
        lambda f, x: functx.vmap(functx.jacrev(functx.grad(f)))(torch.stack([x, -x]).detach()),
    ],
)
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_cache_of_a_function_and_second_derivatives(depth, way):
    body = depth(lambda x: Cached.apply(x) * x)
    ours, theirs = (
        way(lambda x, remat=remat: body(remat)(x).sum(), numbers(3).requires_grad_())
        for remat in (functx.remat, identity)
    )
    assert_same(ours, theirs, eps=64)


@pytest.mark.parametrize("depth", DEPTHS)
def test_nothing_that_is_filled_later_is_held(depth):
    refs = []

    def f(x):
        state = State()
        x = Scaled.apply(x, state).tanh()
        state.k = x.detach() + 1
        refs.append(weakref.ref(state.k))
        return x

    y = depth(f)(functx.remat)(numbers(3).requires_grad_())
    gc.collect()
    assert [ref() for ref in refs] == [None]
    y.sum().backward()
    gc.collect()
    assert {ref() for ref in refs} == {None}


IN_USE = [1.0]


@pytest.mark.parametrize("depth", DEPTHS)
def test_what_the_program_has_exchanged_is_its_own(depth):
    """A replay takes what is there now for its hook's; it has the other's numbers in calls only."""

    def program(remat):
        global IN_USE
        IN_USE, seen = [1.0], []

        def f(x):
            mine = IN_USE
            h = x.sin()
            h.register_hook(lambda g: g * mine[0])
            z = h.exp()
            z.register_hook(lambda g: seen.append(torch.tensor(IN_USE[0])))
            return z * 1

        x = numbers(3).requires_grad_()
        y = depth(f)(remat)(x).sum()
        IN_USE = [5.0]
        first = grad(y, x, retain_graph=True)
        return first, grad(y, x), seen, torch.tensor(IN_USE[0])

    assert_same(program(functx.remat), program(identity), eps=64)


@pytest.mark.parametrize("depth", DEPTHS)
def test_beside_much_that_is_the_programs(depth):
    """What the region's function closes over is not looked into, however much it is."""

    def program(remat):
        handed_out, a_lot = [], [[float(i)] for i in range(100)]

        def f(x):
            s = [{"k": [2.0]}]
            handed_out.append(s)
            h = x.sin()
            h.register_hook(lambda g: g * s[0]["k"][0] + a_lot[7][0])
            return h.exp()

        x = numbers(3).requires_grad_()
        y = depth(f)(remat)(x).sum()
        handed_out[0][0]["k"][0] = 5.0
        return grad(y, x)

    assert_same(program(functx.remat), program(identity), eps=64)


TAKEN_FROM = {
    "Queue": queue.Queue,
    "SimpleQueue": queue.SimpleQueue,
    "iterator": lambda: iter([2.0, 3.0, 5.0, 7.0]),
}


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("kind", TAKEN_FROM)
def test_what_the_program_has_and_hooks_take_from(kind, depth):
    """A replay takes from a copy of that, its hooks do not."""

    def program(remat):
        s = TAKEN_FROM[kind]()

        def hook(g):
            if kind == "iterator":
                return g * next(s)
            s.put(1.0)
            return g * s.qsize()

        def f(x):
            h = x.sin()
            h.register_hook(lambda g: hook(g))
            h.register_hook(lambda g: g + (0 if s is None else 1))
            return h.exp()

        x = numbers(3).requires_grad_()
        y = depth(f)(remat)(x).sum()
        found = [grad(y, x, retain_graph=True) for _ in range(2)]
        return found, torch.tensor(next(s) if kind == "iterator" else s.qsize())

    assert_same(program(functx.remat), program(identity), eps=64)
