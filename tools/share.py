"""How many later runs of regions follow a script to its end, and why the others do not.

A later run is one of a region, or of the same function for regions made anew, after its first with
inputs of the same kinds.
"""

from collections import Counter

from functx._remat import on_run

FIRST = "recorded: the first run"
# Runs of which the engine does not promise that they are followed.
ASIDE = (
    "recorded: a pullback",
    "recorded: in another region",
    "recorded: a region inside",
    "recorded: with a policy",
    "recorded: without a check",
)


def counting(runs):
    """Count in ``runs``, a `Counter`, how each run of a region goes; a context."""
    return on_run(lambda name, how: runs.update([how]))


def report(runs):
    """A table, of counts that may come from several processes."""
    later = {how: n for how, n in runs.items() if how != FIRST}
    single = {how: n for how, n in later.items() if how not in ASIDE}
    lines = [
        f"{sum(runs.values())} runs of regions, of which {sum(later.values())} are later ones."
    ]
    for name, of in (
        ("of all later runs", later),
        ("of those without policy, nest and second derivative", single),
    ):
        followed, total = of.get("followed", 0), sum(of.values())
        share = 100 * followed / total if total else 100
        lines.append(f"{share:6.2f} %  were followed to the end {name}: {followed} of {total}")
    reasons = Counter({how: n for how, n in later.items() if how != "followed"})
    lines += [f"{n:7}  {how}" for how, n in reasons.most_common(40)]
    return "\n".join(lines)
