"""With 64-bit types off nothing is narrowed silently."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from functx._errors import LoweringError
from functx.compat import to_jax


def test_labels_are_int64_to_torch():
    seen = []

    def f(x, y):
        seen.append(y.dtype)
        return torch.nn.functional.cross_entropy(x, y)

    logits = torch.randn(3, 4)
    got = to_jax(f)(jnp.asarray(logits.numpy()), jnp.array([0, 1, 3]))
    np.testing.assert_allclose(got, f(logits, torch.tensor([0, 1, 3])), rtol=1e-6)
    with jax.enable_x64(True):
        to_jax(f)(jnp.ones((3, 4), jnp.float32), jnp.array([0, 1, 3]))
        assert to_jax(lambda x: x + 1)(jnp.ones(2, jnp.int32)).dtype == jnp.int32
    assert set(seen) == {torch.int64}


def test_integers_that_fit_pass_and_others_do_not():
    small, big = torch.tensor([5]), torch.tensor([2**40])
    assert to_jax(lambda x: x + small)(jnp.ones(1, jnp.int32)).tolist() == [6]
    with pytest.raises(LoweringError, match="do not fit"):
        to_jax(lambda x: x + big)(jnp.ones(1, jnp.int32))
    with jax.enable_x64(True):
        assert to_jax(lambda x: x + big)(jnp.ones(1, jnp.int64)).tolist() == [2**40 + 1]


def test_float64_is_refused_and_the_error_says_how():
    for f in (
        lambda x: x.double() * 2,
        lambda x: x + torch.ones(2, dtype=torch.float64),
    ):
        with pytest.raises(LoweringError, match=r"jax\.enable_x64"):
            to_jax(f)(jnp.ones(2))
        with jax.enable_x64(True):
            assert to_jax(f)(jnp.ones(2, jnp.float32)).tolist() == [2, 2]
    with pytest.raises(LoweringError, match="float64"):
        to_jax(torch.sin)(np.ones(2))
    with pytest.raises(LoweringError, match=r"triu.* does not fit"):
        to_jax(lambda x: x.triu(-(2**40)))(jnp.ones((2, 2)))


def test_float32_is_not_computed_in_float64():
    x = torch.linspace(-2, 2, 50)

    def f(x):
        return torch.nn.functional.gelu(x) + torch.nn.functional.gelu(x, approximate="tanh")

    with jax.enable_x64(True):
        text = str(jax.make_jaxpr(to_jax(f))(jnp.asarray(x.numpy())))
    assert "f64[50]" not in text


WIDE = {
    "drawn": lambda x: torch.randint(2**40, x.shape),
    "drawn up to": lambda x: x.long().random_(2**40),
    "filled": lambda x: torch.full(x.shape, 2**40),
    "added": lambda x: x.long() + 2**40,
    "padded": lambda x: torch.nn.functional.pad(x.long(), (1, 1), value=2**40),
    "shifted": lambda x: x.long() << 40,
    "bits of another dtype": lambda x: x.view(torch.int64),
}


@pytest.mark.parametrize("what", WIDE)
def test_wide_integers_of_the_function_are_refused(what):
    lowered = to_jax(WIDE[what], rng=True)
    x = jnp.ones(2, jnp.float32)
    with pytest.raises(LoweringError, match=r"64-bit integers(.|\n)*jax\.enable_x64"):
        lowered(jax.random.key(0), x)
    with jax.enable_x64(True):
        got = lowered(jax.random.key(0), x)
    if "drawn" not in what:
        assert got.tolist() == WIDE[what](torch.ones(2)).tolist()


def test_numbers_that_fit_pass():
    x = jnp.ones(4, jnp.float32)
    assert to_jax(lambda x: x[1:].long() + (2**31 - 1) - 1)(x).tolist() == [2**31 - 1] * 3
    assert to_jax(lambda x: x + 2**40)(x).tolist() == [2.0**40] * 4
    assert to_jax(lambda x: x.to(torch.uint32) * 0 + (2**32 - 1))(x).tolist() == [2**32 - 1] * 4
    drawn = to_jax(lambda x: torch.empty_like(x).random_(), rng=True)(jax.random.key(0), x)
    assert (drawn >= 0).all()
