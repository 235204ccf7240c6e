"""Nodes and leaves of tapes: the part of `_torch` about hooks on them, and new leaves."""

from __future__ import annotations

import functools
import re
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import _HookMixin

# Before a node, past what its class makes of it.
register_prehook = torch._C._FunctionBase.register_prehook


def _getters(*names: str) -> tuple[Callable[..., Any], ...]:
    """What function modes are shown where these attributes of a tensor are read."""
    return tuple(getattr(torch.Tensor, name).__get__ for name in names)


GRAD_FN, BASE, IS_LEAF, RETAINS = _getters("grad_fn", "_base", "is_leaf", "retains_grad")
HOOK_DICTS = _getters("_backward_hooks", "_post_accumulate_grad_hooks")
ABOUT_ITS_TAPE = (
    *(GRAD_FN, BASE, IS_LEAF, RETAINS, *HOOK_DICTS, *_getters("output_nr", "_version")),
    torch.Tensor._is_view,
)
"""What a tensor tells about its tape."""


def wrap_hook_registration(function: Any, wrapper: Callable[[Any], Any]) -> None:
    """Wrap how hooks are hung on the nodes of a Function."""
    node = function._backward_cls
    for name in ("register_hook", "register_prehook"):
        setattr(node, name, wrapper(getattr(node, name)))


def tell_of_hooks(function: Any, hung: Callable[[Any, torch.Tensor, Any, Any], bool]) -> None:
    """Call back when a result of a Function's node gets its first hook: with the dict of them.

    And with what hangs a dict of hooks on a result, which is not done if the answer is yes.

    The engine calls the hooks of all results of a node when it comes by, with ``None`` for those to
    which nothing flows. A result that has a node of its own is not come by then: so they are called
    only where something does.
    """
    register = function._backward_cls._register_hook_dict

    def registering(node: Any, t: torch.Tensor) -> None:
        hooks = t._backward_hooks = _Hooks()
        if not hung(node, t, hooks, functools.partial(_hang, register, node)):
            register(node, t)

    function._backward_cls._register_hook_dict = registering


def let_compiled_autograd_see(
    function: Any, check: Callable[[Any], None] = lambda ctx: None
) -> None:
    """Compiled autograd keeps what it has traced by a key, which only torch's public class has.

    The node is given its context at each call, and its ``backward`` is not looked into.

    Args:
        function: a Function of the engine's own.
        check: is called with each node before it is traced.
    """

    def key(ctx: Any) -> tuple[int]:
        check(ctx)
        return (ctx._autograd_function_id,)

    function._compiled_autograd_key = staticmethod(key)


def _hang(register: Any, node: Any, t: torch.Tensor, hooks: dict[int, Any]) -> None:
    """Hang hooks on a result of a node, which look as if they were nobody's."""
    with torch._C.DisableTorchFunction():
        theirs = t._backward_hooks
        t._backward_hooks = hooks
        register(node, t)
        t._backward_hooks = theirs


class EngineHook:
    """A hook of functx's own on a tensor; by itself, so that there is a dict that others are in."""

    __torch_unserializable__ = True  # torch.save does not say that it leaves it out
    goes_along = False  # with the tensor, where that has another tape

    def is_on(self, t: torch.Tensor) -> None:
        """It is on another tensor now, by `become`."""

    def __call__(self, cotangent: torch.Tensor | None) -> Any:
        """Nothing."""


class _Hooks(OrderedDict[int, Any]):
    """Hooks on a tensor's gradient, of which a user's are not called with ``None``.

    Attributes:
        given: those that gave another gradient, by their keys, since it was cleared.
    """

    def __init__(self) -> None:
        super().__init__()
        self.given: set[int] = set()

    def __setitem__(self, key: int, hook: Any) -> None:
        if not isinstance(hook, EngineHook):
            hook = _unless_nothing(hook, functools.partial(self.given.add, key))
        super().__setitem__(key, hook)


def _unless_nothing(hook: Callable[[Any], Any], changes: Callable[[], None]) -> Any:
    if is_of_several(hook):
        _only_with_something(hook)
        return hook

    @functools.wraps(hook)
    def called(gradient: Any) -> Any:
        if gradient is None or (other := hook(gradient)) is None:
            return None
        changes()
        return other

    return called


def is_of_several(hook: Any) -> bool:
    """Whether it is one of the hooks by which ``register_multi_grad_hook`` waits for all tensors.

    These count: each is to be called if its node runs, also with nothing.
    """
    return is_of_many(hook) and {"fn", "nb_calls"} <= {*hook.__code__.co_freevars}


