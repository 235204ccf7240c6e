"""``from_jax``: convert a JAX function to a torch function.

The function is traced once for each signature: the structure of its arguments, the shapes and
dtypes of its arrays, the values of static arguments, and JAX's settings. It runs in an operator of
torch, for which `torch_operator` has a rule for each transform.
"""

from __future__ import annotations

import functools
import itertools
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import Tensor

from functx._core import uncompiled
from functx._torch.lowering import is_plain, nonstrict_trace, runs_while_tracing, tree_map
from functx.compat._bridge import (
    Settings,
    array_from_torch,
    current_settings,
    decoder,
    encode,
    endless_refused,
)
from functx.compat._from_jax.leaves import Leaf, mark_static, read_leaf
from functx.compat._from_jax.programs import Program
from functx.compat._from_jax.torch_operator import call
from functx.compat._jax import static_arguments


def from_jax(
    g: Callable[..., Any],
    *,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    enable_x64: bool = False,
) -> TorchFunction:
    """Turn a JAX function into a torch function.

    The result takes and returns pytrees (of JAX) with torch tensors instead of JAX arrays. It can
    be differentiated in forward and reverse mode any number of times, batched, recomputed and
    compiled: by ``.backward()``, ``torch.func``, ``functx``, ``torch.utils.checkpoint`` and
    ``torch.compile``. Its derivatives are computed by JAX (``jax.vjp``, ``jax.jvp``, ``jax.vmap``),
    including custom rules; for complex numbers they follow torch's convention.

    ``g`` is traced and compiled once for each signature, as by ``jax.jit``, with the same
    consequences for side effects and for Python control flow. Under ``jax.disable_jit`` it runs
    without tracing. Derivatives run under the JAX settings (64-bit types, precision of products,
    ...) of the forward call. Tensors are passed without a copy if their memory allows that. Results
    share memory with nothing else, so torch may write to them.

    In addition to tensors, arguments may be JAX and numpy arrays (including ``jax.random`` keys)
    and Python numbers, which get no gradient, and hashable objects of any other type, which are
    static. Results that are typed keys are returned as JAX keys.

    With JAX's 64-bit types off, ``int64`` tensors must have values that fit ``int32``, and are
    returned as ``int32``; ``float64`` tensors are errors and are never narrowed.

    Args:
        g: a JAX function. If it is jitted already, its static arguments are static here, too.
        static_argnums: as for ``jax.jit``.
        static_argnames: as for ``jax.jit``.
        enable_x64: run ``g`` with JAX's 64-bit types on, regardless of JAX's setting.

    Returns:
        The torch function. Results are on the device of the first tensor among the arguments.

    Raises:
        TypeError: ``g`` is not callable; or, at a call, an argument or result of ``g`` has a type
            that JAX does not accept.
        LoweringError: at a call, JAX can't read a tensor, or would narrow it.
        ValueError: at a call, a static argument is not hashable, or tensors are on several devices.

    Example:
        >>> import torch, functx, jax.numpy as jnp
        >>> from functx.compat import from_jax
        >>> energy = from_jax(lambda x: jnp.sum(jnp.sin(x) ** 2))
        >>> x = torch.zeros(2, requires_grad=True)
        >>> energy(x).backward()
        >>> x.grad
        tensor([0., 0.])
        >>> functx.vmap(functx.hessian(energy))(torch.zeros(1, 2))
        tensor([[[2., 0.],
                 [0., 2.]]])
    """
    if isinstance(g, (jax.Array, Tensor)) or not callable(g):
        raise TypeError(
            f"from_jax takes a JAX function, not {type(g).__name__}; to convert an array, use"
            " torch.from_dlpack"
        )
    if isinstance(g, torch.nn.Module) or str(getattr(g, "__module__", "")).startswith("torch"):
        raise TypeError(
            f"from_jax takes a JAX function, but {g!r} is a torch function: call it directly"
        )
    return TorchFunction(g, static_argnums, static_argnames, enable_x64)


