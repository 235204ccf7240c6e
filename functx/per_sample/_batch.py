"""The arguments of one call: which leaves have an entry for each example, and slices of them.

Random numbers follow the rules of ``vmap`` for any size of chunks. With ``"error"``, an example
that runs without ``vmap`` may not draw either. With ``"same"``, each chunk starts from the random
state in which the first one started.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType, MemberDescriptorType
from typing import Any

import torch

from functx import _torch
from functx._core import attributes, contents, describe, is_of, tree
from functx._torch.process_patches import use_mapped_masks
from functx.per_sample._carried_state import CarriedState
from functx.per_sample._embeddings import PlainEmbeddings, needs_plain_embeddings

InDims = int | tuple[Any, ...] | list[Any] | None


@dataclass
class ChunkedCall:
    """The state that all chunks of one call share."""

    api: str = "per_sample"
    module: torch.nn.Module | None = None  # the module whose parameters are differentiated
    plain_embeddings: bool = False  # whether chunks need `PlainEmbeddings`
    has_several_batches: bool = False  # whether the caller passed an iterator of batches
    carried: CarriedState = field(init=False)

    def __post_init__(self) -> None:
        self.carried = CarriedState(self.api, self.module)

    def run(self, chunk: Callable[[], Any], randomness: str) -> Any:
        """Run a chunk. If an embedding in it raises an error, run it again in `PlainEmbeddings`."""
        if self.plain_embeddings:
            with PlainEmbeddings():
                return chunk()
        before = random_state() if randomness != "error" else None
        try:
            return chunk()
        except RuntimeError as error:
            if not needs_plain_embeddings(error):
                raise
        self.plain_embeddings = True
        self.carried = CarriedState(self.api, self.module)
        if before is not None:
            restore_random_state(before)
        return self.run(chunk, randomness)


@dataclass(frozen=True)
class Batch:
    """The arguments of a batch, or of a chunk of a batch, as a list of leaves."""

    args: tuple[Any, ...]  # the caller's positional arguments; only their structure is used
    leaves: list[Any]  # of all arguments; a TensorDict with examples in its batch size is one leaf
    specs: list[tuple[tree.TreeSpec, int]]  # for each argument, its structure and its leaves
    dims: list[int | None]  # for each leaf, the dimension of the examples; None if it is shared
    size: int  # the number of examples
    kwargs: dict[str, Any]  # keyword arguments, which all examples share
    positions: tuple[int, ...]  # positions of the differentiated arguments
    start: int  # position of the first example among all examples of the call
    whole: tuple[int, int]  # position and size of the batch that this is a chunk of
    call: ChunkedCall = field(default_factory=ChunkedCall, compare=False, repr=False)

    def chunk(self, start: int, stop: int) -> Batch:
        """The examples from ``start`` to ``stop``, as views."""
        if (start, stop) == (0, self.size):
            return self  # a sparse tensor can't be sliced as a view
        leaves = self._each(lambda leaf, dim: _part(leaf, dim, slice(start, stop)))
        return replace(self, leaves=leaves, size=stop - start, start=self.start + start)

    def take(self, index: torch.Tensor) -> Batch:
        """The examples at some indices, as copies."""
        leaves = self._each(lambda leaf, dim: _part(leaf, dim, index))
        whole, call = (0, len(index)), replace(self.call)
        return replace(self, leaves=leaves, size=len(index), start=0, whole=whole, call=call)

    def zeros(self) -> Batch:
        """A batch with one example, of zeros. It is used if a call has no examples."""
        leaves = self._each(
            lambda leaf, dim: leaf.new_zeros((*leaf.shape[:dim], 1, *leaf.shape[dim + 1 :]))
        )
        call = replace(self.call)
        return replace(self, leaves=leaves, size=1, start=0, whole=(0, 1), call=call)

    def _each(self, change: Callable[[torch.Tensor, int], torch.Tensor]) -> list[Any]:
        return [
            leaf if dim is None else change(leaf, dim) for leaf, dim in zip(self.leaves, self.dims)
        ]

    def of_differentiated(self, each: Sequence[Any]) -> list[Any]:
        """From ``each``, with an entry per leaf, select those of the differentiated leaves."""
        ends = [0, *itertools.accumulate(count for _, count in self.specs)]
        return [one for at in self.positions for one in each[ends[at] : ends[at + 1]]]

    def _arguments(self, leaves: Sequence[Any]) -> list[Any]:
        """The arguments of one example, rebuilt from its leaves."""
        it = iter(leaves)
        return [tree.unflatten(spec, itertools.islice(it, count)) for spec, count in self.specs]

    @property
    def alone(self) -> bool:
        """Whether this is a single example, which runs without ``vmap`` and its limitations."""
        return self.size == 1 and not _torch.transforming()

    def map(
        self, func: Callable[..., Any], randomness: str
    ) -> tuple[list[torch.Tensor], tree.TreeSpec]:
        """Call ``func`` on each example: by ``vmap``, or directly if there is only one.

        Returns the leaves, of shape ``(c, ...)``, and the structure of the result of one example.
        `stacked` rebuilds the structure once, at the end, since a class of the user may check the
        shapes of its tensors.
        """
        structure: list[tree.TreeSpec] = []

        def example(*leaves: Any) -> list[Any]:
            flat, spec = tree.flatten(func(*self._arguments(leaves), **self.kwargs))
            structure.append(spec)
            return flat

        if self.alone:
            leaves = self._each(lambda leaf, dim: _part(leaf, dim, 0))
            forbidden = _FORBIDDEN if randomness == "error" else None
            with _allowed(randomness):
                is_only = self.whole[1] == 1 and not self.call.has_several_batches
                result = self.call.carried.run(example, leaves, self.dims, forbidden, is_only)
            if wrong := [leaf for leaf in result if not isinstance(leaf, torch.Tensor)]:
                raise ValueError(
                    f"per_sample: expected a function that returns tensors, got "
                    f"{describe(wrong[0])} of type {type(wrong[0]).__name__}"
                )
            return [leaf.unsqueeze(0) for leaf in result], structure[-1]
        use_mapped_masks()
        mapped = torch.func.vmap(example, tuple(self.dims), randomness=randomness)
        try:
            return [*mapped(*self.leaves)], structure[-1]
        except RuntimeError as error:
            if "randomness error mode" in str(error):
                error.add_note("per_sample: pass randomness='different' or randomness='same'.")
            raise

    def signature(self) -> tuple[Any, ...]:
        """A key that is equal for batches that differ only in values and number of examples."""

        def of(leaf: Any, dim: int | None) -> Any:
            if tree.is_tensor_dict(leaf):
                inside, spec = tree.flatten(leaf)
                return spec, tuple(of(one, dim) for one in inside)
            if not isinstance(leaf, torch.Tensor):
                return type(leaf)
            return shape_of_one(leaf, dim), leaf.dtype, leaf.device, dim

        return tuple(self.specs), self.positions, *map(of, self.leaves, self.dims)


def _part(leaf: Any, dim: int, examples: int | slice | torch.Tensor) -> Any:
    """The examples that ``examples`` selects from a tensor or a TensorDict."""
    if not isinstance(leaf, torch.Tensor):  # `select` of a TensorDict selects keys
        return leaf[(*[slice(None)] * dim, examples)]
    if isinstance(examples, int):
        return leaf.select(dim, examples)
    if isinstance(examples, slice):
        return leaf.narrow(dim, examples.start, examples.stop - examples.start)
    return leaf.index_select(dim, examples.to(leaf.device))


def stacked(spec: tree.TreeSpec, leaves: Sequence[torch.Tensor]) -> Any:
    """The results of all examples, in the structure of one, from leaves of shape ``(B, ...)``."""
    whole = tree.unflatten(spec, leaves)
    parts = tree.flatten(whole, tree.is_tensor_dict)[0]
    if not (any(map(tree.is_tensor_dict, parts)) and leaves and len(leaves[0])):
        return whole
    # Under vmap a TensorDict is rebuilt with the batch size that torch.func.vmap gives it.
    return torch.func.vmap(lambda *one: tree.unflatten(spec, one))(*leaves)


def shape_of_one(leaf: torch.Tensor, dim: int | None) -> torch.Size:
    """The shape of a leaf for one example. ``dim`` is the dimension of the examples."""
    return leaf.shape if dim is None else leaf.shape[:dim] + leaf.shape[dim + 1 :]


@dataclass(frozen=True)
class Counted:
    """Which examples of a call count. The others are padding and do not run."""

    size: int  # the number of all examples, including padding
    indices: torch.Tensor | None = None  # the indices of the examples that count; None if all do
    empty: bool = False  # whether no example counts; then one example of zeros has run

    def rows(self, leaf: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Expand entries of the examples that ran to entries of all examples, zeros for padding."""
        if self.empty:
            leaf = leaf.narrow(dim, 0, 0)
        if self.indices is None:
            return leaf
        whole = leaf.new_zeros(*leaf.shape[:dim], self.size, *leaf.shape[dim + 1 :])
        return whole.index_copy(dim, self.indices.to(leaf.device), leaf)


