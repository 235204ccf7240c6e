"""Hooks that a body hangs on nodes where its tape ends: where they hang without remat."""

import gc

import pytest
import torch
from cases import numbers
from programs import identity
from references import assert_same
from test_right_hung_on_given import HOW, region

import functx

X = numbers(4)
KINDS = ("register_hook", "register_prehook")


def walked(t):
    """What a walk down from something computed of a tensor comes to."""
    return t.sin().grad_fn.next_functions[0][0]


def expanded(t):
    """As wrappers for parallel training find what accumulates the gradient of a weight."""
    return t.expand_as(t).grad_fn.next_functions[0][0]


MAKE = {
    "leaf": lambda x: x,
    "computed": lambda x: x * 2,
    "of a region": lambda x: functx.remat(torch.exp)(x),
    "one of several": lambda x: torch.stack([x, x * 3]).unbind()[1],
}


def run(remat, how, make, kind, find=walked, differentiate=torch.Tensor.backward):
    """Five gradients, and what the hooks were given."""
    seen, found, held = [], [], []

    def loss(x):
        t = MAKE[make](x)

        def body(t):
            node = find(t)
            held.append(node)
            getattr(node, kind)(
                lambda *gs: seen.append([g.clone() for g in gs[-1] if g is not None])
            )
            return (t.sin() * t).sum()

        return region(remat, how, t, body) + (t * t * 5).sum()

    for _ in range(5):
        x = X.clone().requires_grad_()
        differentiate(loss(x))
        found.append(x.grad)
    return found, seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize("how", HOW)
def test_hooks_are_called_once_with_all_of_the_gradient(how, make, kind):
    for find in (walked, expanded):
        assert_same(
            run(functx.remat, how, make, kind, find), run(identity, how, make, kind, find), 8
        )


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("kind", KINDS)
def test_twice_and_recorded(kind):
    def twice(y):
        y.backward(retain_graph=True)
        y.backward(create_graph=True)

    for make in ("leaf", "computed"):
        args = ("argument", make, kind, walked, twice)
        assert_same(run(functx.remat, *args), run(identity, *args), 8)


@pytest.mark.parametrize("how", ["argument", "capture", "nested"])
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("make", ["leaf", "computed"])
def test_under_transforms(how, make, mapped):
    def gradient(remat):
        seen = []

        def loss(x):
            t = MAKE[make](x)

            def body(t):
                walked(t).register_hook(lambda gs, _: (gs[0] * 3, *gs[1:]))
                walked(t).register_prehook(lambda gs: seen.append(len(gs)))
                return (t.sin() * t).sum()

            return region(remat, how, t, body)

        f = functx.vmap(functx.grad(loss)) if mapped else functx.grad(loss)
        return f(torch.stack([X, -X]) if mapped else X), seen

    assert_same(gradient(functx.remat), gradient(identity), 8)


@pytest.mark.parametrize("how", ["argument", "nested"])
@pytest.mark.parametrize("when", ["before", "between"])
def test_a_handle_takes_it_off(how, when):
    def calls(remat):
        seen, handles = [], []

        def body(t):
            handles.append(expanded(t).register_hook(lambda *gs: seen.append(gs[-1][0].clone())))
            return (t.sin() * t).sum()

        x = X.clone().requires_grad_()
        y = region(remat, how, x, body)
        if when == "before":
            handles[0].remove()
        y.backward(retain_graph=True)
        handles[0].remove()
        y.backward()
        return seen, x.grad

    assert_same(calls(functx.remat), calls(identity), 8)


@pytest.mark.parametrize("kept", [False, True])
def test_it_goes_with_its_node(kept):
    """What no tape leads to lives as long as somebody has it."""

    def calls(remat):
        seen, held = [], []
        w, x = X.clone().requires_grad_(), X.clone().requires_grad_()

        def body(x):
            node = expanded(w)
            node.register_hook(lambda *gs: seen.append(gs[-1][0].clone()))
            if kept:
                held.append(node)
            return x.sin().sum()

        y = remat(body)(x)
        gc.collect()
        (y + (w * w).sum()).backward()
        return seen, w.grad

    ours, plain = calls(functx.remat), calls(identity)
    assert_same(ours, plain)
    assert len(ours[0]) == kept


@pytest.mark.parametrize("kind", KINDS)
def test_on_a_leaf_of_the_body_it_is_an_error(kind):
    def body(x):
        leaf = torch.ones(4, dtype=x.dtype, requires_grad=True)
        y = leaf * x
        getattr(y.grad_fn.next_functions[0][0], kind)(lambda *gs: None)
        return y.sum()

    with pytest.raises(functx.RematError, match=r"makes a leaf .* outside of the region"):
        functx.remat(body)(X.clone().requires_grad_())


@pytest.mark.parametrize("how", ["argument", "capture", "nested", "nested capture"])
def test_where_another_tape_holds_the_node(how):
    """The body lets go of what it has walked."""

    def calls(remat):
        seen = []
        x = X.clone().requires_grad_()
        outside = (x * x).sum()

        def body(x):
            expanded(x).register_hook(lambda *gs: seen.append(gs[-1][0].clone()))
            return x.sin().sum()

        (region(remat, how, x, body) + outside).backward()
        return seen, x.grad

    ours, plain = calls(functx.remat), calls(identity)
    assert_same(ours, plain, 8)
    assert len(ours[0]) == 1


@pytest.mark.parametrize("how", ["argument", "capture", "nested", "nested capture"])
def test_where_only_what_is_returned_holds_the_node(how):
    def calls(remat):
        seen = []
        x = X.clone().requires_grad_()

        def body(x):
            y = x.sin()
            y.grad_fn.next_functions[0][0].register_hook(lambda *gs: seen.append(gs[-1][0].clone()))
            return (y * x).sum()

        region(remat, how, x, body).backward()
        return seen, x.grad

    ours, plain = calls(functx.remat), calls(identity)
    assert_same(ours, plain, 8)
    assert len(ours[0]) == 1
