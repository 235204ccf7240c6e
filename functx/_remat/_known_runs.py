"""Runs that are like runs before: what a pullback reads of them is known, and nobody has to watch.

NOTE [known runs]
The ledger takes as long as everything else about the first run of a region. What it finds out is
the same for two runs in which the same functions were called on the same tensors (inputs and
captures by position, results of operations by number) of the same layouts, and which left the same
nodes on their tapes. So when some code has run alike a few times, its next run has no ledger, and
nobody counts who holds what. It is compared with the known one instead, call by call, and takes
over what was found out there if as many nodes were made. (Tapes of runs that are watched are
compared node by node.) A run that differs anywhere has nothing to take over: its replay leaves
nothing out, its inputs are all kept, and its code has to be known anew.

What the key of a code is decides only what a run is compared with, never what is taken over. Only
what can be compared is known: no region in another one, no policy, no Python on the tape, no
argument or capture that is written to, no autocast, no modes of the user's.

NOTE [written unseen]
Function modes are not shown what runs with them turned off (``DisableTorchFunction``), in another
thread or in an extension in C++. Where that writes to what the body has made, in some runs and not
in others, torch counts it all the same: so the version of what an operation reads is compared too,
where it is not 0, as that of a fresh tensor is. What is made in inference mode has none, and such a
run is not known; nor has what is written by ``.data``, ``.numpy()`` or ``data_ptr()``, in there.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from operator import and_, is_, or_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from functx import _torch, _torch_operators
from functx._remat._arguments import SIMPLE, same
from functx._remat._functions import IN_C
from functx._remat._holders import base_of
from functx._remat._tapes import PLAIN
from functx._torch import get_unwrapped, is_wrapped, sequence_number
from functx._torch_memory import storage_keys

if TYPE_CHECKING:
    from functx._remat._compared import Compared
    from functx._remat._ledger import Ledger

ALIKE = 3
"""So many runs in a row must have been alike."""

_PATIENCE = 8
_MANY, _OPERATIONS = 1024, 32_768  # an operation is 1.3 KB
_DEPTH = 6
_ENDS = 1 << 62  # numbers from here on are of nodes that a tape ends in


class KnownRun:
    """What one run did, and what its ledger found out.

    Args:
        first: the run, which has ended.
        ledger: that watched it.
        needed: which inputs and captures a pullback reads.
        passing: which of them a replay reads but no tape of it.
        unread: which constants no pullback reads.

    Attributes:
        unsure: for each input, whether it could not be told if a tape holds it.
    """

    __slots__ = (
        *("ends", "entries", "externals", "groups", "ledger", "looks", "made", "needed"),
        *("nodes", "origins", "passing", "relations", "settings", "shared", "tape", "unread"),
        *("unsure", "versions"),
    )

    def __init__(
        self,
        first: Compared,
        ledger: Ledger,
        needed: Sequence[bool],
        passing: Sequence[bool],
        unread: Sequence[bool] = (),
    ) -> None:
        self.entries = first.entries
        self.made = first.layouts
        self.origins = first.origins
        self.looks = first.looks
        self.settings = first.settings
        self.externals = [*map(_signature, first.externals())]
        self.shared = sharing(first.externals())
        self.nodes = first.nodes
        self.versions = first.versions
        self.tape, self.ends, self.groups = first.tape, first.ends, first.groups
        self.relations = first.relations()
        self.ledger = ledger
        self.needed = needed
        self.passing = passing
        self.unread = unread
        self.unsure = [h.shared and h.storage in ledger.viewed for h in first.holders]

    def describes(self, first: Compared) -> bool:
        """Whether a run that called the same functions was the same altogether."""
        return (
            len(first.entries) == len(self.entries)
            and first.layouts == self.made
            and first.origins == self.origins
            and first.looks == self.looks
            and first.nodes == self.nodes
            and first.versions == self.versions
            and first.settings == self.settings
            and [*map(_signature, first.externals())] == self.externals
            and sharing(first.externals()) == self.shared
        )

    def agrees(self, other: KnownRun, first: Compared) -> bool:
        """Whether another run that was watched was the same, and had the same found out.

        Of the inputs of both, those are kept that either had to keep. Where somebody else holds
        the memory of one, and views were taken, the other run says what the tape holds.
        """
        agrees = (
            all(fits(a, b.func, b.sources, b.scalars) for a, b in zip(self.entries, other.entries))
            and self.describes(first)
            and (self.tape, self.ends) == (other.tape, other.ends)
            and self.ledger.agrees(other.ledger)
        )
        if agrees:
            ours, theirs = self.unsure, other.unsure
            either, both = functools.partial(_told, or_), functools.partial(_told, and_)
            self.needed = [*map(either, self.needed, other.needed, ours, theirs)]
            self.passing = [*map(both, self.passing, other.passing, ours, theirs)]
            self.unsure = [*map(and_, ours, theirs)]
            self.unread = [*map(and_, self.unread, other.unread)]
        return agrees


def _told(of_both: Any, a: bool, b: bool, a_unsure: bool, b_unsure: bool) -> bool:
    """What the run says that is sure of it, or both do."""
    return of_both(a, b) if a_unsure == b_unsure else b if a_unsure else a


def fits(entry: Any, func: Any, sources: Sequence[int], scalars: Sequence[Any]) -> bool:
    """Whether an entry is of a call of this function on such arguments."""
    if not (entry.func is func or entry.func == func) or entry.sources != (*sources,):
        return False
    known = entry.scalars
    if not (scalars or known) or (len(scalars) == len(known) and all(map(is_, scalars, known))):
        return True
    return same(known, scalars)


class Sightings:
    """The runs of some code on arguments of some kind."""

    def __init__(self) -> None:
        self._run: KnownRun | None = None
        self._alike = 0
        self._others = 0

    def expected(self) -> KnownRun | None:
        """What the next run is compared with, if it needs no ledger."""
        return self._run if self._alike >= ALIKE else None

    def differs(self) -> None:
        """A run was not as expected, or can't be known."""
        self._run, self._alike = None, 0
        self._others += 1

    def saw(self, run: KnownRun, first: Compared) -> None:
        """A run was watched."""
        known = self._run
        if known is not None and known.agrees(run, first):
            self._alike += 1
        else:
            if known is not None:
                self.differs()
            self._run, self._alike = run, 1
            _forget_the_oldest()

    def given_up(self) -> bool:
        """Whether the code seldom does the same twice: it always has a ledger, then."""
        return self._others >= _PATIENCE

    def operations(self) -> int:
        """How much is remembered."""
        known = self._run
        if known is None:
            return 0
        pullbacks = [*(known.ledger.pullbacks or {}).values()]
        return len(known.entries) + sum(pullback.size for pullback in pullbacks)


