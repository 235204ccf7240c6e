"""Stand-ins that look like what they stand for: of its class, with what users have set on it.

A body asks ``isinstance(w, Parameter)``, reads ``w.scale``, and operations of a subclass do what
the subclass says. The forward's stand-in shares its attributes with the user's tensor. A replay's
has a copy, so that what a body sets is set once, and shares them when the body has run: a custom
Function sets ``w.was_added`` when it is pulled back.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from functx._torch_nodes import tensor_over

UNREAD = "_functx_unread"
"""The attribute that a placeholder of the engine's own has."""
_PLAIN_DISPATCH = Tensor.__torch_dispatch__


def _is_plain(kind: type[Tensor]) -> bool:
    return kind is Tensor or kind.__torch_dispatch__ is _PLAIN_DISPATCH


def is_marked(t: Tensor) -> bool:
    """Whether a tensor has a class of its own, or attributes."""
    return t.__class__ is not Tensor or bool(t.__dict__)


def alike(t: Tensor, kind: type[Tensor], attributes: dict[str, Any]) -> Tensor:
    """``t`` as a tensor of some class, with these very attributes.

    One that has a dispatch of its own is such a tensor already, or a fake one: it knows what is in
    it.
    """
    if not (_is_plain(kind) and _is_plain(t.__class__)):
        return t
    if t.__class__ is not kind:
        t = tensor_over(t, t.requires_grad, kind)
    if UNREAD in attributes and UNREAD not in t.__dict__:
        attributes = {name: x for name, x in attributes.items() if name != UNREAD}
    t.__dict__ = attributes
    return t
