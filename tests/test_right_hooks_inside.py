"""Hooks of a body on what it returns, and those of the caller: as without remat, or an error."""

import gc
import weakref

import pytest
import torch
from cases import numbers
from programs import identity
from references import assert_same
from torch.autograd import forward_ad
from torch.autograd.graph import register_multi_grad_hook

import functx

pytestmark = pytest.mark.usefixtures("no_hooks")


def doubles(t, seen):
    t.register_hook(lambda g: seen.append(("inside", g.detach())) or g * 2)


def notes(t, seen):
    t.register_hook(lambda g: seen.append(("inside", g.detach())))


def notes_several(t, seen):
    register_multi_grad_hook([t], lambda gs: seen.append(("inside", gs[0].detach())))


def nothing(t, seen):
    """No hook."""


INSIDE = {"nothing": nothing, "doubles": doubles, "notes": notes, "several": notes_several}


def clamps(t, seen):
    t.register_hook(lambda g: seen.append(("outside", g.detach())) or g.clamp(max=1.5))


def looks(t, seen):
    t.register_hook(lambda g: seen.append(("outside", g.detach())))


def looks_at_node(t, seen):
    t.grad_fn.register_prehook(lambda gs: seen.append(("outside", gs[t.output_nr].detach())))


def retains(t, seen):
    t.retain_grad()
    seen.append(("retained", t))


def removed(t, seen):
    t.register_hook(lambda g: seen.append(("removed", g)) or g.clamp(max=1.5)).remove()


OUTSIDE = {
    "nothing": nothing,
    "clamps": clamps,
    "looks": looks,
    "several": lambda t, seen: register_multi_grad_hook(
        [t], lambda gs: seen.append(("outside", gs[0].detach()))
    ),
    "node": looks_at_node,
    "retains": retains,
    "removed": removed,
}

WRONG = {("doubles", o) for o in ("clamps", "looks", "several", "node", "retains")}
WRONG |= {(i, "clamps") for i in ("notes", "several")}


def alone(hang, seen, remat):
    def body(x):
        h = x.sin()
        hang(h, seen)
        return h

    return body


def second(hang, seen, remat):
    def body(x):
        h = x.sin()
        hang(h, seen)
        return x.cos(), h, x * 2

    return body


def inner(hang, seen, remat):
    """By a region inside."""
    return lambda x: remat(alone(hang, seen, remat))(x * 1)


def on_inner(hang, seen, remat):
    """On the result of a region inside."""

    def body(x):
        h = remat(torch.sin)(x)
        hang(h, seen)
        return h

    return body


def left(hang, seen, remat):
    """What leaves otherwise than by return."""

    def f(x):
        kept = []

        def body(x):
            h = x.sin()
            hang(h, seen)
            kept.append(h)
            return x.cos()

        return remat(body)(x), kept.pop()

    return f


BODIES = {"alone": alone, "second": second, "inner": inner, "on inner": on_inner, "left": left}
RESULTS = {"second": 1, "left": 1}


def plain(loss, x):
    x = x.requires_grad_()
    loss(x).backward()
    return x.grad


WAYS = {
    "plain": plain,
    "grad": lambda loss, x: functx.grad(loss)(x),
    "vmap(grad)": lambda loss, x: functx.vmap(functx.grad(loss))(torch.stack([x, x])),
    "grad(grad)": lambda loss, x: functx.grad(lambda x: functx.grad(loss)(x).sin().sum())(x),
    "jvp(grad)": lambda loss, x: functx.jvp(functx.grad(loss), (x,), (x,)),
    "create_graph": lambda loss, x: torch.autograd.grad(
        loss(x.requires_grad_()), x, create_graph=True
    ),
}


def run(remat, body, inside, outside, way="plain"):
    seen = []
    x = numbers(4)
    made = BODIES[body](INSIDE[inside], seen, remat)

    def loss(x):
        ys = made(x * 1) if body == "left" else remat(made)(x * 1)
        ys = ys if isinstance(ys, tuple) else (ys,)
        OUTSIDE[outside](ys[RESULTS.get(body, 0)], seen)
        return sum((y.exp() * (i + 1)).sum() for i, y in enumerate(ys))

    gradients = WAYS[way](loss, x)
    if way == "grad(grad)":  # where a replay has its own
        return gradients
    if "grad" in way and way != "create_graph":  # what was seen is of levels that have ended
        return gradients, sorted(kind for kind, _ in seen)
    those = [(kind, g.grad if kind == "retained" else g) for kind, g in seen]
    return gradients, sorted(those, key=lambda one: one[0])


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("outside", OUTSIDE)
def test_right_or_an_error(body, inside, outside):
    """What does not commute is refused, and nothing else is."""
    if (inside, outside) in WRONG:
        with pytest.raises(functx.RematError, match="hangs a hook on a result of shape"):
            run(functx.remat, body, inside, outside)
        return
    assert_same(run(functx.remat, body, inside, outside), run(identity, body, inside, outside))


def test_which_is_wrong_is_wrong_without_remat_in_the_other_order():
    """So the two do not commute, in the cases above that are refused."""
    hung = []
    for order in (("inside", "outside"), ("outside", "inside")):
        x = numbers(4).requires_grad_()
        y = x.sin()
        for where in order:
            (doubles if where == "inside" else clamps)(y, [])
        y.exp().sum().backward()
        hung.append(x.grad)
    assert not torch.equal(*hung)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("body", ["alone", "second", "inner", "on inner"])
@pytest.mark.parametrize(
    ("inside", "outside"),
    [("doubles", "nothing"), ("doubles", "removed"), ("notes", "looks"), ("nothing", "clamps")],
)
def test_what_is_right_under_transforms(way, body, inside, outside):
    ours = run(functx.remat, body, inside, outside, way)
    assert_same(ours, run(identity, body, inside, outside, way), eps=16)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("body", ["alone", "second", "inner", "on inner"])
