"""What custom Functions keep on their contexts, and change in backward passes. See `_keepers`."""

import gc
import weakref

import pytest
import torch
from bound import DEPTHS, SinByTerms, identity
from cases import numbers
from references import assert_same
from torch.autograd import Function, grad

import functx


class InANumber(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.n = 1.0
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        ctx.n += 1
        return g * ctx.n


class InAList(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.s = [1.0]

    @staticmethod
    def backward(ctx, g):
        ctx.s[0] += 1
        return g * ctx.s[0]


class InAnAttributeOfItsOwn(Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        ctx.k = 2 * getattr(ctx, "k", 1.0)
        return g * ctx.k


class InATensor(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.b = torch.ones(3, dtype=torch.float64)
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        ctx.b = ctx.b * 2
        return g * ctx.b


class InATensorThatIsWrittenTo(InATensor):
    @staticmethod
    def backward(ctx, g):
        ctx.b.mul_(2)
        return g * ctx.b.clone()


COUNTS = [
    InANumber,
    InAList,
    InAnAttributeOfItsOwn,
    InATensor,
    InATensorThatIsWrittenTo,
    SinByTerms,
]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("counts", COUNTS)
def test_each_backward_pass_counts(counts, depth):
    def program(remat):
        x = numbers(3).requires_grad_()
        y = depth(lambda x: counts.apply(x.sin()).exp())(remat)(x).sum()
        return [grad(y, x, retain_graph=True) for _ in range(4)]

    assert_same(program(functx.remat), program(identity), eps=64)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("counts", COUNTS)
def test_each_counts_where_derivatives_of_gradients_are_taken(counts, depth):
    def program(remat):
        x = numbers(3).requires_grad_()
        y = depth(lambda x: counts.apply(x.sin()).exp())(remat)(x).sum()
        (g,) = grad(y, x, create_graph=True)
        second = [grad(g.sum(), x, retain_graph=True) for _ in range(3)]
        return g, second, grad(y, x, retain_graph=True), grad(g.sum(), x)

    assert_same(program(functx.remat), program(identity), eps=64)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    "take",
    [
        functx.grad,
        functx.jacrev,
        lambda f: functx.grad(lambda x: functx.grad(f)(x).sum()),
        lambda f: lambda x: functx.vmap(functx.grad(f))(torch.stack([x, -x])),
        lambda f: lambda x: (pull := functx.vjp(f, x)[1]) and [pull(x.sum()) for _ in range(3)],
    ],
)
def test_under_transforms(take, depth):
    def program(remat):
        return take(depth(lambda x: InAList.apply(x.sin()).exp().sum())(remat))(numbers(3))

    assert_same(program(functx.remat), program(identity), eps=64)


class Scaled(Function):
    @staticmethod
    def forward(ctx, x, settings):
        ctx.settings = settings
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.settings["k"], None


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("also_a_hook", [False, True])
def test_what_the_region_makes_and_hands_out(also_a_hook, depth):
    """The program changes it, and a hook that reaches it too."""

    def program(remat):
        handed_out = []

        def f(x):
            settings = {"k": 2.0}
            handed_out.append(settings)
            z = Scaled.apply(x.sin(), settings) * 1

            def hook(g):
                settings["k"] += 1
                return g * settings["k"]

            if also_a_hook:
                z.register_hook(hook)
            return z.exp()

        x = numbers(3).requires_grad_()
        y = depth(f)(remat)(x).sum()
        found = [grad(y, x, retain_graph=True)]
        for k in (5.0, 7.0):
            handed_out[0]["k"] = k
            found.append(grad(y, x, retain_graph=True))
            found.append(torch.tensor(handed_out[0]["k"]))
        return found

    assert_same(program(functx.remat), program(identity), eps=64)


class Calls(Function):
    @staticmethod
    def forward(ctx, x, f):
        ctx.f = f
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.f(), None


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("number", [float, torch.tensor])
@pytest.mark.parametrize("when", ["in the region", "by the program"])
def test_a_variable_that_is_bound_again_later(when, number, depth):
    def program(remat):
        handed_out = []

        def f(x):
            k = number(2.0)

            def bind(new):
                nonlocal k
                k = number(new)

            handed_out.append(bind)
            y = Calls.apply(x.sin(), lambda: k).exp()
            if when == "in the region":
                k = number(3.0)
            return y

        x = numbers(3).requires_grad_()
        y = depth(f)(remat)(x).sum()
        first = grad(y, x, retain_graph=True)
        if when != "in the region":
            handed_out[0](5.0)
        return first, grad(y, x)

    assert_same(program(functx.remat), program(identity), eps=64)


@pytest.mark.parametrize("depth", DEPTHS)
def test_what_functions_of_a_replay_keep_goes_with_its_tape(depth):
    """Contexts of replays are in no cycle, and held by nobody."""
    kept = []

    class Keeps(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.held = [x.detach() + 1]
            ctx.counts = {"n": 0}
            kept.append(weakref.ref(ctx.held[0]))
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            ctx.counts["n"] += 1
            return g * ctx.held[0]

    x = numbers(3).requires_grad_()
    gc.collect()
    gc.disable()
    try:
        y = depth(lambda x: Keeps.apply(x.sin()).exp())(functx.remat)(x).sum()
        assert {ref() for ref in kept} == {None}
        for _ in range(2):
            grad(y, x, retain_graph=True)
            assert {ref() for ref in kept} == {None}
        (g,) = grad(y, x, create_graph=True)
        grad(g.sum(), x)
        del y, g
        assert {ref() for ref in kept} == {None}
    finally:
        gc.enable()


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_function_of_a_class_that_each_run_makes(depth):
    def program(remat):
        def f(x):
            class Counts(InANumber):
                pass

            return Counts.apply(x.sin()).exp()

        x = numbers(3).requires_grad_()
        y = depth(f)(remat)(x).sum()
        return [grad(y, x, retain_graph=True) for _ in range(3)]

    assert_same(program(functx.remat), program(identity), eps=64)
