"""Everything that functx changes in torch or transformers for the whole process.

There are five such changes, listed with their tests on the page ``docs/process_patches.md``:

- `show_applications`: what ``Function.apply`` is given is shown to the region whose code runs.
- `run_control_flow`: in the code of a region, control-flow operators run in Python.
- `hide_nested_dummy`: regions do not see how torch makes a tensor that it keeps for nested tensors.
- `applying`: while a function is traced for JAX, attribute lookups on custom autograd Functions go
  through functx. No public interface sees ``Function.apply``: it passes through no mode, and user
  code may have bound it to a name long before.
- `use_mapped_masks`: the question "is this being traced?" in the mask functions of transformers is
  also answered with yes for masks that ``vmap`` maps. The function has no hook or setting for it.

`functx.patch_checkpoint` is not listed here: users ask for it, and it ends with its context.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from functx._torch import function_depth, fwd_grad_mode, inner_of, is_batched, is_wrapped

# What all custom Functions run when they are applied, under whatever name the program has it.
APPLY: Any = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]
_UTILS: Any = torch._functorch.utils
_HIGHER_ORDER: Any = torch._higher_order_ops.utils
_NESTED: Any = torch.nested._internal.nested_tensor


def show_applications(show: Callable[[Any, Any], Any]) -> None:
    """From now on, let Functions take the arguments that ``show(Function, arguments)`` returns.

    ``Function.apply`` passes through no mode unless a transform is active. But its body, in Python,
    looks up ``unwrap_dead_wrappers`` at each call and goes on with what that returns. ``show`` is
    asked only where a function mode is on: elsewhere no region listens.
    """
    plain = _UTILS.unwrap_dead_wrappers

    def unwrap_dead_wrappers(args: Any) -> Any:
        args = plain(args)
        if function_depth():
            caller = sys._getframe(1)
            if caller.f_code is APPLY.__code__:
                return show(caller.f_locals["cls"], args)
        return args

    _UTILS.unwrap_dead_wrappers = unwrap_dead_wrappers


def run_control_flow(instead: Callable[[], Any]) -> None:
    """From now on, let control-flow operators run in the context ``instead()``, if that gives one.

    In eager, ``torch.cond`` and the like compile themselves, within ``setup_compilation_env``. No
    mode sees that.
    """
    plain = _HIGHER_ORDER.setup_compilation_env

    @contextmanager
    def setup_compilation_env() -> Iterator[Any]:
        context = instead()
        if context is None:
            with plain() as backend:
                yield backend
        else:
            with context:
                yield "eager"

    _HIGHER_ORDER.setup_compilation_env = setup_compilation_env


def hide_nested_dummy(unseen: Callable[[], Any]) -> None:
    """From now on, let torch make the tensor that it keeps for jagged tensors in ``unseen()``.

    The first jagged tensor of the process makes it, and all later ones use it.
    """
    plain = _NESTED._nt_view_dummy

    def _nt_view_dummy() -> Any:
        if _NESTED._dummy_instance is not None:
            return plain()
        with unseen():
            return plain()

    _NESTED._nt_view_dummy = _nt_view_dummy


def plain_apply(cls: Any) -> Callable[..., Any]:
    """``cls.apply`` below what intercepts it."""

    def apply(*args: Any, **kwargs: Any) -> Any:
        _application.ours = True
        try:
            return super(_Base, cls).apply(*args, **kwargs)
        finally:
            _application.ours = False

    return apply


_Base: Any = torch.autograd.function._SingleLevelFunction
_Meta: Any = type(_Base)
_applying: list[None] = []  # as many as there are `applying`, in all threads
_counting = threading.Lock()


class _Application(threading.local):
    """The ``apply`` of this thread that is reading attributes of its class."""

    hook: Callable[..., Any] | None = None
    ours = False  # it is that of `plain_apply`
    grad: bool | None = None  # the mode it was called in; None for one of ours


_application = _Application()


def _read(cls: Any, name: str) -> Any:
    """An attribute of a Function: its C++ reads ``_backward_cls`` first, ``forward`` last."""
    found, hook = type.__getattribute__(cls, name), _application.hook
    if name == "_backward_cls":
        _application.grad = None if _application.ours else torch.is_grad_enabled()
        _application.ours = False
    if name != "forward" or hook is None or _application.grad is None:
        return found
    grad, _application.grad = _application.grad, None
    own = int(cls.setup_context is _Base.setup_context)  # whether a context comes first

    def forward(*args: Any, **kwargs: Any) -> Any:
        run = torch.no_grad()(partial(found, *args[:own], **kwargs))
        with torch.set_grad_enabled(grad), fwd_grad_mode(True):
            return hook(cls, partial(_with_views, run), args[own:])

    return forward


def _with_views(run: Callable[..., Any], *args: Any) -> Any:
    """Run a forward; tensors that it hands back are views, as ``apply`` makes them."""
    given = {id(a) for a in args if isinstance(a, torch.Tensor)}
    out = run(*args)
    views = [o.view_as(o) if id(o) in given else o for o in (out if type(out) is tuple else (out,))]
    return tuple(views) if type(out) is tuple else views[0]


@contextmanager
def applying(hook: Callable[..., Any]) -> Iterator[None]:
    """Let ``hook(cls, forward, args)`` stand for the forward of custom Functions of this thread.

    ``Function.apply`` passes through no mode, and may lie in a variable of the user's; what it
    reads of its class is watched for as long.
    """
    before, _application.hook = _application.hook, hook
    with _counting:
        _applying.append(None)
        _Meta.__getattribute__ = _read
    try:
        yield
    finally:
        _application.hook = before
        with _counting:
            _applying.pop()
            if not _applying:
                del _Meta.__getattribute__


def is_mapped(value: Any) -> bool:
    """Whether ``vmap`` maps a tensor, at any level: its examples have values of their own."""
    while isinstance(value, torch.Tensor) and is_wrapped(value):
        if is_batched(value):
            return True
        value = inner_of(value)
    return False


def use_mapped_masks() -> None:
    """Let Hugging Face transformers, if it is loaded, use a padding mask that ``vmap`` maps.

    Its models ask whether a mask masks anything, and leave the mask out if not. That question has
    no answer for a mapped mask. The models do not ask it while a graph is traced, so a mapped mask
    is reported as traced.
    """
    module: Any = sys.modules.get("transformers.masking_utils")
    before = getattr(module, "is_tracing", None)
    if before is not None and before.__module__ != __name__:

        def is_tracing(tensor: Any = None) -> bool:
            return bool(before(tensor)) or is_mapped(tensor)

        module.is_tracing = is_tracing
