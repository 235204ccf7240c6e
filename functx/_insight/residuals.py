"""`saved_residuals`: which values a pullback saves, their sizes, and where they come from.

A function runs forward, and the tensors that its tape holds are listed. They are read from the
nodes themselves, and not from a table of derivatives: from their ``_saved_*`` attributes, and from
the attributes of a custom Function's context.
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
MOST_ROWS = 8  # if a table has more arguments or parameters than this, they share one row


class ShapeAndDtype(NamedTuple):
    """The shape and dtype of a tensor; prints as ``float32[2,3]``."""

    shape: tuple[int, ...]
    dtype: Any

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}[{','.join(map(str, self.shape))}]"


class Residual(NamedTuple):
    """One piece of memory that a pullback saves. The first two fields are those of JAX.

    Attributes:
        value: the shape and dtype of the tensor.
        source: where the tensor comes from, in words.
        nbytes: bytes of memory. For memory that the function allocated, the whole storage; for
            memory that existed before, the bytes of the tensor.
        kind: ``"argument"``, ``"parameter"``, ``"buffer"``, ``"constant"``, ``"named"`` (by
            `functx.checkpoint_name`) or ``"output"`` (of an operation, without a name).
        names: the names that `functx.checkpoint_name` gave to the tensor.
        operation: the operation that made it, such as ``"aten.mm"``; ``""`` if it existed before.
        file: the file of the user code that called the operation, or first read an input.
        line: the line number in ``file``.
        function: the name of the function around that line.
        module: the path of the ``nn.Module`` that was running, from the outermost one.
        on_host: whether the tensor was moved to host memory.
        is_result: whether the memory is also used by the result of the function.
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
        """The shape of the tensor."""
        return self.value.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the tensor."""
        return self.value.dtype

    @property
    def made(self) -> bool:
        """Whether an operation of the function made the tensor."""
        return bool(self.operation)

    def __str__(self) -> str:
        return f"{self.value} {self.source}"


class Residuals(list[Residual], Printed):
    """A list of all that a pullback saves, oldest first. Prints as a table.

    Example:
        >>> import torch, functx
        >>> f = lambda x: torch.sin(torch.sin(x)).sum()
        >>> kept = functx.saved_residuals(f, torch.ones(1000))
        >>> [r.kind for r in kept], kept.nbytes, kept.kept
        (['argument', 'output'], 8000, 4000)
    """

    @property
    def nbytes(self) -> int:
        """The total bytes."""
        return sum(r.nbytes for r in self)

    @property
    def kept(self) -> int:
        """Bytes that the function allocated and did not return, as `functx.memory.Profile.kept`."""
        return sum(r.nbytes for r in self if r.made and not r.is_result)

    def __str__(self) -> str:
        return _side_by_side({"bytes": self})


def saved_residuals(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Residuals:
    """List the values that ``f`` saves between its forward and its backward pass.

    ``f`` runs forward once, on plain autograd. The list has every tensor that the pullback saves,
    including those that regions of `functx.remat` save. Derivatives are taken with respect to the
    tensors that require grad, among the arguments and among captured tensors. If there is none,
    they are taken with respect to all floating point arguments, as in JAX, and ``f`` runs twice.
    The default random generators are restored afterwards, and so are the buffers of modules among
    ``f``, its arguments and its captured variables.

    Args:
        f: any callable: a function, a module, a remat of one, a stack of transforms. A transform
            inside ``f`` that runs a backward pass frees what it saved before ``f`` returns. To see
            what ``grad(vmap(f))`` saves, call ``saved_residuals(functx.vmap(f), x)``.
        *args: the arguments of ``f``, any pytrees.
        **kwargs: keyword arguments of ``f``.

    Returns:
        `Residuals`, a list of `Residual`, each with shape and dtype, its source (``"argument
        x[0]"``, ``"output of aten.sin at net.py:12 in attention"``), and its bytes. Prints as a
        table.

    Raises:
        TypeError: ``f`` is not callable.
        RuntimeError: it is called inside a transform.

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
            "saved_residuals: it can't be called inside a transform. Call it outside, on the "
            "transformed function, such as functx.vmap(f)."
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
    """Print the values that ``f`` saves between its forward and its backward pass, as a table.

    Args:
        f: as for `saved_residuals`; or a dict of such functions by label, which are compared in one
            table, for example without and with `remat`, or with several policies.
        *args: the arguments of ``f``.
        **kwargs: keyword arguments of ``f``.

    Raises:
        TypeError: ``f`` is not callable.

    Example:
        >>> import torch, functx
        >>> f = lambda x: torch.sin(torch.sin(x)).sum()
        >>> both = {"plain": f, "remat": functx.remat(f)}
        >>> functx.print_saved_residuals(both, torch.ones(1000))  # doctest: +ELLIPSIS
        value          plain  remat  from
        float32[1000]  4,000      -  output of aten.sin at ...
        float32[1000]  4,000  4,000  argument x
                       8,000  4,000  total
                       4,000      0  of them saved only for the pullback
    """
    each = f if isinstance(f, dict) else {"bytes": f}
    print(_side_by_side({str(k): saved_residuals(g, *args, **kwargs) for k, g in each.items()}))


@contextmanager
def undisturbed(buffers: Iterable[Tensor]) -> Iterator[None]:
    """A context that restores the default random generators and the values of ``buffers``."""
    before = [(b, b.detach().clone()) for b in buffers]
    with torch.random.fork_rng(cuda_devices()):
        yield
    with torch.no_grad():
        for b, value in before:
            if not torch.equal(b, value):
                b.copy_(value)


def _of_one_run(f: Any, args: Any, kwargs: Any) -> list[Residual] | None:
    """The residuals of one run; ``None`` if no result has a derivative."""
    # The arguments and captured tensors, by the id of their storage.
    inputs: dict[int, tuple[Tensor, Label]] = {}
    for t, label in labels(f, args, kwargs):
        for storage in storages_of(t):
            inputs.setdefault(id(storage), (t, label))
    names: dict[int, dict[str, None]] = defaultdict(dict)
    moved: dict[int, Held] = {}
    storages = LiveStorages(lines=True)

    def named(t: Tensor, name: str) -> None:
        with _torch.without_function_modes():  # a region must not count this as a read
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
            elif first is not None or t.dim() or key in inputs:  # else it is a number in the code
                row = _of_input(t, storage.nbytes(), first, inputs.get(key))
                if key not in rows or rows[key].nbytes < row.nbytes:
                    rows[key] = row
    order = {key: i for i, key in enumerate(inputs)}
    return [rows[k] for k in sorted(rows, key=lambda k: (rows[k].made, order.get(k, len(order))))]


def _held(results: list[Tensor], start: int) -> Iterator[Tensor]:
    """The tensors that the nodes of a tape hold, oldest first, from number ``start`` on."""
    nodes = {node for node in tape_of(results, start) if _torch.sequence_number(node) >= start}
    for node in sorted(nodes, key=_torch.sequence_number):
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            yield from tree.partition([node.saved_tensors, *vars(node).values()])[0]
        elif type(node).__name__ != "AccumulateGrad":  # it holds a leaf, which is alive anyway
            saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
            yield from tree.partition(saved)[0]


def _of_input(t: Tensor, nbytes: int, first: Held | None, labelled: Any) -> Residual:
    """The residual for memory that existed before.

    Args:
        t: the tensor on the tape.
        nbytes: the bytes of its storage.
        first: the first operation that read the storage, if any.
        labelled: the argument or captured tensor with this storage, and its label; or ``None``.
    """
    label = "parameter" if isinstance(t, nn.Parameter) else "constant", ""
    shown, (kind, name) = labelled or (t, label)
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
    """A table of what several functions save, a row for each source.

    Rows that recompute could free come first.
    """
    if not any(found.values()):
        return "nothing is saved: no tensor requires grad, or the derivatives read no values"
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
    rows.append(("", *kept, "of them saved only for the pullback"))
    return _table(("value", *found, "from"), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align columns: the first and the last to the left, the numbers between them to the right."""
    aligned = "<" + ">" * (len(head) - 2) + "<"
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return "\n".join(
        "  ".join(f"{cell:{a}{w}}" for cell, a, w in zip(row, aligned, widths)).rstrip()
        for row in (head, *rows)
    )
