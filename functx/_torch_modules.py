"""Private names of modules, and of the frames that they run in: beside `_torch`."""

from __future__ import annotations

import gc
import sys
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch

# The one base class of what normalises over the batch: lazy, synchronised and of any rank.
BatchNorm = torch.nn.modules.batchnorm._BatchNorm

# Hooks of all modules: of FlopCounterMode, which hangs further ones on what modules are given.
_modules: Any = torch.nn.modules.module
global_hooks = _modules._global_forward_pre_hooks
GLOBAL_HOOKS: tuple[dict[int, Any], ...] = (
    *(_modules._global_forward_pre_hooks, _modules._global_forward_hooks),
    *(_modules._global_backward_pre_hooks, _modules._global_backward_hooks),
)
# What is said of some of them.
_ABOUT_HOOKS: tuple[dict[int, Any], ...] = (
    *(_modules._global_forward_hooks_always_called, _modules._global_forward_hooks_with_kwargs),
)
_DICTS_OF_HOOKS = [
    name
    for name in torch.nn.Module().__dict__
    if name.startswith(("_forward_", "_backward_")) and "_hooks" in name
]
_own_hooks = attrgetter("_forward_hooks"), attrgetter("_forward_pre_hooks")
_all_own_hooks = (*_own_hooks, attrgetter("_backward_hooks"), attrgetter("_backward_pre_hooks"))

# Of classes: in C, and whatever an object says is its class.
_are_modules = torch.nn.Module.__subclasscheck__
_are_scripted = torch.jit.ScriptModule.__subclasscheck__

# A frame further up than that of the caller; `inspect` has it by way of the caller's own.
frame_above = sys._getframe


def hooks_in(modules: Collection[torch.nn.Module]) -> list[dict[int, Any]]:
    """The hooks that run around the forwards of some modules."""
    after, before = _own_hooks
    return [*filter(None, map(after, modules)), *filter(None, map(before, modules))]


def calls_hooks_of_modules(x: Any) -> bool:
    """Whether that is behind what ``register_full_backward_hook`` and the like hang on a tape."""
    return isinstance(x, torch.utils.hooks.BackwardHook)


def called_by(x: Any) -> Sequence[Any]:
    """Hooks of a module that such an object calls."""
    return [*x.user_hooks, *x.user_pre_hooks] if calls_hooks_of_modules(x) else ()


def next_hook() -> int:
    """The number that the next hook will have, of all that are hung anywhere."""
    return torch.utils.hooks.RemovableHandle.next_id


def have_hooks(modules: Collection[torch.nn.Module]) -> bool:
    """Whether there are hooks around the forwards or the backwards of some modules."""
    return any(any(map(hooks, modules)) for hooks in _all_own_hooks)


def dicts_of_hooks(module: torch.nn.Module) -> dict[str, dict[int, Any]]:
    """Those in which a module has hooks, or what is said of them, by their numbers; by name."""
    return {name: d for name in _DICTS_OF_HOOKS if (d := module.__dict__.get(name))}


class _Same(dict[int, Any]):
    """The number of a replay's handle. When that takes its hook off, so is what the forward hung.

    Args:
        handle: of the replay; it holds this.
        key: of the hook in the forward, which may be a replay itself.
        dicts: where that hangs.
    """

    def __init__(self, handle: Any, key: int, dicts: Sequence[dict[int, Any]]) -> None:
        super().__init__({handle.id: None})
        self._key, self._dicts = key, dicts
        handle._functx_same = _same[handle.id] = self
        handle.extra_dict_ref = (*handle.extra_dict_ref, weakref.ref(self))

    def __delitem__(self, key: int) -> None:
        super().__delitem__(key)
        for d in self._dicts:
            d.pop(self._key, None)
        if (one := _same.get(self._key)) is not None and self._key in one:
            del one[self._key]

    def __reduce__(self) -> Any:
        """A copied handle takes off nothing of a region's."""
        return OrderedDict, ()


_same: weakref.WeakValueDictionary[int, _Same] = weakref.WeakValueDictionary()


