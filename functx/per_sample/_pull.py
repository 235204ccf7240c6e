"""Per-example gradients of a few examples, each handed over as soon as it is complete.

A gradient of one parameter is complete when all uses of the parameter have been pulled back. It is
given to a arrivals there and then, and dropped: what the arrivals does not keep never exists
together with the gradients of the other parameters. (A node on every *use*, as hooks on modules
are, would see parts of a gradient; the norm of a sum is no sum of norms.)

Several examples are mapped with ``vmap``. One example alone is not: it runs as it is, without the
limitations of ``vmap``, and if nobody could differentiate the result, in plain autograd.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from functx import _torch, _transforms, _tree, _validate
from functx._errors import TracingError
from functx._jit import jit
from functx._pullback import Pullback, record
from functx.per_sample._batch import Batch, random_state, restore_random_state
from functx.per_sample._chunks import is_out_of_memory, outside
from functx.per_sample._options import PerSample
from functx.per_sample._outer import KeepFactors
from functx.per_sample._sums import Rows, squared_norms

# Factors are looked for where they spare this much of all gradients' numbers.
_WORTH = 0.2
# Examples of so many shapes are compiled for; after that it takes longer than it spares.
_SHAPES = 8


class Arrivals:
    """The gradients of one chunk as they arrive: squared norms by group, and what is kept.

    Norms are taken where groups are given. Gradients of some types are kept.
    """

    def __init__(
        self, groups: list[int] | None, dtype: torch.dtype, keeps: tuple[type, ...], factors: bool
    ) -> None:
        self._groups, self._dtype, self._keeps = groups, dtype, keeps
        self.factors = factors  # whether gradients may be known by factors
        self.squares: dict[int, torch.Tensor] = {}
        self.kept: dict[int, Rows] = {}
        self.dropped: list[int] = []

    def gradient(self, leaf: int, rows: Rows) -> None:
        """Take the gradients by one leaf, of shape ``(c, *leaf.shape)``."""
        if self._groups is not None:
            group, square = self._groups[leaf], squared_norms(rows, self._dtype)
            self.squares[group] = self.squares[group] + square if group in self.squares else square
        if isinstance(rows, self._keeps):
            self.kept[leaf] = rows
        else:
            self.dropped.append(leaf)


def pull(over: PerSample, batch: Batch, make: Callable[[], Arrivals]) -> tuple[Any, Any, Arrivals]:
    """Runs the loss on each example, and feeds the gradients to a arrivals.

    Returns:
        The values, of shape ``(c,)``, the auxiliary outputs (``None`` without ``has_aux``), leaves
        of shape ``(c, ...)``, and the arrivals that took all gradients.
    """
    if batch.size == 1 and not _torch.transforming():
        arrivals = make()
        return *_pull_one(over, batch, arrivals), arrivals
    arrivals, key = make(), ("factors", batch.signature())
    serves = over.compiled is not None and over.compiled.serves(batch)
    if arrivals.factors and not _torch.transforming() and over.hints.get(key, True):
        mode = KeepFactors(batch.size)
        before = random_state() if over.randomness != "error" else None
        try:
            values, aux = _pull_mapped(over, batch, arrivals, mode)
            # Looking at every operation has its price; what it brings depends on shapes alone.
            over.hints[key] = mode.spared >= _WORTH * mode.taken
            return values, aux, arrivals
        except (RuntimeError, TypeError, ValueError) as error:
            # Code that wants a gradient's memory, not its numbers, can't have that of a product
            # which was not computed. Errors of other causes come again.
            if not mode.made or is_out_of_memory(error):
                raise
        over.hints[key] = False
        arrivals = make()
        if before is not None:
            restore_random_state(before)
    elif serves and (found := over.compiled.rows(batch)) is not None:
        values, aux, rows = found
        for leaf in range(len(rows)):
            arrivals.gradient(leaf, rows[leaf])
            rows[leaf] = None
        return values, aux, arrivals
    return *_pull_mapped(over, batch, arrivals, None), arrivals


def recorded(
    over: PerSample,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    positions: tuple[int, ...],
    losses: Callable[..., Any] | None = None,
) -> tuple[Any, Any, Pullback]:
    """The loss of one example, auxiliary outputs, and the pullback; or ``losses`` of several."""
    check = functools.partial(_validate.check_scalar, api=over.api)
    options: dict[str, Any] = {"has_aux": over.has_aux, "check_output": check}
    if losses is not None:
        options = {"has_aux": False, "check_output": lambda output: None}
    return record(losses or over.func, args, kwargs, positions, api=over.api, once=True, **options)


def _pull_mapped(
    over: PerSample, batch: Batch, arrivals: Arrivals, mode: KeepFactors | None
) -> tuple[Any, Any]:
    """With ``vmap`` over the examples."""

    def example(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        level = _torch.current_interpreter().level()

        def take(leaf: int, gradient: torch.Tensor) -> None:
            rows = _rows(gradient, level, batch.size)
            with mode.pause() if mode else nullcontext():
                arrivals.gradient(leaf, mode.take(rows) if mode else rows)

        value, aux, pullback = recorded(over, args, kwargs, batch.positions)
        with mode.pulling_back() if mode else nullcontext():
            _feed(pullback, value, take)
        return value, (_tree.map_(_tensor, aux) if over.has_aux else ())

    value, aux = batch.map(example, over.randomness)
    return value, (aux if over.has_aux else None)


def _pull_one(over: PerSample, batch: Batch, arrivals: Arrivals) -> tuple[Any, Any]:
    """One example, as it is."""

    def example(*args: Any, **kwargs: Any) -> tuple[Any, Any, Pullback]:
        followed = torch.is_grad_enabled() or _torch.dual_level() >= 0
        if followed or torch.is_inference_mode_enabled():
            return recorded(over, args, kwargs, batch.positions)
        return _recorded_plain(over, args, kwargs, batch.positions)

    def take(leaf: int, gradient: torch.Tensor) -> None:
        arrivals.gradient(leaf, _whole(gradient).unsqueeze(0))

    value, aux, pullback = batch.alone(example, over.randomness)
    _feed(pullback, value, take)
    aux = _tree.map_(lambda leaf: _tensor(leaf).unsqueeze(0), aux) if over.has_aux else None
    return value.unsqueeze(0), aux


def _recorded_plain(
    over: PerSample, args: tuple[Any, ...], kwargs: dict[str, Any], positions: tuple[int, ...]
) -> tuple[Any, Any, Pullback]:
    """As `recorded`, in plain autograd: nothing around the call can differentiate the result."""
    _validate.check_inputs(args, positions, over.api)
    with torch.enable_grad():
        arguments = [
            _tree.map_(lambda leaf: leaf.detach().requires_grad_(), arg) if at in positions else arg
            for at, arg in enumerate(args)
        ]
        output, aux = over.func(*arguments, **kwargs), None
        if over.has_aux:
            output, aux = _validate.split_aux(output, over.api)
        _validate.check_scalar(output, over.api)
    pullback = Pullback(tuple(arguments[at] for at in positions), *_tree.flatten(output))
    aux = _tree.map_(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, aux)
    return output.detach(), aux, pullback


def _feed(pullback: Pullback, value: torch.Tensor, take: Callable[..., None]) -> None:
    receivers = {leaf: functools.partial(take, leaf) for leaf in range(pullback.arity)}
    pullback.feed(torch.ones_like(value), receivers, retain_graph=False)


def _rows(gradient: torch.Tensor, level: int, size: int) -> torch.Tensor:
    """The gradients of all examples, ``(c, *leaf.shape)``, from that which ``vmap`` maps."""
    if _torch.is_batched(gradient) and _torch.level_of(gradient) == level:
        value, dim = _torch.unwrap_batch(gradient, level)
        assert dim is not None
        return value.movedim(dim, 0) if dim else value
    return gradient.expand(size, *gradient.shape)  # no example is in it: the same for all


def _whole(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient that is sparse, or spread over processes, in one piece: its norm is wanted."""
    if gradient.layout is not torch.strided:
        return gradient.to_dense()
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def _tensor(leaf: Any) -> torch.Tensor:
    if not isinstance(leaf, torch.Tensor):
        raise ValueError(
            f"per_sample: expected aux to consist of tensors, got {_validate.describe(leaf)} of "
            f"type {type(leaf).__name__}"
        )
    return leaf


