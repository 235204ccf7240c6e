"""``jax.random`` in torch: random numbers from keys, bit for bit those of JAX.

Every function takes a key. It draws the same numbers whenever it gets the same key, and does not use
a generator. So a draw can be repeated anywhere: in the replay of a `functx.remat` region (without a
generator state), in a compiled function, on another device, and in JAX. Under ``vmap`` over keys,
each example draws the numbers of its key. JAX is needed only by `from_jax` and `to_jax`.

A key is an ``int64`` tensor of shape ``(2,)``. Its entries are the unsigned 32-bit words of a JAX
key, in ``[0, 2**32)``. The functions also take the words as ``uint32`` (the dtype of
``jax.random.key_data``, which is slower when compiled) or as ``int32``, and return new keys in the
dtype of the old one. A value that is not a key is a TypeError. An array of keys instead of a key is
a ValueError that says to use ``vmap``. A shape must be a sequence, or it is a TypeError. The
generator is ``threefry2x32`` with ``jax_threefry_partitionable`` on; both are JAX's defaults.

| function | compared with JAX |
|---|---|
| ``key``, ``split``, ``fold_in``, ``bits``, ``uniform``, ``bernoulli``, ``rademacher``, ``randint``, ``permutation``, ``dropout`` | the same bits; ``float16`` numbers between bounds within a rounding |
| ``normal``, ``exponential`` | the same uniform numbers, then torch's functions: within 2e-5 in ``float32``, 2e-12 in ``float64``, 2e-3 in ``float16``, 2e-2 in ``bfloat16``, of the number, or of 1 for numbers below 1 |
| ``truncated_normal`` | the same uniform numbers, then torch's functions, within what the table below says |
| ``gumbel`` | the same uniform numbers, then torch's logarithm: a few ulp, of 1 for numbers below 1; in ``float64`` and mode ``high`` 2e-12 |
| ``categorical`` | the same category, unless two are so close that an ulp decides |

The next table has the largest difference between `truncated_normal` and JAX's under ``jax.jit``,
relative to the number, or to 1 for numbers below 1. Both use the inverse of the error function,
which loses digits in a tail: all 16-bit numbers between 5 and 8 are equal, and JAX's own numbers
without ``jit`` differ by up to 1e-2.

| between | ``float16`` | ``bfloat16`` | ``float32`` | ``float64`` |
|---|---|---|---|---|
| -2 and 2 | 5e-3 | 5e-3 | 2e-6 | 2e-14 |
| 1 and 3 | 3e-2 | 2e-2 | 2e-6 | 2e-14 |
| 2 and 4 | 3e-2 | 2e-2 | 2e-5 | 2e-13 |
| 3 and 6 | 3e-2 | 2e-2 | 2e-5 | 2e-10 |
| 5 and 8 | 3e-2 | 2e-2 | 2e-5 | 2e-10 |

Dtypes: a float dtype that is not given is ``torch.get_default_dtype()``; where numbers depend on an
integer dtype it is the one JAX takes with 64-bit types off (``uint32`` in `bits`, ``int32`` in
`randint`); indices (`permutation`, `categorical`) are ``int64``.

Example:
    >>> import torch
    >>> from functx.compat import random
    >>> key = random.key(0)
    >>> random.uniform(key, (2,))
    tensor([0.9477, 0.9786])
    >>> keys = random.split(key, 3)
    >>> torch.vmap(lambda key, x: random.dropout(key, x, 0.5))(keys, torch.ones(3, 4))
    tensor([[0., 2., 2., 2.],
            [2., 2., 0., 2.],
            [0., 0., 2., 2.]])
"""  # noqa: E501  (a table row can't be broken)

from functx.compat.random._draws import bernoulli as bernoulli
from functx.compat.random._draws import bits as bits
from functx.compat.random._draws import dropout as dropout
from functx.compat.random._draws import exponential as exponential
from functx.compat.random._draws import gumbel as gumbel
from functx.compat.random._draws import normal as normal
from functx.compat.random._draws import rademacher as rademacher
from functx.compat.random._draws import truncated_normal as truncated_normal
from functx.compat.random._draws import uniform as uniform
from functx.compat.random._integers import categorical as categorical
from functx.compat.random._integers import permutation as permutation
from functx.compat.random._integers import randint as randint
from functx.compat.random._keys import PRNGKey as PRNGKey
from functx.compat.random._keys import fold_in as fold_in
from functx.compat.random._keys import from_jax as from_jax
from functx.compat.random._keys import key as key
from functx.compat.random._keys import key_data as key_data
from functx.compat.random._keys import split as split
from functx.compat.random._keys import to_jax as to_jax
from functx.compat.random._keys import wrap_key_data as wrap_key_data
