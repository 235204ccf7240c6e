"""Policies as values: equal, hashable, printable; and what is refused for one."""

import copy
import itertools
import pickle

import pytest
import torch
from cases import numbers

import functx
from functx import checkpoint_policies as cp

from .test_counts_and_bytes import POLICIES

X = numbers(4, 5)
ALL = (
    *(policy for policy, _, _ in POLICIES.values() if isinstance(policy, cp.Policy)),
    cp.save_only_these_names("a", "b"),
)


class TestValues:
    def test_they_are_equal_hashable_and_printable(self):
        assert cp.save_only_these_names("a", "b") == cp.save_only_these_names("b", "a")
        assert len({cp.save_only_these_names("a"), cp.save_only_these_names("a")}) == 1
        for one, other in itertools.combinations(ALL, 2):
            assert (one == other) == (repr(one) == repr(other))
        assert len({hash(policy) for policy in ALL}) > len(ALL) / 2

    def test_they_can_be_pickled_and_copied(self):
        for policy in (*ALL, cp.dots_saveable & ~cp.save_these_operators(torch.ops.aten.sin)):
            if "only_sines" not in repr(policy):  # functions pickle by name, this one by another
                for again in (pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy)):
                    assert again == policy
                    assert hash(again) == hash(policy)

    def test_a_policy_prints_as_it_is_written(self):
        policy = cp.dots_saveable | cp.everything_saveable & ~cp.save_only_these_names("a", "b")
        assert repr(policy) == (
            "dots_saveable | everything_saveable & ~save_only_these_names('a', 'b')"
        )

    @pytest.mark.parametrize("policy", [3, "dots_saveable", [torch.sin], cp, object()])
    def test_what_is_no_policy_is_an_error(self, policy):
        with pytest.raises(TypeError, match="policy"):
            functx.remat(torch.sin, policy=policy)

    @pytest.mark.parametrize("policy", [lambda op: True, lambda ctx, op: True])
    def test_a_function_that_can_not_be_called_as_a_policy_is_an_error(self, policy):
        region = functx.remat(torch.sin, policy=policy)
        with pytest.raises(functx.RematError, match=r"aten\.sin.*policy\(ctx, op, \*args, \*\*kw"):
            region(X.clone().requires_grad_())

    def test_a_policy_that_raises_a_type_error_is_not_taken_for_the_operator(self):
        """`x @ w` would say that it does not know these operands."""

        def policy(ctx, op, *args, **kwargs):
            return len(3)

        region = functx.remat(lambda x: x @ x.mT, policy=policy)
        with pytest.raises(functx.RematError, match=r"raised for aten\.mm.*has no len"):
            region(X.clone().requires_grad_())

    def test_names_are_strings(self):
        with pytest.raises(TypeError, match="string"):
            functx.checkpoint_name(X, 3)
        with pytest.raises(TypeError, match="strings"):
            cp.save_only_these_names(["a"])
        with pytest.raises(ValueError, match="not both"):
            cp.save_and_offload_only_these_names(
                names_which_can_be_saved=["a"],
                names_which_can_be_offloaded=["a"],
                offload_src="device",
                offload_dst="pinned_host",
            )

    def test_all_names_of_jax_are_here(self):
        jax = pytest.importorskip("jax")
        assert set(vars(jax.checkpoint_policies)) <= set(dir(cp))
        with pytest.raises(TypeError, match=r"functx\.checkpoint_policies"):
            functx.remat(torch.sin, policy=jax.checkpoint_policies.dots_saveable)

    def test_a_name_outside_of_regions_is_nothing(self):
        tree = {"x": X, "n": 3}
        assert functx.checkpoint_name(tree, "t")["x"] is X
        assert functx.checkpoint_name(X, "x") is X