def batch_of(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    in_dims: InDims,
    positions: tuple[int, ...],
    api: str,
) -> Batch:
    """Find the examples in the arguments of one call."""
    found = [
        tree.flatten(arg, None if position in positions else _is_mapped_whole)
        for position, arg in enumerate(args)
    ]
    leaves, specs = [leaf for own, _ in found for leaf in own], [(s, len(own)) for own, s in found]
    dims = _flat_dims(args, in_dims, positions, api)
    for at, (leaf, dim) in enumerate(zip(leaves, dims)):
        if dim is None:
            continue
        where = f"{api}: in_dims maps over dimension {dim} of {describe(leaf)}"
        if not isinstance(leaf, torch.Tensor) and not _is_mapped_whole(leaf):
            raise ValueError(
                f"{where} of type {type(leaf).__name__}; only tensors can be mapped, use None there"
            )
        if not -leaf.dim() <= dim < leaf.dim():
            raise ValueError(
                f"{where}, which it does not have; pass in_dims, with None for arguments that all "
                "examples share"
            )
        dims[at] = dim % leaf.dim()
    sizes = {leaf.shape[dim] for leaf, dim in zip(leaves, dims) if dim is not None}
    if not sizes:
        raise ValueError(
            f"{api}: no argument has a batch dimension. Differentiated arguments (argnums) are "
            "shared unless in_dims maps over them, and keyword arguments are always shared"
        )
    size, *others = sorted(sizes)
    if others:
        raise ValueError(
            f"{api}: expected all tensors to have the same number of examples, got sizes "
            f"{[size, *others]}; pass in_dims, with None for arguments that all examples share"
        )
    return Batch(args, leaves, specs, dims, size, kwargs, positions, 0, (0, size))


