"""What `functx.checkpoint` and `checkpoint_sequential` refuse, and their contexts."""

import contextlib
import functools

import pytest
import torch
import torch.utils.checkpoint as theirs
from cases import numbers
from references import assert_same, contexts_that_log

import functx

pytestmark = pytest.mark.usefixtures("hooks")

X = numbers(4)


def body(x, y=None, *, scale=1.0):
    y = x if y is None else y
    return torch.sin(x) * torch.exp(y) * scale


SINES = [torch.sin] * 3


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: functx.checkpoint(body, X, context_fn=lambda: None), TypeError, "two context"),
        (lambda: functx.checkpoint(body, X, preserve_rng_state="no"), ValueError, "preserve_rng"),
        (lambda: functx.checkpoint(use_reentrant=False)(3), TypeError, "callable"),
        *(
            (lambda n=n: functx.checkpoint_sequential(SINES, n, X), TypeError, "segments")
            for n in (1.5, True, None)
        ),
        (lambda: functx.checkpoint_sequential([torch.sin, X], 1, X), TypeError, "Tensor"),
    ],
)
def test_an_error_says_what_does_not_fit(call, error, match):
    with pytest.raises(error, match=match):
        call()
    assert functx.checkpoint_sequential([], 1, X) is X


def test_it_is_a_decorator_too():
    @functx.checkpoint(use_reentrant=False)
    def f(x):
        return x.sin()

    assert f.__name__ == "f"
    x = numbers(3)
    assert_same(functx.vmap(functx.grad(f))(x), x.cos())


class TestContexts:
    def test_they_are_not_entered_where_nothing_is_differentiated(self):
        log = []
        with torch.no_grad():
            functx.checkpoint(body, X, context_fn=contexts_that_log(log))
        assert not log

    def test_they_must_let_exceptions_pass(self):
        def fails(x):
            raise KeyError

        with pytest.raises(functx.RematError, match="suppressed"):
            functx.checkpoint(
                fails,
                X.clone().requires_grad_(),
                context_fn=lambda: (contextlib.suppress(KeyError), contextlib.nullcontext()),
            )


def test_saved_tensors_hooks_can_not_be_respected_by_a_region():
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
