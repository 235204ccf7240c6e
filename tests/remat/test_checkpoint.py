"""`functx.checkpoint` and `checkpoint_sequential` take what torch's take, and compose."""

import contextlib
import functools
import inspect

import pytest
import torch
import torch.utils.checkpoint as theirs
from cases import DTYPE, numbers
from references import assert_same, count, gradients
from torch import nn

import functx

X = numbers(4)
reentrant = pytest.mark.parametrize("reentrant", [None, False, True])


def body(x, y=None, *, scale=1.0):
    y = x if y is None else y
    return torch.sin(x) * torch.exp(y) * scale


@pytest.mark.parametrize("name", ["checkpoint", "checkpoint_sequential"])
def test_every_argument_of_torchs_is_taken(name):
    ours = inspect.signature(getattr(functx, name)).parameters
    for parameter in inspect.signature(getattr(theirs, name)).parameters.values():
        assert ours[parameter.name].kind == parameter.kind


@reentrant
def test_values_and_gradients_are_those_of_the_function(reentrant):
    def loss(call):
        return lambda x: call(body, x, 2 * x).sum()

    ours = functools.partial(functx.checkpoint, use_reentrant=reentrant)
    assert_same(gradients(loss(ours), X), gradients(loss(lambda f, *args: f(*args)), X), eps=8)


def test_keyword_arguments_reach_the_function():
    out = functx.checkpoint(body, X, y=X, scale=3.0, use_reentrant=False)
    assert_same(out, body(X, X, scale=3.0))


@reentrant
def test_parameters_get_gradients_where_no_argument_requires_one(reentrant):
    layer = nn.Linear(4, 4, dtype=DTYPE)
    functx.checkpoint(layer, numbers(2, 4), use_reentrant=reentrant).sum().backward()
    assert_same(layer.weight.grad, numbers(2, 4).sum(0).expand(4, 4), eps=8)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"context_fn": lambda: None}, TypeError, "two context"),
        ({"context_fn": lambda: (contextlib.nullcontext(),) * 3}, TypeError, "two context"),
        ({"context_fn": contextlib.nullcontext}, TypeError, "two context"),
        ({"preserve_rng_state": "no"}, ValueError, "^checkpoint: preserve_rng"),
        ({"function": 3}, TypeError, "callable"),
        ({"respect_saved_tensors_hooks": True}, ValueError, "offload"),
        # As torch's.
        ({"use_reentrant": True, "scale": 2.0}, ValueError, "scale"),
        ({"use_reentrant": True, "debug": True}, ValueError, "use_reentrant=False"),
        ({"use_reentrant": True, "context_fn": list}, ValueError, "use_reentrant=False"),
        ({"debug": True, "context_fn": list}, ValueError, "incompatible"),
    ],
)
def test_wrong_options_are_an_error(options, error, message):
    with pytest.raises(error, match=message):
        functx.checkpoint(options.pop("function", body), X, **options)


def test_contexts_of_the_users_are_entered_whatever_attributes_they_have():
    entered = []

    class Context(contextlib.nullcontext):
        policy_fn = "own"

        def __enter__(self):
            entered.append(self)

    pair = Context(), Context()
    x = X.clone().requires_grad_()
    functx.checkpoint(body, x, use_reentrant=False, context_fn=lambda: pair).sum().backward()
    assert entered == [*pair]


class TestErrors:
    first = True

    @classmethod
    def departs(cls, speed, **options):
        x = X.clone().requires_grad_()
        f = lambda x: x.sin().sin() if cls.first else x.cos().exp().sin()
        cls.first = True
        speed.prepare(lambda: functx.checkpoint(f, x, **options))
        with speed:
            out = functx.checkpoint(f, x, **options)
        cls.first = False
        out.sum().backward()

    def test_a_departure_is_torchs_error_too_and_debug_shows_both_sides(self, speed):
        with pytest.raises(theirs.CheckpointError) as caught:
            self.departs(speed)
        assert isinstance(caught.value, functx.ReplayError)
        assert isinstance(caught.value, functx.RematError)
        with pytest.raises(functx.ReplayError, match=r"sin[\s\S]*cos|cos[\s\S]*sin"):
            self.departs(type(speed)(speed.name), debug=True)


