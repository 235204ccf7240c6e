"""`grads`, `norms` and `clipped_sum`: the gradients of a loss, example by example."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from functx._core import Argnums, validate
from functx.per_sample._batch import Batch, InDims
from functx.per_sample._batched_function import BatchedFunction, Func
from functx.per_sample._chunk_gradients import CompiledGradients
from functx.per_sample._chunks import Chunks
from functx.per_sample._clipping import Scaling, check_scaling, groups_of
from functx.per_sample._gradient_reductions import ClippedSum, Extras, StackedResults


@validate.with_options
def grads(
    func: Func,
    argnums: Argnums = 0,
    *,
    in_dims: InDims = None,
    has_aux: bool = False,
    return_values: bool = False,
    return_norms: bool = False,
    chunk_size: int | None = None,
    budget: int | float | str | None = None,
    randomness: str = "error",
    compile: bool | Mapping[str, Any] = False,
) -> Callable[..., Any]:
    """The gradient of a loss for each example.

    What ``vmap(grad(func))`` computes, in chunks, at the peak memory of one chunk and the result.

    Args:
        func: The loss of one example: takes parameters and an example without batch dimension, and
            returns a tensor of shape ``()`` (with ``has_aux`` a pair of that and a pytree of
            tensors). Or a pair ``(module, criterion)``, see `functional`: the result is then called
            without the parameters, and differentiates those of the module that require grad.
        argnums: Which positional arguments to differentiate, as for :func:`functx.grad`.
        in_dims: Where the examples are, as for :func:`torch.func.vmap`. By default the
            differentiated arguments are shared, and all tensors in the others have their examples
            along dimension 0. Keyword arguments are shared.
        has_aux: Whether ``func`` returns ``(value, aux)``.
        return_values: Return the losses too.
        return_norms: Return the norms of the gradients too.
        chunk_size: How many examples to run at a time; by default all. One at a time runs without
            ``vmap``, and is free of its limitations. If memory runs out the chunk is halved, with a
            warning.
        budget: The largest peak allowed above what is live at the call: bytes, a text such as
            ``"2GiB"``, or, up to 1.0, a share of what all at once take; the chunk size follows,
            from measurements at the first call with a shape (of up to eight examples, which may
            take more than that). The result counts too.
        randomness: ``"error"``, ``"different"`` or ``"same"``, as for :func:`torch.func.vmap`.
        compile: Compile the gradients of a chunk with :func:`functx.jit`; a dict has its options.
            For chunks of one size, ``chunk_size`` or that of the first call, of more than one
            example, where no argument requires grad; of up to eight shapes of examples; not where
            gradients are known by their factors, which is quicker still. Regions stay recomputed.
            Where ``func`` can't be traced, a warning says why, and all runs in eager. Threads that
            call the same function take turns.

    Returns:
        A function of the same arguments, for a batch of ``B`` examples, and
        ``is_padding_example=None``, a bool tensor of shape ``(B,)`` that is ``True`` for those that
        don't count: they are not run, and their rows are zeros. In the place of the batched
        arguments, the last positional argument may be an iterator of batches, each a tuple of them.

        It returns the gradients, a pytree like the argument with leaves of shape
        ``(B, *leaf.shape)``, a tuple of such if ``argnums`` is a tuple; with ``has_aux``, the pair
        of that and ``aux``; with ``return_values`` or ``return_norms``, the pair of that and
        `Extras`.

    Raises:
        TypeError: ``func`` can't be called.
        ValueError: ``in_dims``, sizes or the padding don't fit; the budget is too small for one
            example; the module normalises over the batch.
        RuntimeError: As :func:`functx.grad`; or a random operation with ``randomness="error"``.

    Example:
        >>> import torch, functx
        >>> loss = lambda w, x: (w * x).sum() ** 2
        >>> functx.per_sample.grads(loss, chunk_size=2)(torch.ones(2), torch.eye(3, 2))
        tensor([[2., 0.],
                [0., 2.],
                [0., 0.]])
    """
    chunks = Chunks("per_sample.grads", chunk_size, budget, randomness)
    function = BatchedFunction(func, argnums, in_dims, chunks)
    make = functools.partial(StackedResults, gradients=True)
    return _over_batch(function, make, (return_values, return_norms, has_aux), compile)


@validate.with_options
def norms(
    func: Func,
    argnums: Argnums = 0,
    *,
    groups: Any = None,
    in_dims: InDims = None,
    has_aux: bool = False,
    return_values: bool = False,
    accumulation_dtype: torch.dtype | None = None,
    chunk_size: int | None = None,
    budget: int | float | str | None = None,
    randomness: str = "error",
    compile: bool | Mapping[str, Any] = False,
) -> Callable[..., Any]:
    """The norm of the gradient of each example, exactly, for any code.

    No two gradients of an example exist at the same time: each leaf's is normed and dropped as soon
    as it is complete.

    Options that are not those of `grads`:
        groups: A pytree prefix of the differentiated argument, of labels: leaves under equal labels
            share a norm. By default all do.
        accumulation_dtype: The least dtype to add squares up in; float32 at least.

    Returns:
        A function of the same arguments as that of `grads`, that returns norms of shape ``(B,)``,
        with ``groups`` a dict of such by label, in float32 or the accumulation dtype; with
        ``has_aux`` or ``return_values`` a pair, as for `grads`. Norms of padding are 0.

    Raises:
        TypeError, RuntimeError: As `grads`.
        ValueError: As `grads`; or ``groups`` is no pytree prefix.

    Example:
        >>> import torch, functx
        >>> loss = lambda w, x: (w * x).sum()
        >>> functx.per_sample.norms(loss)(torch.ones(2), torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
        tensor([5., 1.])
    """
    chunks = Chunks("per_sample.norms", chunk_size, budget, randomness)
    function = BatchedFunction(func, argnums, in_dims, chunks)
    make = functools.partial(StackedResults, accumulation_dtype=accumulation_dtype)
    return _over_batch(function, make, (return_values, True, has_aux), compile, groups)


@validate.with_options
def clipped_sum(
    func: Func,
    argnums: Argnums = 0,
    *,
    max_norm: Any = None,
    groups: Any = None,
    scaling: str | Scaling = "clip",
    in_dims: InDims = None,
    has_aux: bool = False,
    return_values: bool = False,
    return_norms: bool = False,
    accumulation_dtype: torch.dtype | None = None,
    chunk_size: int | None = None,
    budget: int | float | str | None = None,
    randomness: str = "error",
    compile: bool | Mapping[str, Any] = False,
    process_group: Any = None,
) -> Callable[..., Any]:
    """The sum over examples of clipped gradients: what differential privacy adds noise to.

    The sum, not the mean: what to divide by is the privacy mechanism's business, as are noise,
    sampling and accounting. The gradients of a chunk are kept until their norms are known, so
    `chunk_size` or `budget` bounds them.

    Options that are not those of `grads`:
        max_norm: The largest norm one example's gradient may have. A number holds for all leaves
            together. A pytree prefix of the differentiated argument, of numbers, gives each of its
            parts a norm and a threshold of its own. With ``groups``, a number for each group, or a
            dict of thresholds by label.
        groups: A pytree prefix of labels: leaves under equal labels are clipped together.
        scaling: ``"clip"``, ``"automatic"`` (see `automatic`), ``"normalize"``, or a function of
            the norms of a group, of shape ``(B,)``, and its threshold, that returns as many
            factors.
        return_norms: Return the norms too, before clipping.
        accumulation_dtype: The dtype in which norms (float32 at least) and the sum are added up,
            and that of the result. By default half precision is summed in float32, and the result
            is of the leaf's dtype.
        process_group: Add up over the ranks of a :mod:`torch.distributed` group (or a
            ``DeviceMesh`` of one dimension; ``True`` for the default group), in one all-reduce.
            Every rank has to call, also without examples.

    Returns:
        A function of the same arguments as that of `grads`, that returns the sum, a pytree like the
        argument; with ``has_aux``, ``return_values`` or ``return_norms`` a pair, as for `grads`
        (values, norms and aux are those of this rank).

    Raises:
        TypeError, RuntimeError: As `grads`.
        ValueError: As `grads`; or thresholds are missing, not positive, or no pytree prefix.

    Example:
        >>> import torch, functx
        >>> loss = lambda w, x: (w * x).sum()
        >>> clipped = functx.per_sample.clipped_sum(loss, max_norm=1.0, return_norms=True)
        >>> total, extras = clipped(torch.ones(2), torch.tensor([[3.0, 4.0], [0.0, 0.5]]))
        >>> total, extras.norms
        (tensor([0.6000, 1.3000]), tensor([5.0000, 0.5000]))
    """
    chunks = Chunks("per_sample.clipped_sum", chunk_size, budget, randomness)
    function = BatchedFunction(func, argnums, in_dims, chunks)
    make = functools.partial(
        ClippedSum,
        scaling=check_scaling(scaling, max_norm, function.api),
        accumulation_dtype=accumulation_dtype,
        process_group=process_group,
    )
    wanted = (return_values, return_norms, has_aux)
    return _over_batch(function, make, wanted, compile, groups, max_norm)


def _over_batch(
    function: BatchedFunction,
    make: Callable[..., StackedResults],
    wanted: tuple[bool, bool, bool],
    compile: bool | Mapping[str, Any],
    groups: Any = None,
    max_norm: Any = None,
) -> Callable[..., Any]:
    """A function of a batch, that runs a reduction of gradients over the examples."""
    validate.check_argnums(function.argnums, function.api)
    names = [name for name, is_wanted in zip(Extras._fields, wanted) if is_wanted]
    function.has_aux = "aux" in names
    if compile is not False:
        function.compiled = CompiledGradients(function, compile)

    def make_for(batch: Batch) -> StackedResults:
        validate.check_inputs(batch.given, batch.positions, function.api)
        differentiated = function.differentiated(batch)
        found = groups_of(differentiated, groups, max_norm, function.api)
        return make(function, batch, found, names)

    return function.over_batch(make_for)
