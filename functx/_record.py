"""What a function runs, found out on fake tensors of its arguments' shapes."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from functx import _torch, _torch_fake, _torch_modes, _torch_modules, _tree
from functx._errors import RematError
from functx._flags import Flags, no_casts_kept
from functx._generator_watch import Watch, bytes_of
from functx._program import Operation, Program, Ref
from functx._remat._function import recording
from functx._remat._functions import PASSIVE, TENSOR_GETTERS
from functx._remat._given import Given, changed
from functx._remat._tracker import SILENT, tracking
from functx._remat._within_reach import reachable
from functx._torch_edges import requires_grad_anywhere


class _Recorder(TorchFunctionMode):
    def __init__(self, program: Program, fakes: Sequence[Tensor], name: str) -> None:
        super().__init__()
        self._program = program
        self._name = name
        self._keep: list[Any] = [fakes]  # so that ids stay theirs
        self._numbers: dict[int, Ref] = {}
        self._stand: dict[int, Tensor] = {}
        self._first: dict[int, int] = {}  # storage -> number of operations before its first use
        self._values = 0
        self._forbidden: list[tuple[int, int]] = []
        self._modes = len(_torch_modes.user_modes())
        self._generators: dict[torch.Generator, tuple[Tensor, bytes]] = {}
        for t in fakes:
            self._new(t, 0)

    def _new(self, t: Tensor, at: int) -> int:
        number = self._values
        self._values += 1
        self._numbers[id(t)] = Ref(number)
        self._keep.append(t)
        self._program.layouts.append((t.shape, t.dtype, t.device))
        self._first.setdefault(_torch.storage_key(t), at)
        return number

    def refuse(self, why: str) -> RematError:
        """An error for what can't be planned."""
        return RematError(
            f"remat: a budget for {self._name!r} can't be kept, because {why}. Plan its parts "
            "instead: functx.plan takes a list of blocks, which may be any functions."
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            if func.__self__.__name__ not in TENSOR_GETTERS:
                return func(*args, **kwargs)
        elif name in PASSIVE:
            return func(*args, **kwargs)
        elif name in ("__set__", "backward", "_backward"):
            raise self.refuse(f"it calls {name} on a tensor")
        if len(_torch_modes.user_modes()) > self._modes:
            raise self.refuse("it enters a mode that its operations run under; enter it outside")
        leaves, spec = _tree.flatten((args, kwargs))
        self.check_generators(leaf for leaf in leaves if isinstance(leaf, torch.Generator))
        real, refs = [], []
        for leaf in leaves:
            ref, stand = self._resolve(leaf)
            refs.append(ref)
            real.append(stand)
        before = [_torch.version(t) if isinstance(t, Tensor) else 0 for t in real]
        grad = torch.is_grad_enabled()
        new_args, new_kwargs = _tree.unflatten(spec, real)
        out = func(*new_args, **new_kwargs)
        at = len(self._program.operations)
        gives = []
        outs = [t for t in _tree.leaves(out) if isinstance(t, Tensor)]
        for t in outs:
            known = self._numbers.get(id(t))
            if known is not None and known.outside:
                # Handed on as it is: from now on it is a value like any other.
                gives.append(self._new(t, 0))
            else:
                gives.append(known.number if known is not None else self._new(t, at))
        now = Flags.now()
        flags = None if now == self._program.flags else now
        self._program.operations.append(Operation(func, refs, spec, gives, grad, flags))
        for t, version, ref in zip(real, before, refs):
            # What is outside is put back by regions, wherever they are cut.
            if isinstance(t, Tensor) and _torch.version(t) != version and not ref.outside:
                self._forbidden.append((self._first[_torch.storage_key(t)], at + 1))
        return out

    def check_generators(self, given: Iterable[torch.Generator] = ()) -> None:
        """Refuse what seeds them: on fake tensors nothing is drawn, so that they stay as they are.

        Torch's own is the whole process's, and only watched.

        Args:
            given: further ones that are used from now on.
        """
        for generator in given:
            if generator is not torch.default_generator and generator not in self._generators:
                state = generator.get_state()
                generator.manual_seed(_NOBODY_S_SEED)
                self._generators[generator] = state, bytes_of(generator.get_state())
        if any(bytes_of(g.get_state()) != own for g, (_, own) in self._generators.items()):
            raise self.refuse("it seeds a random generator; seed it before")

    def put_generators_back(self) -> None:
        """Let them go on as if nobody had been here."""
        for generator, (state, _) in self._generators.items():
            generator.set_state(state)

    def _resolve(self, leaf: Any) -> tuple[Any, Any]:
        if isinstance(leaf, slice) and any(
            isinstance(x, Tensor) for x in (leaf.start, leaf.stop, leaf.step)
        ):
            raise self.refuse("it slices by tensors")
        if not isinstance(leaf, Tensor):
            return leaf, leaf
        ref = self._numbers.get(id(leaf))
        if isinstance(leaf.grad_fn, torch.autograd.function.BackwardCFunction):
            raise self.refuse("it calls a custom Function, whose backward no record sees")
        if ref is not None:
            return ref, self._stand.get(id(leaf), leaf)
        if isinstance(leaf, _torch_fake.FakeTensor) or (
            _torch.is_wrapped(leaf) and _made_of_fakes(leaf)
        ):
            raise self.refuse(
                "it makes tensors where no record sees it (in a transform, or an extension)"
            )
        ref = self._numbers[id(leaf)] = Ref(len(self._program.outside), outside=True)
        self._program.outside.append(leaf)
        stand = self._stand[id(leaf)] = fake_of(leaf)
        self._numbers[id(stand)] = ref
        self._keep += [leaf, stand]
        self._first.setdefault(_torch.storage_key(stand), 0)
        return ref, stand

    def let_go(self) -> list[weakref.ref[Tensor]]:
        """Hold nothing any more; what is alive then, somebody else holds."""
        stand_ins = {id(t) for t in self._stand.values()}
        made: list[Tensor] = [t for t in self._keep if isinstance(t, _torch_fake.FakeTensor)]
        refs = [weakref.ref(t) for t in made if id(t) not in stand_ins]
        self._keep.clear()
        self._stand.clear()
        return refs

    def finish(self, result: Any) -> None:
        """The function returned."""
        leaves, self._program.spec = _tree.flatten(result)
        self._program.results = [
            self._resolve(leaf)[0] if isinstance(leaf, Tensor) else leaf for leaf in leaves
        ]
        n = len(self._program.operations)
        self._program.cuts = [
            c for c in range(n + 1) if not any(a < c < b for a, b in self._forbidden) or c in (0, n)
        ]


_NOBODY_S_SEED = 0x5EED0FA71A1
_one_at_a_time = threading.RLock()  # attributes of modules, and generators, are shared


def _made_of_fakes(t: Tensor) -> bool:
    while _torch.is_wrapped(t):
        t = _torch.get_unwrapped(t)
    return isinstance(t, _torch_fake.FakeTensor)


def fake_of(t: Tensor) -> Tensor:
    """A tensor like ``t`` without memory; call it in a `FakeTensorMode`."""
    made = torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device)
    return made.requires_grad_() if requires_grad_anywhere(t) else made


