"""Where tapes begin and reach, and what torch before 2.13 needs to keep them: beside `_torch`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from functx import _torch, _torch_compiler, _torch_nodes


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def _python_nodes_live_on() -> bool:
    """Whether the Python object of a custom Function's node keeps the node, as since torch 2.13."""
    node = _Same.apply(torch.ones((), requires_grad=True)).grad_fn
    try:
        return bool(node.next_functions)
    except RuntimeError:
        return False


_NODES_LIVE_ON = _python_nodes_live_on()


def gradient_edge(t: torch.Tensor) -> Any:
    """Where the tape of ``t`` begins; ``t`` itself where it is a leaf."""
    node = t.grad_fn
    if node is None:
        return t
    owner = None
    if not _NODES_LIVE_ON and isinstance(node, torch.autograd.function.BackwardCFunction):
        with _torch.without_modes(), torch.enable_grad():
            owner = t.view_as(t).grad_fn  # a node below which the other one lives
    return torch.autograd.graph.GradientEdge(node, t.output_nr, owner)


def node_of(t: torch.Tensor) -> Any:
    """The node that the tape of ``t`` begins with: of a leaf, what accumulates its gradient.

    ``None`` for a wrapper of a level that has ended.
    """
    if t.grad_fn is not None:
        return t.grad_fn
    with torch.enable_grad():
        node = t.view_as(t).grad_fn
    return None if node is None else node.next_functions[0][0]


def node_lives(t: torch.Tensor) -> bool:
    """Whether that is there, and not made to be looked at: somebody has it, or a tape."""
    if t.grad_fn is not None or (node := node_of(t)) is None:
        return t.grad_fn is not None
    node.metadata["functx asks"] = True
    del node
    return node_of(t).metadata.pop("functx asks", False)


def hung_how(node: Any, handle: Any) -> str | None:
    """The method of a node that has hung the hook of this handle on it; ``None`` if none has."""
    hooks = handle.hooks_dict_ref()
    for name in ("register_hook", "register_prehook"):
        probe = getattr(node, name)(_nothing)  # no other way shows the hooks of a node
        probe.remove()
        if probe.hooks_dict_ref() is hooks:
            return name
    return None


def has_hooks_of_users(node: Any) -> bool:
    """Whether hooks hang on a node of torch's own, or before it, that are not functx's."""
    found: list[Any] = []
    for name in ("register_hook", "register_prehook"):
        if not _torch_nodes.is_of_python(node):
            probe = getattr(node, name)(_nothing)
            hooks = probe.hooks_dict_ref()
            probe.remove()
            found += hooks.values()
    return not all(type(hook).__module__.startswith("functx.") for hook in found)


def _nothing(*gradients: Any) -> None:
    """A hook."""


class _IfAccumulated:
    """A hook for when a gradient is accumulated, which torch calls where none is, too."""

    def __init__(self, hook: Any) -> None:
        functools.update_wrapper(self, hook, updated=())
        self._hook = hook
        self.nothing_in = -1  # the backward pass in which nothing came

    def __call__(self, leaf: torch.Tensor) -> None:
        if self.nothing_in != _torch.current_graph_task_id():
            self._hook(leaf)


class _Coming(_torch_nodes.EngineHook):
    """Sees what comes to a leaf, once."""

    def __init__(self, leaf: torch.Tensor) -> None:
        self._leaf = weakref.ref(leaf)
        self._handle = leaf.register_hook(self)

    def __call__(self, gradient: torch.Tensor | None) -> None:
        self._handle.remove()
        if (leaf := self._leaf()) is not None and gradient is None:
            for hook in (_torch_nodes.hooks_after(leaf) or {}).values():
                if isinstance(hook, _IfAccumulated):
                    hook.nothing_in = _torch.current_graph_task_id()


def calls_only_with_a_gradient(leaf: torch.Tensor) -> None:
    """Let hooks of a leaf not be called in this backward pass if no gradient comes to it."""
    if hooks := _torch_nodes.hooks_after(leaf):
        for key, hook in [*hooks.items()]:
            if not isinstance(hook, _IfAccumulated):
                hooks[key] = _IfAccumulated(hook)
        with _torch.without_modes():
            _Coming(leaf)


def pull_back(
    edges: Sequence[Any],
    inputs: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor],
    *,
    retain_graph: bool,
    create_graph: bool,
) -> Sequence[torch.Tensor]:
    """As transforms of torch.func do it, from edges; zeros for what they do not lead to."""
    found: Sequence[torch.Tensor | None] = [None] * len(inputs)
    if edges and inputs:
        with _torch_compiler.without_compiled_autograd():
            found = torch.autograd.grad(
                edges,
                inputs,
                cotangents,
                retain_graph=retain_graph,
                create_graph=create_graph,
                allow_unused=True,
            )
    return [torch.zeros_like(t) if g is None else g for t, g in zip(inputs, found)]


def requires_grad_anywhere(t: torch.Tensor) -> bool:
    """Whether the tape of any level knows ``t``."""
    while not t.requires_grad:
        if not _torch.is_wrapped(t):
            return False
        t = _torch.get_unwrapped(t)
    return True


def is_computed(t: torch.Tensor) -> bool:
    """Whether the memory of ``t`` was made by an operation that a tape of some level knows."""
    while True:
        base = _torch.view_base(t)
        if (t if base is None else base).grad_fn is not None:
            return True
        if not _torch.is_wrapped(t):
            return False
        t = _torch.get_unwrapped(t)
