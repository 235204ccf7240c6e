"""Wrong use of ``functx.compat.random``: the error says what was given, and what to do."""

import jax
import numpy as np
import pytest
import torch

from functx.compat import random


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: random.key(0.5), TypeError, "integer seed, not float"),
        (lambda: random.key(True), TypeError, "integer seed, not bool"),
        (lambda: random.key(2**64), OverflowError, "more than 64 bits"),
        (lambda: random.key(torch.ones(2)), TypeError, "use vmap for many seeds"),
        (lambda: random.key(torch.tensor(0.5)), TypeError, "torch.float32"),
        (lambda: random.split(0), TypeError, r"random.key\(seed\)"),
        (lambda: random.split(jax.random.key(0)), TypeError, "random.from_jax"),
        (lambda: random.bits(np.zeros(2, "uint32")), TypeError, "random.wrap_key_data"),
        (lambda: random.uniform(torch.zeros(2)), TypeError, "two integer words"),
        (lambda: random.uniform(torch.tensor([1, 2, 3])), TypeError, "two integer words"),
        (lambda: random.uniform(random.split(random.key(0))), ValueError, "use vmap"),
        (lambda: random.uniform(random.key(0), 3), TypeError, r"such as \(3,\), not 3"),
        (lambda: random.uniform(random.key(0), (2.0,)), TypeError, "no integer"),
        (lambda: random.uniform(random.key(0), (-1,)), ValueError, "negative"),
        (lambda: random.uniform(random.key(0), (), torch.int32), ValueError, "not torch.int32"),
        (lambda: random.uniform(random.key(0), (3,), minval=torch.zeros(2)), ValueError, "broadc"),
        (lambda: random.bits(random.key(0), (), torch.int32), ValueError, "unsigned"),
        (lambda: random.bernoulli(random.key(0), 1), TypeError, "real dtype, not int"),
        (lambda: random.bernoulli(random.key(0), mode="x"), ValueError, "'low' or 'high'"),
        (lambda: random.bernoulli(random.key(0), torch.rand(3), (2,)), ValueError, "broadcast"),
        (lambda: random.dropout(random.key(0), torch.ones(2), 2.0), ValueError, "no probability"),
        (lambda: random.gumbel(random.key(0), mode="x"), ValueError, "'low' or 'high'"),
        (lambda: random.randint(random.key(0), (), 0, 2, torch.float32), TypeError, "float32"),
        (lambda: random.randint(random.key(0), (), 0.0, 2), TypeError, "float, no integer"),
        (lambda: random.randint(random.key(0), (), 0, torch.ones(())), TypeError, "no integer"),
        (lambda: random.permutation(random.key(0), 1.0), TypeError, "integer or a tensor"),
        (lambda: random.categorical(random.key(0), torch.ones(3), 1), IndexError, "axis 1"),
        (
            lambda: random.categorical(random.key(0), torch.ones(3), 0, (4,), replace=False),
            ValueError,
            "4 draws without replacement from 3",
        ),
        (lambda: random.fold_in(random.key(0), -1), OverflowError, "outside"),
        (lambda: random.fold_in(random.key(0), 2**32), OverflowError, "outside"),
        (lambda: random.fold_in(random.key(0), 1.0), TypeError, "not float"),
        (lambda: random.fold_in(random.key(0), torch.arange(2)), TypeError, "use vmap"),
        (lambda: random.from_jax(jax.random.key(0, impl="rbg")), TypeError, "rbg"),
    ],
)
def test_wrong_use_says_what_was_given_and_what_to_do(call, error, message):
    with pytest.raises(error, match=message):
        call()
