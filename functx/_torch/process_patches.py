"""Everything that functx changes in torch or transformers for the whole process.

There are six such changes, listed with their tests on the page ``docs/process_patches.md``:

- `show_applications`: regions see the arguments of each ``Function.apply`` in their code.
- `run_control_flow`: in the code of a region, control-flow operators run in Python.
- `hide_nested_dummy`: regions do not see how torch makes the tensor that all jagged tensors share.
- `applying`: while a function is traced for JAX, attribute lookups on custom autograd Functions go
  through functx. No public interface sees ``Function.apply``: it passes through no mode, and user
  code may have bound it to a name long before.
- `numbers_in_texts`: while `functx.jit` traces symbolic sizes, user code that puts one in a text
  gets its number, and the graph is for that number. No mode sees ``repr``.
- `use_mapped_masks`: the mask functions of transformers treat a mask that ``vmap`` maps as if it
  were traced. They have no hook or setting for this.

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

# The function behind ``apply`` of all custom Functions.
APPLY: Any = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]
_UTILS: Any = torch._functorch.utils
_HIGHER_ORDER: Any = torch._higher_order_ops.utils
_NESTED: Any = torch.nested._internal.nested_tensor


def show_applications(show: Callable[[Any, Any], Any]) -> None:
    """From now on, let Functions take the arguments that ``show(Function, arguments)`` returns.

    ``Function.apply`` passes through no mode unless a transform is active. But its Python body
    looks up ``unwrap_dead_wrappers`` at each call and continues with the result. ``show`` is called
    only if a function mode is active, since every region that records is a function mode.
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
    """From now on, run control-flow operators in the context ``instead()``, if that is not None.

    In eager, ``torch.cond`` and similar operators compile themselves inside
    ``setup_compilation_env``. No mode sees that.
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
    """From now on, let torch make its shared tensor for jagged tensors in the context ``unseen()``.

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
    """``cls.apply``, not intercepted by `applying`."""

    def apply(*args: Any, **kwargs: Any) -> Any:
        _application.ours = True
        try:
            return super(_Base, cls).apply(*args, **kwargs)
        finally:
            _application.ours = False

    return apply


_Base: Any = torch.autograd.function._SingleLevelFunction
_Meta: Any = type(_Base)
_applying: list[None] = []  # one entry for each `applying` that is active, in all threads
_counting = threading.Lock()


class _Application(threading.local):
    """The call of ``apply`` on this thread that is reading attributes of its class."""

    hook: Callable[..., Any] | None = None
    ours = False  # whether `plain_apply` made the call
    grad: bool | None = None  # grad mode at the call; None if `plain_apply` made it


_application = _Application()


def _read(cls: Any, name: str) -> Any:
    """Read an attribute of a Function.

    In ``apply``, torch's C++ code reads ``_backward_cls`` first and ``forward`` last.
    """
    found, hook = type.__getattribute__(cls, name), _application.hook
    if name == "_backward_cls":
        _application.grad = None if _application.ours else torch.is_grad_enabled()
        _application.ours = False
    if name != "forward" or hook is None or _application.grad is None:
        return found
    grad, _application.grad = _application.grad, None
    own = int(cls.setup_context is _Base.setup_context)  # 1 if forward takes `ctx` first

    def forward(*args: Any, **kwargs: Any) -> Any:
        run = torch.no_grad()(partial(found, *args[:own], **kwargs))
        with torch.set_grad_enabled(grad), fwd_grad_mode(True):
            return hook(cls, partial(_with_views, run), args[own:])

    return forward


def _with_views(run: Callable[..., Any], *args: Any) -> Any:
    """Run a forward. Inputs that it returns become views, as ``apply`` makes them."""
    inputs = {id(a) for a in args if isinstance(a, torch.Tensor)}
    out = run(*args)
    outs = out if type(out) is tuple else (out,)
    views = [o.view_as(o) if id(o) in inputs else o for o in outs]
    return tuple(views) if type(out) is tuple else views[0]


@contextmanager
def applying(hook: Callable[..., Any]) -> Iterator[None]:
    """Call ``hook(cls, forward, args)`` instead of the forward of custom Functions on this thread.

    ``Function.apply`` passes through no mode, and user code may hold it in a variable. So functx
    intercepts the attributes that ``apply`` reads from its class.
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


_SYMBOLS: Any = (torch.SymInt, torch.SymFloat, torch.SymBool)
_NUMBERS = int, float, bool


@contextmanager
def numbers_in_texts(is_internal: Callable[[str], bool]) -> Iterator[None]:
    """Let symbols be numbers in the texts that user code makes, which guards them.

    Callers have to see to it that one thread at a time does so. ``is_internal`` says which files
    are not of the user's: torch and functx themselves name symbols in texts.
    """
    before = [kind.__repr__ for kind in _SYMBOLS]

    def text_of(number: type, symbol_of: Callable[[Any], str]) -> Callable[[Any], str]:
        def text(self: Any) -> str:
            caller = sys._getframe(1)
            is_users = not is_internal(caller.f_code.co_filename)
            return repr(number(self)) if is_users else symbol_of(self)

        return text

    for kind, number, own in zip(_SYMBOLS, _NUMBERS, before):
        kind.__repr__ = text_of(number, own)
    try:
        yield
    finally:
        for kind, own in zip(_SYMBOLS, before):
            kind.__repr__ = own


def is_mapped(value: Any) -> bool:
    """Whether ``vmap`` maps a tensor at any level, so that each example has its own value."""
    while isinstance(value, torch.Tensor) and is_wrapped(value):
        if is_batched(value):
            return True
        value = inner_of(value)
    return False


def use_mapped_masks() -> None:
    """Let Hugging Face transformers, if it is loaded, use a padding mask that ``vmap`` maps.

    Its models test whether a mask masks anything, and drop the mask if not. Under ``vmap`` this
    test raises an error, since the result may differ by example. The models skip the test while a
    graph is traced, so functx reports a mapped mask as traced.
    """
    module: Any = sys.modules.get("transformers.masking_utils")
    before = getattr(module, "is_tracing", None)
    if before is not None and before.__module__ != __name__:

        def is_tracing(tensor: Any = None) -> bool:
            return bool(before(tensor)) or is_mapped(tensor)

        module.is_tracing = is_tracing
