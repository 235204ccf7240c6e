"""`grads`, `norms` and `clipped_sum`: the gradients of a loss, example by example."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from functx import _tree, _validate
from functx._validate import Argnums
from functx.per_sample import _parallel
from functx.per_sample._batch import Batch, InDims
from functx.per_sample._call import Call, Func, check_func, dims_of, module_arguments
from functx.per_sample._chunks import Chunking
from functx.per_sample._compiled import compiled_by
from functx.per_sample._extras import returned
from functx.per_sample._groups import Groups, Scaling, groups_of, scaling_of
from functx.per_sample._jobs import ClippedSum, Gradients, Leaves, Norms
from functx.per_sample._pull import Loss


def grads(
    func: Func,
    argnums: Argnums = 0,
    *,
    in_dims: InDims = None,
    has_aux: bool = False,
    return_values: bool = False,
    return_norms: bool = False,
    chunk_size: int | None = None,
    memory_budget: int | None = None,
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
        memory_budget: The largest peak allowed, in bytes, above what is live at the call; the chunk
            size follows, from measurements at the first call with a shape (of up to eight examples,
            which may take more than that). The result counts too.
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
    api = "per_sample.grads"

    def make(loss: Loss, leaves: Leaves, groups: Groups) -> Gradients:
        return Gradients(
            loss, leaves, groups, return_values=return_values, return_norms=return_norms
        )

    options = (in_dims, has_aux, chunk_size, memory_budget, randomness, compile)
    return _transform(api, func, argnums, *options, None, make, return_values or return_norms)


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
    memory_budget: int | None = None,
    randomness: str = "error",
    compile: bool | Mapping[str, Any] = False,
) -> Callable[..., Any]:
    """The norm of the gradient of each example, exactly, for any code.

    No two gradients of an example exist at the same time: each leaf's is normed and dropped as soon
    as it is complete.

    Args:
        func: As for `grads`.
        argnums: As for `grads`.
        groups: A pytree prefix of the differentiated argument, of labels: leaves under equal labels
            share a norm. By default all do.
        in_dims: As for `grads`.
        has_aux: As for `grads`.
        return_values: Return the losses too.
        accumulation_dtype: The least dtype to add squares up in; float32 at least.
        chunk_size: As for `grads`.
        memory_budget: As for `grads`.
        randomness: As for `grads`.
        compile: As for `grads`.

    Returns:
        A function of the same arguments as that of `grads`, that returns norms of shape ``(B,)``,
        with ``groups`` a dict of such by label, in float32 or the accumulation dtype; with
        ``has_aux`` or ``return_values`` a pair, as for `grads`. Norms of padding are 0.

    Raises:
        TypeError: As `grads`.
        ValueError: As `grads`; or ``groups`` is no pytree prefix.
        RuntimeError: As `grads`.

    Example:
        >>> import torch, functx
        >>> loss = lambda w, x: (w * x).sum()
        >>> functx.per_sample.norms(loss)(torch.ones(2), torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
        tensor([5., 1.])
    """
    api = "per_sample.norms"

    def make(loss: Loss, leaves: Leaves, grouped: Groups) -> Norms:
        return Norms(
            loss,
            leaves,
            grouped,
            accumulation_dtype=accumulation_dtype,
            return_values=return_values,
            return_norms=True,
        )

    options = (in_dims, has_aux, chunk_size, memory_budget, randomness, compile)
    return _transform(
        api, func, argnums, *options, lambda tree: groups_of(tree, groups, None, api), make,
        return_values,
    )  # fmt: skip


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
    passes: int | None = None,
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    randomness: str = "error",
    compile: bool | Mapping[str, Any] = False,
    process_group: Any = None,
) -> Callable[..., Any]:
    """The sum over examples of clipped gradients: what differential privacy adds noise to.

    The sum, not the mean: what to divide by is the privacy mechanism's business, as are noise,
    sampling and accounting.

    Args:
        func: As for `grads`.
        argnums: As for `grads`.
        max_norm: The largest norm one example's gradient may have. A number holds for all leaves
            together. A pytree prefix of the differentiated argument, of numbers, gives each of its
            parts a norm and a threshold of its own. With ``groups``, a number for each group, or a
            dict of thresholds by label.
        groups: A pytree prefix of labels: leaves under equal labels are clipped together.
        scaling: ``"clip"``, ``"automatic"`` (see `automatic`), ``"normalize"``, or a function of
            the norms of a group, of shape ``(B,)``, and its threshold, that returns as many
            factors.
        in_dims: As for `grads`.
        has_aux: As for `grads`.
        return_values: Return the losses too.
        return_norms: Return the norms too, before clipping.
        accumulation_dtype: The dtype in which norms (float32 at least) and the sum are added up,
            and that of the result. By default half precision is summed in float32, and the result
            is of the leaf's dtype.
        passes: 1 keeps the gradients of a chunk until their norms are known, 2 drops them, and then
            differentiates the weighted sum of the losses. By default 2 where gradients are large
            against activations, which is measured.
        chunk_size: As for `grads`.
        memory_budget: As for `grads`.
        randomness: As for `grads`.
        compile: As for `grads`.
        process_group: Add up over the ranks of a :mod:`torch.distributed` group (or a
            ``DeviceMesh`` of one dimension; ``True`` for the default group), in one all-reduce.
            Every rank has to call, also without examples.

    Returns:
        A function of the same arguments as that of `grads`, that returns the sum, a pytree like the
        argument; with ``has_aux``, ``return_values`` or ``return_norms`` a pair, as for `grads`
        (values, norms and aux are those of this rank).

    Raises:
        TypeError: As `grads`.
        ValueError: As `grads`; or thresholds are missing, not positive, or no pytree prefix.
        RuntimeError: As `grads`.

    Example:
        >>> import torch, functx
        >>> loss = lambda w, x: (w * x).sum()
        >>> clipped = functx.per_sample.clipped_sum(loss, max_norm=1.0, return_norms=True)
        >>> total, extras = clipped(torch.ones(2), torch.tensor([[3.0, 4.0], [0.0, 0.5]]))
        >>> total, extras.norms
        (tensor([0.6000, 1.3000]), tensor([5.0000, 0.5000]))
    """
    api = "per_sample.clipped_sum"
    scale = scaling_of(scaling, max_norm, api)
    if passes not in (None, 1, 2):
        raise ValueError(f"{api}: passes must be 1 or 2, or None to have it chosen, got {passes!r}")

    def make(loss: Loss, leaves: Leaves, grouped: Groups) -> ClippedSum:
        return ClippedSum(
            loss,
            leaves,
            grouped,
            scaling=scale,
            thresholds=grouped.thresholds(max_norm, api),
            accumulation_dtype=accumulation_dtype,
            passes=passes,
            return_values=return_values,
            return_norms=return_norms,
        )

    options = (in_dims, has_aux, chunk_size, memory_budget, randomness, compile)
    return _transform(
        api, func, argnums, *options, lambda tree: groups_of(tree, groups, max_norm, api), make,
        return_values or return_norms, lambda total: _parallel.all_reduced(total, process_group),
    )  # fmt: skip


def _transform(
    api: str,
    func: Func,
    argnums: Argnums,
    in_dims: InDims,
    has_aux: bool,
    chunk_size: int | None,
    memory_budget: int | None,
    randomness: str,
    compile: bool | Mapping[str, Any],
    group: Callable[[Any], Groups] | None,
    make: Callable[[Loss, Leaves, Groups], Any],
    extras_wanted: bool,
    finish: Callable[[Any], Any] = lambda result: result,
) -> Callable[..., Any]:
    """A function that runs a job over the examples it is given."""
    loss_of_one, module = check_func(func, api)
    _validate.check_argnums(argnums, api)
    in_dims = dims_of(module, in_dims, argnums, api)
    shared = (argnums,) if isinstance(argnums, int) else argnums
    chunking = Chunking(chunk_size, memory_budget, randomness, api)
    call = Call(loss_of_one, in_dims, shared, chunking, api, module is not None)

    hints: dict[Any, bool] = {}
    compiled = compiled_by(compile, chunk_size, memory_budget, api)

    def make_job(batch: Batch) -> Any:
        args = batch.args()
        positions = _validate.resolve_argnums(argnums, len(args), api)
        _validate.check_inputs(args, positions, api)
        loss = Loss(loss_of_one, positions, has_aux, randomness, api, hints, compiled)
        leaves = Leaves(loss, batch, single=isinstance(argnums, int))
        chosen = tuple(args[position] for position in positions)
        tree = chosen[0] if isinstance(argnums, int) else chosen
        everything = Groups([0] * len(_tree.leaves(tree)), 1, lambda one: one[0])
        return make(loss, leaves, everything if group is None else group(tree))

    @functools.wraps(loss_of_one, updated=())
    def transformed(*args: Any, **kwargs: Any) -> Any:
        with module_arguments(module, args) as arguments:
            result, extras = call.run(make_job, arguments, kwargs)
            return returned(finish(result), has_aux, extras_wanted, extras)

    return transformed
