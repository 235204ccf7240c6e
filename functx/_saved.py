"""`saved_residuals`: run a function forward, and see which memory its tape holds.

What was made on the way is held by the tape if it is alive while nothing but the tape is, and
goes, or has fewer holders, when the tape does. What was there before is held if it has fewer
holders then. Nothing is derived from formulas of derivatives, so what is listed is what is kept.
What Python holds for the tape (attributes of a custom Function's context, what a region reads
that is no input) has no holders to count, and is looked up there.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from functx import _offload, _torch, _tree
from functx._arrays import backend_of
from functx._costs import fresh_leaves, undisturbed
from functx._labels import Label, labels
from functx._origins import Made, Memory, Origins, cost, described, has_address
from functx._remat._holders import base_of
from functx._remat._observers import on_name
from functx._residuals import ON_HOST, Residual, Residuals, side_by_side
from functx._storages import no_collection
from functx._validate import check_callable


def saved_residuals(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Residuals:
    """What ``f`` keeps between its forward and its backward pass, value by value.

    ``f`` runs forward once, on plain autograd, and what its tape holds is listed: every value that
    the pullback reads, regions of `functx.remat` as they keep it. Derivatives are those with
    respect to the tensors that require grad, in the arguments and closed over; if none does, to
    all floating point arguments, as in JAX (``f`` then runs twice). Random generators and buffers
    of modules are put back as they were.

    Args:
        f: any callable: a function, a module, a remat of one, a stack of transforms. What a
            transform inside it keeps for a backward pass of its own is gone when ``f`` returns:
            of ``vmap(f)`` under a gradient, ask ``saved_residuals(functx.vmap(f), x)``; of
            ``vmap(grad(f))`` it lists what a derivative of that keeps.
        *args: passed to ``f``; any pytrees.
        **kwargs: likewise.

    Returns:
        `Residuals`, a tuple of `Residual`: shape, dtype, bytes, source (``"argument x[0]"``,
        ``"parameter 0.weight"``, ``"named 'z', output of aten.sin at net.py:12 in attention"``),
        and the FLOPs of computing it again; with totals. Prints as a table.

    Raises:
        TypeError: ``f`` can't be called.
        RuntimeError: called inside of a transform.

    Example:
        >>> import torch, functx
        >>> def f(w, x):
        ...     z = functx.checkpoint_name(torch.tanh(x @ w), "z")
        ...     return torch.sin(z).sum()
        >>> w, x = torch.ones(10, 20), torch.ones(50, 10)
        >>> for residual in functx.saved_residuals(f, w, x):
        ...     print(residual.nbytes, residual.kind, residual.flops)
        800 argument 0
        2000 argument 0
        4000 named 21000
        >>> functx.saved_residuals(functx.remat(f), w, x).kept
        0

    Source:
        ``jax.ad_checkpoint.print_saved_residuals``.
    """
    check_callable(f, "saved_residuals")
    if (backend := backend_of("saved_residuals", args, kwargs)) is not None:
        return Residuals(backend.saved_residuals(f, *args, **kwargs))
    if _torch.transforming():
        raise RuntimeError(
            "saved_residuals: called inside of a transform. Call it outside, on the transformed "
            "function: saved_residuals(functx.vmap(f), x)."
        )
    with (
        undisturbed([f, *_modules((args, kwargs))]),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
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
        shape    dtype    plain  remat  from
        (1000,)  float32  4,000  4,000  argument x
        (1000,)  float32  4,000      -  output of aten.sin at ...
        total             8,000  4,000  bytes
        total             4,000      0  of them made for the pullback alone
        total             1,000      0  FLOPs to compute each again

    Source:
        ``jax.ad_checkpoint.print_saved_residuals``.
    """
    if isinstance(f, dict):
        if not f:
            raise ValueError("print_saved_residuals: there is no function in the dictionary")
        print(side_by_side({str(k): saved_residuals(g, *args, **kwargs) for k, g in f.items()}))
    else:
        check_callable(f, "print_saved_residuals")
        print(saved_residuals(f, *args, **kwargs))


def _modules(tree: Any) -> list[nn.Module]:
    return [leaf for leaf in _tree.leaves(tree) if isinstance(leaf, nn.Module)]


