"""`functx.jit`, the function that users call, and the object that it returns.

A call first looks for an entry whose guards hold, then searches the state for a program that fits,
and traces the function only if no program fits.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, MethodType, ModuleType
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch import Tensor

from functx import _torch
from functx._compile.backends import checked_backend
from functx._compile.effects import REFUSALS, Before, Changed, settings_kept, watched
from functx._compile.entries import Entries, Entry, Known, Programs, Traces, state_key
from functx._compile.intact import placed_below
from functx._compile.met import Exchange, Met, refused
from functx._compile.module import JittedModule, is_plain, jitted_module
from functx._compile.operation import IN_EAGER, Call, is_mapped, run
from functx._compile.program import MAKING, Inputs, Outcome, Program, check_class
from functx._compile.retraces import change
from functx._compile.running import Ran, noted, type_of_tensor_in
from functx._compile.search import PLAIN, Search
from functx._compile.surroundings import alike, around, base_of, described, surroundings
from functx._core import (
    TracingError,
    attributes,
    describe,
    is_internal,
    is_of,
    name_of,
    refuse_options,
    tell,
    tree,
    uncompiled,
)
from functx._remat import called, is_tracked, sharding, unseen
from functx._torch import dual_level, graphs, process_patches

_WAY_OUT = "Use a tensor in its place, or move it (a counter, for example) out of the function"
P = ParamSpec("P")
R = TypeVar("R")


@overload
def jit(
    f: Callable[P, R],
    *,
    backend: Any = "inductor",
    dynamic: bool | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[P, R]: ...


@overload
def jit(
    f: None = None,
    *,
    backend: Any = "inductor",
    dynamic: bool | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def jit(
    f: Any = None,
    *,
    backend: Any = "inductor",
    dynamic: bool | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    **_others: Any,
) -> Any:
    """Compile ``f``, any stack of transforms and regions, as one graph.

    A call computes what ``f`` computes in eager from the same arguments and state, or raises an
    error. It is traced once for each signature: the structure of the arguments, shapes, dtypes and
    devices of tensors, the values of everything else, and what is set around the call (grad mode,
    autocast). ``f`` may also read state in closures, modules and globals. Tensors there are read
    again at each call; other values there are checked at each call, and a changed value leads to
    another graph. The graph recomputes the same values as the regions, at the same places, so its
    peak is that of eager. Random numbers advance torch's generators as in eager, and writes to
    buffers and arguments happen once per call and carry their history.

    Gradients flow through the call (``.backward()``, `functx.grad`, any order), and their pullbacks
    are compiled too. Inside vmap and jvp a jitted function runs in eager, with a warning. The whole
    stack inside ``jit`` becomes one graph, so put ``jit`` around all transforms. A function that
    counts its calls (``self.n += 1``) runs in eager, with a warning. The page "Traced and compiled"
    lists what works, what runs in eager and what is an error.

    Args:
        f: a function or ``nn.Module`` of pytrees of tensors. ``None`` gives a decorator.
        backend: ``"inductor"``, the name of another one of ``torch.compile``, or a function that is
            given a graph and example inputs.
        dynamic: with ``True``, sizes of arguments are symbols, and one graph serves all sizes that
            it is valid for; sizes of 0 and 1, and sizes that the function compares, have graphs of
            their own. Only arguments have symbolic sizes: state keeps its shapes. ``None`` or
            ``False`` makes one graph for each shape.
        mode: a mode of ``torch.compile`` without CUDA graphs: ``"default"`` or
            ``"max-autotune-no-cudagraphs"``. Only for inductor.
        options: options of inductor, as for ``torch.compile``, in place of a mode. You can't change
            those that keep the order, the memory and the random numbers of a graph.

    Returns:
        A function that does what ``f`` does. For a module, a module of a derived class over the
        same state (parameters, buffers, hooks, modes, attributes), whose ``forward`` is compiled.

    Raises:
        TypeError: ``f`` is not callable, or a custom container of arguments can't be hashed.
        ValueError: ``mode`` or ``options`` are unknown, or conflict with what functx guarantees.
        functx.TracingError: at a call, if a graph can't do what ``f`` does. For example, Python
            code reads the value of a tensor, or keeps a tensor that the function makes. functx
            undoes the effects of the trace.

    Example:
        >>> import torch, functx
        >>> loss = functx.remat(lambda w, x: torch.sin(x @ w).sum())
        >>> step = functx.jit(functx.vmap(functx.grad(loss), (None, 0)), backend="aot_eager")
        >>> step(torch.zeros(2), torch.ones(3, 2))
        tensor([[1., 1.],
                [1., 1.],
                [1., 1.]])
    """
    refuse_options("functx.jit", _others)
    if f is None:
        return functools.partial(jit, backend=backend, dynamic=dynamic, mode=mode, options=options)
    if not callable(f):
        raise TypeError(f"functx.jit: expected a callable, got {type(f).__name__}.")
    backend = checked_backend(backend, mode, options)
    if isinstance(f, torch.nn.Module) and is_plain(f):
        return jitted_module(f, functools.partial(Jitted, backend=backend, dynamic=bool(dynamic)))
    return Jitted(f, backend, bool(dynamic))


class Failed(Exception):
    """A trace failed with an error of the function or of torch; its effects have been undone.

    The function then runs in eager. If the error is its own, eager raises it too, after the effects
    that the function has until then. If only the trace fails, the eager call succeeds.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.said = (f"{type(error).__name__}: {error}").splitlines()[0]