class TestEarlyStop:
    @staticmethod
    def sums_in_the_replay(**options):
        x = X.clone().requires_grad_()
        out = functx.checkpoint(lambda x: torch.sum(x.sin()), x, **options)
        return count(out.backward)["sum"]

    def test_what_no_gradient_needs_runs_where_it_is_off(self):
        assert self.sums_in_the_replay(use_reentrant=False) == 0
        assert self.sums_in_the_replay(use_reentrant=False, early_stop=False) == 1

    def test_torchs_context_overrules(self):
        with theirs.set_checkpoint_early_stop(False):
            assert self.sums_in_the_replay(use_reentrant=False, early_stop=True) == 1
        with theirs.set_checkpoint_early_stop(True):
            assert self.sums_in_the_replay(use_reentrant=False, early_stop=False) == 0


class TestContexts:
    @pytest.mark.parametrize("way", ["backward", "vmap(grad)"])
    def test_one_is_entered_around_the_forward_and_one_around_the_replay(self, way):
        log = []

        @contextlib.contextmanager
        def context(name):
            log.append(name)
            yield

        contexts = lambda: (context("forward"), context("replay"))
        loss = lambda x: functx.checkpoint(body, x, context_fn=contexts, use_reentrant=False).sum()
        if way == "backward":
            found = gradients(loss, X)[0]
        else:
            found = functx.vmap(functx.grad(loss))(X[None])[0]
        assert log == ["forward", "replay"]
        assert_same(found, gradients(lambda x: body(x).sum(), X)[0], eps=8)
        with torch.no_grad():
            functx.checkpoint(body, X, context_fn=contexts)
        assert len(log) == 2

    def test_they_must_let_exceptions_pass(self):
        contexts = lambda: (contextlib.suppress(KeyError), contextlib.nullcontext())

        def fails(x):
            raise KeyError

        with pytest.raises(functx.RematError, match="suppressed"):
            functx.checkpoint(fails, X.clone().requires_grad_(), context_fn=contexts)

    @pytest.mark.parametrize(("way", "kind"), [("backward", "list"), ("vmap(grad)", "function")])
    def test_selective_contexts_are_policies(self, way, kind):
        def saves_products(context, op, *args, **kwargs):
            saved = op == torch.ops.aten.mm.default
            policy = theirs.CheckpointPolicy
            return policy.MUST_SAVE if saved else policy.PREFER_RECOMPUTE

        ops = [torch.ops.aten.mm.default] if kind == "list" else saves_products
        selective = functools.partial(theirs.create_selective_checkpoint_contexts, ops)
        w = numbers(4, 4)

        def find(**options):
            def loss(x):
                return functx.checkpoint(
                    lambda x: torch.tanh(torch.sin(x @ w) @ w), x, use_reentrant=False, **options
                ).sum()

            if way == "backward":
                return gradients(loss, numbers(3, 4))
            return functx.vmap(functx.grad(loss))(numbers(2, 3, 4))

        assert_same(find(context_fn=selective), find())
        everything, saved = count(find), count(find, context_fn=selective)
        assert saved["tanh"] == everything["tanh"] == 2
        if way == "backward":
            assert saved["mm"] == everything["mm"] - 2


class TestSequential:
    @pytest.mark.parametrize("segments", [1, 2, 3, 7])
    def test_it_cuts_where_torch_cuts_and_the_last_segment_is_no_region(self, segments):
        """A region of ``n`` functions runs ``n - 1`` of them again."""
        chain = nn.Sequential(*(nn.Softplus() for _ in range(7)))
        for functions in (chain, [*chain]):
            ours = lambda x, functions=functions: functx.checkpoint_sequential(
                functions, segments, x, use_reentrant=False
            ).sum()
            assert_same(gradients(ours, X), gradients(lambda x: chain(x).sum(), X), eps=8)
            counts = count(gradients, ours, X)
            assert counts["softplus"] == 7 + (segments - 1) * (7 // segments - 1)

    def test_wrong_options_are_an_error(self):
        sines = [torch.sin] * 3
        for functions, segments, options, error, message in (
            (sines, 2, {"determinism_check": "sometimes"}, ValueError, "determinism_check"),
            (sines, 1, {"nothing": 1}, ValueError, "Unexpected keyword arguments: nothing"),
            *((sines, n, {}, ValueError, "segments") for n in (0, 4)),
            *((sines, n, {}, TypeError, "segments") for n in (1.5, True, None)),
            ([torch.sin, X], 1, {}, TypeError, "Tensor"),
        ):
            with pytest.raises(error, match=message):
                functx.checkpoint_sequential(functions, segments, X, **options)
        assert functx.checkpoint_sequential([], 1, X) is X
