"""Gradients known by their factors, inside of regions, and the bytes that this spares."""

import pytest
import torch
from cases import numbers
from references import assert_same, peak
from torch.nn import functional as F

import functx
from functx import per_sample

from .losses import CASES, arguments, slow, slow_norms, slow_sum, weight


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("chunk_size", [None, 1])
def test_what_is_known_by_factors_is_so_in_a_region(name, chunk_size, made):
    """What is known by factors without a region is in a region, and in a region of a region."""
    loss, params, batch, by_factors = CASES[name]
    params, x = arguments(params, batch)
    norms = slow_norms(slow(loss, params, x))
    inner = functx.remat(lambda p, x: loss(p, x))
    for region in (inner, functx.remat(lambda p, x: inner(p, x).sin())):
        expected = slow_sum(slow(region, params, x), torch.ones(len(x)))
        for grad_mode in (True, False):
            made.clear()
            with torch.set_grad_enabled(grad_mode):
                total = per_sample.clipped_sum(region, max_norm=1e9, chunk_size=chunk_size)
                assert_same(list(total(params, x)), expected, eps=256)
            if chunk_size is None and by_factors is not None:
                assert any(made) == by_factors
    assert_same(per_sample.norms(inner, chunk_size=chunk_size)(params, x), norms, eps=64)


class TestBytes:
    @torch.no_grad()
    @pytest.mark.parametrize("chunk_size", [None, 4])
    def test_a_wide_network_takes_a_sum_and_little_more(self, chunk_size):
        width, size = 200, 16
        params = [weight(width, width) for _ in range(4)]
        x = numbers(size, width)

        def loss(params, x):
            for w in params:
                x = torch.tanh(x @ w)
            return x.sum()

        one = sum(w.nbytes for w in params)
        f = per_sample.clipped_sum(loss, max_norm=1.0, chunk_size=chunk_size)
        assert peak(f, params, x) < 1.6 * one
        assert peak(per_sample.norms(loss), params, x) < 0.7 * one
        assert peak(per_sample.grads(loss), params, x) > size * one

    @pytest.mark.parametrize("grad_mode", [True, False])
    @pytest.mark.parametrize("chunk_size", [None, 4])
    def test_a_wide_network_of_regions_takes_no_more(self, chunk_size, grad_mode, made):
        width, size = 200, 16
        params = [weight(width, width) for _ in range(6)]
        x = numbers(size, width)

        @functx.remat
        def layer(w, x):
            return F.relu(x @ w, inplace=True)  # of memory that a factor had

        def loss(params, x):
            for w in params:
                x = layer(w, x)
            return x.square().sum()

        one = sum(w.nbytes for w in params)
        with torch.set_grad_enabled(grad_mode):
            f = per_sample.clipped_sum(loss, max_norm=1.0, chunk_size=chunk_size)
            assert peak(f, params, x) < 1.6 * one
            f(params, x)  # with what is known by then
        assert all(made)