class Jitted:
    """A function that runs as graphs, one for each signature."""

    def __init__(self, function: Any, backend: Any, dynamic: bool) -> None:
        functools.update_wrapper(self, function, updated=())
        self.function, self.backend, self.dynamic = function, backend, dynamic
        self._programs = Programs()
        self._entries = Entries()
        self._traces = Traces()
        self._warned = False
        self._in_eager: Any = None  # the reason why all calls run in eager, if they do
        self._needs_numbers = False  # a trace with symbolic sizes failed, so each size has a graph
        # The last call filled something (a cache, a flag). It ran in eager, and the next trace may
        # find it filled, and succeed.
        self._filled = False

    @uncompiled  # an enclosing torch.compile must not look inside
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # In another trace the function becomes a part of the graph that is being traced.
        if _torch.tracing() or self._in_eager is not None:
            return self.function(*args, **kwargs)
        if (cause := around()) is not None:
            self._tell(f"it runs in eager, inside of {cause} (J5)")
            return self.function(*args, **kwargs)
        if (_torch.peek_interpreter() is not None or dual_level() >= 0) and is_mapped():
            tell("a jitted function", IN_EAGER)
            return self.function(*args, **kwargs)
        if not kwargs and all(map(_is_tensor, map(type, args))):
            tensors, how = [*args], _how_of_tensors(len(args))
        else:
            tensors, how = tree.partition((args, kwargs), is_leaf=_is_size)
        if _torch.function_depth():
            with unseen():  # an enclosing region must not see functx's own questions to tensors
                entry, state = self._found(tensors, how)
        else:
            entry, state = self._found(tensors, how)
        if entry is None:
            out = self.function(*args, **kwargs)
            if state is not None:
                self._in_eager = state.said
                self._tell(f"it runs in eager, because torch can't trace it: {state.said} (J1)")
            return out
        return self._run(entry, how, tensors, state)

    def _found(self, tensors: Any, how: Any) -> tuple[Any, Any]:
        """An entry that holds for a call, and the tensors of the state.

        If the entry is ``None``, the function runs in eager. In place of the state there is then a
        `Failed` if the trace failed, else ``None``.
        """
        spec, others = how
        settings = surroundings()
        for entry in self._entries:
            state = entry.state(settings, spec, others, tensors)
            if state is not None:
                if entry is not self._entries[0]:
                    self._entries.drop(entry)
                    self._entries.insert(0, entry)
                return entry, state
        return self._searched(tensors, how, settings)

    def _run(self, entry: Entry, how: Any, tensors: Any, state: Any) -> Any:
        program, inputs, originals = entry.program, [*tensors, *state], None
        if entry.lazy:
            originals = [*inputs]
            for i in entry.lazy:
                originals[i] = _torch.alive(inputs[i])
                inputs[i] = _plain(inputs[i])
        call = functools.partial(self._call, how, entry, state)
        results, rest = run(program, call, inputs, originals), program.rest
        if program.returns_arguments:
            given = [o[0].of(how[1]) if o and type(o[0]) is Argument else o for o in rest[1]]
            rest = rest[0], given
        return tree.combine(results, rest)

    def _tell(self, what: str) -> None:
        tell(f"functx.jit: {name_of(self.function)}", what)

    def _call(self, how: Any, entry: Entry, state: Sequence[Tensor]) -> Call:
        program = entry.program
        dynamic = self.dynamic and not self._needs_numbers
        flat = functools.partial(self._flat, how, state, (), _statics(how[1]), False)
        call = Call(flat, self.backend, dynamic, name_of(self.function), state)
        call.real = {program.n + k: t for k, t in enumerate(state) if t.requires_grad}
        call.check = functools.partial(self._check, how, entry, state)
        roots = (self.function, *_statics(how[1]))
        call.watch = lambda: watched(Before(Search(roots)))
        return call

    def _searched(self, tensors: Any, how: Any, settings: Any) -> tuple[Any, Any]:
        """A new entry for a call, and the tensors of the state; see `_found` for ``None``."""
        key = self._key(tensors, how, settings)
        roots = (self.function, *_statics(how[1]))
        # torch traces in one thread at a time. Another thread may have traced this call meanwhile,
        # so look for a program only once the lock is held.
        with MAKING:
            try:
                known, found = self._known(key, roots, tensors) or self._made(
                    key, roots, tensors, how
                )
            except Changed as changed:
                self._runs_in_eager(changed)
                return None, None
            except Failed as failed:
                return None, failed
            entry = Entry(known, found, tensors, how, settings, self._entries.drop)
            self._entries.put(entry)
        return entry, [found.tensors[i] for i in known.read]

    def _runs_in_eager(self, change: Any) -> None:
        """Handle a trace that changed a plain value of user code: only eager can repeat it (J4)."""
        # The first call may just fill a cache or set a flag. It runs in eager, which fills it for
        # good, and the next call tries a trace again.
        if change.fills and not self._filled:
            self._filled = True
            return
        self._in_eager = change.said
        self._tell(
            f"it runs in eager, because it changes {change.said}, which a graph can't repeat at "
            f"each call (J4). {_WAY_OUT}"
        )

    # -- by value

    def _key(self, tensors: Any, how: Any, settings: Any) -> Any:
        """The arguments and surroundings of a call, by value."""
        spec, others = how
        sized = not (self.dynamic and not self._needs_numbers)
        hashed = tuple(None if o is None else _by_value(o[0]) for o in others)
        hashed += tuple(map(_named, tensors))
        kinds = tuple([(*described(base_of(t), sized), is_tracked(t)) for t in tensors])
        key = (spec, hashed, kinds, alike(tensors), repr(settings))
        try:
            hash(key)
        except Exception as error:  # __hash__ may raise any error
            raise TypeError(
                f"functx.jit: an argument can't be hashed ({error}). Use tensors, numbers, tuples."
            ) from error
        return key

    def _known(self, key: Any, roots: Any, tensors: Any) -> Any:
        """A known program that fits a call, and the search that found its state, or ``None``."""
        searches: dict[Any, Search] = {}
        for known in reversed(self._programs.get(key, ())):
            if known.ran not in searches:
                searches[known.ran] = Search(roots, known.ran)
            found = searches[known.ran]
            if known.key != state_key(found, tensors) or not known.returns(found):
                continue
            if known.program.fits(tensors, [found.tensors[i] for i in known.read]):
                return known, found
        return None

    def _made(self, key: Any, roots: Any, tensors: Any, how: Any) -> Any:
        """Trace a new program, with symbolic sizes if asked for and as long as that works."""
        dynamic = self.dynamic and not self._needs_numbers
        try:
            return self._traced(key, roots, tensors, how, dynamic)
        except Exception as error:
            if isinstance(error, (TracingError, Changed, Failed)) or not dynamic:
                raise
            # If this fails too, the error is the function's own.
            found = self._traced(key, roots, tensors, how, False)
            self._needs_numbers = True
            why = (str(error) or type(error).__name__).splitlines()[0]
            tell(
                "functx.jit(dynamic=True)",
                "one graph can't serve all sizes here, so each size has its own graph: torch or "
                f"the function needs sizes as numbers ({why})",
            )
            return found

    def _traced(self, key: Any, roots: Any, tensors: Any, how: Any, dynamic: bool) -> Any:
        for t in tensors:
            check_class(t)
        codes: set[Any] = set()
        before = Before(Search(roots), codes)
        captured = before.found.tensors
        generators = [*before.found.generators, *_statics(how[1])]
        inside = _torch.functorch_depth() > 0
        flat = functools.partial(self._flat, how, captured, tensors, generators, inside)
        numbers = {id(t): k for k, t in enumerate(captured)}
        n = len(tensors)
        inputs = Inputs(
            [_plain(base_of(t)) for t in tensors],
            [is_tracked(t) for t in tensors],
            [t.is_leaf for t in tensors],
            alike(tensors),
            captured,
            [_plain(base_of(t)) for t in captured],
            [numbers.get(id(t), -1) for t in tensors],
            {n + k: t for k, t in enumerate(captured) if t.requires_grad},
        )
        noting = functools.partial(noted, codes)
        try:
            with watched(before):
                program = Program(
                    flat, inputs, dynamic, torch.is_grad_enabled(), before.settle, noting
                )
        except (*REFUSALS, Changed):
            raise
        except Exception as error:
            if dynamic or hasattr(error, "functx_went_on"):
                raise
            raise Failed(error) from error
        program.compile(self.backend, name_of(self.function))
        self._filled = False
        ran: Ran | None = Ran(codes)
        check_types(codes)
        found = Search(roots, ran)
        slots = {id(t): i for i, t in enumerate(found.tensors)}
        used = program.captured()
        if any(id(captured[k]) not in slots for k in used):
            # The trace met a tensor that the names in the code do not lead to. Guard everything
            # that the search before the trace reached.
            ran, found = None, before.found
            slots = numbers
        order = sorted(used, key=lambda k: slots[id(captured[k])])
        program.renumber({k: i for i, k in enumerate(order)})
        returned = _returned(program, how, before.found, name_of(self.function))
        read = [slots[id(captured[k])] for k in order]
        known = Known(program, ran, state_key(found, tensors), found.known, returned, read)
        self._programs.setdefault(key, []).append(known)
        self._traces.append((key, known))
        self._warn_of_traces(found)
        return known, found

    def _warn_of_traces(self, found: Search) -> None:
        if not self._warned and (said := change(self._traces, found)) is not None:
            self._warned = True
            self._tell(f"it is traced for the third time, because {said} (J7)")

    def _check(self, how: Any, entry: Entry, state: Sequence[Tensor]) -> None:
        """Raise if the state has changed, so that running the function again would be wrong."""
        if entry.is_intact(state):
            return
        known = entry.known
        found = Search((self.function, *_statics(how[1])), known.ran)
        tensors = [found.tensors[i] for i in known.read] if found.key == known.key[0] else []
        if [*map(id, tensors)] != [*map(id, state)]:
            raise TracingError(
                "functx.jit: differentiating a pullback computes the function again, but something "
                "that the function reads has been replaced since the call (for example a flag, a "
                "number or a tensor in an attribute). Differentiate before you replace it, or put "
                "functx.jit around the whole derivative (J1)."
            )

    # -- in a trace

    def _flat(
        self,
        how: Any,
        captured: Sequence[Tensor],
        arguments: Sequence[Tensor],
        generators: Sequence[Any],
        inside: bool,
        given: Sequence[Tensor],
        standin: Any,
    ) -> Outcome:
        """Run the function on the tensors of a trace.

        A pullback inside vmap or jvp calls this too, without a trace: the function runs in eager.
        """
        args, kwargs = tree.combine(given, how)
        name = f"functx.jit: {name_of(self.function)}"
        if not _torch.tracing():
            met: Any = Exchange(captured, standin, given)
            with placed_below(met), graphs.exchanging(met.standin):
                return Outcome(tree.partition(self.function(*args, **kwargs))[0], met=met)
        met = Met(captured, standin, given, arguments, generators, inside)
        texts: Any = contextlib.nullcontext()
        if self.dynamic:
            texts = process_patches.numbers_in_texts(is_internal)
        with (
            sharding.watching(name, TracingError),
            placed_below(met),
            graphs.exchanging(met.standin),
            settings_kept(),
            graphs.refusing(),
            texts,
        ):
            _give_attributes(given, arguments)
            before = [_attributes(t) for t in given]
            out = called(self.function, args, kwargs, name, TracingError)
            if before != [_attributes(t) for t in given]:
                raise refused("sets an attribute of an argument", "Set it outside.")
        results, rest = tree.partition(out, is_leaf=_is_size)
        inputs = {*map(id, given), *met.numbers}
        if any(_attributes(t) for t in results if id(t) not in inputs):
            raise refused("sets an attribute of a tensor that it returns", "Set it outside.")
        if rest is not None:  # sizes that the function returns become numbers of this graph
            rest = rest[0], [o and (_as_numbers(o[0]),) for o in rest[1]]
        return Outcome(results, rest, met)

    # -- acting as the function itself

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        """Attributes of a wrapped module, such as its parameters."""
        if name.startswith("__") or not isinstance(self.__dict__.get("function"), torch.nn.Module):
            raise AttributeError(f"functx.jit: no attribute {name!r}")
        return getattr(self.function, name)

    def __reduce__(self) -> Any:
        return Jitted, (self.function, self.backend, self.dynamic)  # a copy has no graphs