def _flat_dims(
    args: tuple[Any, ...], in_dims: InDims, shared: tuple[int, ...], api: str
) -> list[int | None]:
    """The dimension of the examples for each leaf of ``args``."""
    if in_dims is None:
        return [
            None if position in shared or not _is_batched(leaf, api) else 0
            for position, arg in enumerate(args)
            for leaf in tree.flatten(arg, None if position in shared else _is_mapped_whole)[0]
        ]
    if isinstance(in_dims, int):
        in_dims = (in_dims,) * len(args)
    if not isinstance(in_dims, (tuple, list)) or len(in_dims) != len(args):
        raise ValueError(
            f"{api}: in_dims must be an int or a tuple with an entry for each of the {len(args)} "
            f"positional arguments, got {in_dims!r}"
        )
    flat: list[int | None] = []
    for position, (dims, arg) in enumerate(zip(in_dims, args)):
        try:
            flat += tree.broadcast_prefix(
                dims, arg, None if position in shared else _is_mapped_whole
            )
        except ValueError as error:
            raise ValueError(f"{api}: in_dims of argument {position}: {error}") from None
    if wrong := [dim for dim in flat if dim is not None and type(dim) is not int]:
        raise ValueError(f"{api}: in_dims must consist of ints and None, got {wrong[0]!r}")
    return flat


