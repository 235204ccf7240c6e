"""Results pulled back one after the other, where plain torch asks for no ``retain_graph``."""

import gc
import weakref

import pytest
import torch
from cases import numbers
from programs import identity
from references import assert_same, count
from torch import nn

import functx


def leaf(start=0.1):
    return numbers(4, 3, start=start).requires_grad_()


def two(x, y):
    return x.sin().cos(), y.exp().tanh()


def of_one(x):
    return x.sin().cos(), x.exp().tanh()


def after_what_saves_nothing(x):
    h = x + 1
    return h.sin().cos(), h.exp().tanh()


def three(x):
    h = x.sin()
    return h.cos(), x.exp().tanh(), h.tanh()


def one_after_the_other(remat, f, n, order=(0, 1)):
    inputs = [leaf(0.1 + i) for i in range(n)]
    outs = remat(f)(*inputs)
    for i in order:
        outs[i].sum().backward()
    return [t.grad for t in inputs]


def in_a_region(x):
    return functx.remat(of_one)(x)


def mapped(x):
    return functx.vmap(functx.remat(of_one))(x)


def from_regions(x):
    a, b = functx.remat(of_one)(x)
    return functx.remat(torch.sin)(a), b.exp()


class TestRight:
    @pytest.mark.parametrize("order", [(0, 1), (1, 0)])
    @pytest.mark.parametrize("f", [of_one, after_what_saves_nothing, in_a_region, mapped])
    def test_disjoint_results(self, f, order):
        expected = one_after_the_other(identity, f, 1, order)
        assert_same(one_after_the_other(functx.remat, f, 1, order), expected)

    def test_inputs_of_their_own(self):
        expected = one_after_the_other(identity, two, 2)
        assert_same(one_after_the_other(functx.remat, two, 2), expected)

    def test_regions_in_a_row_in_a_region(self):
        expected = one_after_the_other(identity, from_regions, 1)
        assert_same(one_after_the_other(functx.remat, from_regions, 1), expected)

    @pytest.mark.parametrize("check", ["default", "values", "none"])
    def test_two_networks_in_one_region(self, check):
        def program(remat):
            torch.manual_seed(0)
            nets = nn.ModuleList(
                [nn.Sequential(nn.Linear(3, 3).double(), nn.Tanh()) for _ in range(2)]
            )
            x = leaf().detach()
            body = remat(lambda x: [net(x).square().mean() for net in nets])
            for _ in range(5):  # known from the third on
                for loss in body(x):
                    loss.backward()
            return [p.grad for p in nets.parameters()]

        expected = program(identity)
        assert_same(program(lambda f: functx.remat(f, determinism_check=check)), expected)

    def test_some_of_them_together(self):
        expected = one_after_the_other(
            identity, lambda x: [torch.stack(three(x)[::2]).sum(0)], 1, [0]
        )
        x = leaf()
        a, b, c = functx.remat(three)(x)
        (a + c).sum().backward()
        assert_same([x.grad], expected)
        b.sum().backward()
        y = leaf()
        sum(t.sum() for t in three(y)).backward()
        assert_same([x.grad], [y.grad], 8.0)

    def test_what_saves_nothing_any_number_of_times(self):
        x = leaf()
        y = functx.remat(lambda x: x + 1)(x)
        for _ in range(3):
            y.sum().backward()
        assert_same([x.grad], [torch.full_like(x, 3.0)])

    def test_one_of_them_is_retained(self):
        def program(remat):
            x = leaf()
            a, b = remat(of_one)(x)
            a.sum().backward(retain_graph=True)
            b.sum().backward()
            a.sum().backward()
            return [x.grad]

        assert_same(program(functx.remat), program(identity))


class TestRaises:
    @pytest.mark.parametrize("remat", [identity, functx.remat])
    def test_one_result_twice(self, remat):
        a, _ = remat(of_one)(leaf())
        a.sum().backward()
        with pytest.raises(RuntimeError, match="a second time"):
            a.sum().backward()

    @pytest.mark.parametrize("remat", [identity, functx.remat])
    def test_results_that_share_what_is_saved(self, remat):
        a, _, c = remat(three)(leaf())
        a.sum().backward()
        with pytest.raises(RuntimeError, match="a second time"):
            c.sum().backward()

    @pytest.mark.parametrize("remat", [identity, functx.remat])
    def test_written_to_in_between(self, remat):
        x = leaf()
        a, b = remat(lambda x: (x.sin(), x.cos()))(x)
        a.sum().backward()
        with torch.no_grad():
            x.mul_(2)
        with pytest.raises(RuntimeError, match="modified"):
            b.sum().backward()


class TestCosts:
    def test_each_runs_its_own_operations(self):
        x = leaf()
        a, b = functx.remat(of_one)(x)
        first, second = count(a.sum().backward), count(b.sum().backward)
        assert (first["sin"], first["exp"]) == (2, 0)  # one is the derivative of cos
        assert (second["sin"], second["exp"]) == (0, 1)

    @pytest.mark.parametrize("f", [of_one, three])
    def test_nothing_is_kept_when_all_have_been(self, f):
        x = leaf()
        h = x + 1
        kept = weakref.ref(h)
        outs = functx.remat(f)(h)
        del h
        outs[0].sum().backward(inputs=[x])
        gc.collect()
        assert kept() is not None  # for those that are left
        outs[1].sum().backward(inputs=[x])
        gc.collect()
        assert kept() is None
