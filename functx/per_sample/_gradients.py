"""`grads`, `norms` and `clipped_sum`: per-example gradients of a loss."""

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

    It computes what ``vmap(grad(func))`` computes, in chunks. The peak memory is that of one chunk
    and the result.

    Args:
        func: The loss of one example. It takes parameters and an example without batch dimension,
            and returns a tensor of shape ``()`` (with ``has_aux``, a pair of that and a pytree of
            tensors). Or a pair ``(module, criterion)``, see `functional`: the returned function
            then takes no parameters, and differentiates with respect to those parameters of the
            module that require grad.
        argnums: Which positional arguments to differentiate, as for :func:`functx.grad`.
        in_dims: The dimensions of the examples, as for :func:`torch.func.vmap`. By default the
            differentiated arguments are shared, and all tensors in the others have their examples
            along dimension 0. Keyword arguments are shared.
        has_aux: Whether ``func`` returns ``(value, aux)``.
        return_values: Return the losses too.
        return_norms: Return the norms of the gradients too.
        chunk_size: How many examples to run at a time; by default all. With 1, examples run without
            ``vmap`` and its limitations. If memory runs out, the chunk is halved, with a warning.
        budget: The largest peak above what is live at the call, including the result: bytes, a
            string such as ``"2GiB"``, or, up to 1.0, a share of the peak with all examples at once.
            The chunk size is found by measurements at the first call with a shape. These run up to
            eight examples, and may themselves exceed the budget.
        randomness: ``"error"``, ``"different"`` or ``"same"``, as for :func:`torch.func.vmap`.
        compile: Compile the gradients of a chunk with :func:`functx.jit`; a dict has its options.
            This applies to chunks of one size (``chunk_size``, or that of the first call) with more
            than one example, for up to eight shapes of examples, if no argument requires grad. It
            does not apply where gradients are represented by factors, which is faster. Regions are
            still recomputed. If ``func`` can't be traced, a warning gives the reason, and chunks
            run in eager. Threads that call the same function take turns.

    Returns:
        A function of the same arguments, for a batch of ``B`` examples, and
        ``is_padding_example=None``, a bool tensor of shape ``(B,)`` that is ``True`` for examples
        that don't count: they do not run, and their rows are zeros. Instead of the batched
        arguments, the last positional argument may be an iterator of batches, each a tuple of them.

        It returns the gradients, a pytree like the argument with leaves of shape
        ``(B, *leaf.shape)``, or a tuple of such pytrees if ``argnums`` is a tuple. With
        ``has_aux``, it returns the pair of that and ``aux``; with ``return_values`` or
        ``return_norms``, the pair of that and `Extras`.

    Raises:
        TypeError: ``func`` is not callable.
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

    The gradients of an example with respect to different leaves never exist at the same time. As
    soon as a gradient is complete, its norm is computed and the gradient is freed.

    Options in addition to those of `grads`:
        groups: A pytree prefix of the differentiated argument, with labels as leaves. Leaves with
            equal labels share a norm. By default all leaves share one norm.
        accumulation_dtype: The dtype in which squares are summed, at least float32.

    Returns:
        A function of the same arguments as that of `grads`. It returns norms of shape ``(B,)``, or
        with ``groups`` a dict of such norms by label, in float32 or the accumulation dtype. With
        ``has_aux`` or ``return_values`` it returns a pair, as for `grads`. Norms of padding are 0.

    Raises:
        TypeError, RuntimeError: As `grads`.
        ValueError: As `grads`; or ``groups`` is not a pytree prefix.

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
    """The sum of the clipped gradients of all examples, to which differential privacy adds noise.

    It returns the sum, not the mean. The privacy mechanism chooses the denominator, noise, sampling
    and accounting. The gradients of a chunk are kept until their norms are known, so `chunk_size`
    or `budget` bounds their memory.

    Options in addition to those of `grads`:
        max_norm: The largest norm that the gradient of one example may have. A number applies to
            all leaves together. A pytree prefix of the differentiated argument, with numbers as
            leaves, gives each of its parts a separate norm and threshold. With ``groups``, a number
            that applies to each group, or a dict of thresholds by label.
        groups: A pytree prefix with labels as leaves: leaves with equal labels are clipped
            together.
        scaling: ``"clip"``, ``"automatic"`` (see `automatic`), ``"normalize"``, or a function that
            takes the norms of a group, of shape ``(B,)``, and its threshold, and returns a factor
            for each norm.
        return_norms: Return the norms before clipping, too.
        accumulation_dtype: The dtype of the result, in which the sum and the norms (at least in
            float32) are accumulated. By default half precision is summed in float32, and the result
            has the dtype of the leaf.
        process_group: Sum over the ranks of a :mod:`torch.distributed` group (or a ``DeviceMesh``
            of one dimension; ``True`` for the default group), in one all-reduce. Every rank has to
            call the function, also without examples.

    Returns:
        A function of the same arguments as that of `grads`. It returns the sum, a pytree like the
        argument. With ``has_aux``, ``return_values`` or ``return_norms`` it returns a pair, as for
        `grads` (values, norms and aux are those of this rank).

    Raises:
        TypeError, RuntimeError: As `grads`.
        ValueError: As `grads`; or thresholds are missing, not positive, or not a pytree prefix.

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
    requested = (return_values, return_norms, has_aux)
    return _over_batch(function, make, requested, compile, groups, max_norm)


def _over_batch(
    function: BatchedFunction,
    make: Callable[..., StackedResults],
    requested: tuple[bool, bool, bool],
    compile: bool | Mapping[str, Any],
    groups: Any = None,
    max_norm: Any = None,
) -> Callable[..., Any]:
    """A function of a batch that runs a reduction of gradients over the examples.

    ``requested`` says for each field of `Extras` whether the caller wants it.
    """
    validate.check_argnums(function.argnums, function.api)
    names = [name for name, is_requested in zip(Extras._fields, requested) if is_requested]
    function.has_aux = "aux" in names
    if compile is not False:
        function.compiled = CompiledGradients(function, compile)

    def make_for(batch: Batch) -> StackedResults:
        validate.check_inputs(batch.args, batch.positions, function.api)
        differentiated = function.differentiated(batch)
        found = groups_of(differentiated, groups, max_norm, function.api)
        return make(function, batch, found, names)

    return function.over_batch(make_for)