def is_of_many(hook: Any) -> bool:
    """Whether it is one of those that ``register_multi_grad_hook`` hangs on several tensors."""
    by = torch.autograd.graph.register_multi_grad_hook
    code = getattr(hook, "__code__", None)
    return (
        isinstance(code, types.CodeType)
        and code.co_filename == by.__code__.co_filename
        and code.co_qualname.startswith(by.__qualname__)
    )


def _only_with_something(hook: Any) -> None:
    """Have the user's function not called where nothing came to any of the tensors."""
    cell = hook.__closure__[hook.__code__.co_freevars.index("fn")]
    if isinstance(cell.cell_contents, _WithSomething):
        return
    cell.cell_contents = _WithSomething(cell.cell_contents)


class _WithSomething:
    """A function of several gradients, of which one is there at least."""

    def __init__(self, fn: Callable[[Sequence[Any]], Any]) -> None:
        self._fn = fn

    def __call__(self, gradients: Sequence[Any]) -> None:
        if any(g is not None for g in gradients):
            self._fn(gradients)


def tells_where(handle: Any) -> bool:
    """Whether a handle tells where its hook hangs, as torch's do."""
    return hasattr(handle, "hooks_dict_ref")


def where_hung(handle: Any) -> Callable[[], Any]:
    """What tells the dict that a hook hangs in, by its handle; ``None`` if that is gone."""
    found: Callable[[], Any] = handle.hooks_dict_ref
    return found


def hook_of(handle: Any) -> Any:
    """What a handle takes off; ``None`` if that hangs there no more."""
    return (handle.hooks_dict_ref() or {}).get(handle.id)


def tell_of_removal(handle: Any, told: dict[int, Any]) -> None:
    """Have the number of a handle deleted from a dict, too, when it takes its hook off."""
    ref = weakref.ref(told)
    alive = lambda: nowhere() if (found := ref()) is None else found  # noqa: E731
    handle.extra_dict_ref = (*handle.extra_dict_ref, alive)


def belongs_to(handle: Any, one: Any) -> Any:
    """Have a handle know what it belongs to, weakly; what it belonged to before, if that lives."""
    known = getattr(handle, "_functx_one", None)
    handle._functx_one = weakref.ref(one)
    return None if known is None or (found := known()) is one else found


def exchange_hook(handle: Any, exchanged: Callable[[Any], Any]) -> None:
    """Hang another hook in place of one, by its handle, if it still hangs."""
    if (hook := hook_of(handle)) is not None:
        dict.__setitem__(handle.hooks_dict_ref(), handle.id, exchanged(hook))


def rehang(handle: Any, hang: Callable[[Any], Any]) -> None:
    """Hang a hook elsewhere, by ``hang``; its handle takes it off there."""
    hook = handle.hooks_dict_ref().pop(handle.id)
    handle.hooks_dict_ref = (there := hang(hook)).hooks_dict_ref
    hooks = handle.hooks_dict_ref()
    hooks[handle.id] = hooks.pop(there.id)


def when_the_pass_has_ended(call: Callable[[], None]) -> None:
    """Call ``call`` when the backward pass that this thread is in has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


class _Nowhere(OrderedDict[int, Any]):
    def __reduce__(self) -> Any:
        return nowhere, ()


_NOWHERE = _Nowhere()


def nowhere() -> Any:
    """A dict in which nothing hangs: what a copied handle knows, weakly, in place of another."""
    return _NOWHERE


def observe_hooks_of_nodes(
    observe: Callable[[Any, Callable[[], tuple[Any, Any]]], tuple[Any, Any]],
) -> None:
    """Have ``observe`` hang hooks on nodes, which no mode is shown.

    Args:
        observe: is given the dict of hooks that a node has already, if it has one, and what hangs
            a further one; gives what that does, the dict and the handle.
    """
    hang = torch.autograd.Function._register_hook

    def register_hook(hooks: Any, hook: Any) -> tuple[Any, Any]:
        return observe(hooks, functools.partial(hang, hooks, hook))

    _HookMixin._register_hook = staticmethod(register_hook)  # type: ignore[method-assign]


def has_hooks(t: torch.Tensor) -> bool:
    """Whether a tensor has a hook on its gradient; no public way tells."""
    hooks = t._backward_hooks
    return bool(hooks) and has_users_hook(hooks)


def hooks_after(t: torch.Tensor) -> Any:
    """The dict of the hooks of a leaf for when its gradient is accumulated, or nothing."""
    return t._post_accumulate_grad_hooks


def hooks_of(t: torch.Tensor) -> Any:
    """The dict of the hooks of a tensor that has some."""
    return t._backward_hooks


def users_keys(hooks: Any) -> list[int]:
    """Of a dict of hooks, the keys of those that are not functx's own."""
    return [key for key, hook in hooks.items() if not isinstance(hook, EngineHook)]


