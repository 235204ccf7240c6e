"""A cross-check as one page of HTML that needs no other file: verdict, tables, figures as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from functx.compat._precision import Difference

if TYPE_CHECKING:
    from functx.compat._report import Crosscheck

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c1c1c; background: #fff;
       max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child, td.text { text-align: left; }
.scroll { overflow-x: auto; }
.verdict { padding: .6rem .9rem; border-left: .35rem solid; margin: 1rem 0; }
.good { border-color: #2b7a3d; background: #eef7f0; } td.good { color: #2b7a3d; background: none; }
.bad { border-color: #b3261e; background: #fbeeed; } td.bad { color: #b3261e; background: none;
  font-weight: 600; }
.bar { display: inline-block; height: .6rem; background: #4a6fa5; vertical-align: middle; }
.bar.jax { background: #c98a2b; }
code, pre { font: 13px/1.45 ui-monospace, monospace; background: #f4f4f4; }
pre { padding: .6rem; overflow-x: auto; }
.note { color: #555; font-size: .9rem; }
"""


def page(report: Crosscheck) -> str:
    """The page of a cross-check."""
    title = f"crosscheck {report.name}"
    sections = [
        f"<h1>{escape(title)}</h1>",
        _verdict(report.problems()),
        _first(report),
        _differences(report.differences),
        _kept(report),
        _runs(report),
        _environment(report),
    ]
    body = "\n".join(section for section in sections if section)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n"
        "</body>\n</html>\n"
    )


def _verdict(problems: Sequence[str]) -> str:
    if not problems:
        return '<p class="verdict good">torch and JAX agree.</p>'
    items = "".join(f"<li>{escape(problem)}</li>" for problem in problems)
    return f'<div class="verdict bad">torch and JAX disagree:<ul>{items}</ul></div>'


def _first(report: Crosscheck) -> str:
    first = report.first
    if first is None:
        return ""
    said = f"<h2>Where it starts</h2>\n<p>{escape(str(first))}</p>"
    if first.source is None:
        return said
    code = f"{first.source.file}:{first.source.line}\n    {first.source.text}"
    return f"{said}\n<pre>{escape(code)}</pre>"


def _differences(differences: dict[str, Difference]) -> str:
    head = (
        "transform",
        "apart, ulp",
        "apart, relative",
        "allowed",
        "torch from float64, ulp",
        "JAX from float64, ulp",
        "farthest at",
        "",
    )
    rows = [
        (
            what,
            _number(d.ulps),
            _number(d.relative),
            _number(d.allowed),
            _number(d.torch_ulps),
            _number(d.jax_ulps),
            f"{d.where} ({d.dtype})",
            ("agree", "good") if d.agrees else ("DIFFERENT", "bad"),
        )
        for what, d in differences.items()
    ]
    note = (
        "An ulp is the precision of the dtype at the largest entry of a tensor. The reference is"
        " torch in float64."
    )
    return f"<h2>Values and derivatives</h2>\n{_table(head, rows)}\n{_note(note)}"


def _kept(report: Crosscheck) -> str:
    a, b = report.kept_torch, report.kept_jax
    if a is None or b is None:
        return ""
    most = max((r.activations for kept in (a, b) for r in kept.by_region), default=0)
    rows: list[Sequence[Any]] = []
    for n in range(max(len(a.by_region), len(b.by_region))):
        sides = [kept.by_region[n] if n < len(kept.by_region) else None for kept in (a, b)]
        sizes = [None if r is None else r.activations for r in sides]
        name = next(r.name for r in sides if r is not None)
        verdict: Any = ("equal", "good") if sizes[0] == sizes[1] else ("DIFFERENT", "bad")
        if sizes[0] != sizes[1] and report.kept_equal:  # kept all the same, for another region
            verdict = "passed through"
        bars = "".join(_bar(size, most, side) for size, side in zip(sizes, ("", " jax")))
        rows.append((f"{n + 1}: {name}", _count(sizes[0]), _count(sizes[1]), _Raw(bars), verdict))
    same = ("equal", "good") if report.kept_equal else ("DIFFERENT", "bad")
    rows.append(("all", _count(a.activations), _count(b.activations), "", same))
    rows.append(("arguments", _count(a.arguments), _count(b.arguments), "", ""))
    head = ("region", "torch, bytes", "JAX, bytes", "", "")
    note = (
        "Activations that the pullback keeps at the boundary of each region: in torch those whose"
        " storages are alive, in JAX the leaves of the function that jax.vjp returns. An array that"
        " several regions take counts for the first."
    )
    return f"<h2>Bytes kept at region boundaries</h2>\n{_table(head, rows)}\n{_note(note)}"


def _runs(report: Crosscheck) -> str:
    head = (
        "transform",
        "torch peak, bytes",
        "XLA temporary, bytes",
        "torch, s",
        "JAX, s",
        "products torch (recomputed)",
        "products JAX (recomputed)",
    )
    rows = []
    for what, run in report.runs.items():
        p = run.products
        products = ("", "")
        if p is not None:
            products = (f"{p.torch} ({p.torch_recomputed})", f"{p.jax} ({p.jax_recomputed})")
        rows.append(
            (
                what,
                _count(run.torch_peak),
                _count(run.xla_temp),
                _number(run.torch_seconds),
                _number(run.jax_seconds),
                *products,
            )
        )
    note = (
        "Peak and temporary bytes count different things: torch's are all storages that a call"
        " creates, XLA's the temporary buffers of a program. Products are matrix products and"
        " convolutions."
    )
    if not report.barriers_kept:
        note += " XLA merged recomputations away, so its bytes are those of a program without them."
    return f"<h2>Memory, work and time</h2>\n{_table(head, rows)}\n{_note(note)}"


def _environment(report: Crosscheck) -> str:
    said = ", ".join(f"{name} {version}" for name, version in report.environment.items())
    figures = json.dumps(report.figures(), indent=1)
    return (
        f"{_note(said)}\n<details><summary>all figures</summary><pre>{escape(figures)}</pre>"
        "</details>"
    )


class _Raw(str):
    """Text that is HTML already."""


def _table(head: Iterable[str], rows: Iterable[Sequence[Any]]) -> str:
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    lines = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f'<div class="scroll"><table>\n<tr>{titles}</tr>\n{lines}\n</table></div>'


def _cell(content: Any) -> str:
    if isinstance(content, tuple):
        text, kind = content
        return f'<td class="{kind}">{escape(text)}</td>'
    return f"<td>{content if isinstance(content, _Raw) else escape(str(content))}</td>"


def _bar(size: int | None, most: int, side: str) -> _Raw:
    width = 0.0 if not size or not most else 8 * size / most
    return _Raw(f'<span class="bar{side}" style="width: {width:.2f}rem"></span> ')


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:.3g}"


def _count(x: int | None) -> str:
    return "" if x is None else f"{x:,}"
