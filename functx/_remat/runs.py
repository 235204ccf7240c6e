"""How each run of a region went, for observers: see `observers.on_run`."""

from __future__ import annotations

from typing import Any

from functx._remat import departures
from functx._remat.observers import observers
from functx._remat.region import Region
from functx._remat.script import OF_NO_REGION, identity_of

FIRST = "recorded: the first run"


def how_it_ran(region: Region, function: Any, follower: Any, key: Any) -> str:
    """Whether a run has followed a script, at which call it departed, or why it was recorded."""
    if follower is not None:
        if follower.heir is None:
            return "followed"
        at = follower.steps[follower.at].func
        return f"departed: at {departures.name_of(at)}"
    reasons = {
        "with a policy": region.options.policy is not None,
        "without a check": region.options.determinism_check == "none",
        "in a trace or another's ledger": key is None,
    }
    for reason, holds in reasons.items():
        if holds:
            return f"recorded: {reason}"
    return _recorded(region, function, key)


def _recorded(region: Region, function: Any, key: Any) -> str:
    """The reason why there was no script for a run that could have followed one."""
    script = getattr(region, "script", None)
    hinders = "it is not differentiated" if script is None else script.untold
    before = _runs_of(region, function)
    said = ""
    for runs in before:
        for other, reason in runs:
            if other == key:
                said = reason or "its scripts do not fit"
    for runs in before:
        runs.append((key, hinders))
    if function is not None and identity_of(function) is None:
        before[-1][-1] = key, hinders or "a function that functx can't identify"
    return f"recorded: {said}" if said else FIRST


def _runs_of(region: Region, function: Any) -> list[list[Any]]:
    """The lists of earlier runs of the same region, and of equal functions.

    Each entry has the key of the run, and the reason why a later run can't follow it.
    """
    known = observers.recorded
    if function is None:  # a pullback; it may have no scripts
        return [known.setdefault(region.scripts or "a pullback", [])]
    names = [departures.code_of(function) or type(function)]
    if (identity := identity_of(function)) is not None:
        names = [identity]
    if region.scripts is not OF_NO_REGION:
        names.insert(0, region.scripts)
    return [known.setdefault(name, []) for name in names]
