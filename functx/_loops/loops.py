"""Loops that save a few of their states.

A loop is cut into a tree of regions (`binomial`), and the recompute engine does the rest: nothing
here depends on derivatives. So a loop composes with every transform as any region does, tensors
that its body closes over get gradients, and random numbers are replayed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from functx._core import backend_of, check_callable, describe, integer, name_of
from functx._core import tree as _tree
from functx._loops import binomial, while_loop
from functx._remat import Options, run

Step = Callable[[Any, Any], tuple[Any, Any]]


def remat_scan(
    body: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    *,
    slots: int | None = None,
) -> tuple[Any, Any]:
    """`jax.lax.scan` that saves ``slots`` of its carries and recomputes the others.

    It runs ``carry, y = body(carry, x)`` for each ``x`` of ``xs``. Derivatives of any order, in
    reverse and in forward mode, are those of the plain loop. Between the forward and the backward
    pass, at most ``slots`` carries and the residuals of the last step are alive. A backward pass
    runs as few steps again as that allows: for 1,024 steps these are 3,755 with 10 slots, and 2,002
    with 44. Forward mode, and a call that is not differentiated, run every step once.

    Args:
        body: takes a carry and a slice of ``xs``, and returns the next carry and an output. Tensors
            that it closes over get gradients.
        carry: any pytree. Its tensors keep their shapes and dtypes from step to step; its other
            leaves (for example the number of the step) may change.
        xs: a pytree of tensors of shape ``(length, ...)``, or ``None``.
        length: the number of steps; required if ``xs`` has no tensors.
        reverse: whether to go from the last slice to the first. Outputs are stacked in the order of
            ``xs`` in any case.
        slots: how many carries to save, including the first one. With ``None``, the number of
            binary digits of ``length - 1``.

    Returns:
        The last carry, and the outputs, with tensors stacked to ``(length, ...)``. Numbers become
        tensors; ``None`` stays ``None``.

    Raises:
        TypeError: ``body`` does not return a pair, or changes the structure, shapes or dtypes of
            the carry; or ``xs`` has a leaf that is not a tensor.
        ValueError: lengths differ or are missing, or ``slots`` is too small.

    Example:
        >>> import torch, functx
        >>> def body(carry, x):
        ...     return carry * x, carry
        >>> functx.remat_scan(body, torch.tensor(1.0), torch.tensor([2.0, 3.0, 4.0]), slots=1)
        (tensor(24.), tensor([1., 2., 6.]))

    Source:
        Griewank and Walther, *Algorithm 799: revolve*, ACM TOMS 26(1), 2000.
    """
    check_callable(body, "remat_scan")
    if (backend := backend_of("remat_scan", (carry, xs), {})) is not None:
        _checked_slots("remat_scan", 1, slots)
        return backend.remat_scan(body, carry, xs, length, reverse, slots)
    leaves, spec = _tree.flatten(xs)
    layout = (spec, tuple(leaf is not None for leaf in leaves))
    leaves = [leaf for leaf in leaves if leaf is not None]
    steps = _length(leaves, length)
    slots = _checked_slots("remat_scan", steps, slots)
    if steps == 0:
        return carry, _no_steps(body, layout, carry, leaves)

    def step(carry: Any, xs: Sequence[Tensor]) -> tuple[Any, Any]:
        return _scan_step(body, layout, carry, xs)

    return _advance(step, name_of(body), reverse, carry, leaves, steps, slots)


def remat_loop(
    body: Callable[[Any], Any],
    state: Any,
    steps: int | Callable[[Any], Any] | None = None,
    *,
    cond: Callable[[Any], Any] | None = None,
    slots: int | None = None,
) -> Any:
    """``state = body(state)``, ``steps`` times or while ``cond(state)``, saving ``slots`` states.

    Derivatives of any order, in reverse and in forward mode, are those of the plain loop. A loop
    with a number of steps costs as much as `remat_scan`. A loop with a condition runs in blocks of
    1, 2, 4, ... steps. For ``n`` steps it saves about ``log2(n)`` states, and twice as many during
    its backward pass, which runs each step about ``1 + log2(n) / 2`` times again. Forward mode runs
    every step once.

    Args:
        body: takes a state and returns the next one. Tensors that it closes over get gradients.
        state: any pytree. Leaves that are not tensors may change, so a state can count its steps.
        steps: how often to call ``body``; with a condition, at most how often. A callable is taken
            as ``cond``.
        cond: takes a state and returns whether to go on, as a bool or a tensor with one element.
            Under ``vmap`` the loop runs until no example goes on; finished examples keep their
            state.
        slots: how many states to save, including the first one. With ``None``, the number of binary
            digits of ``steps - 1``. Not allowed with a condition.

    Returns:
        The last state.

    Raises:
        TypeError: ``body`` or ``cond`` is not callable, ``steps`` is not an int, or both ``steps``
            and ``cond`` are missing.
        ValueError: ``steps`` is negative; or ``slots`` is too small, or used with a condition.

    Example:
        The state has the number of the step:

        >>> import torch, functx
        >>> def euler(state):
        ...     i, x = state
        ...     return i + 1, x + 0.01 * torch.sin(0.01 * i - x)
        >>> def flow(x):
        ...     return functx.remat_loop(euler, (0, x), 100, slots=5)[1]
        >>> functx.jacrev(flow)(torch.zeros(2)).diagonal()
        tensor([0.3981, 0.3981])

        The derivative of a square root, by Newton's method:

        >>> def root(a):
        ...     return functx.remat_loop(
        ...         lambda x: (x + a / x) / 2, a, cond=lambda x: abs(x * x - a) > 1e-6
        ...     )
        >>> functx.vmap(functx.grad(root))(torch.tensor([4.0, 9.0, 16.0]))
        tensor([0.2500, 0.1667, 0.1250])

    Source:
        See `remat_scan`. For loops of unknown length, Stumm and Walther, *New algorithms for
        optimal online checkpointing*, SIAM J. Sci. Comput. 32(2), 2010, need fewer states.
    """
    check_callable(body, "remat_loop")
    if callable(steps) and cond is None:
        steps, cond = None, steps
    if steps is None and cond is None:
        raise TypeError("remat_loop: pass the number of steps, or a condition")
    if steps is not None:
        steps = integer(steps, "remat_loop: steps must be an int")
        if steps < 0:
            raise ValueError(f"remat_loop: steps is {steps}, expected 0 or more")
    if cond is not None:
        check_callable(cond, "remat_loop")
        if slots is not None:
            raise ValueError(
                "remat_loop: slots can be used only without a condition. A loop with a condition "
                "saves about 2 * log2(n) of its n states. Leave slots out."
            )
    backend = backend_of("remat_loop", (state,), {})
    if backend is not None and (cond is not None or backend.can_scan(state)):
        _checked_slots("remat_loop", 1, slots)
        return backend.remat_loop(body, state, steps, cond, slots)
    if cond is None:
        assert steps is not None
        slots = _checked_slots("remat_loop", steps, slots)
        if steps == 0:
            return state

        def step(state: Any, _: Any) -> tuple[Any, None]:
            return body(state), None

        return _advance(step, name_of(body), False, state, [], steps, slots)[0]
    return while_loop.loop(body, cond, state, steps, name_of(body))


def _advance(
    step: Step,
    name: str,
    reverse: bool,
    carry: Any,
    xs: Sequence[Tensor],
    steps: int,
    slots: int,
) -> tuple[Any, Any]:
    """Run ``steps`` steps as a chain of regions and a last step outside all regions.

    ``step`` takes a carry and slices of length one, and returns the same. Each of ``xs`` has the
    shape ``(steps, ...)``. With ``reverse``, the steps go through them from the end.
    """
    parts = list(binomial.chain(steps, slots))
    pieces = _pieces(xs, [m for m, _ in parts], reverse)

    def again(carry: Any, xs: Sequence[Tensor], steps: int, slots: int) -> tuple[Any, Any]:
        return _advance(step, name, reverse, carry, xs, steps, slots)

    outputs = []
    for (m, own), piece in zip(parts[:-1], pieces):
        o = Options(name=f"{m} steps of {name}")
        carry, ys = run(again, (carry, piece, m, own), {}, o)
        outputs.append(ys)
    carry, ys = step(carry, pieces[-1])
    outputs.append(ys)
    return carry, _stacked(outputs[::-1] if reverse else outputs)


def _pieces(xs: Sequence[Tensor], sizes: list[int], reverse: bool) -> list[list[Tensor]]:
    """``xs`` cut for the parts of a chain, by one ``split`` per tensor."""
    if len(sizes) == 1:
        return [list(xs)]
    cut = [x.split(sizes[::-1] if reverse else sizes) for x in xs]
    pieces = [[c[i] for c in cut] for i in range(len(sizes))]
    return pieces[::-1] if reverse else pieces


def _stacked(outputs: list[Any]) -> Any:
    if len(outputs) == 1:
        return outputs[0]
    trees = [_tree.flatten(ys) for ys in outputs]
    leaves, spec = trees[0]
    for _, other in trees[1:]:
        if other != spec:
            raise TypeError(
                "remat_scan: body must return outputs of the same structure at every step, got "
                f"{_tree.shown(spec)} and {_tree.shown(other)}"
            )
    stacked = [
        None if leaf is None else torch.cat([tree[0][i] for tree in trees])
        for i, leaf in enumerate(leaves)
    ]
    return _tree.unflatten(spec, stacked)


Layout = tuple[Any, tuple[bool, ...]]
"""The structure of ``xs``, and which of its leaves are tensors; the others are ``None``."""


def _scan_step(body: Any, layout: Layout, carry: Any, xs: Sequence[Tensor]) -> tuple[Any, Any]:
    """One step, on slices of length one."""
    spec, present = layout
    rest = iter(xs)
    x = _tree.unflatten(spec, [next(rest)[0] if there else None for there in present])
    result = body(carry, x)
    if not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(
            f"remat_scan: body must return a pair (carry, y), got {describe(result)} of type "
            f"{type(result).__name__}"
        )
    new, y = result
    new = _checked_carry(carry, new)
    return new, _tree.map_(_row, y)


def _no_steps(body: Any, layout: Layout, carry: Any, xs: Sequence[Tensor]) -> Any:
    """The stacked outputs of zero steps: those of one step on zeros, cut to length zero."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        xs = [x.new_zeros((1, *x.shape[1:])) for x in xs]
        _, ys = _scan_step(body, layout, carry, xs)
    return _tree.map_(lambda leaf: leaf if leaf is None else leaf[:0], ys)


