"""`remat`: the decorator, on functions, methods and modules."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypedDict, TypeVar, Unpack, overload

from torch import nn

from functx._core import validate
from functx._policies import policy as policies
from functx._remat.call import Rematted
from functx._remat.module import remat_module
from functx._remat.region import Options, Plans
from functx._remat.script import Scripts

F = TypeVar("F", bound=Callable[..., Any])


class RematOptions(TypedDict, total=False):
    """The keyword arguments of `remat`."""

    policy: Any
    static_argnums: int | Sequence[int]
    static_argnames: str | Sequence[str]
    preserve_rng_state: bool | Literal["all"]
    determinism_check: Literal["default", "none"]
    debug: bool
    budget: Any
    prevent_cse: bool


@overload
def remat(f: F, **said: Unpack[RematOptions]) -> F: ...


@overload
def remat(f: None = None, **said: Unpack[RematOptions]) -> Callable[[F], F]: ...


def remat(
    f: Any = None,
    *_args: Any,
    policy: Any = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    preserve_rng_state: bool | Literal["all"] = True,
    determinism_check: Literal["default", "none"] = "default",
    debug: bool = False,
    budget: Any = None,
    prevent_cse: bool = True,
    **_others: Any,
) -> Any:
    """Make ``f`` keep only its inputs, and compute the rest again when it is differentiated.

    ``remat(f)`` is ``f``: values and derivatives are those of ``f``, in plain ``.backward()`` and
    every stack of transforms of functx or torch.func; only time and memory differ. As with
    ``torch.utils.checkpoint`` and ``jax.checkpoint``, the Python code of ``f`` runs again. Tensors
    that it reads without getting them as arguments (from closures, attributes or globals) get their
    gradients too, and a replay reads the same tensors as the forward.

    Args:
        f: Any callable. On a class's method, use `remat` as a decorator. For an ``nn.Module``,
            `remat` returns a module that shares its parameters, buffers, hooks and submodules.
            Arguments and results are pytrees; leaves that are not tensors are passed on. For
            ``None``, `remat` returns a decorator.
        policy: Which values to save in addition to the inputs, if the pullback reads them: one of
            `functx.checkpoint_policies`, a list of ATen operators, or a function
            ``policy(ctx, op, *args, **kwargs)`` that returns a bool or a
            ``torch.utils.checkpoint.CheckpointPolicy``. ``None`` saves no other values.
        static_argnums: Positions of arguments that are not tensors, as in JAX. They need not be
            declared.
        static_argnames: The same, by name.
        preserve_rng_state: Whether a replay draws the same random numbers as the forward, from
            torch's default generators on every device and from any other ``torch.Generator``. With
            ``"all"``, also from the global generators of Python and NumPy. ``False`` is correct
            only if ``f`` draws no random numbers.
        determinism_check: ``"default"`` raises an error if the calls of a replay differ from those
            of the forward. ``"none"`` compares only their order, not shapes, dtypes and numbers.
        debug: If a replay departs, show the calls of the forward and of the replay side by side.
        budget: The most bytes that a call of ``f`` and one pullback of it may have live at a time,
            in addition to the bytes that were live before: an int, a text such as ``"2GiB"``, or a
            float up to 1, which is a share of the bytes that they have live without regions. At the
            first call with new shapes, functx measures and chooses the values to recompute, see
            `functx.plan`. Other uses may take more: several cotangents at once, derivatives of
            derivatives, forward mode around it, a pullback that is kept.
        prevent_cse: Accepted for compatibility with JAX. Nothing merges a replay with its forward.

    Returns:
        A callable (or module) that computes the same as ``f``.

    Raises:
        TypeError: ``f`` is not callable, or an option has the wrong type.
        ValueError: an option is not known; or, at the call, ``static_argnums`` is out of range.
        functx.RematError: at a call that could lose a gradient, or that a region can't support.
        functx.ReplayError: in the derivative, if a replay departs from the forward.

    Example:
        >>> import torch, functx
        >>> w = torch.ones(3)
        >>> block = functx.remat(lambda x: torch.sin(w * x).sum())
        >>> functx.vmap(functx.grad(block))(torch.zeros(2, 3))
        tensor([[1., 1., 1.],
                [1., 1., 1.]])

    Source:
        Griewank and Walther, *Algorithm 799: revolve*, ACM TOMS 26(1), 2000; Chen et al.,
        *Training deep nets with sublinear memory cost*, 2016; the pullback as a replay of the
        function, Maclaurin et al., *autograd*, 2015.
    """
    validate.refuse_options("remat", _others)
    if _args:
        raise TypeError(
            "remat: call remat(f)(x) or functx.checkpoint(f, x), and pass options by keyword."
        )
    said = static_argnums, static_argnames, preserve_rng_state, determinism_check, debug
    if policy is None and budget is None and all(map(operator.is_, said, _UNSAID)):
        options = _DEFAULTS  # no check, to save time: regions of closures are made at each call
    else:
        options = checked_options(
            policy=policy,
            preserve_rng_state=preserve_rng_state,
            determinism_check=determinism_check,
            debug=debug,
            budget=budget,
            static=validate.checked_static(static_argnums, static_argnames),
        )
    return (lambda f: _rematted(f, options)) if f is None else _rematted(f, options)


def checked_options(
    caller: str = "remat", policy: Any = None, budget: Any = None, **said: Any
) -> Options:
    """The checked options of a call of ``caller``.

    `remat`, `functx.checkpoint` and `functx.apply_remat` check their options here. Options that a
    region does not support raise a ``TypeError`` or a ``ValueError``.
    """
    options = Options(**said)
    known = {"determinism_check": ("default", "none"), "preserve_rng_state": (True, False, "all")}
    for option, values in known.items():
        if (value := getattr(options, option)) not in values:
            raise ValueError(f"{caller}: {option} is {value!r}, expected one of {values}.")
    if getattr(policy, "is_functx_plan", False):
        if budget is not None:
            raise ValueError(
                f"{caller}: a plan is a policy with a budget; don't pass another budget."
            )
        policy, budget = None, policy
    elif budget is not None:
        if policy is not None:
            raise ValueError(f"{caller}: a budget chooses what to save; don't pass a policy too.")
        budget = validate.checked_budget(budget, caller)
    policy = policies.as_policy(policy)
    if policy == policies.Everything(False):
        policy = None
    plans = None if budget is None else Plans()
    contexts = policies.as_contexts(policy) if budget is None else None
    return replace(options, policy=policy, contexts=contexts, budget=budget, plans=plans)


_UNSAID = (), (), True, "default", False  # the defaults of the options of `remat`
_DEFAULTS = checked_options(static=None)


def _rematted(f: Any, options: Options) -> Any:
    options = options.of(validate.name_of(f), Scripts())
    if isinstance(f, nn.Module):
        if not validate.has_forward(f):
            raise TypeError(
                f"remat: a {type(f).__name__} does not define a forward. Make a region of each of "
                "its modules: functx.apply_remat(model, 'layers.*'), or a loop with functx.remat."
            )
        return remat_module(f, options)
    if isinstance(f, (staticmethod, classmethod)):
        return type(f)(_rematted(f.__func__, options))
    if not callable(f) or isinstance(f, type):  # instances of a class would not be regions
        raise TypeError(f"remat: expected a function or module, got {validate.describe(f)}.")
    validate.warn_if_later(f)
    return Rematted(f, options)