def _is_batched(leaf: Any, api: str) -> bool:
    """Whether a leaf is mapped over if the caller does not pass ``in_dims``."""
    if isinstance(leaf, torch.Tensor) or _is_mapped_whole(leaf):
        return True
    inside = [*_inside(leaf)]
    inside += [one for part in inside for one in contents(part) or ()]  # for UserDict and the like
    if any(is_of(one, torch.Tensor) for one in inside):
        raise ValueError(
            f"{api}: {type(leaf).__name__} has tensors in it but is not a pytree. Pass a dict or a "
            "tuple of tensors, or register the class with torch.utils._pytree; or pass in_dims, "
            "with None for arguments that all examples share"
        )
    return False


def _inside(leaf: Any) -> Iterator[Any]:
    """The values in an object that can be read without running its code."""
    yield from contents(leaf) or ()
    yield from (attributes(leaf) or {}).values()
    if type(leaf) is MappingProxyType:
        yield from gc.get_referents(leaf)
    for cls in type(leaf).__mro__:
        for slot in vars(cls).values():
            if type(slot) is MemberDescriptorType and slot.__objclass__ is cls:
                with suppress(AttributeError):  # the slot is not set
                    yield slot.__get__(leaf)


def _is_mapped_whole(one: Any) -> bool:
    """Whether ``one`` is a TensorDict with a batch size, over which it is mapped as one leaf."""
    return tree.is_tensor_dict(one) and one.ndim > 0


def split_batches(args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]] | None:
    """The arguments of each batch, if the last one is an iterator (or a DataLoader) of batches.

    Each batch is a tuple or list of the remaining positional arguments, or the only such argument.
    """
    kinds = (Iterator, torch.utils.data.DataLoader)
    if not args or isinstance(args[-1], torch.Tensor) or not isinstance(args[-1], kinds):
        return None
    batches = (contents(one) if is_of(one, (tuple, list)) else (one,) for one in args[-1])
    return ((*args[:-1], *(batch or ())) for batch in batches)


def joined(batches: Sequence[Batch]) -> tuple[Any, ...]:
    """The arguments of several batches, concatenated."""
    leaves = [
        own[0] if dim is None else torch.cat(own, dim)
        for dim, *own in zip(batches[0].dims, *(batch.leaves for batch in batches), strict=True)
    ]
    it = iter(leaves)
    specs = batches[0].specs
    return tuple(tree.unflatten(spec, itertools.islice(it, count)) for spec, count in specs)


def counted_rows(is_padding: Any, size: int, api: str) -> torch.Tensor | None:
    """The indices of the examples that count; ``None`` if all do."""
    if is_padding is None:
        return None
    is_padding = torch.as_tensor(is_padding)
    if is_padding.dtype != torch.bool or is_padding.shape != (size,):
        raise ValueError(
            f"{api}: is_padding_example must be a bool tensor of shape ({size},), True for the "
            f"examples that don't count, got {describe(is_padding)}"
        )
    return None if not is_padding.any() else (~is_padding).nonzero().squeeze(1)


_FORBIDDEN = (
    "vmap: called random operation while in randomness error mode. Please either use the 'same' or "
    "'different' randomness flags, or draw the random numbers outside and pass them in as arguments"
)


def random_state() -> list[torch.Tensor]:
    """The states of torch's default generators, for CPU and for CUDA if it is in use."""
    on_device = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *on_device]


def restore_random_state(saved: list[torch.Tensor]) -> None:
    """Restore the default generators."""
    torch.set_rng_state(saved[0])
    if saved[1:]:
        torch.cuda.set_rng_state_all(saved[1:])


@contextmanager
def _allowed(randomness: str) -> Iterator[None]:
    """With ``"error"``, raise the error of ``vmap`` if code inside draws random numbers."""
    if randomness != "error":
        yield
        return
    before = random_state()
    yield
    if not all(map(torch.equal, before, random_state())):
        restore_random_state(before)
        raise RuntimeError(_FORBIDDEN)
