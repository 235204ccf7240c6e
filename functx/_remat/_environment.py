"""The surroundings of a region that a replay restores, and puts back afterwards.

Random numbers, autocast, the default dtype and device, deterministic algorithms, which kernels are
allowed, and modes that the user had pushed. A replay leaves the global state as it found it.

NOTE [parametrizations]
Under ``parametrize.cached()`` a module computes a parametrization once. The cache belongs to the
process, so a replay has one of its own, with what the forward found in it.

NOTE [hooks of all modules]
Those that a user hangs on every module (`FlopCounterMode` does) are not the same in a backward pass
that is inside of less, or of more, than its forward was. What they run is part of the region.

NOTE [generators]
States are read when the region starts (default generators) or when an operation is given a
generator, and kept only if the region drew from them. Default generators belong to the process, so
replays that restore one hold a process-wide lock; what other threads draw from it meanwhile is not
reproducible. Those of CUDA are one a device, and another thread may be at work on another device:
the region's are those of the current device and of the devices of the tensors it reads.

NOTE [seeds]
A body may seed a generator. With ``torch.seed()``, or by a clock, each run draws other numbers,
silently: the operations are the same. So the seed that a replay leaves is compared. It may be gone
by then (``torch.random.fork_rng``), so an operation that draws where another seed is than when the
body began is recorded with it.
"""

from __future__ import annotations

import ctypes
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from functx import _torch_globals, _torch_modes
from functx._errors import RematError, ReplayError
from functx._remat import _python_random
from functx._remat._module_state import ModuleState
from functx._remat._options import Options
from functx._remat._past_torch import ways_of
from functx._remat._per_thread import Runner
from functx._remat._within_reach import reach
from functx._torch import default_generators
from functx._torch_kernels import casts, put_back, settings_and_casts
from functx._torch_modules import hooks_of_all, set_hooks_of_all

_generators = threading.RLock()
_shared = threading.RLock()


