"""`functional_call`: call a module with other parameters and buffers, and leave it as it was.

NOTE [slots]
A tensor of a module is stored in a *slot*. A slot has two names if the module that owns it is
registered twice: ``self.a = layer; self.blocks = nn.ModuleList([self.a])``. torch's own
``functional_call`` swaps tensors name by name, and restores them in the same order. For the second
name, it notes as original the replacement that it has set by the first name. So this replacement
stays in the module. It is not a ``Parameter``, and the module silently stops training. functx finds
all slots before it sets anything, sets each slot once, and restores exactly the object that the
slot held, also after an error or an interrupt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from functx._remat import refuse_sharded
from functx._torch import slots
from functx._torch.slots import MISSING, Slot

_NAME = "functx.functional_call"


def functional_call(
    module: nn.Module,
    parameter_and_buffer_dicts: dict[str, Tensor] | Sequence[dict[str, Tensor]],
    args: Any = None,
    kwargs: dict[str, Any] | None = None,
    *,
    tie_weights: bool = True,
    strict: bool = False,
) -> Any:
    """Call a module with other parameters and buffers: :func:`torch.func.functional_call`.

    Afterwards every parameter, buffer and attribute of the module is the same object as before,
    also if the call raises an error or is interrupted. This also holds for a module that has one
    submodule under two names, where torch leaves a replacement behind.

    Args:
        module: The module to call.
        parameter_and_buffer_dicts: Tensors by name, in a dict, or in several dicts that have no
            name in common. For names that are missing, the module uses its own tensors. A buffer
            that the module replaces during the call is written back to the dict, if it is one dict.
        args: The positional arguments, a tuple. Anything else is the only argument.
        kwargs: The keyword arguments.
        tie_weights: Whether one value is enough for a tensor that the module has under several
            names. With ``False`` each name is set separately; if two names share a slot (in a
            submodule that is registered twice), the later one in the dict is used.
        strict: Whether missing and unexpected names are errors.

    Returns:
        The result of the module.

    Raises:
        TypeError: ``module`` is not an ``nn.Module``, or a value is not a tensor.
        ValueError: Two dicts have a name in common; tied names have different values; or a name is
            that of a parametrized tensor, instead of the original that it is computed from.
        RuntimeError: With ``strict``, names are missing or unexpected; or the module is a
            TorchScript module or ``nn.DataParallel``.
        AttributeError: A name leads through a submodule that does not exist.

    Example:
        >>> import torch, functx
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> functx.functional_call(layer, {"weight": torch.ones(1, 2)}, torch.ones(2))
        tensor([2.])
        >>> type(layer.weight).__name__
        'Parameter'
    """
    replacements = _merged(parameter_and_buffer_dicts)
    _check(module, replacements)
    refuse_sharded(module, _NAME, [*replacements])
    values = _with_tied_names(module, replacements, tie_weights, strict)
    found = _slots(module, values)
    # By slot, so that each slot is set and restored once; see NOTE [slots].
    chosen = {slot.key: (slot, values[name]) for name, slot in found.items()}
    before = [(slot, _original(slot)) for slot, _ in chosen.values()]
    recurrent = slots.recurrent_states(slot.owner for slot, _ in before)
    if args is None:
        args = ()
    elif not isinstance(args, tuple):
        args = (args,)
    try:
        for slot, value in chosen.values():
            slot.put(value)
        return module(*args, **(kwargs or {}))
    finally:
        try:
            _write_back(replacements, found)
            _put_back(before, recurrent)
        except BaseException:  # a second interrupt
            _put_back(before, recurrent)
            raise


def _merged(dicts: Any) -> dict[str, Tensor]:
    """The dict that the caller passed, or the union of several dicts."""
    if isinstance(dicts, dict):
        return dicts
    if not isinstance(dicts, Sequence):
        raise ValueError(
            "Expected parameter_and_buffer_dicts to be a dict, or a list/tuple of dicts, but got "
            f"{type(dicts)}"
        )
    if not all(isinstance(d, dict) for d in dicts):
        raise ValueError("Expected all elements of parameter_and_buffer_dicts to be dictionaries")
    merged: dict[str, Tensor] = {}
    repeated: list[str] = []
    for one in dicts:
        repeated += [name for name in one if name in merged]
        merged.update(one)
    if repeated:
        raise ValueError(
            f"{repeated} appeared in multiple dictionaries; behavior of functional call is "
            "ambiguous"
        )
    return merged


def _check(module: Any, replacements: dict[str, Tensor]) -> None:
    """Raise an error for a module that can't have other parameters, and for wrong values."""
    if torch.jit.is_tracing() or isinstance(module, slots.ScriptModules):
        raise RuntimeError("The stateless API can't be used with Jitted modules")
    if isinstance(module, nn.DataParallel):
        raise RuntimeError("The stateless API can't be used with nn.DataParallel module")
    if not isinstance(module, nn.Module):
        raise TypeError(f"{_NAME}: expected an nn.Module, got {type(module).__name__}")
    for name, value in replacements.items():
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(
                f"{_NAME}: the value of {name!r} is a {type(value).__name__}, which is not an "
                "instance of torch.Tensor"
            )


