"""The names that the code of a function uses."""

from __future__ import annotations

import dis
import types

_Names = tuple[tuple[str, ...], tuple[str, ...]]
# By the id of the code, which is kept with them: the hash of a code is that of all that is in it.
_known: dict[int, tuple[types.CodeType, _Names]] = {}
_MANY = 4096
_REBINDS = dis.opmap["STORE_GLOBAL"]


def names_in(code: types.CodeType) -> _Names:
    """Names that code and what is nested in it reads (attributes too), and globals it rebinds."""
    found = _known.get(id(code))
    if found is None:
        names: dict[str, None] = dict.fromkeys(code.co_names)
        rebound: dict[str, None] = {}
        if _REBINDS in code.co_code[::2]:  # or a cache there is the same number
            rebound.update(
                (i.argval, None) for i in dis.get_instructions(code) if i.opcode == _REBINDS
            )
        for part in code.co_consts:
            if isinstance(part, types.CodeType):
                inner = names_in(part)
                names |= dict.fromkeys(inner[0])
                rebound |= dict.fromkeys(inner[1])
        if len(_known) >= _MANY:
            _known.clear()
        found = _known[id(code)] = code, (tuple(names), tuple(rebound))
    return found[1]
