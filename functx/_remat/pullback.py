"""The pullback of a region as a region itself, where somebody differentiates it."""

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
    """What `replay.pulled_back` returns, as a region of ``flat``: values, kept ones, cotangents."""
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
    """What messages call a pullback."""

    of: Any

    def __str__(self) -> str:
        return f"the pullback of {self.of}"


class RegionPullback:
    """`replay.pulled_back` as the body of a region, which is given a node's values and the rest.

    Not all gradients that are asked for are there: ``found`` says which are.
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
