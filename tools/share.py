"""How many later runs of regions follow a script to its end, and why the others do not.

A later run is one of a region, or of the same function for regions made anew, after its first with
inputs of the same kinds. Those set aside are regions with a policy, without a check, and with a
transform inside.
"""

from collections import Counter

from functx._remat import on_run

FIRST = "recorded: the first run"
ASIDE = (
    "recorded: a transform inside",
    "recorded: with a policy",
    "recorded: without a check",
)


def counting(runs):
    """Count in ``runs``, a `Counter`, how each run of a region goes; a context."""
    return on_run(lambda name, how: runs.update([how]))


def share(runs):
    """The share of later runs that were followed to the end, but for those set ``ASIDE``."""
    return _share({how: n for how, n in runs.items() if how != FIRST and how not in ASIDE})[0]


def _share(later):
    followed, total = later.get("followed", 0), sum(later.values())
    return followed / total if total else 1.0, f"{followed} of {total}"


def report(runs):
    """A table, of counts that may come from several processes."""
    later = {how: n for how, n in runs.items() if how != FIRST}
    single = {how: n for how, n in later.items() if how not in ASIDE}
    # A program that makes other calls in each run departs, whatever the engine does.
    alike = {how: n for how, n in single.items() if not how.startswith("departed")}
    lines = [f"{sum(runs.values())} runs of regions, {sum(later.values())} of them later ones"]
    for name, of in (
        ("all later runs", later),
        ("those that are not set aside", single),
        ("those of these that do not depart", alike),
    ):
        part, counts = _share(of)
        lines.append(f"{part:8.2%}  followed to the end, of {name}: {counts}")
    reasons = Counter({how: n for how, n in later.items() if how != "followed"})
    width = max(map(len, reasons), default=0)
    for how, n in reasons.most_common(40):
        lines.append(f"{n:8}  {how:{width}}{'  (set aside)' if how in ASIDE else ''}".rstrip())
    return "\n".join(lines)
