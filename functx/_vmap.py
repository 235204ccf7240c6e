"""``vmap`` as torch's, with dimensions of dicts by their keys.

torch takes ``in_dims`` and ``out_dims`` that are dicts in the order in which they were written, so
``{"b": 1, "a": 0}`` for ``{"a": ..., "b": ...}`` silently maps over the wrong dimensions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from functx import _tree
from functx._padding import read_no_masks


@functools.wraps(torch.func.vmap)
def vmap_by_keys(
    func: Callable[..., Any], in_dims: Any = 0, out_dims: Any = 0, *options: Any, **named: Any
) -> Any:
    read_no_masks()
    own = torch.func.vmap(func, in_dims, out_dims, *options, **named)
    of_inputs, of_outputs = _tree.has_dict(in_dims), _tree.has_dict(out_dims)
    if not of_inputs and not of_outputs:
        return own

    @functools.wraps(own)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        given, flat = in_dims, _Flat(func, out_dims) if of_outputs else None
        if of_inputs:
            try:
                given = tuple(
                    _tree.unflatten(_tree.flatten(arg)[1], _tree.spread(dim, arg))
                    for dim, arg in zip(in_dims, args, strict=True)
                )
            except ValueError:
                return own(*args, **kwargs)  # which says what is wrong
        if flat is None:
            return torch.func.vmap(func, given, out_dims, *options, **named)(*args, **kwargs)
        results = torch.func.vmap(flat, given, flat.dims, *options, **named)(*args, **kwargs)
        return _tree.unflatten(flat.spec, results)

    return mapped


class _Flat:
    """A function that returns the leaves of what another returns.

    Attributes:
        dims: The dimension of each. Filled in when the function has returned, before torch looks.
        spec: The structure.
    """

    def __init__(self, func: Callable[..., Any], out_dims: Any) -> None:
        self._func, self._out_dims = func, out_dims
        self.dims: Any = []
        self.spec: Any = None
        functools.update_wrapper(self, func)

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        """The leaves of the result."""
        result = self._func(*args, **kwargs)
        leaves, self.spec = _tree.flatten(result)
        try:
            self.dims[:] = _tree.spread(self._out_dims, result)
        except ValueError as error:
            raise ValueError(
                f"vmap: out_dims {self._out_dims!r} don't fit what the function returns: {error}"
            ) from None
        return leaves