def _with_tied_names(
    module: nn.Module, replacements: dict[str, Tensor], tie_weights: bool, strict: bool
) -> dict[str, Tensor]:
    """The values by name, including names that are tied to a name in ``replacements``."""
    values = dict(replacements)
    if not (tie_weights or strict):
        return values
    of_tensor: dict[int, list[str]] = defaultdict(list)
    for name, tensor in slots.named_tensors(module):
        of_tensor[id(tensor)].append(name)
    if tie_weights:
        for names in of_tensor.values():
            if len(names) == 1:
                continue
            chosen = [name for name in names if name in replacements]
            if len({id(replacements[name]) for name in chosen}) > 1:
                raise ValueError(
                    f"functional_call got multiple values for keys {sorted(chosen)}, which are "
                    "tied. Pass one of them, or the same tensor for all of them. Consider using "
                    "tie_weights=False if these are different parameters that only share their "
                    "values"
                )
            if chosen:
                values |= dict.fromkeys(names, replacements[chosen[0]])
    if strict:
        existing = {name for names in of_tensor.values() for name in names}
        unexpected, missing = sorted(values.keys() - existing), sorted(existing - values.keys())
        wrong = {"Unexpected": unexpected, "Missing": missing}
        lines = [f"{what} key(s): {', '.join(map(repr, ks))}." for what, ks in wrong.items() if ks]
        if lines:
            raise RuntimeError(
                f"Error(s) in reparametrizing for {type(module).__name__}:\n\t" + "\n\t".join(lines)
            )
    return values


def _slots(module: nn.Module, names: Iterable[str]) -> dict[str, Slot]:
    """The slot for each name, found by attribute lookups that start at the module."""
    owners: dict[str, Any] = {"": module}
    found: dict[str, Slot] = {}
    for path in names:
        way, _, name = path.rpartition(".")
        if not name:
            raise KeyError(f'{_NAME}: tensor name can\'t be empty string "", got {path!r}')
        owner = owners[way] if way in owners else _submodule(owners, way)
        slot = found[path] = Slot(owner, name)
        if slot.store is None and is_parametrized(slot.owner, name):
            inner = f"{way}." * bool(way) + f"parametrizations.{name}.original"
            originals = [n for n, _ in slots.named_tensors(module) if n.startswith(inner)]
            raise ValueError(
                f"{_NAME}: {path!r} is computed by a parametrization, so replacing it would write "
                f"to the original tensors. Replace these instead: {', '.join(originals)}. Or "
                "remove the parametrization: torch.nn.utils.parametrize.remove_parametrizations"
            )
    return found


def _submodule(cache: dict[str, Any], path: str) -> nn.Module:
    """The submodule at a path of attributes. ``cache`` has the modules found, and the root."""
    way, _, part = path.rpartition(".")
    outer = cache[way] if way in cache else _submodule(cache, way)
    owner = getattr(outer, part, MISSING)
    if owner is MISSING:
        raise AttributeError(
            f"{_NAME}: there is no submodule {path!r}: {type(outer).__name__} has no attribute "
            f"`{part}`"
        )
    if not isinstance(owner, nn.Module):
        raise TypeError(
            f"{_NAME}: there is no submodule {path!r}: {part!r} is a {type(owner).__name__}, which "
            "is not an instance of torch.nn.Module"
        )
    cache[path] = owner
    return owner


def _original(slot: Slot) -> Any:
    """The value of a slot before the call; an error if it is not a tensor."""
    value = slot.read()
    if value is MISSING or value is None or isinstance(value, Tensor):
        return value
    raise TypeError(
        f"{_NAME}: attribute `{slot.name}` of {type(slot.owner).__name__} is a "
        f"{type(value).__name__}, which is not an instance of torch.Tensor"
    )


def _write_back(replacements: dict[str, Tensor], found: dict[str, Slot]) -> None:
    """Write values that the module has assigned during the call to the caller's dict."""
    for name, before in replacements.items():
        now = found[name].read()
        if now is not before and now is not MISSING:
            replacements[name] = now


def _put_back(before: list[tuple[Slot, Any]], recurrent: list[tuple[Any, Any]]) -> None:
    """Restore the original object of every slot."""
    for slot, value in before:
        slot.put(value)
    for owner, state in recurrent:
        vars(owner).update(state)