def _row(leaf: Any) -> Any:
    """An output as one row of the stacked outputs."""
    if leaf is None:
        return None
    return (leaf if isinstance(leaf, Tensor) else torch.as_tensor(leaf)).unsqueeze(0)


def _checked_carry(before: Any, after: Any) -> Any:
    """The carry after a step, with dicts in the order that they had before."""
    old, new, spec = while_loop.aligned("remat_scan", before, after)
    for i, (a, b) in enumerate(zip(old, new)):
        same = isinstance(a, Tensor) == isinstance(b, Tensor)
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            same = a.shape == b.shape and a.dtype == b.dtype
        if not same:
            raise TypeError(
                "remat_scan: body must return a carry of the same shapes and dtypes that it got; "
                f"leaf {i} was {describe(a)} and became {describe(b)}"
            )
    return _tree.unflatten(spec, new)


def _length(leaves: Sequence[Any], length: int | None) -> int:
    """The number of steps that ``xs`` and ``length`` agree on."""
    found = set() if length is None else {length}
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"remat_scan: xs must be tensors, got {describe(leaf)} of type "
                f"{type(leaf).__name__}"
            )
        if leaf.dim() == 0:
            raise ValueError(
                "remat_scan: xs must have a leading dimension to step through, got a tensor of "
                "shape ()"
            )
        found.add(leaf.shape[0])
    if not found:
        raise ValueError("remat_scan: pass length, since xs has no tensors")
    if len(found) > 1 or min(found) < 0:
        raise ValueError(
            f"remat_scan: xs and length must agree on one number of steps, got length={length} "
            f"and leading dimensions {[leaf.shape[0] for leaf in leaves]}"
        )
    return found.pop()


