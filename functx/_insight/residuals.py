"""`saved_residuals`: which values a pullback keeps, how large they are, and where they are from.

A function runs forward, and what its tape holds is listed. Nothing is derived from formulas of
derivatives: each node shows what it saved, a custom Function's context also in its attributes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from functx import _torch
from functx._core import (
    Held,
    LiveStorages,
    backend_of,
    check_callable,
    cuda_devices,
    has_derivatives,
    storages_of,
    tree,
)
from functx._insight.argument_names import Label, labels
from functx._insight.plots import Printed
from functx._policies import offload
from functx._remat import on_name, tape_of

ON_HOST = ", in host memory"
MOST_ROWS = 8  # of a kind that was there before; more are one row


class ShapeAndDtype(NamedTuple):
    """The shape and dtype of a tensor; prints as ``float32[2,3]``."""

    shape: tuple[int, ...]
    dtype: Any

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}[{','.join(map(str, self.shape))}]"


class Residual(NamedTuple):
    """One piece of memory that a pullback keeps; the first two fields are those of JAX.

    Attributes:
        value: the shape and dtype of what is in it.
        source: where it comes from, in words.
        nbytes: bytes of memory that are kept. Of what the function made, all that the value is a
            part of; of what was there before, as many as the tensor shows.
        kind: ``"argument"``, ``"parameter"``, ``"buffer"``, ``"constant"``, ``"named"`` (by
            `functx.checkpoint_name`) or ``"output"`` (of an operation, without a name).
        names: that `functx.checkpoint_name` gave it.
        operation: that made it, such as ``"aten.mm"``; ``""`` if it was there before.
        file: of what called the operation, or first read an input; so ``line``, ``function``.
        module: the path of the ``nn.Module`` that was running, from the outermost.
        on_host: whether it was moved to host memory.
        is_result: whether it is (a part of) what the function returned.
    """

    value: ShapeAndDtype
    source: str
    nbytes: int
    kind: str
    names: tuple[str, ...] = ()
    operation: str = ""
    file: str = ""
    line: int = 0
    function: str = ""
    module: str = ""
    on_host: bool = False
    is_result: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the value."""
        return self.value.shape

    @property
    def dtype(self) -> Any:
        """Of the value."""
        return self.value.dtype

    @property
    def made(self) -> bool:
        """Whether the function made it."""
        return bool(self.operation)

    def __str__(self) -> str:
        return f"{self.value} {self.source}"


class Residuals(list[Residual], Printed):
    """All that a pullback keeps, in the order in which it came about; prints as a table.

    Example:
        >>> import torch, functx
        >>> f = lambda x: torch.sin(torch.sin(x)).sum()
        >>> kept = functx.saved_residuals(f, torch.ones(1000))
        >>> [r.kind for r in kept], kept.nbytes, kept.kept
        (['argument', 'output'], 8000, 4000)
    """

    @property
    def nbytes(self) -> int:
        """Bytes of everything."""
        return sum(r.nbytes for r in self)

    @property
    def kept(self) -> int:
        """Bytes that the function made and did not return, as `functx.memory.Profile.kept`."""
        return sum(r.nbytes for r in self if r.made and not r.is_result)

    def __str__(self) -> str:
        return _side_by_side({"bytes": self})