class Environment:
    """What a region found around it when it ran first.

    Args:
        options: what the caller asked for.
        inputs: tensors whose devices have generators and autocast states.
        body: the user's function, if there is one.
        arguments: its arguments that are no tensors.
    """

    __slots__ = (
        *("_autocast", "_hooks", "_left_changed", "_modes", "_name", "_parametrizations"),
        *("_after", "_in_turn", "_random", "_seeds", "_settings", "_state"),
    )

    def __init__(
        self,
        options: Options,
        inputs: Sequence[Tensor],
        body: Any = None,
        arguments: Sequence[Any] = (),
    ) -> None:
        generators = default_generators()
        self._autocast: dict[str, tuple[bool, torch.dtype, bool]] = {}  # of others than the CPU
        for t in inputs:
            if not t.is_cpu:
                self._casting(t.device.type)
        if len(generators) > 1:
            self._casting("cuda")
        self._name = options.name
        self._seeds: dict[Any, bytes] = {}
        # What default generators were after the operation that drew last; whether operations alone
        # have moved them, as far as was looked.
        self._after: dict[Any, Any] = {}
        self._in_turn = True
        self._settings = settings = settings_and_casts()
        self._hooks = hooks_of_all() if settings[-4] else None
        self._left_changed = False  # by the first run, when it had ended
        found = reach(body, arguments)
        self._state = ModuleState(found)
        self._modes = _torch_modes.user_modes()
        self._parametrizations = _torch_globals.parametrization_cache()
        # How to read and set each generator and array, and what it was.
        self._random: dict[Any, tuple[Callable[[], Any], Callable[[Any], Any], Any]] = {}
        for array in found.arrays:
            self._keep(id(array), *ways_of(array))
        if options.preserve_rng_state:
            for key, generator in generators:
                self._keep(key, generator.get_state, generator.set_state)
            if found.packages or found.generators or options.preserve_rng_state == "all":
                for key, read, write in _python_random.reachable(
                    found.packages, found.generators.values(), options.preserve_rng_state
                ):
                    self._keep(key, read, write)

    def _casting(self, kind: str) -> None:
        if kind not in self._autocast and torch.amp.is_autocast_available(kind):
            self._autocast[kind] = casts(kind)

    def _casts_differ(self) -> bool:
        """Whether those of other devices than the CPU are not what they were."""
        return any(state != casts(kind) for kind, state in self._autocast.items())

    def _keep(self, key: Any, read: Callable[[], Any], write: Callable[[Any], Any]) -> None:
        if key not in self._random:
            self._random[key] = (read, write, read())

    def given(self, generator: torch.Generator) -> None:
        """An operation of the first run is about to draw from a generator."""
        self._keep(generator, generator.get_state, generator.set_state)

    def draws(self) -> None:
        """An operation of a known run is about to draw from default generators."""
        self._in_turn = self._in_turn and all(
            _equal(self._after.get(key, state), read())
            for key, (read, _, state) in self._default_generators()
        )

    def drew(self) -> None:
        """It has drawn."""
        self._after = {key: read() for key, (read, _, _) in self._default_generators()}

    def _default_generators(self) -> list[tuple[Any, Any]]:
        of = self._random.items()
        return [(key, how) for key, how in of if key == "cpu" or isinstance(key, torch.device)]

    def seal(self, written: set[int], ours: Any, own: Any, *read: Iterable[Tensor]) -> Set[int]:
        """The first run ended: what it did not change need not be kept.

        Args:
            written: ids of tensors that were written to in place.
            ours: whether it made a tensor, or was given it.
            own: the caller's tensor for what stands for it.
            read: tensors that it read, inputs and captures.

        Returns:
            Ids of the tensors in what it changed.
        """
        stored = self._state.seal(written, ours, own)
        if self._modes != _torch_modes.user_modes():
            raise RematError(
                f"remat: when the region {self._name!r} ended, other modes were active than when "
                "it began (torch.set_default_device makes one active); a replay could not leave "
                "them so. Take with torch.device(...) in the region, or set it outside."
            )
        self._left_changed = self._settings != settings_and_casts() or (
            bool(self._autocast) and self._casts_differ()
        )
        random, foreign = self._random, set[Any]()
        if len(random) > 1:
            foreign = {key for key in random if isinstance(key, torch.device)}
        if foreign:
            foreign -= {torch.device("cuda", torch.cuda.current_device())}
            foreign -= {t.device for tensors in read for t in tensors}
        for key in [*random]:
            read_now, _, state = random[key]
            now = read_now()
            if key in foreign or _equal(state, now):
                del random[key]
                continue
            if isinstance(now, Tensor) and _seed(now) != _seed(state):
                self._seeds[key] = _seed(now)
            self._in_turn = self._in_turn and key in self._after and _equal(self._after[key], now)
        self._after = {}
        return stored

    def before(self) -> dict[int, Any]:
        """What containers held, by their ids, that are in no global and no object; told once."""
        found, self._state.lost = self._state.lost, {}
        return {key: held for key, (_, held) in found.items()}

    def lost_any(self) -> bool:
        """Whether there are such containers."""
        return bool(self._state.lost)

    def surroundings(self) -> Any:
        """What of it decides which operations run; ``None`` where that can't be compared."""
        if self._modes or self._parametrizations or self.casts() or self._hooks:
            return None
        return self._settings, self._autocast

    def casts(self) -> bool:
        """Whether autocast was on."""
        others = self._autocast
        return self._settings[-3] or (bool(others) and any(on for on, _, _ in others.values()))

    def restored(self, replay: Any = None) -> AbstractContextManager[Runner | None] | None:
        """The same surroundings, for a replay; ``None`` where they are so already.

        They give what runs the body, if it can't be just called.

        Args:
            replay: its tracker; code that is known runs nothing of the user's, whose objects and
                lists stay as they are then.
        """
        changed = self._random or (replay is not None and self._state.changed()) or self.differ()
        return self._put_back(replay) if changed else None

    def drawing(self) -> AbstractContextManager[Any]:
        """The same generators, for code that is known, where `differ` found nothing."""
        return self._put_back(None) if self._random else _AS_IT_IS

    def differ(self) -> bool:
        """Whether anything is not as it was of what operations depend on, but generators."""
        if self._modes or self._parametrizations or self._left_changed or self._hooks:
            return True
        if _torch_globals.parametrization_cache() or self._settings != settings_and_casts():
            return True
        return bool(self._autocast) and self._casts_differ()

    def drawn_from(self) -> list[Any] | None:
        """The devices whose default generators known operations moved; ``None`` if others did."""
        return [*self._random] if self._in_turn else None

    @contextmanager
    def _put_back(self, replay: Any) -> Iterator[Runner | None]:
        with ExitStack() as stack:
            run: Runner | None = None
            of_cpu = {"cpu": tuple(self._settings[-3:])}
            for kind, (enabled, dtype, cache) in (of_cpu | self._autocast).items():
                if self._left_changed or (enabled, dtype, cache) != casts(kind):
                    stack.enter_context(
                        torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache)
                    )
            now = settings_and_casts()
            if self._left_changed or self._settings != now:
                stack.callback(put_back, now)
                put_back(self._settings)
            if self._hooks or now[-4]:
                stack.enter_context(_shared)
                stack.callback(set_hooks_of_all, hooks_of_all())
                set_hooks_of_all(self._hooks)
            for mode in _torch_modes.missing_modes(self._modes):
                stack.enter_context(mode)
            if (cached := _torch_globals.parametrization_cache()) or self._parametrizations:
                # What the forward found computed; what the replay computes is the replay's own.
                stack.enter_context(_shared)
                stack.callback(_torch_globals.set_parametrization_cache, cached)
                _torch_globals.set_parametrization_cache(_own(self._parametrizations))
            if self._random:
                stack.enter_context(_generators)
                for read, write, state in self._random.values():
                    stack.callback(write, read())
                    write(state)
            if self._seeds:
                stack.push(self._check_seeds)
            if replay is not None:
                ours = getattr(replay, "has", None)
                run = stack.enter_context(self._state.restored(self._name, ours))
            yield run

    def _check_seeds(self, kind: Any, *exc: object) -> None:
        """A body that seeds a generator must give it the same seed again. ``NOTE [seeds]``."""
        if kind is not None and issubclass(kind, ReplayError):
            return
        for key, seed in self._seeds.items():
            read, _, before = self._random[key]
            if _seed(read()) not in (seed, _seed(before)):
                raise ReplayError(
                    f"remat: the region {self._name!r} seeds a generator, and its replay gave it "
                    "another seed than its forward (torch.seed(), a clock, os.urandom), so it drew "
                    "other random numbers. Seed it outside of the region, or with a seed that the "
                    "region is given."
                )


_AS_IT_IS: AbstractContextManager[None] = nullcontext()


def _own(cache: tuple[int, dict[Any, Any]] | None) -> tuple[int, dict[Any, Any]] | None:
    return None if cache is None else (cache[0], dict(cache[1]))


def _seed(state: Tensor) -> bytes:
    """What a generator was seeded with: its state begins with that, on every device."""
    return ctypes.string_at(state.data_ptr(), 8)


def _equal(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return pickle.dumps(a) == pickle.dumps(b)
    # Not torch.equal: reading the state must be no operation that a mode could see.
    n = a.nbytes  # len(a) is slow
    return n == b.nbytes and not _compare(a.data_ptr(), b.data_ptr(), n)


def _compare_bytes(a: int, b: int, n: int) -> int:
    return ctypes.string_at(a, n) != ctypes.string_at(b, n)


try:
    _compare: Callable[[int, int, int], int] = ctypes.CDLL(None).memcmp
    _compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)  # type: ignore[attr-defined]
except (AttributeError, OSError, TypeError):  # no such library there, or none without a name
    _compare = _compare_bytes