def comparable(first: Compared, ledger: Ledger) -> bool:
    """Whether all that counts of a run, which was watched, can be compared."""
    return (
        first.settings is not None
        and None not in first.ends
        and ledger.forgettable()
        and all(
            entry.parts is None
            and (entry.func.__class__ in IN_C or _is_ours(entry.func))
            and SIMPLE.issuperset(map(type, entry.scalars))
            for entry in first.entries
        )
        and all(map(_ordinary, first.externals()))
    )


def _is_ours(func: Any) -> bool:
    return (getattr(func, "__module__", None) or "").partition(".")[0] in ("torch", "functx")


def _ordinary(t: Tensor) -> bool:
    while is_wrapped(t):
        if _torch.is_functional(t):
            return False
        t = get_unwrapped(t)
    return (
        type(t) in PLAIN
        and t.layout is torch.strided
        and not (t.is_quantized or t.is_inference() or t.is_conj() or t.is_neg())
        and not _torch_operators.is_zero_tensor(t)
    )


def _signature(t: Tensor) -> Any:
    """All of a tensor that decides what operations on it do, but its values."""
    if is_wrapped(t):
        dim = _torch.batch_dim(t) if _torch.is_batched(t) else None
        return _torch.wrapper_level(t), dim, t.requires_grad, _signature(get_unwrapped(t))
    if t.layout is not torch.strided:
        return None
    return (
        *(type(t), t.shape, t.stride(), t.storage_offset(), t.dtype, t.device, t.requires_grad),
        *(t.is_conj(), t.is_neg(), t.is_inference()),
    )


