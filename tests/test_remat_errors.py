"""What remat refuses, and how errors in a region come out."""

import pytest
import torch
from cases import numbers
from programs import body
from references import assert_same
from torch.utils.checkpoint import CheckpointError

import functx
from functx._remat import _operator

pytestmark = pytest.mark.usefixtures("hooks")


class TestErrors:
    @pytest.mark.parametrize("f", [3, "f", torch.ones(2), [body]])
    def test_not_callable(self, f):
        with pytest.raises(TypeError, match=r"remat.*call"):
            functx.remat(f)

    @pytest.mark.parametrize("kind", ["generator", "coroutine", "asynchronous generator"])
    def test_a_body_that_runs_after_the_call_saves_nothing_and_says_so(self, kind):
        def generator(x):
            yield x.sin()

        async def coroutine(x):
            return x.sin()

        async def asynchronous_generator(x):
            yield x.sin()

        with pytest.warns(UserWarning, match="outside of any region"):
            functx.remat(locals()[kind.replace(" ", "_")])

    @pytest.mark.parametrize("policy", ["everything", 3, object()])
    def test_unknown_policy(self, policy):
        with pytest.raises((TypeError, ValueError), match=r"unknown policy.*polic"):
            functx.remat(body, policy=policy)(numbers(3).requires_grad_())

    def test_unknown_keyword(self):
        with pytest.raises(TypeError, match="use_reentrant"):
            functx.remat(body, use_reentrant=False)

    def test_unknown_determinism_check(self):
        with pytest.raises(ValueError, match="default"):
            functx.remat(body, determinism_check="sometimes")

    def test_errors_of_the_function_come_out_unchanged(self):
        class MineError(Exception):
            pass

        def f(x):
            raise MineError("mine")

        for call in (functx.remat(f), functx.grad(functx.remat(f)), functx.vmap(functx.remat(f))):
            with pytest.raises(MineError, match="mine"):
                call(numbers(3).requires_grad_())
        assert_same(functx.grad(torch.sin)(numbers()), numbers().cos())  # the levels are as before

    def test_errors_in_a_replay_come_out_unchanged(self):
        calls = []

        def f(x):
            calls.append(1)
            if len(calls) > 1:
                raise KeyError("mine")
            return x.sin().exp()

        x = numbers(3).requires_grad_()
        value = functx.remat(f)(x).sum()
        with pytest.raises(KeyError, match="mine") as caught:
            value.backward()
        assert "replay" in " ".join(getattr(caught.value, "__notes__", []))

    def test_a_replay_that_departs_raises(self):
        calls = []

        def f(x):
            calls.append(1)
            return x.sin().exp() if len(calls) == 1 else x.cos().exp()

        x = numbers(3).requires_grad_()
        value = functx.remat(f)(x).sum()
        with pytest.raises(CheckpointError):
            value.backward()

    def test_a_transform_that_nobody_knows(self, monkeypatch):
        """As one that a later torch may have."""
        monkeypatch.delitem(_operator._RULES, functx._torch.TransformType.Vmap)
        f = functx.vmap(functx.grad(lambda x: functx.remat(body)(x).sum()))
        with pytest.raises(functx.RematError, match=r"no rule for the transform .*Vmap"):
            f(numbers(2, 3))
