"""`patch_checkpoint`: third-party code that calls ``torch.utils.checkpoint`` runs on functx.

NOTE [one code object]
Other modules hold ``torch.utils.checkpoint.checkpoint`` under names of their own, in classes,
partials, defaults and closures. None of these is looked for: the function stays the object it is,
and its *code* is exchanged, so that whoever calls it, however they came by it, calls functx; and
putting the code back undoes that for all of them, whatever they have bound to what meanwhile.
Pickles, which name the function, and ``torch.compile``, which knows it by identity and has an
implementation of its own, are not affected; while tracing, the latter calls it, and gets torch's.

NOTE [replays are patched]
A replay that runs after the patch was undone must meet functx where the forward met it, so what is
called through the patch puts it in place for itself whenever it runs.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, ParamSpec, TypeVar

import torch

from functx import _torch, _torch_compiler
from functx._checkpoint import checkpoint, within

P = ParamSpec("P")
R = TypeVar("R")

_lock = threading.RLock()
_active = 0
_saved: list[_Saved] = []


class Patch:
    """A patch that is in place, until `undo` or the end of a ``with`` block."""

    def __init__(self) -> None:
        self._on = False
        self._apply()

    def undo(self) -> None:
        """Take the patch back; a second call does nothing."""
        with _lock:
            if self._on:
                self._on = False
                _leave()

    def _apply(self) -> None:
        with _lock:
            if not self._on:
                _enter()
                self._on = True

    def __enter__(self) -> Patch:
        self._apply()
        return self

    def __exit__(self, *exc: object) -> None:
        self.undo()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """As a decorator: in place while ``function`` runs, and not for longer."""
        self.undo()

        @functools.wraps(function)
        def patched(*args: P.args, **kwargs: P.kwargs) -> R:
            with Patch():
                return function(*args, **kwargs)

        return patched

    def __repr__(self) -> str:
        return f"<functx.patch_checkpoint(), {'in place' if self._on else 'undone'}>"


def patch_checkpoint() -> Patch:
    """Make code that calls ``torch.utils.checkpoint`` use functx instead, in the whole process.

    Covers ``torch.utils.checkpoint.checkpoint``, ``checkpoint_sequential`` and
    ``CheckpointFunction``, wherever and however they were imported before: under other names, in
    partials, closures, defaults, attributes of classes and modules (Hugging Face's
    ``gradient_checkpointing_enable``, FSDP's checkpoint wrapper). Calls mean what they mean to
    `functx.checkpoint`. Code that ``torch.compile`` compiles keeps the compiler's own
    implementation. What was computed while the patch was in place can be differentiated later
    (replays of what was called through the patch put it in place again, while they run).

    The patch is in place when this returns; patches may nest, across threads too, and the last to
    be undone restores torch's code.

    Returns:
        A handle: use it in a ``with`` block, as a decorator of a function, or call its ``undo()``,
        or drop it and leave the patch in place for good.

    Raises:
        RuntimeError: torch's function can't be found, because it was replaced before functx was
            imported, or takes other arguments than those known here.

    Example:
        >>> import torch, functx
        >>> from torch.utils.checkpoint import checkpoint
        >>> def loss(x):
        ...     return checkpoint(torch.sin, x, use_reentrant=False).sum()
        >>> with functx.patch_checkpoint():
        ...     print(functx.vmap(functx.grad(loss))(torch.zeros(2, 3)))
        tensor([[1., 1., 1.],
                [1., 1., 1.]])
    """
    return Patch()


class _Saved:
    """What was in place of something that is patched."""

    def __init__(self, owner: Any, name: str, was: Any, now: Any) -> None:
        self.owner, self.name, self.was, self.now = owner, name, was, now

    def restore(self) -> None:
        """Put it back, unless somebody else has put another thing there since."""
        if vars(self.owner).get(self.name) is not self.now:
            return
        if self.was is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.was)


_ABSENT = object()


def _enter() -> None:
    global _active
    if _active == 0:
        _install()
    _active += 1


def _leave() -> None:
    global _active
    _active -= 1
    if _active == 0:
        function = _torch_compiler.torch_checkpoint()
        if function.__code__ is _replacement(_original):
            function.__code__ = _original.__code__
        while _saved:
            _saved.pop().restore()


_original: Any = None


def _install() -> None:
    global _original
    function = _torch_compiler.torch_checkpoint()
    code, ours = function.__code__, _replacement(function)
    _original = FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    _original.__kwdefaults__ = function.__kwdefaults__
    function.__code__ = ours
    # Where somebody has put their own function in place of torch's.
    module, public = _torch_compiler.checkpoint_module, _torch_compiler.public_torch_checkpoint
    if module.checkpoint is not public:
        _put(module, "checkpoint", public)
    _put(module.CheckpointFunction, "apply", staticmethod(_apply_function))
    _put(torch.Tensor, "requires_grad_", _requires_grad_)


def _put(owner: Any, name: str, now: Any) -> None:
    _saved.append(_Saved(owner, name, vars(owner).get(name, _ABSENT), now))
    setattr(owner, name, now)


def _parameters(code: CodeType) -> tuple[tuple[str, ...], frozenset[str]]:
    """The names of positional parameters, and of keyword-only ones."""
    n = code.co_argcount
    return code.co_varnames[:n], frozenset(code.co_varnames[n:][: code.co_kwonlyargcount])


def _replacement(function: Any) -> CodeType:
    """The code that takes what torch's function takes."""
    code = function.__code__
    for known in (_of_2_11, _of_2_15):
        if not code.co_freevars and _parameters(code) == _parameters(known.__code__):
            return known.__code__
    positional, keywords = _parameters(code)
    raise RuntimeError(
        f"patch_checkpoint: torch.utils.checkpoint.checkpoint of this torch takes "
        f"{(*positional, *sorted(keywords))}, which this functx does not know. Call "
        "functx.checkpoint in its place."
    )


# They run under torch's name, with the globals and the defaults of torch's function: they must find
# everything else by themselves.
def _of_2_11(
    function: Any,
    *args: Any,
    use_reentrant: Any = None,
    context_fn: Any = None,
    determinism_check: Any = "default",
    debug: Any = False,
    early_stop: Any = True,
    **kwargs: Any,
) -> Any:
    from functx._patch import _call

    return _call(
        function,
        *args,
        use_reentrant=use_reentrant,
        context_fn=context_fn,
        determinism_check=determinism_check,
        debug=debug,
        early_stop=early_stop,
        **kwargs,
    )


def _of_2_15(
    function: Any = None,
    *args: Any,
    use_reentrant: Any = None,
    preserve_rng_state: Any = True,
    context_fn: Any = None,
    determinism_check: Any = "default",
    debug: Any = False,
    early_stop: Any = True,
    respect_saved_tensors_hooks: Any = None,
    **kwargs: Any,
) -> Any:
    from functx._patch import _call

    return _call(
        function,
        *args,
        use_reentrant=use_reentrant,
        preserve_rng_state=preserve_rng_state,
        context_fn=context_fn,
        determinism_check=determinism_check,
        debug=debug,
        early_stop=early_stop,
        respect_saved_tensors_hooks=respect_saved_tensors_hooks,
        **kwargs,
    )


def _call(function: Any, *args: Any, **options: Any) -> Any:
    if _original is not None and _torch_compiler.of_the_compiler(function):
        return _original(function, *args, **options)
    if function is None and not args:  # with options alone, a decorator
        return lambda f: functools.wraps(f)(functools.partial(_call, f, **options))
    # NOTE [replays are patched]
    return checkpoint(functools.partial(within, Patch, function), *args, **options)


def _apply_function(run_function: Any, preserve_rng_state: bool, *args: Any) -> Any:
    """``CheckpointFunction.apply``."""
    preserve = bool(preserve_rng_state)
    return _call(run_function, *args, use_reentrant=True, preserve_rng_state=preserve)


def _requires_grad_(self: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
    """``Tensor.requires_grad_``, which nobody may call under a transform.

    With checkpointing, transformers and peft register a hook that calls it on what the embeddings
    return, for the sake of the reentrant checkpoint that functx stands in for.
    """
    if requires_grad and _torch.peek_interpreter_stack() is not None:
        frame = getattr(inspect.currentframe(), "f_back", None)
        caller = "" if frame is None else frame.f_code.co_name
        del frame
        if caller.startswith("make_inputs_require_grad"):
            return self
    return _requires_grad(self, requires_grad)


_requires_grad = torch.Tensor.requires_grad_
