"""Results that other results are computed from: their whole gradient, or an error."""

import contextlib
import gc
import weakref

import pytest
import torch
from cases import numbers
from programs import identity
from references import assert_same

import functx

pytestmark = pytest.mark.usefixtures("no_hooks")

X = numbers(3)


def two(x):
    h = x.sin()
    return h, h.cos()


def three(x):
    h = x.sin()
    k = h.exp()
    return k, h, k.cos()


def apart(x):
    return x.sin(), x.cos()


def halves(x):
    a, b = x.sin().repeat(2).chunk(2)
    return a, b.cos()


def by_hook(h, seen):
    h.register_hook(seen.append)


def by_a_changing_hook(h, seen):
    h.register_hook(lambda g: g * 2)


def by_grad(h, seen):
    h.retain_grad()


LOOKS = [by_hook, by_a_changing_hook, by_grad]


def pulled(remat, f, look, use, at=0):
    """Gradients, and what is seen of a result."""
    x, seen = X.clone().requires_grad_(), []
    results = remat(f)(x)
    look(results[at], seen)
    use(*results).sum().backward()
    return x.grad, *seen, results[at].grad if look is by_grad else None


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("use", [lambda h, y: y, lambda h, y: y + 3 * h])
def test_a_part_of_a_gradient_is_an_error(look, use):
    pulled(identity, two, look, use)
    with pytest.raises(functx.RematError, match="a further region"):
        pulled(functx.remat, two, look, use)


@pytest.mark.parametrize("look", LOOKS)
def test_what_is_whole_is_right(look):
    for f, use in (
        (two, lambda h, y: 3 * h),
        (apart, lambda h, y: h + y),
        (halves, lambda h, y: h + y),
        (two, lambda h, y: h + y.detach()),
    ):
        assert_same(pulled(functx.remat, f, look, use), pulled(identity, f, look, use))
    # The last one has a hook, or one in the middle of which nothing above is pulled back.
    for at, use in ((2, lambda k, h, y: y + k + h), (0, lambda k, h, y: k + h)):
        got = pulled(functx.remat, three, look, use, at)
        assert_same(got, pulled(identity, three, look, use, at))


def test_a_chain_of_results():
    for at, use in ((0, lambda k, h, y: y), (1, lambda k, h, y: y), (1, lambda k, h, y: k)):
        with pytest.raises(functx.RematError, match="it has a hook"):
            pulled(functx.remat, three, by_hook, use, at)


def test_a_hook_of_what_is_gone():
    h, y = functx.remat(two)(X.clone().requires_grad_())
    h.register_hook(lambda g: g * 2)
    loss = (h * 2).sum() + y.sum()
    del h
    with pytest.raises(functx.RematError, match="it has a hook"):
        loss.backward()


@pytest.mark.parametrize(
    "ask",
    [
        lambda loss, x, h: torch.autograd.grad(loss, h),
        lambda loss, x, h: torch.autograd.grad(loss, [x, h]),
        lambda loss, x, h: torch.autograd.grad(loss, torch.autograd.graph.get_gradient_edge(h)),
        lambda loss, x, h: loss.backward(inputs=[h]),
    ],
)
def test_a_gradient_with_respect_to_a_result(ask):
    x = X.clone().requires_grad_()
    h, y = functx.remat(two)(x)
    with pytest.raises(functx.RematError, match="further region"):
        ask((h + y).sum(), x, h)
    h, y = functx.remat(two)(x)
    ask((h * h).sum(), x, h)  # nothing else is pulled back
    h, y = functx.remat(two)(x)
    (g,) = torch.autograd.grad((h + y).sum(), x)  # nobody asks for its gradient
    assert_same(g, torch.autograd.grad(sum(two(x)).sum(), x)[0])


def test_under_transforms():
    def loss(x, remat, factor):
        h, y = remat(two)(x)
        if factor:
            h.register_hook(lambda g: g * factor)
        return (h + y).sum()

    xs = torch.stack([X, X + 1])
    for g, x in ((functx.grad(loss), X), (functx.vmap(functx.grad(loss), (0, None, None)), xs)):
        with pytest.raises(functx.RematError, match="it has a hook"):
            g(x, functx.remat, 2)
        assert_same(g(x, functx.remat, None), g(x, identity, None))


@pytest.mark.parametrize("under_grad", [False, True])
def test_what_left_otherwise(under_grad):
    log = []

    def body(x):
        log.append(x.sin())
        return log[-1] * 2

    def loss(x):
        log.clear()
        y = functx.remat(body)(x)
        log[0].register_hook(lambda g: g * 3)
        return (y + log[0]).sum()

    with pytest.raises(functx.RematError, match="it has a hook"):
        functx.grad(loss)(X) if under_grad else loss(X.clone().requires_grad_()).backward()


def test_what_left_and_nothing_is_computed_from():
    def program(remat):
        log, x, seen = [], X.clone().requires_grad_(), []
        y = remat(lambda x: (log.append(x.sin()), x.cos())[1])(x)
        log[0].register_hook(seen.append)
        (y + log[0] * 2).sum().backward()
        return x.grad, *seen

    assert_same(program(functx.remat), program(identity))