def has_users_hook(hooks: Any) -> bool:
    """Whether there is a hook that is not functx's own."""
    return hooks is not None and not all(isinstance(h, EngineHook) for h in hooks.values())


def forget_hooks(t: torch.Tensor) -> None:
    """Nothing hangs on ``t``: its hooks went with its tape, and it would not hang further ones."""
    if t._backward_hooks is not None:
        t._backward_hooks = None


def number(node: Any, n: int) -> None:
    """Have a node run as if it was made when the count was ``n``."""
    node._set_sequence_nr(n)


def can_become(t: torch.Tensor) -> bool:
    """Whether ``t`` is plain, and nobody looks at its gradient, so that `become` may be called."""
    return type(t) is torch.Tensor and not (has_hooks(t) or t.retains_grad)


def become(t: torch.Tensor, new: torch.Tensor) -> bool:
    """Make ``t``, whoever holds it, another tensor; not where C++ holds one of them, as a tape."""
    if t._use_count() > 1 or new._use_count() > 1:  # type: ignore[attr-defined]
        return False
    hooks = new._backward_hooks  # which the object has, not what is swapped
    torch._C._swap_tensor_impl(t, new)
    if hooks is not None:
        t._backward_hooks = hooks
        for hook in hooks.values():
            if isinstance(hook, EngineHook):
                hook.is_on(t)
    return True


def graph_is_kept() -> bool:
    """Whether the tape that the engine is running stays: ``retain_graph``; no public way tells."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def saves(node: Any) -> bool:
    """Whether a node can't run twice without ``retain_graph``; by its kind, if it is C++'s."""
    kind = type(node)
    if (found := _saves.get(kind)) is None:
        if issubclass(kind, torch._C._FunctionBase):
            return bool(node._raw_saved_tensors)
        names = ("CopySlices", "CppFunction")
        found = kind.__name__ in names or any(n.startswith("_raw_saved") for n in dir(kind))
        _saves[kind] = found
    return found


_saves: dict[type, bool] = {}


def is_of_python(node: Any) -> bool:
    """Whether a node is that of a custom Function."""
    return isinstance(node, torch._C._FunctionBase)


def hang_before(node: Any, hook: Callable[[Any], Any]) -> None:
    """Hang a hook before a node of any kind, past what its class makes of it."""
    if is_of_python(node):
        register_prehook(node, hook)
    else:
        node.register_prehook(hook)


def saved_by(node: Any) -> list[torch.Tensor] | None:
    """The tensors that a node of torch's own has saved; ``None`` of nodes that do not tell."""
    names = _saved_names.get(type(node), ())
    if names == ():
        names = _saved_names[type(node)] = _names_of_saved(type(node))
    if names is None:
        return None
    found: list[torch.Tensor] = []
    for name in names[1:]:
        saved = getattr(node, name)
        if isinstance(saved, torch.Tensor):
            found.append(saved)
        elif isinstance(saved, tuple):
            found += [t for t in saved if isinstance(t, torch.Tensor)]
    return found


_saved_names: dict[type, Sequence[str] | None] = {}
_GENERATED = re.compile(r"(?<!Cpp)Backward\d+")


def _names_of_saved(kind: type) -> Sequence[str] | None:
    if kind.__name__ == "AccumulateGrad":
        return ("",)
    # What torch generates from its formulas has all that it saves as attributes.
    if issubclass(kind, torch._C._FunctionBase) or not _GENERATED.search(kind.__name__):
        return None
    return ("", *(name for name in dir(kind) if name.startswith("_saved_")))


def tensor_over(
    t: torch.Tensor, requires_grad: bool, kind: type[torch.Tensor] = torch.Tensor
) -> torch.Tensor:
    """``t.detach().requires_grad_(requires_grad)`` of a plain tensor, shown to no dispatch mode.

    To be shown a ``detach`` takes modes more time than all else about it.
    """
    return torch.Tensor._make_subclass(kind, t, requires_grad)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def behind_a_node(t: torch.Tensor) -> torch.Tensor:
    """``t``, behind a node that hands its gradient on where it is a leaf.

    Whether a backward pass asks for the gradient of a leaf, torch says only by an exception that
    holds the stack of C++: tens of microseconds, where the answer for any other node takes 0.1.
    """
    if (
        t.requires_grad
        and t.grad_fn is None
        and type(t) in _PLAIN
        and t.layout is torch.strided
        and not t.is_nested
    ):
        return t[...]  # an alias; by its operator, it takes twice the time
    return t