def are_one(handles: Sequence[Any], hung: Sequence[tuple[dict[int, Any], Sequence[int]]]) -> None:
    """Hooks of modules that a replay has hung are those of the forward, to whoever takes them off.

    Args:
        handles: of those that hang there still, in the order of hanging them.
        hung: dicts of modules, and the numbers of what the forward has hung in each.
    """
    dicts = [d for d, _ in hung]
    for d, keys in hung:
        own = [one for one in handles if one.hooks_dict_ref() is d and one.id in d]
        if len(own) == len(keys):
            for handle, key in zip(own, keys):
                _Same(handle, key, dicts)


@contextmanager
def handles_made(made: list[Any]) -> Iterator[None]:
    """Note the handles of hooks that this thread makes."""
    kind, thread = torch.utils.hooks.RemovableHandle, threading.get_ident()
    make = kind.__init__

    def noting(handle: Any, *args: Any, **kwargs: Any) -> None:
        make(handle, *args, **kwargs)
        if threading.get_ident() == thread:
            made.append(handle)

    kind.__init__ = noting  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        kind.__init__ = make  # type: ignore[method-assign]


def hooks_of_all() -> list[dict[int, Any]]:
    """Those of all modules, now."""
    return [*map(dict, GLOBAL_HOOKS + _ABOUT_HOOKS)]


def set_hooks_of_all(hooks: list[dict[int, Any]] | None) -> None:
    """Put back what `hooks_of_all` gave; none, for ``None``."""
    for i, there in enumerate(GLOBAL_HOOKS + _ABOUT_HOOKS):
        there.clear()
        if hooks is not None:
            there.update(hooks[i])


def frames_of_threads() -> list[types.FrameType]:
    """Where each thread is now; no public way tells."""
    return [*sys._current_frames().values()]


def is_scripted(module: torch.nn.Module) -> bool:
    """Whether a module is TorchScript, whose state is in C++; all below it is, too."""
    return isinstance(module, torch.jit.ScriptModule)


def modules_of(module: torch.nn.Module, others: Any) -> dict[int, torch.nn.Module]:
    """By its id, a module and all below it: ``modules()``, which takes three times as long.

    None where it is scripted, or has not begun to be a module (``super().__init__()``).

    Args:
        module: by its type.
        others: there what is below but is none by its type is added: a child may know its parent
            by a weak proxy, which says that it is a module.
    """
    found = {id(module): module}
    try:
        stack = [module]
        while stack:
            for child in [*stack.pop()._modules.values()]:
                if child is not None and id(child) not in found:
                    found[id(child)] = child
                    stack.append(child)
        kinds = {*map(type, found.values())}
        unusual = not all(map(_are_modules, kinds)) or any(map(_are_scripted, kinds))
    except Exception:  # none by its type, or not yet
        unusual = True
    return _unusual(module, others) if unusual else found


def _unusual(module: torch.nn.Module, others: Any) -> dict[int, torch.nn.Module]:
    found: dict[int, torch.nn.Module] = {}
    stack = [module]
    while stack:
        one = stack.pop()
        if not _are_modules(type(one)):
            others.append(one)
        elif not _are_scripted(type(one)) and "_modules" in one.__dict__:
            found[id(one)] = one
            children = one.__dict__["_modules"].values()
            stack += [c for c in children if c is not None and id(c) not in found]
    return found


def buffers_of(module: torch.nn.Module) -> dict[str, Any]:
    """The dict in which a module keeps its own buffers."""
    return module._buffers


def forget_lent_weights() -> None:
    """Take from recurrent modules the weights that ``functional_call`` had lent them.

    They keep a list of their weights, which is brought up to date when they are called next.
    """
    for module in gc.get_objects():
        if issubclass(type(module), torch.nn.RNNBase):
            module._update_flat_weights()


def running_modules() -> list[torch.nn.Module]:
    """The modules whose forward is running, innermost first."""
    running: list[torch.nn.Module] = []
    frame: Any = frame_above(1)
    while frame is not None:
        if frame.f_code is torch.nn.Module._call_impl.__code__:
            running.append(frame.f_locals["self"])
        frame = frame.f_back
    return running


def module_path() -> str:
    """Where among the modules that are running this is, from the outermost one: ``"0.attn"``."""
    running = running_modules()
    if not running:
        return ""
    for path, module in running[-1].named_modules(remove_duplicate=False):
        if module is running[0]:
            return path
    return ""