@dataclass(frozen=True)
class Argument:
    """Stands for a result that is an argument and not a tensor: each call returns its own."""

    index: int

    def of(self, others: Any) -> Any:
        """The argument at this place in a call."""
        return others[self.index]


def _returned(program: Program, how: Any, found: Search, name: str) -> list[Any]:
    """The objects that existed before the call and that the function returns.

    Results that are arguments are replaced by an `Argument` with their place.

    Raises:
        TracingError: The function returns an object that it has made.
    """
    if program.rest is None:
        return []
    others = program.rest[1]
    arguments = {id(o[0]): i for i, o in enumerate(how[1]) if o is not None}
    held, returned = {*map(id, found.held)}, []
    for i, other in enumerate(others):
        if other is None or type(x := other[0]) in PLAIN:
            continue
        if id(x) in arguments:
            others[i], program.returns_arguments = (Argument(arguments[id(x)]),), True
        elif id(x) in held or isinstance(x, (type, enum.Enum, ModuleType)):
            returned.append(x)
        elif not _is_constant(x):
            raise TracingError(
                f"functx.jit: {name} returns an object that is not a pytree, {describe(x)}. A "
                "graph can't make a new one at each call (J4). Return tensors, tuples, lists and "
                "dicts, or register its class (torch.utils._pytree.register_dataclass, "
                "register_pytree_node)."
            )
    return returned


