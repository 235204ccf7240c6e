"""Pullbacks of regions whose run is a known one: the same operations as before, without a replay.

NOTE [known pullbacks]
The first run of a region that is as a known one (``NOTE [known runs]`` in `_known_runs`) has called
the same functions on the same tensors with the same numbers. So its pullback, for the same results
and the same inputs, runs the same ATen operations, in surroundings that are as they were. These are
written down once (`_straight_line`), and from then on run as they are: no Python of the user's, no
mode, no tape, no second run of torch's engine.

The replay that is written down is that of a run like others: it is the pullback, and lets go of
memory as ever. A dispatch mode may change which formula torch takes for a derivative. So when what
was written down runs first, it is compared with an ordinary replay, bit by bit, and each gradient
goes when it has been looked at: the inputs and the cotangents stay, till the replay has them. Where
anything is unusual (modes, hooks, transforms, anomaly mode, other surroundings), there is an
ordinary replay as ever. Under ``vmap``, what the code computes with is what is inside of batched
tensors. What a body has written to, a buffer that counts, the code gets as it was.

Code that draws random numbers begins where the generators were, and draws in the same order. That
gives the same numbers if nothing but operations moves generators, which each forward looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from functx import _torch, _torch_vmap
from functx._remat import _room
from functx._remat._arguments import LIST
from functx._remat._entry import Entry
from functx._remat._known_runs import sharing
from functx._remat._lines import Code, Trial, lean_checksum
from functx._remat._profile import shown
from functx._remat._room import Needs
from functx._remat._straight_line import Recorder, may_be_written
from functx._remat._tapes import PLAIN
from functx._torch_kernels import overriding
from functx._torch_memory import storage_keys
from functx._torch_modes import below_autograd
from functx._torch_operators import OTHERWISE_UNDER_MODES

PullBack = Callable[[list[Tensor], list[Tensor]], "list[Tensor | None]"]
"""An ordinary pullback, of what a node has saved and of cotangents; it empties both lists."""

Levels = tuple[tuple[int, int], ...]
"""Numbers of levels, outermost first, and the dimension that each maps over."""

_VMAP = _torch.TransformType.Vmap
_MANY = 16
# How many tensors those read that make tensors of numbers, if these are all that they make them of.
_READS = {torch.tensor: 0, torch.as_tensor: 0, torch.asarray: 0, Tensor.new_tensor: 1}
_PLAIN = frozenset(PLAIN)


class Known:
    """What is known of a pullback.

    Attributes:
        code: what does the same; ``None`` where there is none.
        levels: for each gradient, those of ``vmap`` at which it is batched, see `_taken_apart`.
        needs: what the code needs.
        trial: gives checksums of the gradients instead.
        seen: whether it was compared with a replay.
        shared: which inputs and constants share memory, and where each begins; ``None`` if none do.
        size: how many operations it runs.
    """

    __slots__ = ("code", "levels", "needs", "seen", "shared", "size", "trial")

    def __init__(self, shared: Any = None) -> None:
        self.code: Code | None = None
        self.trial: Trial | None = None
        self.needs: Needs | None = None
        self.levels: Sequence[Levels] = ()
        self.seen = False
        self.shared = shared
        self.size = 0

    def __call__(self, code: Code, given: list[Tensor]) -> list[Tensor | None]:
        """The gradients, from what `_taken_apart` gives; the list is emptied."""
        with _torch.cleared_interpreter_stack(), below_autograd():
            gradients = code(given)
        if not self.levels:
            return gradients
        return [None if g is None else _batched(g, of) for g, of in zip(gradients, self.levels)]

    def written(self, recorder: Recorder, gradients: Sequence[Tensor | None]) -> None:
        """Take what a recorder has written down, if it can be told where gradients come from."""
        found = _taken_apart([g for g in gradients if g is not None], False)
        if found is None:
            return
        plain, layouts = map(iter, found)
        self.code = recorder.code([None if g is None else next(plain) for g in gradients])
        self.trial, self.needs, self.size = recorder.trial, recorder.needs, recorder.size
        levels = [() if g is None else next(layouts)[0] for g in gradients]
        self.levels = levels if any(levels) else ()

    def tried(self, given: list[Tensor]) -> Any:
        """Checksums of gradients; ``None`` where it fails: the replay says what there is to say."""
        trial = self.trial
        if trial is None:  # another thread was here
            return None
        try:
            with _torch.cleared_interpreter_stack(), below_autograd():
                return trial(given)
        except Exception:
            return None
        finally:
            given.clear()


def _batched(t: Tensor, levels: Levels) -> Tensor:
    for level, dim in reversed(levels):
        t = _torch.add_batch_dim(t, dim, level)
    return t


def known_gradients(
    payload: Any,
    saved: list[Tensor],
    cotangents: list[Tensor],
    asked: Any,
    pull_back: PullBack,
) -> list[Tensor | None] | None:
    """The gradients of a region's inputs, if its pullback is known, or may be from now on.

    Args:
        payload: of the node.
        saved: what the node has saved; emptied if there is an answer.
        cotangents: likewise.
        asked: what else decides which operations run: which results, which gradients.
        pull_back: an ordinary replay.

    Returns:
        What ``pull_back`` gives; ``None`` if that is to be called.
    """
    region = payload.region
    environment = region.environment
    drawn = environment.drawn_from()
    if drawn is None or not _is_usual(payload) or environment.differ():
        return None
    name = region.options.name
    constants = [c.found(name) for c in region.constants if not c.is_absent()]
    kept = len(saved) + len(constants)
    apart = _taken_apart([*saved, *constants, *cotangents], payload.level > 0)
    if apart is None:
        return None
    given, layouts = apart
    del apart, constants
    pullbacks, key = region.ledger.pullbacks, (asked, layouts)
    known = pullbacks.get(key)
    code = None if known is None else known.code
    if known is not None and (code is None or known.shared != _shared(given, kept, known.shared)):
        return None
    if known is not None and code is not None and known.seen:
        saved.clear()
        cotangents.clear()
        with shown(region.options, replay=True), environment.drawing():
            return known(code, given)
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return None  # what compares bits waits for the device, which a capture does not allow
    if known is None and (len(pullbacks) >= _MANY or not _are_apart(given, kept)):
        return None
    level = _room.begins(given)
    new, bits = known, None
    if new is None:
        new, recorder = _to_be_written(payload, given, kept, drawn)
        del given
        with recorder or nullcontext():
            gradients = pull_back(saved, cotangents)
        if recorder is not None:
            with suppress(Exception):  # no concern of those who get the gradients
                new.written(recorder, gradients)
    else:
        tried = new.needs is not None and _room.is_there(level, new.needs)
        if tried:
            with environment.drawing():
                bits = new.tried(given)
        del given
        gradients = pull_back(saved, cotangents)
        # In this order: other threads may be here as well.
        if tried and (
            bits is None or bits != [None if g is None else lean_checksum(g) for g in gradients]
        ):
            new.code = None
        elif tried:
            new.seen = True
            new.trial = None
    found = _taken_apart([g for g in gradients if g is not None], False)
    _room.ends(() if found is None else found[0], level, new.needs)
    pullbacks.setdefault(key, new)
    return gradients


def _to_be_written(
    payload: Any, given: Sequence[Tensor], kept: int, drawn: Sequence[Any]
) -> tuple[Known, Recorder | None]:
    """A pullback that is not known yet, and what writes it down, if that may be."""
    region = payload.region
    environment = region.environment

    def usual() -> bool:
        with overriding():  # or not, operators don't ask
            return not environment.differ()

    known = Known(_shared(given, kept))
    kinds = [step.kind for step in region.ledger.steps]
    if any(k.func in OTHERWISE_UNDER_MODES or not may_be_written(k) for k in kinds):
        return known, None
    literals = not any(map(_makes_of_tensors, region.entries))
    there = [i for i, need in enumerate(payload.needed) if need]
    passing = [n for n, i in enumerate(there) if i in payload.passing]
    return known, Recorder(given, kept, usual, literals, passing, drawn)


def _makes_of_tensors(entry: Entry) -> bool:
    """Whether an operation makes a tensor of the values of others, which nobody sees it read."""
    if entry.func == Tensor.__getitem__:
        return LIST in entry.scalars and len(entry.sources) > 1
    try:
        return len(entry.sources) > _READS.get(entry.func, len(entry.sources))
    except TypeError:  # not hashable
        return False


def _shared(given: Sequence[Tensor], kept: int, before: Any = ()) -> Any:
    if before is None:  # where none of them did, it is no matter whether some do
        return None
    found = sharing(given[:kept])
    return None if found is None else (found, [t.storage_offset() for t in given[:kept]])


def _are_apart(given: Sequence[Tensor], kept: int) -> bool:
    """Whether no cotangent has memory of anything else.

    In code each is known by its memory, and what is one now may be two another time. That of inputs
    and constants is shared in all known runs, or in none.
    """
    keys = storage_keys(given)
    cotangents = {*keys[kept:]}
    return len(cotangents) == len(given) - kept and cotangents.isdisjoint(keys[:kept])


def _is_usual(payload: Any) -> bool:
    """Whether nothing is there that an ordinary pullback would take note of."""
    return not (
        (payload.level == 0 and torch.is_grad_enabled())
        or _torch.function_mode_depth()
        or _torch.dispatch_mode_depth()
        or any(i.key() != _VMAP for i in _torch.interpreters())
        or _torch.forward_ad_level() >= 0
        or _torch_vmap.legacy_vmap_level()
        or torch.is_anomaly_enabled()
        or torch.is_inference_mode_enabled()
    )


def _taken_apart(
    tensors: Sequence[Tensor], at_a_level: bool
) -> tuple[list[Tensor], tuple[Any, ...]] | None:
    """The plain tensors inside of some, and for each its levels of ``vmap`` and its layout.

    ``None`` where there are others, or a tape at a level of a transform that would be recorded on.
    """
    given, layouts = [], []
    for t in _torch.unwrap_dead(tensors):
        levels: Levels = ()
        while _torch.is_wrapped(t):
            if not _torch.is_batched(t):
                return None
            levels += ((_torch.wrapper_level(t), _torch.batch_dim(t)),)
            t = _torch.get_unwrapped(t)
        if (
            type(t) not in _PLAIN
            or t.layout is not torch.strided
            or (at_a_level and t.requires_grad)
        ):
            return None
        given.append(t)
        flags = t.is_conj(), t.is_neg()
        layouts.append((levels, t.shape, t.stride(), t.dtype, t.device, *flags))
    return given, tuple(layouts)
