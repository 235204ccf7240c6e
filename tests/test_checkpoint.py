"""What `functx.checkpoint` and `checkpoint_sequential` refuse, and their contexts."""

import contextlib
import functools

import pytest
import torch
import torch.utils.checkpoint as theirs
from cases import numbers
from nets import Block, seeded
from references import assert_same

import functx

pytestmark = pytest.mark.usefixtures("hooks")

X = numbers(4)


def body(x, y=None, *, scale=1.0):
    y = x if y is None else y
    return torch.sin(x) * torch.exp(y) * scale


def test_hooks_of_a_module_run_again_as_torchs():
    block, calls = seeded(Block), []
    block.register_forward_hook(lambda *_: calls.append(1))
    functx.checkpoint(block, numbers(2, 3), use_reentrant=False).sum().backward()
    assert len(calls) == 2
    plain = seeded(Block)
    plain(numbers(2, 3)).sum().backward()
    assert_same([p.grad for p in block.parameters()], [p.grad for p in plain.parameters()])


def test_values_that_are_not_known():
    with pytest.raises(ValueError, match="determinism_check"):
        functx.checkpoint(body, X, determinism_check="sometimes")
    with pytest.raises(ValueError, match="preserve_rng_state"):
        functx.checkpoint(body, X, preserve_rng_state="sometimes")


def test_as_a_decorator():
    @functx.checkpoint(use_reentrant=False)
    def f(x):
        return x.sin()

    assert f.__name__ == "f"
    x = numbers(3)
    assert_same(functx.vmap(functx.grad(f))(x), x.cos())
    with pytest.raises(TypeError, match="callable"):
        functx.checkpoint(use_reentrant=False)(3)


def test_without_gradients_it_is_the_function():
    with torch.no_grad():
        assert_same(functx.checkpoint(body, X), body(X))


def test_debug_is_overruled_by_torchs_context():
    with theirs.set_checkpoint_debug_enabled(True), pytest.raises(ValueError, match="exclude"):
        functx.checkpoint(body, X, context_fn=lambda: None)


class TestContexts:
    @staticmethod
    def contexts(log):
        @contextlib.contextmanager
        def context(name):
            log.append(name)
            yield

        return lambda: (context("forward"), context("replay"))

    def test_are_not_entered_where_nothing_is_differentiated(self):
        log = []
        with torch.no_grad():
            functx.checkpoint(body, X, context_fn=self.contexts(log))
        assert not log

    def test_what_the_function_closes_over_is_found(self):
        scale, factor = X.clone().requires_grad_(), 2.0
        out = functx.checkpoint(lambda x: x * scale * factor, X, context_fn=self.contexts([]))
        factor = 5.0  # bound late; the replay sees what the forward saw
        out.sum().backward()
        assert_same(scale.grad, 2.0 * X)
        assert factor == 5.0

    def test_must_be_two(self):
        with pytest.raises(TypeError, match="two context managers"):
            functx.checkpoint(body, X, context_fn=lambda: None)

    def test_must_let_exceptions_pass(self):
        def fails(x):
            raise KeyError

        with pytest.raises(functx.RematError, match="suppressed"):
            functx.checkpoint(
                fails,
                X.clone().requires_grad_(),
                context_fn=lambda: (contextlib.suppress(KeyError), contextlib.nullcontext()),
            )


def test_saved_tensors_hooks_that_are_to_be_respected():
    """No hook sees what a region keeps: an error, where there are both."""
    contexts = functools.partial(
        theirs.create_selective_checkpoint_contexts, [torch.ops.aten.sin.default]
    )
    x = X.clone().requires_grad_()

    def call(respect, **options):
        return functx.checkpoint(
            torch.sin, x, use_reentrant=False, respect_saved_tensors_hooks=respect, **options
        )

    call(True, context_fn=contexts)
    if torch._C._autograd._saved_tensors_hooks_is_enabled():
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            call(True)
            call(None, context_fn=contexts)
            with pytest.raises(functx.RematError, match="offload"):
                call(True, context_fn=contexts)
    with pytest.raises(ValueError, match="respect_saved_tensors_hooks"):
        functx.checkpoint(torch.sin, x, use_reentrant=True, respect_saved_tensors_hooks=True)


class TestSequential:
    def test_a_list_that_changes_later(self):
        chain = [torch.sin, torch.exp, torch.cos, torch.tanh]
        x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
        out = functx.checkpoint_sequential(chain, 2, x)
        chain[0] = torch.cos
        out.sum().backward()
        torch.tanh(torch.cos(torch.exp(torch.sin(y)))).sum().backward()
        assert_same(x.grad, y.grad)

    @pytest.mark.parametrize("segments", [1.5, True, None])
    def test_segments_that_are_no_number(self, segments):
        with pytest.raises(TypeError, match="segments"):
            functx.checkpoint_sequential([torch.sin] * 3, segments, X)

    def test_no_function(self):
        with pytest.raises(TypeError, match="Tensor"):
            functx.checkpoint_sequential([torch.sin, X], 1, X)
        assert functx.checkpoint_sequential([], 1, X) is X
