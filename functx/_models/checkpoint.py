"""Drop-in replacements for ``checkpoint`` and ``checkpoint_sequential`` of torch.

They have torch's signatures and one implementation, a region of `functx.remat`. Every option either
has its effect or raises an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from functx._core import RematError, check_callable, name_of, warn_if_later
from functx._loops import checked_chain, composed
from functx._remat import checked_options, run
from functx._torch import compiler

_OF_REMAT = frozenset({"policy", "budget", "prevent_cse", "static_argnums", "static_argnames"})
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: Callable[[], Contexts] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool | str = True,
    respect_saved_tensors_hooks: bool | None = None,
    **kwargs: Any,
) -> Any:
    """``function(*args, **kwargs)`` as a region, which saves its inputs and recomputes the rest.

    This takes the arguments of `torch.utils.checkpoint.checkpoint` and does what `functx.remat`
    does: it works under every stack of transforms, and tensors that ``function`` closes over get
    their gradients.

    Args:
        function: any callable.
        *args: its arguments, any pytrees.
        use_reentrant: in torch this chooses between two implementations. functx has one, with the
            gradients of ``function`` itself. With ``True``, replays run in full, and keyword
            arguments, ``context_fn`` and ``debug`` are errors, as in torch. Unlike in torch,
            parameters get gradients even if no argument requires one.
        context_fn: returns two context managers, for the forward and for replays. The contexts of
            `torch.utils.checkpoint.create_selective_checkpoint_contexts` are taken as the
            ``policy`` of `functx.remat`; others are entered around ``function``.
        determinism_check: as for `functx.remat`.
        debug: as for `functx.remat`; not together with ``context_fn``.
        early_stop: with ``False``, replays run in full; by default, they leave out what no gradient
            needs. Torch's ``set_checkpoint_early_stop`` overrides this option, and
            ``set_checkpoint_debug_enabled`` overrides ``debug``.
        preserve_rng_state: as for `functx.remat`.
        respect_saved_tensors_hooks: an option of torch 2.14. Saved-tensor hooks do not see what a
            region saves, so ``True`` is an error; use an offload policy to move saved values.
        **kwargs: keyword arguments of ``function``.

    Returns:
        The result of ``function``.

    Raises:
        TypeError: ``function`` is not callable, or an option has the wrong type.
        ValueError: options exclude each other, or a value is unknown.
        functx.RematError: a region can't keep its promise; it is a ``CheckpointError`` of torch.

    Example:
        >>> import torch, functx
        >>> def loss(x):
        ...     return functx.checkpoint(torch.sin, x, use_reentrant=False).sum()
        >>> functx.vmap(functx.grad(loss))(torch.zeros(2, 3))
        tensor([[1., 1., 1.],
                [1., 1., 1.]])
    """
    check_callable(function, "checkpoint")
    asked_to_stop, asked_to_debug = compiler.checkpoint_overrules()
    debug = debug if asked_to_debug is None else asked_to_debug
    early_stop = early_stop if asked_to_stop is None else asked_to_stop
    early_stop = early_stop and not use_reentrant
    has_contexts = context_fn is not noop_context_fn
    # These errors have the same types and texts as in torch.
    if use_reentrant and kwargs:
        raise ValueError(f"Unexpected keyword arguments: {','.join(kwargs)}; use_reentrant=True")
    if use_reentrant and (has_contexts or debug):
        raise ValueError("`context_fn` or `debug` is only supported when use_reentrant=False.")
    if debug and has_contexts:
        raise ValueError("debug=True is incompatible with non-default context_fn")
    if respect_saved_tensors_hooks:
        raise ValueError(
            "checkpoint: respect_saved_tensors_hooks=True is not supported, because saved-tensor "
            "hooks do not see what a region saves. Leave it out. To save values in host memory, "
            "use functx.remat with a policy such as "
            "checkpoint_policies.offload_dot_with_no_batch_dims('device', 'pinned_host')."
        )
    if has_contexts and compiler.in_plain_graph():
        return torch_checkpoint(
            function, *args, use_reentrant=False, context_fn=context_fn, **kwargs
        )
    warn_if_later(function)
    policy, body = None, function
    if has_contexts and torch.is_grad_enabled():  # torch too enters them only in grad mode
        contexts = context_fn()
        pair = contexts if isinstance(contexts, tuple) else ()
        if [isinstance(c, AbstractContextManager) for c in pair] != [True, True]:
            raise TypeError(
                f"checkpoint: context_fn returned {contexts!r}; expected two context managers, one "
                "for the forward and one for replays."
            )
        forward, replays = pair
        if type(forward).__module__ == torch_checkpoint.__module__:  # selective checkpoint
            policy = getattr(forward, "policy_fn", None)
        if policy is None:
            body = _entered(function, forward, replays)
    options = checked_options(
        "checkpoint",
        policy=policy,
        preserve_rng_state=preserve_rng_state,
        determinism_check=determinism_check,
        debug=debug,
    )
    options = replace(options, name=name_of(function), early_stop=early_stop)
    if _OF_REMAT.isdisjoint(kwargs):
        return run(body, args, kwargs, options)
    try:
        return run(body, args, kwargs, options)
    except TypeError as error:
        for name in _OF_REMAT.intersection(kwargs):
            if f"unexpected keyword argument {name!r}" in str(error):
                error.add_note(
                    f"checkpoint passes {name!r} to the function, as torch's checkpoint does. To "
                    "use options of functx.remat, call functx.remat(function, ...)(*args)."
                )
        raise


def checkpoint_sequential(
    functions: Sequence[Callable[[Any], Any]] | nn.Sequential,
    segments: int,
    input: Any,
    use_reentrant: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Run a chain of functions in ``segments`` pieces, all of which but the last are regions.

    This takes the arguments of `torch.utils.checkpoint.checkpoint_sequential`, and cuts the chain
    at the same places: pieces have ``len(functions) // segments`` functions, and the last one has
    the rest.

    Args:
        functions: an ``nn.Sequential``, or the functions in order.
        segments: the number of pieces, from 1 to the number of functions.
        input: the argument of the first function.
        use_reentrant: as for `checkpoint`.
        **kwargs: further options of `checkpoint`, such as ``preserve_rng_state``.

    Returns:
        The result of the last function.

    Raises:
        TypeError: ``segments`` is not an integer, or one of ``functions`` is not callable.
        ValueError: ``segments`` is out of range, or an option is unknown.

    Example:
        >>> import torch, functx
        >>> chain = [torch.sin, torch.cos, torch.sin, torch.cos]
        >>> x = torch.zeros(2, requires_grad=True)
        >>> functx.checkpoint_sequential(chain, 2, x, use_reentrant=False).shape
        torch.Size([2])
    """
    options = checkpoint.__kwdefaults__ or {}
    unknown = kwargs.keys() - options.keys()
    if unknown:
        raise ValueError(
            f"Unexpected keyword arguments: {','.join(sorted(unknown))}. checkpoint_sequential "
            f"takes {', '.join(sorted(options))}."
        )
    parts, segments = checked_chain(functions, segments, "checkpoint_sequential")
    size = len(parts) // segments
    for number in range(segments - 1):
        piece = functools.partial(composed, *parts[number * size : (number + 1) * size])
        input = checkpoint(piece, input, use_reentrant=use_reentrant, **kwargs)
    return composed(*parts[size * (segments - 1) :], input)


def _entered(function: Any, forward: Any, replays: Any) -> Callable[..., Any]:
    """``function`` inside ``forward`` at the first call, and inside ``replays`` at later calls."""
    coming = [forward]

    def body(*args: Any, **kwargs: Any) -> Any:
        with coming.pop() if coming else replays:
            return function(*args, **kwargs)
        raise RematError(
            "checkpoint: a context manager of context_fn suppressed an exception of the function, "
            "so there is no result. Its __exit__ must not return True."
        )

    return body
