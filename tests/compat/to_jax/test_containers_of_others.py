"""Lowered functions that hold containers of other libraries.

The kind: `to_jax` looks at what a function closes over, and a module holds. A container whose class
overrides how it is read, a lazy dict, a tuple without a length, is read as the built-in one that it
is derived from, and none of its own methods runs.
"""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from functx.compat import to_jax

called = []


def refusing(name):
    def method(self, *args, **kwargs):
        called.append(name)
        raise RuntimeError(f"{name} of a foreign object was called")

    return method


METHODS = [f"__{name}__" for name in ("len", "iter", "getitem", "eq", "hash", "bool")]
METHODS += ["values", "items", "keys"]
DERIVED = {
    base: type(f"Lazy{base.__name__}", (base,), {name: refusing(name) for name in METHODS})
    for base in (tuple, list, dict, set)
}


@pytest.mark.parametrize("base", DERIVED)
def test_a_container_of_another_library_is_left_alone(base):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
            self.held = held

        def forward(self, x):
            return (x * self.weight).sum()

    held = DERIVED[base]()
    x = jnp.array([3.0, 4.0])
    called.clear()
    params, f = to_jax(Model())
    assert [float(f(params, x)) for _ in range(2)] == [11.0, 11.0]
    assert float(to_jax(lambda x: held if x is None else x.sum())(x)) == 7.0
    assert not called


def test_what_is_in_one_belongs_to_the_signature():
    factors = DERIVED[list]([2.0])
    f = to_jax(lambda x: x * list.__getitem__(factors, 0))
    x = jnp.array([1.0, 2.0])
    np.testing.assert_array_equal(f(x), [2.0, 4.0])
    list.__setitem__(factors, 0, 3.0)
    np.testing.assert_array_equal(f(x), [3.0, 6.0])


def test_an_argument_without_a_hash_is_named_whatever_its_hash_raises():
    with pytest.raises(TypeError, match="a Lazyset, which is neither an array nor hashable"):
        to_jax(lambda x, held: x.sum())(jnp.ones(2), DERIVED[set]())
