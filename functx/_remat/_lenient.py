"""A replay that is compared only in what the user's code runs.

NOTE [replayed pullbacks]
Which operations a pullback is made of is torch's and the engine's choice. What trackers are shown
of it is what hooks and the backwards of custom Functions run, and this must be what they ran, with
the same numbers: a first derivative was taken with those. But what the first run computed of
nothing that it was given, and so may have kept for the next one (a mask, a table), it may have run
alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from torch import Tensor

from functx import _torch
from functx._errors import RematError, ReplayError
from functx._places import describe_place, where
from functx._remat._entry import NO_CALLS, Calls, called
from functx._remat._parts import Parts
from functx._remat._tapes import tensors_of
from functx._remat._tracker import Tracker
from functx._remat._writes import written_by

Numbered = Sequence[tuple[int, "weakref.ref[Tensor]"]]
Met = tuple[Sequence[Tensor], Numbered, Numbered]
"""What a first run captured, its inputs and its constants: whoever closes over one holds it."""


def met_as(originals: Iterable[Tensor], origins: Iterable[tuple[str, int]]) -> Met:
    """What a first run has met, by the kind and number of each."""
    those = [*zip(originals, origins)]
    given, constants = (
        [(n, weakref.ref(t)) for t, (kind, n) in those if kind == which]
        for which in ("input", "constant")
    )
    return [t for t, (kind, _) in those if kind == "capture"], given, constants


class Lenient(Tracker):
    """The tracker of a replay in which externals are known by identity.

    For pullbacks, whose operations may differ from run to run; only what hooks and custom Functions
    close over is foreign there. That may be an input, too: what the pullback reads, they may read.
    What the first run wrote to is as it was before, and once more written to in a copy.

    Args:
        region: that is replayed.
        captured: what stands for what it captured now.
        inputs: what stands for its inputs.
    """

    def __init__(self, region: Any, captured: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.left: dict[int, Tensor] = {}
        met: Met = region.originals
        given = [(o, inputs[n]) for n, ref in met[1] if (o := ref()) is not None]
        constants = [(region.constants[n], ref()) for n, ref in met[2]]
        name = self._name = region.options.name
        own = [(o, c.for_replay(name)) for c, o in constants if o is not None and c.is_rewritten()]
        pairs = [*given, *own, *zip(met[0], captured, strict=True)]
        self._standins = {id(o): (o, s) for o, s in pairs}
        compares = region.options.replay and region.options.determinism_check != "none"
        self._calls = Calls(region.entries) if compares else None
        self._written = region.written_unseen
        self._at = 0

    def resolve(self, t: Tensor) -> Tensor:
        """The stand-in of a captured tensor or an input, anything else as it is."""
        found = self._standins.get(id(t))
        return t if found is None else found[1]

    def close(self, func: Any) -> None:
        """Compare what the user's code calls."""
        calls = self._calls
        if calls is not None and func not in NO_CALLS:
            at = calls.after(self._at, func, self._scalars)
            if at is None:
                was, now = calls.next(self._at), called(func, self._scalars)
                ran = "nothing" if was is None else called(was.func, was.scalars)
                self._depart(f"{now} is run at {describe_place(where())}, where {ran} was")
            self._at = at
        self._scalars.clear()

    def execute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One operation; likewise what it runs of the user's code."""
        entry = self._calls.entries[self._at - 1] if self._calls is not None and self._at else None
        if entry is None or entry.func != func or entry.parts is None:
            return func(*args, **kwargs)
        return Parts(func, self._name, entry.parts)(*args, **kwargs)

    def before(self, func: Any, args: Any, kwargs: Any) -> None:
        """Nothing from outside is written to once more."""
        self.written(tensors_of(written_by(func, args, kwargs)) if self._written else ())

    def written(self, tensors: Sequence[Tensor]) -> None:
        """Likewise in a region inside."""
        written = [one for ref in self._written if (one := ref()) is not None]
        for t in tensors:
            whole = _torch.view_base(t)
            if any(one is t or one is whole for one in written):
                raise RematError(
                    f"remat: the {self._name} is differentiated, in which a hook or the backward "
                    f"of a custom Function writes in place to a tensor of shape {tuple(t.shape)} "
                    "that it did not make: that would be written to once more. Write to it outside "
                    "of the region: in a hook on a result, or when the backward has run."
                )

    def made(self, t: Tensor) -> None:
        """Nothing is kept."""

    def complete(self) -> None:
        """What the first run went on with was not needed again."""
        if self._calls is not None and (rest := self._calls.next(self._at)) is not None:
            self._depart(f"nothing is run where {called(rest.func, rest.scalars)} was")

    def _depart(self, how: str) -> NoReturn:
        raise ReplayError(
            f"remat: the {self._name} is differentiated, and what hooks and backwards of custom "
            f"Functions run in it has changed since it ran: {how}. Something that they read (a "
            "factor, a flag, a global) is not what it was in the first derivative. Change it after "
            "the last backward pass, or keep it where it stays the same: in an attribute of ctx, "
            "in an argument of the Function, or in a default argument of the hook."
        )
