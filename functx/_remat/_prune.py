"""Running only what a pullback reads: memory nobody wrote to stands in for everything else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from functx import _torch, _torch_operators
from functx._offload import Fetcher
from functx._places import describe_place, where
from functx._remat._alike import UNREAD, alike, is_marked
from functx._remat._asked import Asked
from functx._remat._holders import base_of
from functx._remat._ledger import Ledger
from functx._remat._saving import IN_PLACE, StoodIn, key_of, standing_in
from functx._remat._step import Step, empty, kind_of, kinds, laid_out, layout_of, to_write_to
from functx._remat._watch import Watcher, watchers, watching
from functx._remat._written_since import written_since
from functx._torch import dispatch_mode_depth

_NOTHING = torch.empty(0)
# What tapes run for themselves most, and may run once more than in the forward.
_CLONE = torch.ops.aten.clone.default


class Plan:
    """What a replay runs, which is the same for all replays of regions that ran alike.

    NOTE [sections]
    A dispatch mode costs microseconds for each step. Where all steps belong to operations that the
    function mode sees, it is only entered for operations of which something does not run.

    Args:
        ledger: of the forward.
        wanted: the results that are pulled back; ``None`` for all.
        have_kept: whether what the region kept is at hand.
        asked: what for, if not for the gradients of all inputs.

    Attributes:
        dead: the functions and layouts of steps that give one tensor, which nobody reads.
        given: what of that is handed out instead of run for, by key.
        sections: the steps of each operation of the body of which something does not run; ``None``
            if some belong to none.
    """

    def __init__(
        self, ledger: Ledger, wanted: Sequence[int] | None, have_kept: bool, asked: Asked | None
    ) -> None:
        self.steps: Sequence[Step] = ledger.steps
        self._runs, self.given = ledger.replay_of(wanted, have_kept, asked)
        self._giving = {key >> 6 for key in self.given}
        # What memory has become in place is put there: that must be real.
        self._writes = any(key & IN_PLACE == IN_PLACE for key in self.given)
        sections = None if ledger.fetcher is not None else ledger.sections()
        self.sections = None if sections is None else self._incomplete(sections)
        self.dead = {
            at: (step.kind.func, step.layouts[0])
            for at, (step, runs) in enumerate(zip(self.steps, self._runs))
            if not (runs or step.writes or step.handed_out or at in self._giving)
            and step.layouts is not None
            and len(step.layouts) == 1
            and step.layouts[0] is not None
            and step.kind.func is not _CLONE
            and not self.is_written(step)
            and _torch_operators.returns_one(step.kind.func)
            and not _torch_operators.returns_one_list(step.kind.func)
        }

    def _incomplete(self, sections: dict[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
        """Those in which something does not run. ``NOTE [sections]``."""
        if all(self._runs):
            return {}
        return {
            operation: (first, end)
            for operation, (first, end) in sections.items()
            if False in self._runs[first:end] and not all(map(self.must_run, range(first, end)))
        }

    def is_written(self, step: Step) -> bool:
        """Whether something may be put into the memory of what a step gives."""
        return self._writes and step.rewritten

    def gives(self, at: int) -> bool:
        """Whether a result of a step is at hand."""
        return at in self._giving

    def must_run(self, at: int) -> bool:
        """Whether a step is run, as it is read or can't be left out."""
        if self._runs[at]:
            return True
        step = self.steps[at]
        return step.layouts is None and not step.writes and at not in self._giving


