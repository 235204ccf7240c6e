"""``requires_grad_`` in the body of a region, of what the body did not make."""

from __future__ import annotations

from torch import Tensor

from functx._errors import RematError
from functx._remat._foreign import Standins
from functx._remat._region import Region


class Asking(Standins):
    """Stand-ins that may come to require grad, or no longer, while the body runs.

    An argument that did not require grad is its own stand-in, and becomes an input that does. Other
    stand-ins are switched on and off for the body, and what they stand for when it has ended.
    """

    def __init__(self, region: Region, lift_constants: bool) -> None:
        super().__init__(region, lift_constants)
        self._switched: dict[int, tuple[Tensor, Tensor]] = {}  # (that tensor, the stand-in)

    def check_captures(self) -> None:
        """The run ended."""
        for original, t in self._switched.values():
            self._switch_outside(original, t.requires_grad)
        super().check_captures()

    def asked_for_a_gradient(self, t: Tensor, on: bool) -> Tensor | None:
        """``t.requires_grad_(on)``: an argument that is its own stand-in is an input that does."""
        found = self._index.get(id(t))
        if found is None or on == found[1].requires_grad:
            return None
        _, t, position = found
        original, (kind, number) = self._originals[position], self.origins[position]
        if original is not t and id(t) in self.leaves:
            self._switched[id(t)] = original, t
            return t
        if not (on and kind == "input" and original is t and self._at_base()):
            raise RematError(
                f"remat: the region {self._region.options.name!r} sets requires_grad={on} of a "
                f"tensor of shape {tuple(t.shape)} that is none of its arguments, nor made in it. "
                "Set it before the region is called, or let the region work on a .detach() of it."
            )
        self._switch_outside(t, on)
        self._region.frames[0].slots[number] = True
        self.leaves[id(t)] = self.given_a_gradient[id(t)] = t
        return t

    def _switch_outside(self, t: Tensor, on: bool) -> None:
        outer = self._region.outer
        if outer is None:
            t.requires_grad_(on)
            return
        # In a replay, it has been.
        there = outer.asked_for_a_gradient(t, on) if isinstance(outer, Asking) else None
        if there is not None:
            there.requires_grad_(on)