class _Signature:
    """The program for one signature, and the structure of its results.

    Attributes:
        program: ``g`` as a function of flat arrays.
        out_tree: the structure of its results, known after tracing.
        decoders: for each result, the function that makes it from an array of the program.
    """

    def __init__(
        self, g: Any, name: str, leaves: Sequence[Leaf], in_tree: Any, settings: Settings
    ) -> None:
        self.out_tree: Any = None
        self.decoders: list[Callable[[Any], Any] | None] = []

        def flat(*arrays: Any) -> list[Any]:
            it = iter(arrays)
            args, kwargs = jax.tree_util.tree_unflatten(in_tree, [x.value(it) for x in leaves])
            try:
                outs, self.out_tree = jax.tree_util.tree_flatten(g(*args, **kwargs))
            except TypeError as error:
                if "must be Tensor, not" in str(error):
                    error.add_note(f"from_jax takes JAX functions, but {name} calls torch")
                raise
            outs = [_result(out, name) for out in outs]
            self.decoders = [decoder(out) for out in outs]
            return [encode(out) for out in outs]

        flat.__name__ = flat.__qualname__ = name
        self.program = Program(flat, name, settings)

    def result(self, outs: Sequence[Tensor]) -> Any:
        """The result of ``g``, from the results of the program."""
        values = [
            out if decode is None else _decoded(out, decode, self.program.name)
            for out, decode in zip(outs, self.decoders, strict=True)
        ]
        return jax.tree_util.tree_unflatten(self.out_tree, values)


_numbers = itertools.count()
_functions: weakref.WeakValueDictionary[str, TorchFunction] = weakref.WeakValueDictionary()


class TorchFunction:
    """A JAX function as a torch function; see :func:`from_jax`."""

    def __init__(self, g: Callable[..., Any], argnums: Any, argnames: Any, x64: bool) -> None:
        functools.update_wrapper(self, g, updated=())
        self.__wrapped__ = g
        self._name = getattr(g, "__name__", type(g).__name__)
        self._options = (argnums, argnames, x64)
        self._static = static_arguments(g, argnums, argnames)
        self._signatures: dict[Hashable, _Signature] = {}
        # The function that Dynamo calls without tracing into it, made when Dynamo first needs it.
        # It finds this object by a handle, since all versions of Dynamo treat strings as constants.
        self._opaque: Any = None
        self._handle = f"{self._name} {next(_numbers)}"
        _functions[self._handle] = self

    def __repr__(self) -> str:
        return f"from_jax({self._name})"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self) -> Any:
        return TorchFunction, (self.__wrapped__, *self._options)

    def __deepcopy__(self, memo: dict[int, Any]) -> TorchFunction:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function on pytrees of tensors."""
        if torch.compiler.is_dynamo_compiling():
            _make_opaque(self._handle)
            return self._opaque(*tree_map(lambda x: _NONE if x is None else x, (args, kwargs)))
        return self._call(args, kwargs)

    @uncompiled
    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        settings = current_settings(self._options[2])
        with endless_refused():
            flat, tree = jax.tree_util.tree_flatten(mark_static(self._static, args, kwargs))
        device = next((x.device for x in flat if isinstance(x, Tensor)), None)
        if device is None and any(isinstance(x, jax.core.Tracer) for x in flat):
            return self.__wrapped__(*args, **kwargs)  # called by another JAX function
        read = [read_leaf(x, device, self._name, settings.enable_x64) for x in flat]
        leaves = [leaf for leaf, _ in read]
        key = (tree, settings, tuple([leaf.key for leaf in leaves]))
        signature = self._signatures.get(key)
        if signature is None:
            made = _Signature(self.__wrapped__, self._name, leaves, tree, settings)
            signature = self._signatures.setdefault(key, made)
        tensors = [tensor for _, tensor in read if tensor is not None]
        return signature.result(call(signature.program, tensors))


_NONE = "functx: None"  # Dynamo can't pass None to a function that it does not trace into


@runs_while_tracing
def _make_opaque(handle: str) -> bool:
    """Make the function that Dynamo puts into its graph unopened; AOTAutograd traces through it."""
    f = _functions[handle]
    if f._opaque is None:

        @uncompiled
        def opaque(args: Any, kwargs: Any) -> Any:
            decode = lambda x: None if isinstance(x, str) and x == _NONE else x  # noqa: E731
            return f._call(*tree_map(decode, (args, kwargs)))

        f._opaque = nonstrict_trace(opaque)
    return True


def _result(out: Any, name: str) -> Any:
    if isinstance(out, Tensor):
        raise TypeError(
            f"from_jax: {name} returned a torch tensor, but from_jax takes JAX functions; a torch"
            " function needs no conversion"
        )
    try:
        return jnp.asarray(out)
    except TypeError as err:
        raise TypeError(
            f"from_jax: {name} returned a {type(out).__name__}, which JAX does not accept. Return"
            " arrays in tuples, lists, dicts or registered pytrees"
        ) from err


def _decoded(out: Tensor, decode: Callable[[Any], Any], name: str) -> Any:
    if not is_plain(out):
        raise TypeError(
            f"from_jax: {name} returned typed random keys (or an array of another type that torch"
            " lacks) inside a torch transform; return jax.random.key_data(key) instead"
        )
    return decode(array_from_torch(out))
