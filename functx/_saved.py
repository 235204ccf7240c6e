"""`saved_residuals`: run a function forward, and see which memory its tape holds.

Nothing is derived from formulas of derivatives: each node of the tape shows what it saved, a custom
Function's context also in its attributes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from functx import _offload, _torch, _tree
from functx._arrays import backend_of
from functx._labels import Label, labels
from functx._remat import on_name
from functx._residuals import ON_HOST, Residual, Residuals, Value, side_by_side
from functx._storages import storages_of
from functx._traced import Held, TracedStorages
from functx._validate import check_callable


def saved_residuals(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Residuals:
    """What ``f`` keeps between its forward and its backward pass, value by value.

    ``f`` runs forward once, on plain autograd, and what its tape holds is listed: every value that
    the pullback reads, regions of `functx.remat` as they keep it. Derivatives are those with
    respect to the tensors that require grad, in the arguments and closed over; if none does, to
    all floating point arguments, as in JAX (``f`` then runs twice). Default random generators, and
    buffers of the modules that ``f`` is, is given, or closes over, are put back as they were.

    Args:
        f: any callable: a function, a module, a remat of one, a stack of transforms. What a
            transform inside it keeps for a backward pass of its own is gone when ``f`` returns:
            of ``vmap(f)`` under a gradient, ask ``saved_residuals(functx.vmap(f), x)``; of
            ``vmap(grad(f))`` it lists what a derivative of that keeps.
        *args: passed to ``f``; any pytrees.
        **kwargs: likewise.

    Returns:
        `Residuals`, a list of `Residual`: what it is, its source (``"argument x[0]"``,
        ``"parameter 0.weight"``, ``"output of aten.sin at net.py:12 in attention"``,
        ``"named 'z' at net.py:13 in attention"``), and its bytes. Prints as a table.

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
            "saved_residuals: called inside of a transform. Call it outside, on the transformed "
            "function: saved_residuals(functx.vmap(f), x)."
        )
    buffers = [t for t, (kind, _) in labels(f, args, kwargs) if kind == "buffer"]
    with undisturbed(buffers), torch.inference_mode(False), torch.enable_grad():
        found = _of_one_run(f, args, kwargs)
        if found is None:
            args, kwargs = fresh_leaves((args, kwargs))
            found = _of_one_run(f, args, kwargs)
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
        ValueError: ``f`` is an empty dictionary.

    Example:
        >>> import torch, functx
        >>> f = lambda x: torch.sin(torch.sin(x)).sum()
        >>> both = {"plain": f, "remat": functx.remat(f)}
        >>> functx.print_saved_residuals(both, torch.ones(1000))  # doctest: +ELLIPSIS
        value          plain  remat  from
        float32[1000]  4,000  4,000  argument x
        float32[1000]  4,000      -  output of aten.sin at ...
                       8,000  4,000  total
                       4,000      0  of them made for the pullback alone
    """
    if isinstance(f, dict):
        if not f:
            raise ValueError("print_saved_residuals: there is no function in the dictionary")
        print(side_by_side({str(k): saved_residuals(g, *args, **kwargs) for k, g in f.items()}))
    else:
        check_callable(f, "print_saved_residuals")
        print(saved_residuals(f, *args, **kwargs))


def fresh_leaves(tree: Any) -> Any:
    """The same values, as leaves of a tape of their own.

    Those require grad that did; where none did, all that can.
    """
    some = any(isinstance(t, Tensor) and t.requires_grad for t in _tree.leaves(tree))

    def leaf(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        wanted = t.requires_grad if some else t.is_floating_point() or t.is_complex()
        return t.detach().requires_grad_(wanted)

    return _tree.map_(leaf, tree)


@contextmanager
def undisturbed(buffers: Iterable[Tensor]) -> Iterator[None]:
    """Put the default random generators back, and the values of some buffers."""
    before = [(b, b.detach().clone()) for b in buffers]
    devices = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    with torch.random.fork_rng(devices), torch.no_grad():
        with torch.enable_grad():
            yield
        for b, value in before:
            if not torch.equal(b, value):
                b.copy_(value)


def _of_one_run(f: Any, args: Any, kwargs: Any) -> list[Residual] | None:
    """What is kept; ``None`` if no result has a derivative."""
    known: dict[int, tuple[Tensor, Label]] = {}
    for t, label in labels(f, args, kwargs):
        for storage in storages_of(t):
            known.setdefault(id(storage), (t, label))
    names: dict[int, list[str]] = {}
    moved: dict[int, Held] = {}
    storages = TracedStorages()

    def named(t: Tensor, name: str) -> None:
        with _torch.without_function_modes():  # or a region would take it that the memory is read
            for storage in storages_of(t):
                names.setdefault(id(storage), []).append(name)

    def offloaded(t: Tensor, host: Tensor) -> None:
        (source,), (copy,) = storages_of(t), storages_of(host)
        if (made := storages.birth_of(source)) is not None:
            moved[id(copy)] = made
            names[id(copy)] = names.get(id(source), [])

    start = _torch.next_sequence_number()
    with on_name(named), _offload.on_offload(offloaded), storages:
        out = f(*args, **kwargs)
    results = [t for t in _tree.leaves(out) if isinstance(t, Tensor)]
    tape = [t.grad_fn for t in results if t.grad_fn is not None]
    if not tape:
        return None
    returned = {id(storage) for t in results for storage in storages_of(t)}
    rows: dict[int, Residual] = {}
    for t in held(tape, start):
        for storage in storages_of(t):
            key = id(storage)
            born = storages.birth_of(storage)
            if born is None and t.dim() == 0 and key not in known:
                continue  # a number of the program's
            shown = min(storage.nbytes(), t.numel() * t.element_size())
            if born is None or not storages.is_new(storage):
                row = _from_outside(t, shown, born, known.get(key))
                if key not in rows or rows[key].nbytes < shown:
                    rows[key] = row
            else:
                of = tuple(dict.fromkeys(names.get(key, ())))
                rows[key] = _made(moved.get(key, born), storage.nbytes(), of, key in moved)
                rows[key] = rows[key]._replace(is_result=key in returned)
    order = {key: i for i, key in enumerate(known)}
    return [rows[k] for k in sorted(rows, key=lambda k: (rows[k].made, order.get(k, len(order))))]


def held(tape: Iterable[Any], start: int) -> Iterator[Tensor]:
    """What the nodes of a tape hold that are not older than a sequence number, oldest first."""
    seen = {node for node in tape if node._sequence_nr() >= start}
    stack = list(seen)
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is not None and node not in seen and node._sequence_nr() >= start:
                seen.add(node)
                stack.append(node)
    for node in sorted(seen, key=lambda node: node._sequence_nr()):
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            held: Any = [node.saved_tensors, *vars(node).values()]
        elif type(node).__name__ == "AccumulateGrad":
            continue  # a leaf, which is there anyway
        else:
            held = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        yield from (t for t in _tree.leaves(held) if isinstance(t, Tensor))


def _from_outside(t: Tensor, nbytes: int, first: Held | None, known: Any) -> Residual:
    kind, name = "parameter" if isinstance(t, nn.Parameter) else "constant", ""
    if known is not None:
        t, (kind, name) = known
        nbytes = min(nbytes, t.numel() * t.element_size())
    if name or first is None:
        return Residual(Value(tuple(t.shape), t.dtype), f"{kind} {name}".rstrip(), nbytes, kind)
    source = f"a {kind} that {os.path.basename(first.file)}:{first.line} in {first.function} reads"
    where = (), "", first.file, first.line, first.function
    return Residual(Value(tuple(t.shape), t.dtype), source, nbytes, kind, *where)


def _made(born: Held, nbytes: int, names: tuple[str, ...], on_host: bool) -> Residual:
    operation = "aten." + born.operation if "::" not in born.operation else born.operation
    source = f"named {', '.join(map(repr, names))}" if names else f"output of {operation}"
    source += f" at {born.place}" + (f" ({born.module})" if born.module else "")
    return Residual(
        Value(born.shape, born.dtype),
        source + (ON_HOST if on_host else ""),
        nbytes,
        "named" if names else "output",
        *(names, operation, born.file, born.line, born.function, born.module, on_host),
    )