def sharing(tensors: Sequence[Tensor]) -> Any:
    """Which of some tensors share their memory; ``None`` where none do."""
    if len(tensors) < 2 or len({*(keys := storage_keys(map(base_of, tensors)))}) == len(keys):
        return None
    return [*map(keys.index, keys)]


_sightings: dict[Any, Sightings] = {}


def layout_of(t: Tensor) -> Any:
    """What is compared of the result of an operation."""
    try:
        return t.shape, t.dtype, t.requires_grad
    except RuntimeError:  # a nested tensor has no shape
        return None


def tape_of(nodes: Sequence[Any], start: int) -> Any:
    """What is compared of a tape that was looked at: its nodes, and when they were made."""
    if not _AS_VIEW:
        _AS_VIEW.update(_aliases())
    kinds = [_AS_VIEW.get(kind, kind) for kind in map(type, nodes)]
    return kinds, [n - start if n < _ENDS else 0 for n in map(sequence_number, nodes)]


_AS_VIEW: dict[type, type] = {}


def _aliases() -> dict[type, type]:
    """``reshape`` makes one kind of view where dispatch modes are active, and else another."""
    with _torch.without_modes(), _torch.cleared_interpreter_stack(), torch.enable_grad():
        t = torch.zeros(2, 2, requires_grad=True)
        return {type(t.mT.reshape(1, 2, 2).grad_fn): type(t.view(4).grad_fn)}


def sightings_of(
    f: Any, statics: Sequence[Any], inputs: Sequence[Tensor], levels: tuple[Any, ...]
) -> Sightings | None:
    """The runs before of what is to run now, at levels like these; ``None`` if it can't be told."""
    if (code := _code(f, _DEPTH)) == id(type(f)):  # an object: what it does, it may hold
        return None
    key = (
        code,
        *[None if s is None else _code(s, 0) for s in statics],
        *map(layout_of, inputs),
        *(levels, _torch.interpreter_depth(), torch.is_grad_enabled()),
    )
    try:
        found = _sightings.get(key)
    except TypeError:  # not hashable
        return None
    if found is None:
        found = _sightings[key] = Sightings()
    return None if found.given_up() else found


def _forget_the_oldest() -> None:
    kept = [*_sightings.items()]
    operations = sum(sightings.operations() for _, sightings in kept)
    for n, (key, sightings) in enumerate(kept):
        if operations <= _OPERATIONS and len(kept) - n <= _MANY:
            break
        operations -= sightings.operations()
        _sightings.pop(key, None)


def _code(f: Any, depth: int) -> Any:
    """What tells apart functions that do different things, and not those that are made anew."""
    kind = type(f)
    if kind is types.FunctionType:
        if f.__closure__ is None and f.__defaults__ is None:
            return id(f.__code__)  # the hash of a code is that of all that is in it
        held = [_code(x, depth - 1) for x in f.__defaults__ or ()] if depth else []
        for cell in f.__closure__ or () if depth else ():
            try:
                held.append(_code(cell.cell_contents, depth - 1))
            except ValueError:  # not bound yet
                held.append(None)
        return (id(f.__code__), *held)
    if kind is types.MethodType:
        return _code(f.__func__, depth), _code(f.__self__, 0)
    if issubclass(kind, nn.Module):
        return id(kind), id(f.__dict__)  # which a module shares with its remat
    if kind in SIMPLE:
        return kind, f
    if kind is tuple or kind is list:
        return (kind, len(f), *[_code(x, depth - 1) for x in f[:8]]) if depth else id(kind)
    if kind is functools.partial and depth:
        return kind, _code(f.func, depth - 1), _code(f.args, depth - 1), len(f.keywords)
    if kind is types.BuiltinFunctionType:
        owner = f.__self__
        static = owner is None or isinstance(owner, (type, types.ModuleType))
        return f if static else (kind, id(type(owner)), f.__name__)
    return id(kind)