def _is_constant(x: Any) -> bool:
    """Whether an object never changes, so that each call may return the same one."""
    if type(x) is frozenset:
        return all(type(v) in PLAIN for v in x)
    is_number = type(x).__module__ == "numpy" and type(x).__name__ != "ndarray"
    return is_number or type(x).__name__ in ("PyTreeSpec", "TreeSpec") or type(x) is slice


def check_types(codes: set[CodeType]) -> None:
    """Refuse ``type(x) is torch.Tensor``: in a trace a tensor is of a derived class."""
    # tensordict wraps torch's vmap once it is imported, and compares types only for a fast path.
    around_vmap = f"{os.sep}tensordict{os.sep}"
    for code in codes:
        if around_vmap in code.co_filename:
            continue
        if (line := type_of_tensor_in(code)) is not None:
            raise TracingError(
                f"functx.jit: at {code.co_filename}:{line} the function compares type(x) with a "
                "tensor class, but tensors of a trace are instances of a derived class (J1). Use "
                "isinstance(x, torch.Tensor)."
            )


def _statics(others: Any) -> tuple[Any, ...]:
    """The arguments that are not tensors."""
    return tuple(other[0] for other in others if other is not None)


def _by_value(x: Any) -> Any:
    """A key for an argument: the value if it is plain, else its class.

    The search adds the contents of other objects to the key.
    """
    if type(x) not in PLAIN:
        return type(x).__qualname__
    return type(x), repr(x) if type(x) in (float, complex) else x


