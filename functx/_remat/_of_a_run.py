"""What is of a run: what the body has made, or was given.

NOTE [of a run]
A tracker knows by identity what operations gave and read. There is more that a body may put into a
container. What a region inside has made, or was given, that region tells of when it puts it there.
A wrapper of a transform inside, whose level may have ended, is around what is of the run. And it
may be of what nobody sees: `may_be_unseen`. That is as far as it can be told.
"""

from __future__ import annotations

import weakref

from torch import Tensor

from functx import _torch
from functx._remat._past_torch import may_be_unseen


class Knowing:
    """The part of a tracker that knows what is of its run."""

    _put_inside: dict[int, weakref.ref[Tensor]] | None = None

    def put_inside(self, t: Tensor) -> None:
        """A region inside this one has put ``t`` somewhere, which is of its run."""
        if self._put_inside is None:
            self._put_inside = {}
        self._put_inside[id(t)] = weakref.ref(t)

    def saw(self, t: Tensor) -> bool:
        """Whether an operation gave ``t``, or the body was given it."""
        raise NotImplementedError

    def had(self, t: Tensor) -> bool:
        """Whether the body made ``t``, or was given it, as far as can be told."""
        while not self.saw(t):
            known = self._put_inside
            if known is not None and (ref := known.get(id(t))) is not None and ref() is t:
                return True
            if not _torch.is_wrapped(t):
                return may_be_unseen(t)
            t = _torch.get_unwrapped(t)
        return True
