"""``module_from_jax``: make an ``nn.Module`` from a JAX function and its parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from torch import Tensor, nn

from functx.compat._bridge import array_from_torch, has_torch_dtype, tensor_from_jax
from functx.compat._from_jax.torch_function import TorchFunction, from_jax


def module_from_jax(
    fn: Callable[..., Any],
    params: Any,
    *,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    enable_x64: bool = False,
) -> JaxModule:
    """Make an ``nn.Module`` from a JAX function whose first argument is its parameters.

    The module can be trained like any other: its ``parameters()`` can be passed to a torch
    optimizer, its ``state_dict()`` can be saved, and it can be part of a larger module.

    Args:
        fn: a JAX function ``fn(params, *args, **kwargs)``.
        params: a pytree of JAX. Floating point and complex arrays are copied to parameters, which
            are named by their path (``"params/Dense_0/kernel"``); other arrays become buffers.
            Typed random keys, and leaves that are not arrays, stay unchanged.
        static_argnums: as for :func:`from_jax`; ``params`` is argument 0.
        static_argnames: as for :func:`from_jax`.
        enable_x64: as for :func:`from_jax`.

    Returns:
        The module; call it as ``module(*args, **kwargs)``.

    Raises:
        TypeError: if ``fn`` is not callable.
        ValueError: if two leaves of ``params`` have the same name.

    Example:
        >>> import torch, jax.numpy as jnp
        >>> from functx.compat import module_from_jax
        >>> net = module_from_jax(lambda p, x: p["w"] @ x + p["b"],
        ...                       {"w": jnp.ones((2, 3)), "b": jnp.zeros(2)})
        >>> {name: tuple(p.shape) for name, p in net.named_parameters()}
        {'b': (2,), 'w': (2, 3)}
        >>> net(torch.ones(3))
        tensor([3., 3.], grad_fn=<JaxCallBackward>)
        >>> net.jax_params()["b"]
        Array([0., 0.], dtype=float32)
    """
    function = from_jax(
        fn, static_argnums=static_argnums, static_argnames=static_argnames, enable_x64=enable_x64
    )
    return JaxModule(function, params)


class JaxModule(nn.Module):
    """See :func:`module_from_jax`."""

    def __init__(self, function: TorchFunction, params: Any) -> None:
        super().__init__()
        self._function = function
        paths, self._tree = jax.tree_util.tree_flatten_with_path(params)
        # For each leaf the name of its tensor, or the leaf itself in a tuple.
        self._leaves: list[Any] = []
        for path, leaf in paths:
            is_array = isinstance(leaf, (jax.Array, np.ndarray))
            if not is_array or not has_torch_dtype(leaf.dtype):
                self._leaves.append((leaf,))
                continue
            name = jax.tree_util.keystr(path, simple=True, separator="/").replace(".", "_")
            if hasattr(nn.Module, name):  # a method of modules has this name, such as "half"
                name += "_"
            if hasattr(self, name):
                raise ValueError(f"module_from_jax: two leaves of params have the name {name!r}")
            tensor = tensor_from_jax(leaf)
            if tensor.is_floating_point() or tensor.is_complex():
                self.register_parameter(name, nn.Parameter(tensor))
            else:
                self.register_buffer(name, tensor)
            self._leaves.append(name)

    def params(self) -> Any:
        """The parameters as a pytree of tensors, with the structure of the original ``params``."""
        return self._rebuilt(lambda tensor: tensor)

    def jax_params(self) -> Any:
        """Copies of the parameters as a pytree of JAX arrays."""
        return self._rebuilt(array_from_torch)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function on the parameters and these arguments."""
        return self._function(self.params(), *args, **kwargs)

    def extra_repr(self) -> str:
        """The function's name."""
        return repr(self._function)

    def _rebuilt(self, convert: Callable[[Tensor], Any]) -> Any:
        leaves = [
            convert(getattr(self, leaf)) if isinstance(leaf, str) else leaf[0]
            for leaf in self._leaves
        ]
        return jax.tree_util.tree_unflatten(self._tree, leaves)