@pytest.mark.parametrize(
    ("inside", "outside"), [("doubles", "clamps"), ("notes", "clamps"), ("doubles", "looks")]
)
def test_what_is_refused_under_transforms(way, body, inside, outside):
    with pytest.raises(functx.RematError, match="hangs a hook on a result of shape"):
        run(functx.remat, body, inside, outside, way)


@pytest.mark.parametrize("outside", ["nothing", "removed", "clamps", "looks", "retains"])
def test_a_dual_level(outside):
    """What the caller has there is an alias of a result."""

    def run(remat):
        x, seen = numbers(4).requires_grad_(), []
        with forward_ad.dual_level():
            y = remat(alone(doubles, seen, remat))(forward_ad.make_dual(x * 1, torch.ones(4)))
            OUTSIDE[outside](y, seen)
            return torch.autograd.grad(y.exp().sum(), x)

    if outside in ("nothing", "removed"):
        assert_same(run(functx.remat), run(identity), eps=8)
    else:
        with pytest.raises(functx.RematError, match="where that has a tangent"):
            run(functx.remat)


def hooked(seen):
    def body(x):
        h = x.sin()
        doubles(h, seen)
        return h

    return body


def test_a_gradient_with_respect_to_the_result():
    """Where that is all, there is no replay; where there is one, it is a part."""
    for also in (False, True):
        x = numbers(3).requires_grad_()
        y = functx.remat(hooked([]))(x)
        with pytest.raises(functx.RematError, match=r"its gradient is (all that is )?asked for"):
            torch.autograd.grad(y.exp().sum(), [y, x] if also else y)
        x = numbers(3).requires_grad_()
        y = functx.remat(hooked([]))(x)
        (gradient,) = torch.autograd.grad(y.exp().sum(), x)
        assert_same(gradient, 2 * x.sin().exp() * x.cos(), eps=8)


def test_passes_are_told_apart():
    """A hook that was taken off is not there; nor is what one gave in an earlier pass."""

    def passes(remat):
        x, seen, times = numbers(3).requires_grad_(), [], [None, 2.0, None]

        def body(x):
            h = x.sin()
            notes(h, seen)
            return h

        y = remat(body)(x)
        handle = y.register_hook(lambda g: None if (f := times.pop()) is None else g * f)
        loss, found = y.exp().sum(), []
        for _ in range(3):
            try:
                found.append(torch.autograd.grad(loss, x, retain_graph=True)[0])
            except functx.RematError:
                found.append(None)
        handle.remove()
        return *found, torch.autograd.grad(loss, x)[0]

    ours, right = passes(functx.remat), passes(identity)
    assert ours[1] is None
    assert_same([ours[0], *ours[2:]], [right[0], *right[2:]], eps=8)


@pytest.mark.parametrize("which", [(), (0,), (1,), (0, 1)])
def test_hooks_of_a_body_that_the_caller_takes_off(which):
    """By the handles of the first run, of which there are more after a replay."""

    def called(remat):
        x, seen, handles = numbers(3).requires_grad_(), [], []

        def body(x):
            h = x.sin()
            for factor in (2, 3):
                hook = lambda g, f=factor: seen.append(f) or g * f + f  # noqa: E731
                handles.append(h.register_hook(hook))
            return h

        y = remat(body)(x)
        for n in which:
            handles[n].remove()
        y.exp().sum().backward()
        return seen, x.grad

    assert_same(called(functx.remat), called(identity), eps=8)


def test_a_gradient_that_the_body_wants_retained():
    """It is what hooks have made of it."""

    def body(x):
        h = x.sin()
        h.retain_grad()
        doubles(h, [])
        return h

    y = functx.remat(body)(numbers(3).requires_grad_())
    with pytest.raises(functx.RematError, match="its gradient is retained"):
        y.exp().sum().backward()


def test_the_ways_out():
    """A copy is returned, or all hooks are on one side."""

    def run(remat, how):
        x, seen = numbers(3).requires_grad_(), []

        def body(x):
            h = x.sin()
            if how != "outside":
                doubles(h, seen)
            if how == "inside":
                clamps(h, seen)
            return h.clone() if how == "clone" else h.view(-1) if how == "view" else h

        y = remat(body)(x)
        if how == "outside":
            doubles(y, seen)
        if how != "inside":
            clamps(y, seen)
        y.exp().sum().backward()
        return seen, x.grad

    for how in ("inside", "outside", "clone", "view"):
        assert_same(run(functx.remat, how), run(identity, how), eps=8)


def test_several_tensors_of_which_one_is_returned():
    """A replay's pass begins with a node of which torch does not tell that it runs it."""

    def called(remat, mode):
        x, seen = numbers(3).requires_grad_(), []

        def body(x):
            a = x.sin()
            h = a.exp()
            register_multi_grad_hook([a, h], seen.append, mode=mode)
            return h

        torch.autograd.grad((remat(body)(x) * 2).sum(), x)
        return seen

    for mode in ("all", "any"):
        assert_same(called(functx.remat, mode), called(identity, mode), eps=8)


def test_what_hooks_of_a_body_close_over_is_not_held():
    """By the dict that stays of the first run: it is a replay that makes it anew."""
    refs = []

    def body(x):
        h, large = x.sin(), x.detach() * 2
        h.register_hook(lambda g: g * large)
        refs.append(weakref.ref(large))
        return h

    y = functx.remat(body)(numbers(3).requires_grad_())
    gc.collect()
    assert refs[0]() is None
    y.sum().backward()
    assert len(refs) == 2
