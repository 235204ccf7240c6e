"""`apply_remat`: make submodules of an existing model regions, and change nothing else about it.

NOTE [forward of an instance]
A region replaces ``forward`` on the instance, not on its class. So the module keeps its type,
parameters, ``state_dict`` and hooks (which run outside the region, once). The replacement is an
object with a reference to its module, so ``copy.deepcopy`` and ``pickle`` copy both together.
A *shallow* copy of a module (``copy.copy``, the replicas of ``nn.DataParallel``) shares the
replacement with the original. The replacement then looks at its caller's frame to find out which of
the two modules was called.
"""

from __future__ import annotations

import functools
import inspect
import sys
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from functx._core import integer, tell
from functx._models import select
from functx._remat import Options, RematModule, checked_options, run

M = TypeVar("M", bound=nn.Module)


class RegionForward:
    """``forward`` of a module, as a region. ``NOTE [forward of an instance]``.

    Args:
        module: the module.
        options: the options of the region.
        own: the ``forward`` that the instance had before; ``None`` if it used that of its class.
    """

    def __init__(self, module: nn.Module, options: Options, own: Any = None) -> None:
        self.__self__ = module
        self.options = options
        self.own = own
        functools.update_wrapper(self, self._forward_of(module), updated=())
        self.__func__ = type(module).forward
        self._is_marked = select.is_marked_layer(module)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._forward_of(self.__self__))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The original ``forward``, as a region."""
        module = self.__self__
        if not torch.compiler.is_compiling():
            caller = sys._getframe(1).f_locals.get("self")
            if isinstance(caller, nn.Module) and vars(caller).get("forward") is self:
                module = caller  # it may be a shallow copy
        forward = self._forward_of(module)
        if self._is_marked and torch.is_grad_enabled():
            name = type(module).__name__
            args, kwargs = _without_cache(name, args, kwargs)
            if self._checkpoints_itself(module):
                tell(
                    name,
                    "transformers checkpoints this layer too, so it runs once more than necessary. "
                    "Call model.gradient_checkpointing_disable(), or use functx.patch_checkpoint() "
                    "instead of apply_remat",
                )
        return run(forward, args, kwargs, self.options)

    def _forward_of(self, module: nn.Module) -> Any:
        if self.own is not None:
            return self.own
        forward = select.without_own_checkpoint(type(module).forward)
        if torch.compiler.is_compiling():  # Dynamo of torch 2.11 can't trace a method made here
            return functools.partial(forward, module)
        return forward.__get__(module)

    def _checkpoints_itself(self, module: nn.Module) -> bool:
        """Whether transformers checkpoints this layer in a way that the region can't avoid.

        This is true if the instance had a ``forward`` attribute, which calls the ``forward`` of the
        class. It is also true for older versions of transformers, which checkpoint in ``__call__``,
        around the region.
        """
        if not (module.training and getattr(module, "gradient_checkpointing", False)):
            return False
        forward = type(module).forward
        return self.own is not None or forward is select.without_own_checkpoint(forward)

    @property
    def __globals__(self) -> Any:
        """``torch.jit.script`` reads this attribute first, so the error is raised here."""
        raise AttributeError(
            f"torch.jit.script can't compile {self!r}; call functx.remove_remat(model) first"
        )

    def __reduce__(self) -> Any:
        return RegionForward, (self.__self__, self.options, self.own)

    def __repr__(self) -> str:
        return f"<forward of {self.options.name} as a region>"


def apply_remat(
    model: M,
    where: select.Where,
    *,
    every: int = 1,
    policy: Any = None,
    preserve_rng_state: bool | Literal["all"] = True,
    determinism_check: Literal["default", "none"] = "default",
    debug: bool = False,
    budget: Any = None,
) -> M:
    """Make submodules of a model into regions, in place.

    Each saves only the inputs of its ``forward`` and recomputes the rest when it is differentiated,
    as with `functx.remat`. Everything else stays the same: types, names, parameters, buffers,
    ``state_dict``, hooks and pickling. Copies of the model have regions too.

    Args:
        model: an ``nn.Module``; it may be wrapped by DDP, FSDP or ``torch.compile``.
        where: which submodules:

            - a class or a tuple of classes: their instances,
            - a name as in ``model.named_modules()``, or a pattern of names, in which ``*`` stands
              for anything up to the next dot and ``**`` for anything (``"layers.*"``),
            - the name of a class,
            - a compiled regular expression, which has to match a whole name,
            - a predicate ``(name, module) -> bool``, or ``(module) -> bool``,
            - a module of the model,
            - ``"gradient_checkpointing"``: the layers that Hugging Face transformers or diffusers
              would checkpoint. Use it instead of ``gradient_checkpointing_enable()``; if that is
              called as well, each region replaces its layer's checkpoint. As in transformers, an
              empty cache of keys and values is not used while a derivative is taken,
            - or a list of these.

            Each entry has to match a module. The model does not count as its own submodule. A match
            inside another match becomes a region inside a region.
        every: of the modules found, in order, take the first of every ``every``.
        policy: as for `functx.remat`, like all further options.
        preserve_rng_state: whether replays draw the random numbers that the forward drew.
        determinism_check: whether shapes, dtypes and numbers are compared.
        debug: whether the error of a replay that departs shows both calls.
        budget: bytes for each region.

    Returns:
        ``model``, the same object. A module that was a region already gets the new options.

    Raises:
        TypeError: ``model`` is not a module, or ``where`` has a type that can't select modules.
        ValueError: ``where`` matches nothing (the message lists similar names), or matches a module
            that can't be made a region.

    Example:
        >>> import torch, functx
        >>> net = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4)))
        >>> _ = functx.apply_remat(net, torch.nn.Linear, every=2)
        >>> net(torch.zeros(2, 3)).sum().backward()
        >>> _ = functx.remove_remat(net)
    """
    _check_model(model, "apply_remat")
    if integer(every, "apply_remat: every must be an int") < 1:
        raise ValueError(f"apply_remat: every is {every}, expected a positive integer.")
    options = checked_options(
        "apply_remat",
        policy=policy,
        preserve_rng_state=preserve_rng_state,
        determinism_check=determinism_check,
        debug=debug,
        budget=budget,
    )
    found = list(select.find(model, where, "apply_remat").items())[::every]
    for name, module in found:
        if isinstance(module, RematModule):
            raise ValueError(
                f"apply_remat: {name!r} was made by functx.remat and is a region already. Leave it "
                "out of where, or build the model without functx.remat."
            )
    for name, module in found:
        title = f"{name} ({type(module).__name__})" if name else type(module).__name__
        own = vars(module).get("forward")
        own = own.own if isinstance(own, RegionForward) else own
        module.forward = RegionForward(module, replace(options, name=title), own)
    return model


def remove_remat(model: M, where: select.Where | None = None) -> M:
    """Undo `apply_remat`, in place: submodules get their original ``forward`` back.

    Args:
        model: an ``nn.Module``.
        where: which submodules, as for `apply_remat`; ``None`` for all of them and the model
            itself. Modules that are not regions are left unchanged.

    Returns:
        ``model``, the same object.

    Raises:
        TypeError: ``model`` is not a module, or ``where`` has a type that can't select modules.
        ValueError: ``where`` matches nothing.
    """
    _check_model(model, "remove_remat")
    names = None if where is None else select.find(model, where, "remove_remat")
    for module in [*model.modules()] if names is None else names.values():
        region = vars(module).get("forward")
        if isinstance(region, RegionForward):
            del module.forward
            if region.own is not None:
                module.forward = region.own
    return model


def remat_regions(model: nn.Module) -> list[str]:
    """The names of a model's modules that are regions, in order; ``""`` is the model itself.

    Example:
        >>> import torch, functx
        >>> net = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(4)])
        >>> functx.remat_regions(functx.apply_remat(net, "[12]"))
        ['1', '2']
    """
    _check_model(model, "remat_regions")
    return [
        name
        for name, m in model.named_modules()
        if isinstance(m, RematModule) or isinstance(vars(m).get("forward"), RegionForward)
    ]


def _check_model(model: Any, caller: str) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{caller}: expected an nn.Module first, got {type(model).__name__}.")


def _without_cache(layer: str, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with ``use_cache=False`` and without an empty cache, as transformers does it.

    A cache that is not empty (a trained prefix, the states of a prompt) stays: the layer reads it,
    and the region refuses it. If an empty cache is dropped, a warning names the class of the layer.
    ``use_cache=True`` alone causes no warning, since encoders get it from their config.
    """
    if any(map(_is_empty, (*args, *kwargs.values()))):
        tell(
            layer,
            "this layer is a region and a derivative is taken, so it runs without a cache of keys "
            "and values. Pass use_cache=False to silence this warning",
        )
    args = tuple(None if _is_empty(a) else a for a in args)
    kwargs = {name: None if _is_empty(a) else a for name, a in kwargs.items()}
    return args, kwargs | ({"use_cache": False} if kwargs.get("use_cache") is True else {})


def _is_empty(cache: Any) -> bool:
    """Whether ``cache`` is a cache of transformers without entries."""
    length = getattr(cache, "get_seq_length", None)
    return length is not None and not length()
