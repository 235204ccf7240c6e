"""What hooks of a replay reach holds what the forward's hooks would find there.

NOTE [what hooks are bound to]
The tape of a forward holds the hooks that were hung there, and these read and write what they reach
when they are called: a counter, a factor, a list of gradients. The hooks of a replay are made anew,
and so is what they reach. It is left there, since others of the replay may reach it too; but when
its body has returned it is filled with what is in that of the forward, and what a hook has left
there is put back. This is so of numbers and the like, of what holds nothing yet, and of what was
put there since, by a hook or by the program; anything else is the replay's. Defaults, and arguments
of a partial, are set.

What nobody but hooks of the forward reaches is not kept, but the numbers there, and what hooks have
left. What others of a replay hold may be the program's, which is not to find that there: it is so
while a hook is called. What is beyond the very thing that the forward has found is the program's.

A replay that a derivative may be taken of is run again for that, as it was run first: with what was
there then, and what is there afterwards is not put back. But hooks that are called later than by
what is run again find what is there by now. Tensors of which a derivative may be taken are the
replay's own, unless others find them.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CellType, MappingProxyType
from typing import Any

from torch import Tensor
from torch.autograd.function import FunctionCtx

from functx._errors import RematError, ReplayError
from functx._remat._arguments import same
from functx._remat._contents_by_place import Contents, contents, is_compared, is_number
from functx._remat._in_parts import running
from functx._remat._past_torch import is_the_users
from functx._remat._reached_by_hooks import FUNCTIONS, METHODS, Fixed, Walk, bound_by
from functx._remat._slots import own_attributes
from functx._remat._state_of_hooks import NOTHING_GIVEN, Found, FoundTensor, Given, Written

NOTHING: Mapping[str, Any] = MappingProxyType({})

AFound = Found | FoundTensor
Finding = Given | Written
State = Mapping[str, Contents]
"""What a hook finds, by the way there."""


class Bound:
    """What a hook is bound to.

    Args:
        hook: of a forward, whose body has returned, or of a replay.
        reached: what it reaches, if that is known.

    Attributes:
        outer: the ways to variables that the function of the region closes over.
    """

    def __init__(self, hook: Any, reached: Mapping[str, AFound | Fixed] = NOTHING) -> None:
        self._name = _name_of(hook)
        self._kind = _kind_of(hook)
        self._found = {way: x for way, x in reached.items() if isinstance(x, AFound)}
        self._fixed = {
            way: x.value
            for way, x in reached.items()
            if isinstance(x, Fixed) and is_number(x.value)
        }
        self._kept = kept(hook)
        self.outer = frozenset(way for way, found in self._found.items() if found.is_outer)

    def __str__(self) -> str:
        return self._name

    def is_of(self, x: Any) -> bool:
        """Whether that is made of the same code."""
        return bool(self._kind == _kind_of(x))

    def is_like(self, other: Bound) -> bool:
        """Whether that is the same function, or an object that is the same."""
        return bool(self._kind == other._kind and self._kept == other._kept)

    def known(self) -> Iterator[int]:
        """Ids of what the hook of a forward reaches, where that is held."""
        return (found.id_of_it() for found in self._found.values())

    def state(self) -> State:
        """What the hook finds now."""
        return {way: found.now() for way, found in self._found.items()}

    def give(
        self, hook: Any, reached: Mapping[str, Any], state: State, run: Reaching
    ) -> list[Finding]:
        """Let a hook of a replay find what is in a state.

        Args:
            hook: the hook.
            reached: what it reaches.
            state: what it is to find.
            run: the replay.

        Raises:
            ReplayError: it can't.
        """
        given, is_theirs = [], run.is_the_programs(hook)
        for way, x in reached.items():
            if way in self._fixed and isinstance(x, Fixed) and x.value is not self._fixed[way]:
                x.set(self._fixed[way])
            elif way in state and not isinstance(x, Fixed):
                found = self._found[way]
                given.append(run.give(found, x, state[way], self._name, is_theirs=is_theirs))
        return given


class Reaching:
    """What hooks of a replay reach.

    Args:
        hooks: as the user has hung them; ``None`` for what is none of the user's.
        region: the name of what is replayed.
        compares: whether it is an error if they can't find what those of the forward do.
        forward: those of the forward, in the same order.
    """

    def __init__(
        self, hooks: Sequence[Any], region: str, compares: bool, forward: Sequence[Bound | None]
    ) -> None:
        known = {key for bound in forward if bound is not None for key in bound.known()}
        ways = [() if bound is None else bound.outer for bound in forward]
        walk = Walk(hooks, ways=ways, known=known - {id(None)})
        self._by_hook: Sequence[Mapping[str, Any]] = walk.by_hook
        self._others = walk.others
        self._given: dict[int, Finding] = {}
        self._region, self._compares = region, compares

    def give(self, found: AFound, to: Any, now: Contents, hook: str, *, is_theirs: bool) -> Finding:
        """Let hooks find something in what they reach, once.

        Raises:
            ReplayError: that can't be.
        """
        if id(to) not in self._given:
            # A variable is surely the replay's own where a hook is.
            others = is_theirs if type(to) is CellType else id(to) in self._others
            given = found.give(to, now, others=others)
            if given is None and self._compares:
                raise ReplayError(
                    f"remat: a {found} that {hook} has found in the forward of the region "
                    f"{self._region!r} was changed after that had returned; a replay finds another "
                    "one, which can't be made the same. Make it outside of the region, or keep in "
                    "it what has names or numbers as keys and is exchanged, not written to."
                )
            self._given[id(to)] = given or NOTHING_GIVEN
        return self._given[id(to)]

    def by_hook(self) -> Sequence[Mapping[str, Any]]:
        """What each hook reaches; it is told once."""
        those, self._by_hook = self._by_hook, ()
        return those

    def is_the_programs(self, hook: Any) -> bool:
        """Whether anything but the tape of the replay holds a hook."""
        return id(hook) in self._others

    @contextmanager
    def found(self, given: Sequence[Finding], *, recorded: bool, again: bool) -> Iterator[None]:
        """Hooks, or backwards of custom Functions, find what they were given.

        Args:
            given: to them.
            recorded: whether derivatives may be taken: tensors are the replay's own but where
                others find them.
            again: whether that is run once more for one: what they leave is known, but where they
                are called later than by that.

        Raises:
            RematError: what they leave can't be found by all.
        """
        later = again and not running.again
        for one in given:
            one.lend(later=later)
        could = True
        try:
            yield
        finally:
            for one in reversed(given):
                could &= one.put_back(for_all=later or not again, only_constants=recorded)
        if not could and self._compares:
            raise RematError(
                f"remat: a hook or a custom Function of the region {self._region!r} changes, in "
                "a backward pass, what the region makes and what is held outside of it: there it "
                "would not change, as a replay has its own. Make it outside of the region, or keep "
                "in it what has names or numbers as keys and is exchanged, not written to."
            )

    def bound(
        self, hook: Callable[..., Any], given: Sequence[Finding], *, recorded: bool, again: bool
    ) -> Callable[..., Any]:
        """A hook that finds what it was given; see `found`."""

        @functools.wraps(hook)
        def called(*gradients: Any) -> Any:
            with self.found(given, recorded=recorded, again=again):
                return hook(*gradients)

        return called if any(one is not NOTHING_GIVEN for one in given) else hook


def _found(x: Any) -> AFound:
    return FoundTensor(x) if isinstance(x, Tensor) else Found(x)


def found_by(hooks: Sequence[Any], outer: Collection[int]) -> list[Mapping[str, AFound | Fixed]]:
    """What each hook of a body that has returned reaches. See `Reaching`, `Walk`."""
    walk = Walk(hooks, outer)
    found: dict[int, AFound] = {}
    reached: list[Mapping[str, AFound | Fixed]] = []
    for those in walk.by_hook:
        reached.append(
            {
                way: x if isinstance(x, Fixed) else found.setdefault(id(x), _found(x))
                for way, x in those.items()
            }
        )
    contexts = {id(hook) for hook in hooks if isinstance(hook, FunctionCtx)}
    for key, one in found.items():
        one.is_outer = key in outer
        one.leave(others=key in walk.others and key not in contexts)  # which hold what is saved
    return reached


def _name_of(f: Any) -> str:
    name = getattr(f if isinstance(f, FUNCTIONS) else type(f), "__qualname__", None)
    return name if isinstance(name, str) else "a partial"


def _kind_of(f: Any) -> Any:
    """What is the same of functions that were made of the same code."""
    if isinstance(f, functools.partial):
        return _kind_of(f.func)
    if not isinstance(f, FUNCTIONS):
        return type(f).__module__, type(f).__qualname__
    return getattr(inspect.unwrap(f), "__code__", _name_of(f))


class Kept:
    """Numbers of a function or an object: equal to those of the same one, whatever they are now.

    Args:
        x: the function or object.
        numbers: what it is bound to, or its attributes.
    """

    __slots__ = ("_numbers", "_of")

    def __init__(self, x: Any, numbers: list[Any]) -> None:
        self._of = weakref.ref(x)
        self._numbers = numbers

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Kept):
            return NotImplemented
        mine = self._of()
        return (mine is not None and mine is other._of()) or same(self._numbers, other._numbers)

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return str(self._numbers)

    def __repr__(self) -> str:
        return "numbers"  # of which thing does not tell that


def kept(x: Any) -> Kept | tuple[Any, ...] | None:
    """What is compared of ``x`` that is made anew by each run; ``None`` for nothing.

    Numbers that are attributes of an object, or in a tuple. Lists and dicts may be changed by what
    runs since, and nothing tells one from another.
    """
    if isinstance(x, tuple):
        return tuple(one for one in x if is_compared(one)) or None
    if isinstance(x, METHODS):
        return kept(x.__self__)
    cls = type(x)
    if isinstance(x, (Tensor, type, *FUNCTIONS)) or not is_the_users(cls.__module__):
        return None
    own = own_attributes(x).items()
    found = [n for name, one in own if is_compared(one) for n in (name, one)]
    return Kept(x, found) if found and cls.__weakrefoffset__ else None


def kept_by_a_function(f: Any) -> Kept | None:
    """The same of what a function is bound to."""
    found = []
    for name, x in bound_by(f):
        for content in (x.value,) if isinstance(x, Fixed) else contents(x).values():
            if is_compared(content):
                found += [name, content]
    return Kept(f, found) if found and type(f).__weakrefoffset__ else None
