"""Hooks of a body that a backward pass calls with parts of a gradient.

NOTE [in parts]
Without remat a backward pass calls a hook once, with all that flows to its tensor. With remat that
comes together in the replay for a node's pullback. But where derivatives of gradients are taken,
some of it comes by the pullback of the node, and some by the pullback of a pullback, each with its
own replay. What a hook makes of the parts adds up to what it makes of the whole if it is linear;
`clamp` is not. So from the second part on a hook is called once more, with the whole, and it is an
error that this is something else.

What a replay calls in running something again belongs to no pass. And there are no parts where no
pullback of the region has been recorded in a pass before: then nothing is kept to be compared.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from functx import _torch, _torch_nodes, _torch_vmap
from functx._errors import RematError
from functx._torch_fake import FakeTensor


class _Running(threading.local):
    of: int | None = None  # the backward pass that pulls back what a replay has put on a tape
    again = False  # whether what runs is a part of a replay: it was run before
    around = False  # whether the replay that is under way is


running = _Running()

Gradients = tuple["Tensor | None", ...]


class Parts:
    """What a hook was given in a backward pass, and what it made of that.

    Attributes:
        recorded_in: the pass in which a pullback was recorded first; ``None`` if none was.
        so_far: the sums, by the pass, until it has ended; of the outermost region's alone.
    """

    recorded_in: int | None = None
    so_far: Mapping[int, tuple[Gradients, Gradients]] = MappingProxyType({})

    def around(self) -> Parts | None:
        """The same hook, as the region around knows it."""
        return None

    def outermost(self) -> Parts:
        """The same hook, as the outermost region knows it."""
        around = self.around()
        return self if around is None else around.outermost()

    def may_be_given_parts(self, backward: int) -> bool:
        """Whether a pullback of a region that has it was recorded before a pass."""
        around = self.around()
        recorded = self.recorded_in not in (None, backward)
        return recorded or (around is not None and around.may_be_given_parts(backward))

    def add(self, hook: Callable[..., Any], given: Sequence[Any], made: Any, region: str) -> None:
        """The hook was called.

        Args:
            hook: which is called again.
            given: what it was given: the gradient of a tensor; or tuples, of a node.
            made: what it gave.
            region: its name, for messages.

        Raises:
            RematError: what it makes of the parts is not what it makes of the whole.
        """
        backward = running.of
        if backward is None or not self.may_be_given_parts(backward):
            return
        one = self.outermost()
        with torch.no_grad(), _torch.without_modes():
            whole = _flat(given)
            sums = _flat(given[:1] if made is None else [made])
            if backward in one.so_far:
                before, made_before = one.so_far[backward]
                whole, sums = _added(before, whole), _added(made_before, sums)
                one.forget(backward)
                if not _are_close(_flat([_made_of(hook, given, whole)]), sums):
                    raise _not_linear(region)
            one.so_far = {**one.so_far, backward: (whole, sums)}

    def forget(self, backward: int) -> None:
        """A pass has ended."""
        self.so_far = {key: sums for key, sums in self.so_far.items() if key != backward}


def _flat(tree: Any) -> Gradients:
    """Of nested tuples; off all tapes."""
    flat: list[Tensor | None] = []
    for x in tree:
        if isinstance(x, (tuple, list)):
            flat += _flat(x)
        else:
            as_it_is = x is None or _torch_vmap.is_legacy_batched(x)  # which nothing detaches
            flat.append(x if as_it_is else x.detach())
    return tuple(flat)


def _added(a: Gradients, b: Gradients) -> Gradients:
    return tuple(y if x is None else x if y is None else x + y for x, y in zip(a, b))


def _made_of(hook: Callable[..., Any], given: Sequence[Any], whole: Gradients) -> Any:
    rest = iter(whole)
    args = [tuple(next(rest) for _ in x) if isinstance(x, tuple) else next(rest) for x in given]
    made = hook(*args)
    return args[0] if made is None else made


def _are_close(these: Gradients, those: Gradients) -> bool:
    """Up to rounding, as seen by the largest entry."""
    return len(these) == len(those) and all(map(_is_close, these, those))


def _is_close(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return all(x is None or not _is_true(x.any()) for x in (a, b))
    if a.shape != b.shape:
        return False
    if not a.numel() or isinstance(a, FakeTensor):  # as where a graph is traced
        return True
    largest = torch.maximum(a.abs().max(), b.abs().max())
    apart = (a - b).abs().max()
    differ = apart > _ROUNDINGS * torch.finfo(a.dtype).eps * largest  # where all are numbers
    return not _is_true(differ)


def _is_true(t: Tensor) -> bool:
    """Whether it is, of any of the examples."""
    while _torch.is_wrapped(t):
        t = _torch.get_unwrapped(t)
    if _torch_vmap.is_legacy_batched(t):
        t = _torch_vmap.remove_legacy_batch_dim(t, _torch_vmap.legacy_vmap_level(), 0, 0)
    return bool(t.any())


_ROUNDINGS = 1024


def _not_linear(region: str) -> RematError:
    return RematError(
        f"remat: a hook that the region {region!r} hangs inside changes gradients, and one "
        "backward pass, which takes a derivative of a gradient, hands them to it in parts; of the "
        "parts it makes something else than of the whole. Hang it outside of the region, on an "
        "argument or a result, or take it off for this pass."
    )


def in_parts(
    hook: Callable[..., Any],
    parts: Parts,
    region: str,
    of_user: Any,
) -> Any:
    """``hook``, that is looked at where it is given parts. ``NOTE [in parts]``.

    Args:
        hook: that a replay has hung.
        parts: what is known of it.
        region: its name, for messages.
        of_user: what was hung.
    """

    @functools.wraps(hook)
    def called(*gradients: Any) -> Any:
        made = hook(*gradients)
        parts.add(hook, gradients, made, region)
        return made

    called.__dict__[_OF] = of_user
    return called


def of_the_user(hook: Any) -> Any:
    """What was hung, where that is `in_parts`."""
    while (inside := getattr(hook, "__dict__", {}).get(_OF)) is not None:
        hook = inside
    return hook


_OF = "functx_hook"


def begins(hooks: Sequence[Parts], *, recorded: bool) -> None:
    """A backward pass comes to the node of a region.

    Args:
        hooks: that its body hangs.
        recorded: whether the pullback is.
    """
    running.of = backward = _torch.current_graph_task_id()
    for hook in hooks:
        if recorded and hook.recorded_in is None:
            hook.recorded_in = backward
    if any(hook.may_be_given_parts(backward) for hook in hooks):
        _torch_nodes.when_the_pass_has_ended(functools.partial(_forget, hooks, backward))


def _forget(hooks: Sequence[Parts], backward: int) -> None:
    for hook in hooks:
        hook.outermost().forget(backward)
