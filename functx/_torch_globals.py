"""Private names for state of the process that users set, beside those in `_torch`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.utils import parametrize as _parametrize

from functx import _torch

# The hooks that see what the tape saves, if there are any; the argument ends no tracing by it.
hooks_on_saved = torch._C._autograd._top_saved_tensors_default_hooks

_AS_IT_IS: AbstractContextManager[None] = nullcontext()


def grad_mode(enabled: bool) -> AbstractContextManager[Any]:
    """Grad mode on or off; setting it where it is so already costs an operation that modes see."""
    if torch.is_grad_enabled() == enabled:
        return _AS_IT_IS
    return torch.set_grad_enabled(enabled)


def without_saved_tensors_hooks() -> AbstractContextManager[None]:
    """Hooks that the user has around this point do not see what tapes in here save."""
    if hooks_on_saved(True) is None:
        return _AS_IT_IS
    return _without_hooks()


@contextmanager
def _without_hooks() -> Iterator[None]:
    hooks = []
    try:
        while (top := hooks_on_saved(True)) is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            hooks.append(top)
        yield
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def parametrization_cache() -> tuple[int, dict[Any, Any]] | None:
    """How deep in ``parametrize.cached()`` this is, and what it holds; ``None`` outside."""
    if not _parametrize._cache_enabled:
        return None
    return _parametrize._cache_enabled, dict(_parametrize._cache)


def set_parametrization_cache(state: tuple[int, dict[Any, Any]] | None) -> None:
    """Put back what `parametrization_cache` gave."""
    _parametrize._cache_enabled, _parametrize._cache = state or (0, {})


def foreign_saved_tensors_hooks() -> bool:
    """Whether hooks that are not those of torch's checkpoint see what the tape saves.

    What the tape holds is unknown then. (``save_on_cpu`` keeps the very objects that are on the
    CPU: nothing counts those.)
    """
    top = hooks_on_saved(True)
    return top is not None and getattr(top[0], "__module__", None) != "torch.utils.checkpoint"


def fork_generators() -> AbstractContextManager[Any]:
    """Default generators, of the CPU and of all CUDA devices, get back the states they have now."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    return torch.random.fork_rng(devices=devices)


@functools.cache
def _inference_hides_derivatives() -> bool:
    """Whether derivatives are zero in inference mode, as before torch 2.13."""
    with _torch.cleared_interpreter_stack(), _torch.without_modes(), torch.inference_mode():
        return not torch.func.grad(torch.sin)(torch.zeros(()))


def check_derivatives_exist(api: str) -> None:
    """Raise where torch would say without an error that a derivative is zero."""
    if torch.is_inference_mode_enabled() and _inference_hides_derivatives():
        raise RuntimeError(
            f"{api}: in torch.inference_mode, torch {torch.__version__} gives zeros for "
            "derivatives. Leave it, or use torch.no_grad()."
        )