def _is_size(x: Any) -> bool:
    return type(x) is torch.Size  # a tuple that stays a leaf, so that its class survives


def _as_numbers(x: Any) -> Any:
    """A returned value that is not a tensor, with numbers in place of symbolic sizes."""
    return torch.Size(map(graphs.number, x)) if _is_size(x) else graphs.number(x)


def _give_attributes(given: Sequence[Tensor], arguments: Sequence[Tensor]) -> None:
    """Copy attributes of arguments to their stand-ins, and let ``isinstance`` see parameters."""
    for t, argument in zip(given, arguments):
        if t is not argument:
            t.__dict__.update({k: v for k, v in argument.__dict__.items() if k not in t.__dict__})
            if isinstance(argument, torch.nn.Parameter):
                t._is_param = True


def _attributes(t: Tensor) -> dict[str, Any]:
    """The attributes that users have given to a tensor of a trace."""
    known = _torch.attributes_of_fakes()
    return {k: v for k, v in t.__dict__.items() if k not in known}


_is_tensor = frozenset({Tensor, torch.nn.Parameter}).__contains__


@functools.cache
def _how_of_tensors(n: int) -> Any:
    """The second result of `tree.partition` for a call with ``n`` tensors and nothing else."""
    with unseen():
        return tree.partition(((torch.empty(()),) * n, {}))[1]


def _named(t: Tensor) -> Any:
    """The attributes of an argument, by value or by identity."""
    return tuple((k, _by_value(v) if type(v) in PLAIN else id(v)) for k, v in t.__dict__.items())


def _plain(t: Tensor) -> Tensor:
    """A tensor without pending conjugation or negation, or a wrapper of a level that has ended."""
    return _torch.alive(t).resolve_conj().resolve_neg()


def is_compiled(x: Any) -> bool:
    """Whether ``x`` was made by `functx.jit` or ``torch.compile``."""
    names = "_torchdynamo_orig_callable", "_orig_mod"
    found = attributes(x) or {}
    return is_of(x, (Jitted, JittedModule)) or any(name in found for name in names)
