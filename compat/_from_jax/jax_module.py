"""``module_from_jax``: a JAX function and its parameters as an ``nn.Module``."""

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
    """Make an ``nn.Module`` of a JAX function whose first argument are its parameters.

    The module trains as any other: ``parameters()`` go to a torch optimizer, ``state_dict()`` to a
    file, and it may be a part of a larger module.

    Args:
        fn: a JAX function ``fn(params, *args, **kwargs)``.
        params: a pytree as JAX knows them.  Floating point and complex arrays become parameters
            (copies, named by their place: ``"params/Dense_0/kernel"``), other arrays buffers;
            typed random keys and all that is no array stay as they are.
        static_argnums: as of :func:`from_jax`; ``params`` is argument 0.
        static_argnames: as of :func:`from_jax`.
        enable_x64: as of :func:`from_jax`.

    Returns:
        The module; called as ``module(*args, **kwargs)``.

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
            if hasattr(nn.Module, name):  # "half", "type", "train": modules have methods, too
                name += "_"
            if hasattr(self, name):
                raise ValueError(f"module_from_jax: the name {name!r} is taken twice in params")
            tensor = tensor_from_jax(leaf)
            if tensor.is_floating_point() or tensor.is_complex():
                self.register_parameter(name, nn.Parameter(tensor))
            else:
                self.register_buffer(name, tensor)
            self._leaves.append(name)

    def params(self) -> Any:
        """The parameters as a pytree like the one the module was made of, with tensors."""
        return self._rebuilt(lambda tensor: tensor)

    def jax_params(self) -> Any:
        """Copies of the parameters as a pytree of JAX arrays, to go on in JAX."""
        return self._rebuilt(array_from_torch)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The function of the parameters and these arguments."""
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