def _checked_slots(api: str, steps: int, slots: int | None) -> int:
    """How many states to save. Raises an error if they are too few for the number of steps."""
    if slots is None:
        return binomial.default_slots(steps)
    slots = integer(slots, f"{api}: slots must be an int or None")
    if slots < 1:
        raise ValueError(f"{api}: slots is {slots}; a loop saves at least one state, its first")
    least = binomial.least_slots(steps)
    if slots < least:
        raise ValueError(
            f"{api}: {steps} steps need {least} slots or more, got {slots}; with fewer, regions "
            "would be nested too deeply"
        )
    return slots


def remat_sequential(functions: Any, segments: int, x: Any) -> Any:
    """Call ``functions`` one after another, in segments that save only their inputs.

    This is :func:`torch.utils.checkpoint.checkpoint_sequential` for every transform. All segments
    but the last are regions of `functx.remat`. The last segment would be run again right after the
    forward pass, so making it a region would save no memory.

    Args:
        functions: an ``nn.Sequential``, or callables; each takes the result of the one before.
        segments: the number of segments; their lengths differ by at most one.
        x: the argument of the first function, any pytree.

    Returns:
        The result of the last function.

    Raises:
        TypeError: one of ``functions`` is not callable, or ``segments`` is not an int.
        ValueError: ``segments`` is not between 1 and the number of functions.

    Example:
        >>> import torch, functx
        >>> layers = [torch.nn.Linear(3, 3) for _ in range(6)]
        >>> x = torch.ones(2, 3, requires_grad=True)
        >>> functx.remat_sequential(layers, 3, x).sum().backward()
        >>> x.grad.shape
        torch.Size([2, 3])
    """
    parts, segments = checked_chain(functions, segments, "remat_sequential")
    cuts = binomial.segments(len(parts), segments)
    for start, end in cuts[:-1]:
        o = Options(name=f"functions {start} to {end - 1} of remat_sequential")
        x = run(functools.partial(composed, *parts[start:end]), (x,), {}, o)
    return composed(*parts[cuts[-1][0] :], x)


def checked_chain(
    functions: Any, segments: Any, api: str
) -> tuple[list[Callable[[Any], Any]], int]:
    """The functions as a list, and the number of segments as an int."""
    parts = list(functions.children() if isinstance(functions, nn.Sequential) else functions)
    for part in parts:
        check_callable(part, api)
    segments = integer(segments, f"{api}: segments must be an int")
    most = max(len(parts), 1)
    if not 1 <= segments <= most:
        raise ValueError(
            f"{api}: {len(parts)} functions can be cut into 1 to {most} segments, not {segments}"
        )
    return parts, segments


def composed(*functions_and_x: Any) -> Any:
    *functions, x = functions_and_x
    for function in functions:
        x = function(x)
    return x