def _of_one_run(f: Any, args: Any, kwargs: Any) -> list[Residual] | None:
    """What is kept; ``None`` if no result has a derivative."""
    origins = Origins()
    known: dict[int, tuple[Tensor, Label]] = {}
    for t, label in labels(f, args, kwargs):
        if has_address(base_of(t)):
            known.setdefault(origins.meet(base_of(t)).key, (t, label))
    start = _torch.next_sequence_number()
    with no_collection():
        with on_name(origins.named), _offload.on_offload(origins.offloaded), origins:
            out = f(*args, **kwargs)
        results = [base_of(t) for t in _tree.leaves(out) if isinstance(t, Tensor)]
        returned = {origins.meet(t).key for t in results if has_address(t)}
        tape = [t.grad_fn for t in results if t.grad_fn is not None]
        del out, results
        if not tape:
            return None
        nodes = _nodes(tape, start)
        held = _memory_of(map(_held_by_python, nodes))
        alive = [(m, m.holders()) for m in origins.memory.values() if m.alive]
        # Ends hold leaves, which are no residuals; these holders are to stay.
        ends = [node for node in nodes if _is_end(node)]
        gone = _watch(node for node in nodes if not _is_end(node))
        del tape, nodes
        if not gone():
            gc.collect()  # the user's code has it in a cycle, perhaps
        if not gone():  # or holds a tensor that is on it
            tensors = [t for m, _ in alive if m.alive for t in m.seen()]
            left = _nodes([t.grad_fn for t in tensors if t.grad_fn is not None], start)
            held |= _memory_of(map(_saved_by, left))
            del tensors, left
        kept = [m for m, n in alive if not m.alive or m.key in held or m.holders() < n]
    del ends
    there = {id(m.value) for m in kept} | {id(m.value.moved) for m in kept if m.value is not None}
    rows = []
    for m in kept:
        if m.outside:
            rows.append(_from_outside(m, known.get(m.key)))
        elif m.value is not None:
            again = cost(m.value.moved or m.value, lambda value: id(value) in there)
            rows.append(_made(m, m.value, again, m.key in returned))
    return rows


def _nodes(tape: Iterable[Any], start: int) -> list[Any]:
    """The nodes of a tape that are not older than a sequence number."""
    seen = {node for node in tape if _torch.sequence_number(node) >= start}
    stack = list(seen)
    while stack:
        for following, _ in stack.pop().next_functions:
            if (
                following is not None
                and following not in seen
                and (_is_end(following) or _torch.sequence_number(following) >= start)
            ):
                seen.add(following)
                stack.append(following)
    return list(seen)


def _is_end(node: Any) -> bool:
    return type(node).__name__ == "AccumulateGrad"


class _Sentinel:
    pass


def _watch(nodes: Iterable[Any]) -> Callable[[], bool]:
    """Tells whether these nodes are gone."""
    refs = []
    for node in nodes:
        node.metadata[_Sentinel] = sentinel = _Sentinel()
        refs.append(weakref.ref(sentinel))
    return lambda: all(ref() is None for ref in refs)


def _memory_of(trees: Iterable[Any]) -> set[int]:
    """Addresses of the tensors in some trees."""
    leaves = [leaf for tree in trees for leaf in _tree.leaves(tree)]
    bases = [base_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
    return {_torch.storage_key(t) for t in bases if has_address(t)}


def _held_by_python(node: Any) -> Any:
    """What the context of a custom Function holds, or the region of a node of this library."""
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        return ()
    payload: Any = getattr(node, "payload", None)
    if not hasattr(payload, "region"):
        return list(vars(node).values())
    held = (t for constant in payload.region.constants for t in constant.held())
    return [*payload.apart, *held]


def _saved_by(node: Any) -> Any:
    """What a node shows of what it saved."""
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        return node.saved_tensors
    names = [name for name in dir(node) if name.startswith("_saved_")]
    return [getattr(node, name) for name in names]


def _from_outside(m: Memory, known: tuple[Tensor, Label] | None) -> Residual:
    file, line, function = ("", 0, "") if m.place is None else described(m.place)
    if known is None:
        t = max(m.seen(), key=lambda t: t.numel(), default=None)
        kind, name = "parameter" if isinstance(t, nn.Parameter) else "constant", ""
    else:
        t, (kind, name) = known
    source = f"{kind} {name}" if name else f"a {kind}"
    if line and not name:
        source += f" that {os.path.basename(file)}:{line} in {function} reads"
    shown = m.nbytes if t is None else min(m.nbytes, t.numel() * t.element_size())
    return Residual(
        shape=() if t is None else tuple(t.shape),
        dtype=None if t is None else t.dtype,
        device=None if t is None else t.device,
        nbytes=shown,
        kind=kind,
        source=source,
        file=file,
        line=line,
        function=function,
    )


def _made(m: Memory, kept: Made, again: int, is_result: bool) -> Residual:
    value = kept.moved or kept
    file, line, function = value.line()
    source = f"output of {value.operation} at {os.path.basename(file)}:{line} in {function}"
    if value.module:
        source += f" ({value.module})"
    if value.names:
        source = f"named {', '.join(map(repr, dict.fromkeys(value.names)))}, {source}"
    if value.parts:
        source += f", with {', '.join(map(repr, dict.fromkeys(value.parts)))} in it"
    if is_result:
        source += ", a result"
    if kept.moved is not None:
        source += ON_HOST
    return Residual(
        shape=value.shape,
        dtype=value.dtype,
        device=kept.device,
        nbytes=m.nbytes,
        kind="named" if value.names else "output",
        source=source,
        names=tuple(dict.fromkeys(value.names)),
        operation=value.operation,
        file=file,
        line=line,
        function=function,
        module=value.module,
        flops=again,
        on_host=kept.moved is not None,
        is_result=is_result,
    )
