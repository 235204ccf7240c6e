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
    that it reaches otherwise than through its arguments (closures, attributes, globals) get their
    gradients too, and a replay sees what the forward saw.

    Args:
        f: any callable. On a class's method, use it as a decorator. An ``nn.Module`` gives one that
            shares its parameters, buffers, hooks and submodules. Arguments and results are any
            pytrees; leaves that are no tensors just pass. ``None`` gives a decorator.
        policy: what to keep beside the inputs, of what the pullback reads: one of
            `functx.checkpoint_policies`, a list of ATen operators, or a function
            ``policy(ctx, op, *args, **kwargs)`` that returns a bool or a
            ``torch.utils.checkpoint.CheckpointPolicy``. ``None`` keeps nothing.
        static_argnums: positions of arguments that are no tensors, as in JAX; need not be declared.
        static_argnames: likewise, by name.
        preserve_rng_state: replay random numbers as they were drawn: from torch's default
            generators on every device, and from any other ``torch.Generator``. ``"all"``: from
            Python's and NumPy's global ones too. ``False`` is right only where nothing is drawn.
        determinism_check: ``"default"`` raises where the calls of a replay differ from those of the
            forward. ``"none"`` compares their order alone, not shapes, dtypes and numbers.
        debug: where a replay departs, show what the forward and the replay called side by side.
        budget: the most bytes that a call of ``f`` and one pullback of it may have live beside what
            was there before: an int, a text such as ``"2GiB"``, or, as a float up to 1, a share of
            what they have without regions. What to recompute is chosen and measured at the first
            call with new shapes, see `functx.plan`. Other uses may take more: several cotangents at
            once, derivatives of derivatives, forward mode around it, a pullback that is kept.
        prevent_cse: accepted for compatibility with JAX; nothing merges a replay with its forward.

    Returns:
        A callable (or module) that does what ``f`` does.

    Raises:
        TypeError: ``f`` is not callable, or an option has the wrong type.
        ValueError: an option is not known; or, at the call, ``static_argnums`` is out of range.
        functx.RematError: when called, where the promise can't be kept.
        functx.ReplayError: when differentiated, where a replay departs from the forward.

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
        raise TypeError("remat: call remat(f)(x), or functx.checkpoint(f, x); options go by name.")
    said = static_argnums, static_argnames, preserve_rng_state, determinism_check, debug
    if policy is None and budget is None and all(map(operator.is_, said, _UNSAID)):
        options = _DEFAULTS  # which need no check (regions of closures are made at each call)
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
    """What the user asked ``caller`` for; a ``TypeError`` or ``ValueError`` if no region can do it.

    `remat`, `functx.checkpoint` and `functx.apply_remat` check their options here.
    """
    options = Options(**said)
    known = {"determinism_check": ("default", "none"), "preserve_rng_state": (True, False, "all")}
    for option, values in known.items():
        if (value := getattr(options, option)) not in values:
            raise ValueError(f"{caller}: {option} is {value!r}, expected one of {values}.")
    if getattr(policy, "is_functx_plan", False):
        if budget is not None:
            raise ValueError(
                f"{caller}: a plan is a policy with a budget; don't give another budget."
            )
        policy, budget = None, policy
    elif budget is not None:
        if policy is not None:
            raise ValueError(f"{caller}: a budget chooses what to keep; don't give a policy too.")
        budget = validate.checked_budget(budget, caller)
    policy = policies.as_policy(policy)
    if policy == policies.Everything(False):
        policy = None
    plans = None if budget is None else Plans()
    contexts = policies.as_contexts(policy) if budget is None else None
    return replace(options, policy=policy, contexts=contexts, budget=budget, plans=plans)


_UNSAID = (), (), True, "default", False  # how `remat` is called without options
_DEFAULTS = checked_options(static=None)


def _rematted(f: Any, options: Options) -> Any:
    options = options.of(validate.name_of(f), Scripts())
    if isinstance(f, nn.Module):
        if not validate.has_forward(f):
            raise TypeError(
                f"remat: a {type(f).__name__} has no forward of its own. Make a region of each of "
                "its modules: functx.apply_remat(model, 'layers.*'), or a loop with functx.remat."
            )
        return remat_module(f, options)
    if isinstance(f, (staticmethod, classmethod)):
        return type(f)(_rematted(f.__func__, options))
    if not callable(f) or isinstance(f, type):  # of a class, its instances are no regions
        raise TypeError(f"remat: expected a function or module, got {validate.describe(f)}.")
    validate.warn_if_later(f)
    return Rematted(f, options)