def record(
    f: Callable[..., Any], args: Any, kwargs: Any, name: str
) -> tuple[Program, list[Tensor]]:
    """What ``f(*args, **kwargs)`` runs.

    Returns:
        The program, and the tensors among the arguments, which go into it.

    Raises:
        functx.RematError: that can't be found out without values.
    """
    leaves, spec = _tree.flatten((args, kwargs))
    inputs = list({id(x): x for x in leaves if isinstance(x, Tensor)}.values())
    places = {id(x): i for i, x in enumerate(inputs)}
    program = Program(len(inputs))
    modules = reachable(f, leaves)
    with (
        _one_at_a_time,
        _torch.cleared_interpreter_stack(),
        tracking(SILENT),
        _torch.without_dispatch_modes(),  # nothing runs that a counter or a profiler should see
        unchanged(modules, name),
        no_casts_kept(),
        _torch_fake.FakeTensorMode(),
    ):
        fakes = [fake_of(t) for t in inputs]
        recorder = _Recorder(program, fakes, name)
        watch = Watch(recorder.refuse)
        stand = [fakes[places[id(x)]] if isinstance(x, Tensor) else x for x in leaves]
        given = Given((args, kwargs), f, name)
        fake_args, fake_kwargs = tree = given.apart(_tree.unflatten(spec, stand))
        watched = given.watch(tree)
        try:
            with recording(), watch, recorder:
                result = f(*fake_args, **fake_kwargs)
            watch.check()
            recorder.check_generators()
            if changed(watched):
                raise recorder.refuse("it changes a list or a dict that it is given; return it")
            recorder.finish(result)
        except (
            _torch_fake.DataDependentOutputException,
            _torch_fake.DynamicOutputShapeException,
        ) as e:
            raise recorder.refuse(f"it depends on values ({e})") from e
        finally:
            recorder.put_generators_back()
        made = recorder.let_go()
        del result, stand, fake_args, fake_kwargs, fakes, tree, watched
    if any(ref() is not None for ref in made):
        gc.collect()
        if any(ref() is not None for ref in made):
            raise recorder.refuse(
                "it keeps a tensor otherwise than by return (in a list, an attribute, a cache)"
            )
    return program, inputs


@contextmanager
def unchanged(modules: Sequence[Any], name: str) -> Iterator[None]:
    """Refuse what rebinds attributes of modules; they are put back."""
    places = [(d, m) for m in modules for d in (m.__dict__, _torch_modules.buffers_of(m))]
    before = [(d, m, dict(d)) for d, m in places]
    try:
        yield
    finally:
        changed = [
            name
            for d, m, old in before
            for name in old.keys() | d.keys()
            if d.get(name) is not old.get(name) and not _lists_parameters(name, m)
        ]
        for d, _, old in before:
            d.clear()
            d.update(old)
    if changed:
        raise RematError(
            f"remat: a budget for {name!r} can't be kept, because it rebinds {changed[0]!r} of a "
            "module. Write to it in place, or plan its parts: functx.plan takes a list of blocks."
        )


def _lists_parameters(name: str, module: Any) -> bool:
    """Whether it is the list that a recurrent layer makes anew of its parameters at each call.

    Called by `functional_call`, it lists those that it was called with.
    """
    return isinstance(module, torch.nn.RNNBase) and name in ("_flat_weights", "_flat_weight_refs")