def test_what_left_is_computed_from_a_result_or_from_what_left():
    def program(remat, of):
        log, x = [], X.clone().requires_grad_()

        def body(x):
            h = x.sin()
            k = h.exp()
            log.extend([k, k.sin()])
            return h

        h = remat(body)(x)
        (h if of is None else log[of]).register_hook(lambda g: g * 2)
        (log[1] + h).sum().backward()
        return x.grad

    for of in (None, 0):
        with pytest.raises(functx.RematError, match="it has a hook"):
            program(functx.remat, of)
    assert_same(program(functx.remat, 1), program(identity, 1))


def test_nothing_is_held():
    """Neither the node nor the results are in a cycle with the engine's hooks."""
    x = X.clone().requires_grad_()
    gc.collect()
    gc.disable()
    try:
        h, y = functx.remat(two)(x)
        refs = [weakref.ref(t) for t in (h, y, h.grad_fn)]
        (h + y).sum().backward()
        del h, y
        assert [r() for r in refs] == [None] * 3
    finally:
        gc.enable()


def test_hooks_of_the_engine_are_no_hooks():
    """A region that is given such a result has one node."""
    x = X.clone().requires_grad_()
    h, _y = functx.remat(two)(x)
    a, b = functx.remat(lambda h, x: (h.sin(), x.cos()))(h, x)
    assert a.grad_fn is b.grad_fn


def test_a_result_of_a_region_inside():
    """What the region inside computes one of its results from, the outer one computes it from."""
    outer = {
        "as they are": lambda h, y: (h, y),
        "more of it": lambda h, y: (h, y * 2),
        "a region more": lambda h, y: (h, functx.remat(torch.exp)(y)),
    }
    for after in outer.values():
        for look in LOOKS:
            for use in (lambda h, y: y, lambda h, y: y + 3 * h):
                with pytest.raises(functx.RematError, match="a further region"):
                    pulled(functx.remat, lambda x, a=after: a(*functx.remat(two)(x)), look, use)


def test_a_gradient_retained_of_what_a_result_has_become():
    def run(remat):
        x = X.clone().requires_grad_()
        h, y = remat(lambda x: (x.sin() + 0, x.sin().sum() + x.sum()))(x)
        h.mul_(2.0)
        h.retain_grad()
        (h.square().sum() + y).backward()
        return x.grad, h.grad

    assert_same(run(functx.remat), run(identity))

    def run(remat):
        x = X.clone().requires_grad_()
        h, y = remat(lambda x: ((h := x.sin() + 0), h + x))(x)
        h.mul_(2.0)
        h.retain_grad()
        (h.square() + y).sum().backward()
        return x.grad, h.grad

    assert_same(run(functx.remat), run(identity))


@pytest.mark.parametrize("way", ["jvp", "dual level"])
@pytest.mark.parametrize("look", LOOKS)
def test_tangents_that_others_are_computed_from(look, way):
    """Of a primal, who looks at it has an alias."""

    def pushed(remat, at):
        x, t = X.clone().requires_grad_(), X.cos().requires_grad_()
        seen = []
        if way == "jvp":
            primals, tangents = functx.jvp(remat(two), (x,), (t,))
            results = *primals, *tangents
        else:
            duals = remat(two)(torch.autograd.forward_ad.make_dual(x, t))
            results = [p for parts in zip(*map(unpack, duals)) for p in parts]
        look(results[at], seen)
        sum(r.square().sum() for r in results).backward()
        return x.grad, t.grad, *seen

    unpack = torch.autograd.forward_ad.unpack_dual
    level = torch.autograd.forward_ad.dual_level if way != "jvp" else contextlib.nullcontext
    with level():
        for at in (0, 1, 3):
            assert_same(pushed(functx.remat, at), pushed(identity, at), eps=16)
        with pytest.raises(functx.RematError, match="computes another one"):
            pushed(functx.remat, 2)


def scaled(x):
    x.mul_(2)
    return x.sin()


def scaled_part(x):
    x[1:].mul_(2)
    return x.sin()


X_LEAF = X.clone().requires_grad_()


@pytest.mark.parametrize("body", [scaled, scaled_part])
@pytest.mark.parametrize("look", LOOKS)
def test_what_a_region_has_written_to_is_a_result_of_it(body, look):
    z = X_LEAF * 1
    y = functx.remat(body)(z)
    look(z, [])
    with pytest.raises(functx.RematError, match="computes another one"):
        torch.autograd.grad(y.sum(), X_LEAF)


@pytest.mark.parametrize("body", [scaled, scaled_part])
def test_a_gradient_with_respect_to_what_a_region_has_written_to(body):
    z = X_LEAF * 1
    y = functx.remat(body)(z)
    with pytest.raises(functx.RematError, match="is asked for"):
        torch.autograd.grad(y.sum(), (X_LEAF, z))


@pytest.mark.parametrize("look", LOOKS)
def test_the_whole_of_which_a_region_writes_to_a_part(look):
    whole = X_LEAF * 1
    y = functx.remat(scaled)(whole[1:])
    look(whole, [])
    with pytest.raises(functx.RematError, match="computes another one"):
        torch.autograd.grad(y.sum(), X_LEAF)


@pytest.mark.parametrize("look", LOOKS)
def test_what_a_region_has_written_to_where_nothing_of_it_is_computed_from_that(look):
    def gradients(remat):
        seen, z = [], X_LEAF * 1

        def body(z):
            y = z.exp()
            z.mul_(2)
            return y

        y = remat(body)(z)
        look(z, seen)
        (found,) = torch.autograd.grad((y + z).sum(), X_LEAF)
        return found, *seen

    assert_same(gradients(functx.remat), gradients(identity))
