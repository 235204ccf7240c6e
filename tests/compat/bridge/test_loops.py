"""`remat_scan` and `remat_loop` of JAX arrays are nested scans that keep a few carries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import functx

W = jnp.asarray(np.random.default_rng(0).normal(size=(3, 3)), jnp.float32) / 2
XS = {"a": jnp.asarray(np.random.default_rng(1).normal(size=(23, 3)), jnp.float32)}
START = jnp.ones(3)


def body(carry, x):
    new = jnp.tanh(carry @ W + x["a"])
    return new, {"sum": new.sum(), "none": None}


def plain(carry, xs, reverse=False):
    return jax.lax.scan(body, carry, xs, reverse=reverse)


def loss(scan):
    def f(carry, xs):
        carry, ys = scan(carry, xs)
        return (carry**2).sum() + (ys["sum"] ** 2).sum()

    return f


def close(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), a, b)


def scanned(**options):
    return lambda carry, xs: functx.remat_scan(body, carry, xs, **options)


@pytest.mark.parametrize(
    ("slots", "reverse"), [(None, False), (None, True), (8, True), (22, False)]
)
def test_a_scan_is_that_of_jax(slots, reverse):
    ours = scanned(reverse=reverse, slots=slots)
    theirs = lambda carry, xs: plain(carry, xs, reverse)  # noqa: E731
    close(ours(START, XS), theirs(START, XS))
    close(*(jax.grad(loss(f), (0, 1))(START, XS) for f in (ours, theirs)))
    if slots == 22:
        f, g, rows = loss(ours), loss(theirs), jnp.stack([START, 2 * START])
        close(*(functx.vmap(functx.grad(h), (0, None))(rows, XS) for h in (f, g)))
        close(*(jax.jit(jax.jacfwd(jax.grad(h)))(START, XS) for h in (f, g)))
        close(*(functx.jvp(h, (START, XS), (START, XS)) for h in (f, g)))


# Of 23 steps by scans of 23; 5 and 5; 3, 3 and 3; 2, 2, 2, 2 and 2.
@pytest.mark.parametrize(
    ("slots", "depth", "outer"), [(23, 1, 23), (22, 2, 5), (9, 2, 5), (8, 3, 3), (6, 5, 2)]
)
def test_no_more_carries_than_slots_are_kept(slots, depth, outer):
    f = scanned(slots=slots)
    jaxpr = str(jax.make_jaxpr(f)(START, XS))
    assert jaxpr.count("scan[") >= depth
    pullback = jax.vjp(lambda c: loss(f)(c, XS), START)[1]
    kept = sum(
        leaf.nbytes
        for leaf in jax.tree.leaves(pullback)
        if leaf.shape[1:] == (3,) and leaf is not W
    )
    # Carries, and the slices of xs that are read again, which are an argument.
    assert kept - XS["a"].nbytes <= outer * START.nbytes


def test_a_loop_is_a_scan_of_its_carry():
    def ours(x, n=13, **options):
        return functx.remat_loop(lambda h: jnp.tanh(h @ W), x, n, **options).sum()

    def theirs(x):
        for _ in range(13):
            x = jnp.tanh(x @ W)
        return x.sum()

    close(*(jax.grad(f)(START) for f in (ours, theirs)))
    close(jax.grad(ours)(START), jax.grad(lambda x: ours(x, slots=6))(START))
    close(ours(START, 0), START.sum())
    assert "scan" in str(jax.make_jaxpr(ours)(START))
    # One that counts in Python is unrolled.
    weights = [W, W * 2, W * 3]
    step = lambda s: (s[0] + 1, s[1] @ weights[s[0]])  # noqa: E731
    close(functx.remat_loop(step, (0, START), 3), (3, START @ W @ W @ W * 6))


def test_a_loop_with_a_condition():
    def root(a, **options):
        return functx.remat_loop(
            lambda x: (x + a / x) / 2, a, cond=lambda x: jnp.abs(x * x - a) > 1e-5, **options
        )

    numbers = jnp.array([4.0, 9.0, 16.0])
    close(functx.vmap(root)(numbers), jnp.sqrt(numbers))
    close(jax.jit(jax.jvp, static_argnums=0)(root, (4.0,), (1.0,)), (2.0, 0.25))
    bounded = functx.vmap(functx.grad(lambda a: root(a, steps=20)))(numbers)
    close(bounded, 0.5 / jnp.sqrt(numbers))
    with pytest.raises(ValueError, match="Reverse-mode"):
        functx.grad(root)(numbers[0])


def test_wrong_use_says_what_to_do():
    with pytest.raises(ValueError, match=r"23 steps over JAX arrays need 6 slots or more, got 5"):
        functx.remat_scan(body, START, XS, slots=5)
    with pytest.raises(ValueError, match="length"):
        functx.remat_scan(body, START, XS, 4)
    with pytest.raises(TypeError, match="expected a callable, got 3"):
        functx.remat_loop(lambda x: x, START, 3, cond=3)
    close(functx.remat_scan(lambda c, _: (c * 2, None), START, length=4)[0], START * 16)
    empty = {"a": jnp.zeros((0, 3))}
    assert functx.remat_scan(body, START, empty)[1]["sum"].shape == (0,)