def saved_residuals(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Residuals:
    """What ``f`` keeps between its forward and its backward pass, value by value.

    ``f`` runs forward once, on plain autograd. Listed is every value that the pullback reads,
    regions of `functx.remat` as they keep it. Derivatives are those with respect to the tensors
    that require grad, in the arguments and closed over; if none does, to all floating point
    arguments, as in JAX (``f`` then runs twice). Default random generators, and buffers of the
    modules that ``f`` is, is given, or closes over, are put back as they were.

    Args:
        f: any callable: a function, a module, a remat of one, a stack of transforms. What a
            transform inside it keeps for a backward pass of its own is gone when ``f`` returns:
            of ``vmap(f)`` under a gradient, ask ``saved_residuals(functx.vmap(f), x)``.
        *args: passed to ``f``; any pytrees.
        **kwargs: likewise.

    Returns:
        `Residuals`, a list of `Residual`: what it is, its source (``"argument x[0]"``,
        ``"output of aten.sin at net.py:12 in attention"``), and its bytes. Prints as a table.

    Raises:
        TypeError: ``f`` can't be called.
        RuntimeError: called inside of a transform.

    Example:
        >>> import torch, functx
        >>> def f(w, x):
        ...     z = functx.checkpoint_name(torch.tanh(x @ w), "z")
        ...     return torch.sin(z).sum()
        >>> w, x = torch.ones(10, 20), torch.ones(50, 10)
        >>> for value, source, nbytes, *_ in functx.saved_residuals(f, w, x):
        ...     print(value, nbytes, source)  # doctest: +ELLIPSIS
        float32[10,20] 800 argument w
        float32[50,10] 2000 argument x
        float32[50,20] 4000 named 'z' at ...
        >>> functx.saved_residuals(functx.remat(f), w, x).kept
        0

    Source:
        ``jax.ad_checkpoint.print_saved_residuals``.
    """
    check_callable(f, "saved_residuals")
    if (backend := backend_of("saved_residuals", args, kwargs)) is not None:
        return Residuals(backend.saved_residuals(f, *args, **kwargs))
    if _torch.peek_interpreter() is not None:
        raise RuntimeError(
            "saved_residuals: called inside of a transform; call it outside, on functx.vmap(f)"
        )
    buffers = [t for t, (kind, _) in labels(f, args, kwargs) if kind == "buffer"]
    with undisturbed(buffers), torch.inference_mode(False), torch.enable_grad():
        found = _of_one_run(f, args, kwargs)
        tensors, how = tree.partition((args, kwargs))
        if found is None and not any(t.requires_grad for t in tensors):
            leaves = [t.detach().requires_grad_(has_derivatives(t)) for t in tensors]
            found = _of_one_run(f, *tree.combine(leaves, how))
    return Residuals(found or ())


def print_saved_residuals(f: Any, /, *args: Any, **kwargs: Any) -> None:
    """Print what ``f`` keeps between its forward and its backward pass, as a table.

    Args:
        f: as for `saved_residuals`; or a dictionary of such functions by label, which are compared
            in one table: what is kept without and with `remat`, or under several policies.
        *args: passed to ``f``.
        **kwargs: likewise.

    Raises:
        TypeError: ``f`` can't be called.

    Example:
        >>> import torch, functx
        >>> f = lambda x: torch.sin(torch.sin(x)).sum()
        >>> both = {"plain": f, "remat": functx.remat(f)}
        >>> functx.print_saved_residuals(both, torch.ones(1000))  # doctest: +ELLIPSIS
        value          plain  remat  from
        float32[1000]  4,000      -  output of aten.sin at ...
        float32[1000]  4,000  4,000  argument x
                       8,000  4,000  total
                       4,000      0  of them made for the pullback alone
    """
    each = f if isinstance(f, dict) else {"bytes": f}
    print(_side_by_side({str(k): saved_residuals(g, *args, **kwargs) for k, g in each.items()}))


@contextmanager
def undisturbed(buffers: Iterable[Tensor]) -> Iterator[None]:
    """Put the default random generators back, and the values of some buffers."""
    before = [(b, b.detach().clone()) for b in buffers]
    with torch.random.fork_rng(cuda_devices()):
        yield
    with torch.no_grad():
        for b, value in before:
            if not torch.equal(b, value):
                b.copy_(value)


def _of_one_run(f: Any, args: Any, kwargs: Any) -> list[Residual] | None:
    """What is kept; ``None`` if no result has a derivative."""
    known: dict[int, tuple[Tensor, Label]] = {}
    for t, label in labels(f, args, kwargs):
        for storage in storages_of(t):
            known.setdefault(id(storage), (t, label))
    names: dict[int, dict[str, None]] = defaultdict(dict)
    moved: dict[int, Held] = {}
    storages = LiveStorages(lines=True)

    def named(t: Tensor, name: str) -> None:
        with _torch.without_function_modes():  # or a region would take it that the memory is read
            for storage in storages_of(t):
                names[id(storage)][name] = None

    def offloaded(t: Tensor, host: Tensor) -> None:
        (source,), (copy,) = storages_of(t), storages_of(host)
        if (made := storages.first_use(source)[0]) is not None:
            moved[id(copy)], names[id(copy)] = made, names[id(source)]

    start = _torch.next_sequence_number()
    with on_name(named), offload.on_offload(offloaded), storages:
        results = tree.partition(f(*args, **kwargs))[0]
    if all(t.grad_fn is None for t in results):
        return None
    returned = {id(storage) for t in results for storage in storages_of(t)}
    rows: dict[int, Residual] = {}
    for t in _held(results, start):
        for storage in storages_of(t):
            key, (first, is_new) = id(storage), storages.first_use(storage)
            if first is not None and is_new:
                row = _made(moved.get(key, first), storage.nbytes(), (*names[key],), key in moved)
                rows[key] = row._replace(is_result=key in returned)
            elif first is not None or t.dim() or key in known:  # else it is a number in the code
                row = _given(t, storage.nbytes(), first, known.get(key))
                if key not in rows or rows[key].nbytes < row.nbytes:
                    rows[key] = row
    order = {key: i for i, key in enumerate(known)}
    return [rows[k] for k in sorted(rows, key=lambda k: (rows[k].made, order.get(k, len(order))))]


def _held(results: list[Tensor], start: int) -> Iterator[Tensor]:
    """What the nodes of a tape hold that are not older than a sequence number, oldest first."""
    nodes = {node for node in tape_of(results, start) if _torch.sequence_number(node) >= start}
    for node in sorted(nodes, key=_torch.sequence_number):
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            yield from tree.partition([node.saved_tensors, *vars(node).values()])[0]
        elif type(node).__name__ != "AccumulateGrad":  # a leaf, which is there anyway
            yield from tree.partition([getattr(node, n) for n in dir(node) if n[:7] == "_saved_"])[
                0
            ]


def _given(t: Tensor, nbytes: int, first: Held | None, known: Any) -> Residual:
    """What was there before: as much of it as the tape, and the function, have of it."""
    label = "parameter" if isinstance(t, nn.Parameter) else "constant", ""
    shown, (kind, name) = known or (t, label)
    nbytes = min(nbytes, *(one.numel() * one.element_size() for one in (t, shown)))
    value = ShapeAndDtype(tuple(shown.shape), shown.dtype)
    if name or first is None:
        return Residual(value, f"{kind} {name}".rstrip(), nbytes, kind)
    source = f"a {kind} that {first.place} reads"
    return Residual(value, source, nbytes, kind, (), "", first.file, first.line, first.function)


def _made(first: Held, nbytes: int, names: tuple[str, ...], on_host: bool) -> Residual:
    operation = first.operation if "::" in first.operation else f"aten.{first.operation}"
    source = f"named {', '.join(map(repr, names))}" if names else f"output of {operation}"
    source += f" at {first.place}" + (f" ({first.module})" if first.module else "")
    source, kind = source + (ON_HOST if on_host else ""), "named" if names else "output"
    site = first.file, first.line, first.function, first.module
    value = ShapeAndDtype(first.shape, first.dtype)
    return Residual(value, source, nbytes, kind, names, operation, *site, on_host)


def _side_by_side(found: dict[str, Residuals]) -> str:
    """What several functions keep, a line for each source: first what recompute could free."""
    if not any(found.values()):
        return "nothing is kept: nothing requires grad, or no derivative reads anything"
    sizes: dict[tuple[bool, str, str], dict[str, list[int]]] = {}
    for label, residuals in found.items():
        kinds = Counter(r.kind for r in residuals)
        for r in residuals:
            source = r.source if len(found) == 1 else r.source.removesuffix(ON_HOST)
            many = not r.made and kinds[r.kind] > MOST_ROWS
            what = ("", f"all {r.kind}s") if many else (str(r.value), source)
            at = sizes.setdefault((r.made, *what), {k: [] for k in found})[label]
            at[:] = [sum(at) + r.nbytes] if many else [*at, r.nbytes]
    rows = []
    for (_, value, source), by in sorted(sizes.items(), key=lambda item: not item[0][0]):
        cells = [
            (f"{len(n)} x " if len(n) > 1 else "") + (f"{sum(n) // len(n):,}" if n else "-")
            for n in by.values()
        ]
        rows.append((value, *cells, source))
    rows.append(("", *(f"{r.nbytes:,}" for r in found.values()), "total"))
    kept = [f"{r.kept:,}" for r in found.values()]
    rows.append(("", *kept, "of them made for the pullback alone"))
    return _table(("value", *found, "from"), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns: the first and the last are text, numbers between them stand to the right."""
    aligned = "<" + ">" * (len(head) - 2) + "<"
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return "\n".join(
        "  ".join(f"{cell:{a}{w}}" for cell, a, w in zip(row, aligned, widths)).rstrip()
        for row in (head, *rows)
    )