class Compiled:
    """Runs one loss over chunks of one size as one graph each, by `functx.jit`.

    A chunk of few examples is small work for each operation, and what Python and the transforms add
    is paid for every chunk. Where the loss can't be traced, all runs in eager, with a warning.
    """

    def __init__(self, over: PerSample, options: Mapping[str, Any]) -> None:
        self._compiler: Callable[..., Any] = jit(**options)
        self._over = over
        self._sizes: dict[Any, int] = {}
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._gave_up = self._warned = False
        self._lock = threading.RLock()

    def serves(self, batch: Batch) -> bool:
        """Whether a chunk may run compiled; those of other sizes would each have to be compiled."""
        signature = batch.signature()
        if signature not in self._sizes and len(self._sizes) >= _SHAPES:
            self._warn(f"examples of more than {_SHAPES} shapes came; pad them")
            return False
        size = self._sizes.setdefault(signature, self._over.chunk_size or batch.size)
        if self._gave_up or batch.size != size or size == 1:
            return False
        if _torch.transforming() or _torch.dispatch_depth() or _torch.dual_level() >= 0:
            return False
        leaves = (leaf for leaf in batch.leaves if isinstance(leaf, torch.Tensor))
        return not torch.is_grad_enabled() or not any(leaf.requires_grad for leaf in leaves)

    def rows(self, batch: Batch) -> tuple[Any, Any, list[Any]] | None:
        """Values, auxiliary outputs and gradients by leaf; ``None`` if there is no graph."""
        over = self._over
        each = _transforms.grad_and_value(over.func, batch.positions, over.has_aux)
        form, randomness = replace(batch, leaves=[], kwargs={}), over.randomness

        def gradients(leaves: list[Any], kwargs: dict[str, Any]) -> Any:
            return replace(form, leaves=leaves, kwargs=kwargs).map(each, randomness)

        with self._lock:
            key = batch.signature(), batch.spec, batch.positions
            run = self._functions.setdefault(key, self._compiler(gradients))
            try:
                found, value = run(batch.leaves, batch.kwargs)
            except TracingError as error:
                self._gave_up = True
                self._warn(str(error))
                return None
        value, aux = value if over.has_aux else (value, None)
        return value, aux, _tree.leaves(found)

    def _warn(self, cause: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{self._over.api}: compile=True has no effect here, chunks run in eager: {cause}",
                RuntimeWarning,
                stacklevel=outside(),
            )


def compiled_by(over: PerSample, compile: bool | Mapping[str, Any]) -> Compiled | None:
    """What the option asks for."""
    if not isinstance(compile, (bool, Mapping)):
        raise TypeError(
            f"{over.api}: compile must be True or a dict of options of functx.jit, got {compile!r}"
        )
    if over.memory_budget is not None and compile is not False:
        raise ValueError(
            f"{over.api}: no size of chunks is chosen for compiled code; give chunk_size with "
            "compile, instead of memory_budget"
        )
    return None if compile is False else Compiled(over, {} if compile is True else compile)