class Pruned(Watcher):
    """Runs what is live; in place of everything else, hands out memory nobody wrote to.

    Args:
        plan: what runs.
        kept: results that the region kept, by key; they are handed out instead of run for.
        fetcher: brings back those of them that are in host memory, if there are any.
    """

    def __init__(
        self, plan: Plan, kept: Mapping[int, Tensor], fetcher: Fetcher | None = None
    ) -> None:
        super().__init__()
        self._plan = plan
        self._steps = plan.steps
        # (The first step that does not run begins to bring values back.)
        self._dead = plan.dead if fetcher is None else {}
        self._kept = kept
        self._fetcher = fetcher
        self._at = 0
        self.sections = plan.sections

    def run(self, operation: int, func: Any, args: Any, kwargs: Any) -> Any:
        """One operation of the body. ``NOTE [sections]``."""
        assert self.sections is not None
        section = self.sections.get(operation)
        if section is None:
            return func(*args, **kwargs)
        self._at = section[0]
        with self:
            out = func(*args, **kwargs)
        if self._at != section[1]:
            raise Departed(f"{func} ran otherwise than in the forward", self)
        return out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operation of the replay."""
        dead = self._dead.get(self._at)
        if dead is not None and dead[0] is func and not (self.paused or dispatch_mode_depth()):
            self._at += 1  # as below, where no other mode is to be told
            standing_in(StoodIn.UNWRITTEN)
            return empty(dead[1])
        kind = kinds.get(id(func)) or kind_of(func)
        runs = self.paused or kind.view
        at = self._at
        if at == 0 and self._fetcher is not None and not runs:
            with watching(False):
                self._fetcher.begin(self._kept)
        if not runs:
            step = self._next(func)
            runs = self._plan.must_run(at)
            if step.handed_out:
                # What it reads was never computed where the forward had the result at hand.
                how = f"it runs {func} where a region inside had kept what that gives"
                raise Departed(how, self)
        if runs:
            if kind.scalar or (args and type(args[0]) is not Tensor):
                args, kwargs = _torch_operators.callable_arguments(func, args, kwargs or {})
            if not self.paused:
                standing_in(StoodIn.NOTHING)
            return kind.run(*args, **kwargs) if kwargs else kind.run(*args)
        layout = step.layouts[0] if func is _CLONE and step.layouts else None
        if layout is not None and layout[0] != args[0].shape:
            raise Departed(f"it copies {[*args[0].shape]} where the forward {[*layout[0]]}", self)
        with watching(False):
            out = self._stand_in(at, args)
        if self._plan.gives(at):
            standing_in(StoodIn.KEPT, self._handed_out(step, at, out))
            # A region around this one must know that the result comes from what is kept.
            values = [t for key, t in self._kept.items() if key >> 6 == at]
            args, kwargs = (*(args[:1] if step.writes else ()), *values), {}
        else:
            standing_in(StoodIn.UNWRITTEN)
        for watcher in watchers():
            watcher.skipped(func, args, kwargs or {}, out)
        return out

    def check(self, results: Sequence[Tensor | None]) -> None:
        """The body has run: everything that the forward ran must have come by.

        Raises:
            Departed: some of it did not; what came before may have been taken for it.
        """
        if self._at != len(self._steps):
            was = self._steps[self._at].kind.func
            raise Departed(f"it ended where the forward ran {was}", self)

    def _next(self, func: Any) -> Step:
        step = self._steps[self._at] if self._at < len(self._steps) else None
        if step is None or step.kind.func is not func:
            was = "had ended" if step is None else f"ran {step.kind.func}"
            raise Departed(f"it runs {func} where the forward {was}", self)
        self._at += 1
        return step

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        standing_in(StoodIn.NOTHING)
        if self._fetcher is not None:
            self._fetcher.end()

    def skipped(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """NOTE [what inner regions leave out] in `_watch`."""
        self._next(func)

    def _stand_in(self, at: int, args: Any) -> Any:
        """What an operation gives that does not run."""
        step = self._steps[at]
        if step.writes:
            if self._plan.gives(at):
                value = self._value(step, key_of(at, IN_PLACE))
                laid_out(args[0], layout_of(value)).copy_(value)
            return args[0]
        assert step.layouts is not None
        room = to_write_to if self._plan.is_written(step) else empty
        outs = [
            None
            if layout is None
            else self._value(step, key)
            if (key := key_of(at, place)) in self._kept
            else room(layout)
            for place, layout in enumerate(step.layouts)
        ]
        if _torch_operators.returns_one_list(step.kind.func):
            return outs
        return outs[0] if _torch_operators.returns_one(step.kind.func) else tuple(outs)

    def _handed_out(self, step: Step, at: int, out: Any) -> dict[int, Tensor]:
        """What is handed out, by place; where that is a copy, the original."""
        fetcher, outs = self._fetcher, out if isinstance(out, (tuple, list)) else (out,)
        found = {}
        if step.writes:
            kept = self._kept[key := key_of(at, IN_PLACE)]
            brought = fetcher is not None and fetcher.brings(key)
            return {IN_PLACE: laid_out(out, layout_of(kept)) if brought else kept}
        for key, t in self._kept.items():
            place = key & IN_PLACE
            if key >> 6 == at and place < len(outs):
                copied = step.rewritten and not (fetcher is not None and fetcher.brings(key))
                found[place] = t if copied else outs[place]
        return found

    def _value(self, step: Step, key: int) -> Tensor:
        """A kept result; a copy if it is going to be written to."""
        value = self._kept[key]
        if self._fetcher is not None and self._fetcher.brings(key):
            return self._fetcher.value(key, value)
        return value.clone() if step.rewritten else value.detach()


def planned(
    ledger: Ledger,
    wanted: Sequence[int] | None,
    kept: Sequence[Tensor],
    asked: Asked | None = None,
) -> Pruned:
    """What a replay runs under.

    Args:
        ledger: of the forward.
        wanted: the results that are pulled back; ``None`` for all.
        kept: the values that the region kept, if they are at hand.
        asked: what for, if not for the gradients of all inputs.
    """
    if kept and ledger.shared and written_since(ledger.shared, kept):
        kept = ()
    which = wanted, len(kept) == len(ledger.kept), asked
    plan = ledger.plans.get(which)
    if plan is None:
        plan = ledger.plans[which] = Plan(ledger, *which)
    values: dict[int, Tensor] = {}
    if plan.given:
        values = {key: base_of(t) for key, t in zip(ledger.kept, kept) if key in plan.given}
    return Pruned(plan, values, ledger.fetcher)


class Departed(BaseException):
    """A replay runs other ATen operations than its forward; no body may swallow this.

    Args:
        how: they differ. The line of the user's code that is running is added.
        replay: which one; regions inside of it, that are running, let this pass.
    """

    def __init__(self, how: str, replay: Watcher) -> None:
        super().__init__(f"at {describe_place(where())}, {how}")
        self.replay = replay


def placeholder(t: Tensor) -> Callable[[], Tensor]:
    """What makes a tensor like ``t``, at the same levels, in memory nobody wrote to.

    It stands for an input that a pullback does not read: its shape and layout, and the levels at
    which it requires grad, still decide which operations run.
    """
    t = _torch.unwrap_if_dead(t)
    if _torch.is_wrapped(t):
        return _wrapped(t)
    if _torch_operators.is_zero_tensor(t):
        return lambda: t  # forward mode's zeros have no memory
    layout, conjugate, negative = layout_of(t), t.is_conj(), t.is_neg()
    requires = t.requires_grad
    kind, attributes = (t.__class__, dict(t.__dict__)) if is_marked(t) else (Tensor, None)

    def make() -> Tensor:
        with watching(False), _torch.cleared_interpreter_stack():
            made = empty(layout)
            made = made.conj() if conjugate else made
            made = _torch_operators.neg_view(made) if negative else made
            if attributes is not None:
                made = alike(made, kind, dict(attributes))
            return _requiring(made, requires)

    return make


def _wrapped(t: Tensor) -> Callable[[], Tensor]:
    level, inner = _torch.wrapper_level(t), placeholder(_torch.get_unwrapped(t))
    dim = _torch.batch_dim(t) if _torch.is_batched(t) else None
    requires = t.requires_grad
    witness = _torch.wrap_for_grad(_NOTHING, level)

    def make() -> Tensor:
        value = inner()
        if _torch.unwrap_if_dead(witness) is not witness:  # the level has ended
            return value
        if dim is not None:
            return _torch.add_batch_dim(value, dim, level)
        return _requiring(_torch.wrap_for_grad(value, level), requires)

    return make


def _requiring(t: Tensor, requires: bool) -> Tensor:
    if requires:
        _torch.require_grad(t)  # what it returns may be a wrapper of the innermost level
        setattr(t, UNREAD, True)
    return t


def is_unread(t: Tensor) -> bool:
    """Whether ``t`` is a placeholder: a tape may end there, as no derivative comes from it."""
    return getattr(t, UNREAD, False)
