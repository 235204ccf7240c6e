"""The pullback of a region, which is a region itself if it is differentiated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from functx._remat import forward
from functx._remat.region import Options
from functx._remat.replay import pulled_back
from functx._remat.script import Scripts


def pull_back_in_a_region(
    payload: Any, leaves: list[Tensor], results: list[int], asked: list[int], flat: list[Tensor]
) -> tuple[list[int], list[Tensor]]:
    """`replay.pulled_back` as a region, whose inputs are ``flat``.

    These are the values of the node, the values that the policy saved, and the cotangents.
    """
    body = RegionPullback(payload, leaves, results, asked)
    region, scripts = payload.region, None
    if not (leaves or region.leaves or region.further or region.changed or region.draws):
        what = payload.level, (*results,), (*asked,), (*payload.requiring,)
        if (scripts := region.script.pullbacks.get(what)) is None:
            scripts = region.script.pullbacks[what] = Scripts()
    grads = forward.run(body, body, flat, _OPTIONS, Title(region.title), None, scripts)
    return body.found, grads


_OPTIONS = Options(name="a pullback", is_pullback=True)


@dataclass(frozen=True)
class Title:
    """The title of a pullback in messages."""

    of: Any

    def __str__(self) -> str:
        return f"the pullback of {self.of}"


class RegionPullback:
    """`replay.pulled_back` as the body of a region.

    Some gradients that are asked for may be ``None``. ``found`` lists those that are not.
    """

    def __init__(
        self, payload: Any, leaves: list[Tensor], results: list[int], asked: list[int]
    ) -> None:
        self.payload, self.leaves, self.results, self.asked = payload, leaves, results, asked
        self.found: list[int] = []

    def __call__(self, *flat: Tensor) -> list[Tensor]:
        n, m = self.payload.n_values, len(flat) - len(self.results)
        values, cotangents = [*flat[:n]], [*flat[m:]]
        args = self.payload, values, flat[n:m], self.leaves, self.results, cotangents, self.asked
        del flat
        self.found, grads = pulled_back(*args)
        return grads
