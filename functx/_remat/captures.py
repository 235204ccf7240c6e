"""The listener of a forward: it turns foreign tensors into inputs (NOTE [by place]).

NOTE [inside or foreign]
A tensor that is neither an input nor a result of a call was either made inside of the region, or is
foreign. This decision determines values. `Captures.meet` makes it, and no other code does:

1. If the tensor wraps an input or a result, at a level that has ended or that was entered inside,
   it counts as that input or result.
2. If it lies in memory that the region's operations made, or is a view of a stand-in, it was made
   inside.
3. If it is on a tape that leads to a stand-in, it was made inside. (``Function.apply`` returns such
   tensors.)
4. Otherwise it is foreign. If one of torch's own transforms, entered inside, has wrapped it, then
   the tensor within the wrapper is foreign.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle

from functx import _torch
from functx._core import NORMALISATIONS, RematError, tree
from functx._remat import departures, examples, levels, sharding
from functx._remat.calls import CAPTURE, DATA, INSIDE, OUTSIDE, READ, SWITCHES, Call, is_simple
from functx._remat.ledger import Ran, Record, leave_out
from functx._remat.ledger import ledgers as all_ledgers
from functx._remat.listener import Listener, Listening
from functx._remat.region import Inputs
from functx._remat.writes import check_written
from functx._torch.graphs import standin_of

# These change requires_grad of a tensor (to the given value, if they have no argument that says
# otherwise) or its data (`None`).
_CHANGES: dict[Any, bool | None] = {
    **{Tensor.detach_: False, Tensor.data.__set__: None},  # type: ignore[attr-defined]
    **dict.fromkeys(SWITCHES, True),
}
# These run the autograd engine on the tapes of their arguments.
ENGINE = {torch.autograd.grad, torch.autograd.backward, Tensor.backward}


class Captures(Listener):
    """Listens to a forward."""

    def __init__(
        self,
        region: Any,
        inputs: Inputs,
        record: Record,
        outer: Listening | None,
        first_node: int,
        log: list[Call] | None = None,
    ) -> None:
        """Listen to a run of ``region``.

        ``log`` is the log that this run must make. If it is ``None``, the enclosing region
        (``outer``) is asked for it.
        """
        expected = log
        if expected is None and outer is not None:
            expected = outer.log_inside()
        ledgers = (record, *(() if outer is None else outer.ledgers))
        super().__init__(region, inputs.standins, ledgers, expected)
        self.outer, self.inputs, self.record = outer, inputs, record
        self.wanted = {} if outer is None else outer.wanted_inside()
        # The savers of this region and of enclosing ones whose policies look at operations:
        self.asked = [x.saver for x in ledgers if x.saver is not None and x.saver.asks]
        self.captured: dict[int, int] = {}  # by the id of a foreign tensor, its number as an input
        self.held: list[Tensor] = []  # keeps foreign tensors alive, so that their ids stay unique
        self.made: set[int] = set()  # inputs that were made inside, of Python's or NumPy's data
        self.hooks: list[RemovableHandle] = []  # hooks on tensors that were made inside
        # Inputs that are not differentiated:
        self.constants = [i for i, t in enumerate(self.standins) if not levels.is_tracked(t)]
        # An effect that the log of calls does not show. If there is one, no later run can follow
        # the script of this one.
        self.hides = ""
        # For each call the number of calls before it, with those of regions inside:
        self.before: list[int] = []
        self.modes = _modes_entered()
        self.first_node = first_node

    def begin(self) -> None:
        """Listen to operations from now on."""
        _torch.push_dispatch_mode(self.record)

    def end(self) -> None:
        """The region's code has returned."""
        _torch.pop_dispatch_mode(None)

    def take_over(self, follower: Any) -> None:
        """Record the rest of a run that has followed a script so far (NOTE [two speeds])."""
        super().take_over(follower)
        self.hooks += follower.hooks
        for number, t in follower.foreign.items():
            self.held.append(t)
            if number in follower.script.made:
                self.made.add(number)
            else:
                self.captured[id(t)] = number
        self.record.go_on_from(follower.script.ran, follower.calls_before())
        self.before = [*(follower.script.before or range(follower.at))][: follower.at]

    def let_go(self) -> None:
        """Drop all stand-ins and hooks: the region has finished.

        After this, any remaining reference to a stand-in is held by user code.
        """
        self.wanted |= {k: self.standins[-1 - k] for k in self.wanted if k < 0}
        for handle in self.hooks:  # hooks may hold the tape; a replay registers its own
            handle.remove()
        self.hooks.clear()
        self.standins.clear()
        self.inputs.leaves.clear()
        self.held.clear()

    def leaves_unseen(self, results: list[Tensor]) -> list[Tensor]:
        """The leaves on the tape that no mode has seen. They become further inputs.

        C++ code that is not called through ``torch.ops`` reads such leaves. The walk over the tape
        also notes in ``inputs.reached`` which inputs the results depend on, at all levels.

        Raises:
            RematError: the tape leads to a tensor from outside that is not a leaf.
        """
        found: dict[int, Tensor] = {}
        inputs, reached = self.inputs, set[Any](self.inputs.reached or ())
        for node in tape_of(results, self.first_node):
            if isinstance(node, BackwardCFunction) and not hasattr(node, "payload"):
                self.hides = "a custom Function"  # the log does not show its arguments
                for ledger in self.ledgers:
                    ledger.blind = True  # no mode sees what a custom Function reads
            leaf = getattr(node, "variable", None)
            if leaf is None:
                ours = node._sequence_nr() >= self.first_node
            else:
                ours = inputs.leaves.get(id(leaf)) is leaf or self.number_of(leaf) is not None
                reached.add(inputs.places.get(id(leaf)))
            if not ours and leaf is not None and _torch.level_of(leaf) <= 0:
                found[id(leaf)] = leaf
            elif not ours:
                raise RematError(
                    f"remat: {self.region.title} passes a captured tensor to C++ code that functx "
                    "can't see, or calls a pullback that was made outside of the region. Gradients "
                    "would be lost. Pass the tensor to the region as an argument, or make the "
                    "pullback inside of the region."
                )
        inputs.reached = reached - {None}
        return [*found.values()]

    def leave_out(self, results: list[Tensor]) -> Ran:
        """Find what a replay may leave out (rule 6)."""
        return leave_out(self.region, self.record, results)

    # -- results

    def returned(self, out: Any, given: Any, operands: Any) -> Any:
        out = super().returned(out, given, operands)
        call, record = self.last[0], self.record
        call.draws, call.writes = record.draws_now, record.writes_now
        record.draws_now = record.writes_now = False
        call.is_flat = len(call.given) == len(operands) and all(map(is_simple, operands))
        call.is_plain = (
            call.is_flat
            and type(out) is Tensor
            and call.results[0][0] not in call.given
            and call.results[0][0] not in self.leaves
            and not (call.draws or call.writes or call.func in _MORE)
            and not (self.norms and call.func in NORMALISATIONS)
        )
        return out

    def log(self, call: Call) -> Call | None:
        record = self.record
        if not self.hides and call.func not in (CAPTURE, DATA):
            if record.draws_now or record.writes_now:
                self.hides = "a draw or a write outside of its calls"
            elif _modes_entered() != self.modes:
                self.hides = "a dispatch mode that it enters"
        self.before.append(len(record.starts) - 1)
        return super().log(call)

    def hide(self, why: str) -> None:
        self.hides = self.hides or why

    def set_aside(self, nodes: int) -> None:
        self.inputs.nodes += nodes

    def give(self, tensors: list[Tensor]) -> list[Tensor]:
        call, record = self.last[0], self.record
        call.draws, call.writes = record.draws_now, record.writes_now
        record.draws_now = record.writes_now = False
        due = self.last[1]
        asleep, self.asleep = self.asleep, True
        if due is None:
            tensors = [self._handed_through(t) for t in tensors]
        else:  # in a replay of the region around: such a tensor has the number that is due
            for t, (number, _, _) in zip(tensors, due.results):
                if number == -1 - len(self.standins):
                    self.capture(t)
        self.asleep = asleep
        return super().give(tensors)

    def _handed_through(self, t: Tensor) -> Tensor:
        """The stand-in, if a transform inside has returned a foreign tensor; otherwise ``t``."""
        value = levels.alive(t)
        if self.number_of(t) is not None or _torch.level_of(value) > self.depth:
            return t
        if not levels.is_tracked(value) or self._is_inside(value):
            return t
        return self.meet(t, None, None)[1]

    # -- inputs

    def admit(self, t: Tensor) -> int:
        """Add a further input; returns its number."""
        number = len(self.standins)
        standin = self.inputs.admit(t)
        if standin is not t or self.number_of(standin) is None:
            self.know(standin, -1 - number)
        if not levels.is_tracked(standin):
            self.constants.append(number)
        return number

    def meet(self, t: Tensor, number: int | None, due: Any) -> tuple[int, Tensor]:
        if (placed := self.placed(t, number, due)) is not None:
            return placed
        number = self.number_within(t) if number is None else number
        if number is not None and due != -1 - len(self.standins):
            return number, t
        value = levels.alive(t)
        if due == INSIDE or (due is None and self._is_inside(value)):
            return INSIDE, t
        if _torch.level_of(value) > self.depth:
            if not levels.is_tracked(value):
                return self._meet_wrapped(value, due)
            inner = levels.inside(value, self.depth)
            raise departures.refused(
                f"{self.region.title} gives a captured tensor of shape {tuple(inner.shape)} to a "
                "transform of torch.func. Use functx's transform of the same name, or pass the "
                "tensor to the region as an argument."
            )
        captured = self.captured.get(id(t))
        if captured is None or due is not None:
            captured = self.capture(t)
        return -1 - captured, self.standins[captured]

    def _meet_wrapped(self, t: Tensor, due: Any) -> tuple[int, Tensor]:
        """The number and stand-in for a tensor that a transform of torch.func has wrapped.

        The tensor is not differentiated at the levels of that transform.
        """
        inner = levels.alive(levels.inside(t, self.depth))
        captured = self.captured.get(id(inner))
        if captured is None or due is not None:
            captured = self.capture(inner)
        return -1 - captured, self.wrapped_again(t, self.standins[captured])

    def capture(self, t: Tensor) -> int:
        """Make a foreign tensor an input; returns its number."""
        value = standin_of(levels.alive(t))
        self.held.append(t)
        if self.outer is not None:
            (value,) = self.outer.take(CAPTURE, [value])
        number = self.captured[id(t)] = self.admit(levels.alive(value))
        return number

    def _is_inside(self, t: Tensor) -> bool:
        """See NOTE [inside or foreign]."""
        base = levels.base_of(t)
        if self.record.has_made(_torch.storage_of(base)) or id(base._base) in self.inputs.leaves:
            # (The tape alone does not decide: a view that was made under no_grad is not on it.)
            return True
        if not levels.is_tracked(t):
            return False
        leaves = self.inputs.leaves
        on_tape = [getattr(node, "variable", None) for node in tape_of([t], self.first_node)]
        return any(leaf is not None and leaves.get(id(leaf)) is leaf for leaf in on_tape)

    # -- calls

    def changes_leaf(self, func: Any, args: Any, kwargs: Any) -> bool:
        """See `Listener`. A forward changes the leaf here; from now on it is another input.

        A tensor that was made inside, or is already on the region's tape, is not such a leaf.
        """
        t, wanted, number = args[0], _wanted(func, args, kwargs), self.number_of(args[0])
        if not t.is_leaf or _torch.level_of(t) > 0:
            return False
        if number is None:
            if self._is_inside(t) or (not wanted and id(t) in self.captured):
                return False
        else:  # a captured constant is its own stand-in
            i = -1 - number
            if number >= 0 or i < self.n_args or i in self.made or self.standins[i] is not t:
                return False
        if wanted is not t.requires_grad:
            t.requires_grad_(wanted)
            listener: Any = self
            while isinstance(listener, Captures):
                listener.forget(t)
                listener = listener.outer
        return True

    def forget(self, t: Tensor) -> None:
        """Forget a captured constant whose requires_grad was changed.

        The next call that reads it makes it another input.
        """
        if (known := self.known.pop(id(t), None)) is not None and -1 - known[1] in self.constants:
            self.constants.remove(-1 - known[1])
        self.captured.pop(id(t), None)

    def execute(self, call: Call, func: Any, args: Any, kwargs: Any) -> Any:
        if func in ENGINE:
            self.hides = "a call of the engine"
        if func in _SPECIAL:
            self._special(call, func, args, kwargs)
        if self.asked:
            examples.expect(self.asked, func, args, kwargs)
        try:
            out = super().execute(call, func, args, kwargs)
        except RuntimeError as error:
            if _WRITES_A_LEAF not in str(error):
                raise
            raise departures.written(self.region.title, args) from error
        if self.record.written:
            self.record.written.clear()
            check_written(self.standins, self.constants, self.made, self.region.title)
        if func in ENGINE and any(t.grad is not None for t in self.inputs.leaves.values()):
            what = f"{self.region.title} calls backward(): gradients of its inputs would be lost"
            raise departures.refused(
                f"{what}. Use torch.autograd.grad, or call backward() outside of the region."
            )
        return out

    def _special(self, call: Call, func: Any, args: Any, kwargs: Any) -> None:
        if func in ENGINE:
            if call.given[:1] != [OUTSIDE] and any(map(self._is_given, tree.leaves(args[:1]))):
                raise departures.refused(
                    f"{self.region.title} differentiates a tensor that was computed outside of the "
                    "region, whose tape the region can't see. Compute the tensor inside of the "
                    "region, or differentiate it outside."
                )
        elif func is _LABEL:
            sharding.check(args[0], self.region.title)
        elif (
            isinstance(t := args[0], Tensor)
            and self._is_given(t)
            and _wanted(func, args, kwargs) is not t.requires_grad
        ):
            raise departures.refused(
                f"{self.region.title} changes requires_grad or data of a tensor that it did "
                f"not make, of shape {tuple(t.shape)}. Do it outside of the region. If a hook does "
                "it, put the region inside the module that has the hook. A tensor that does not "
                "require grad can be written with copy_(). (A region can call requires_grad_() on "
                "a leaf that it closes over.)"
            )

    def pulls_back_outside(self, args: Any, kwargs: Any) -> bool:
        """See `Listener`. If results depend on something on that tape, `leaves_unseen` finds it.

        Tensors that the region was given or has made do not count as outside. Only
        `torch.autograd.grad` is allowed: in a replay `backward()` would add to ``.grad`` again.
        """
        if self.due is not None:
            return super().pulls_back_outside(args, kwargs)
        outputs = args[0] if args else kwargs.get("outputs")
        return all(map(self._is_outside, tree.leaves(outputs)))

    def _is_outside(self, x: Any) -> bool:
        """Whether an output, or its node, was made outside, and is not an argument."""
        if hasattr(x, "_sequence_nr"):
            return bool(x._sequence_nr() < self.first_node)
        if not isinstance(x, Tensor):
            return True  # the output number of a gradient edge
        return self.number_within(x) is None and not self._is_inside(levels.alive(x))

    def hang(self, func: Any, args: Any, kwargs: Any) -> Any:
        t = args[0]
        number = self.number_of(t) or self.meet(t, None, None)[0]
        if number >= 0 or -1 - number in self.made:
            handle = _torch.hang_on(t, func, *args[1:], **kwargs)
            if isinstance(handle, RemovableHandle):
                self.hooks.append(handle)
            return handle
        if -1 - number >= self.n_args:
            raise departures.refused(
                f"{self.region.title} registers a hook on a captured tensor of shape "
                f"{tuple(t.shape)}, or calls retain_grad() on it. A replay could not repeat that. "
                "Do it outside of the region, or pass the tensor to the region as an argument."
            )
        # `t` stands in for an argument. The hook must be on the caller's tensor, so that it sees
        # the whole gradient.
        n = len(self.inputs.frames)
        given = self.inputs.values[n][self.inputs.position(-1 - number, n)]
        if self.outer is not None:
            return self.outer.hang(func, (given, *args[1:]), kwargs)
        return _torch.hang_on(given, func, *args[1:], **kwargs)

    def _is_given(self, t: Any) -> bool:
        """Whether ``t`` is an input itself, or a node that is older than the region.

        Wrappers of inputs do not count, nor do inputs that were made inside, of data.
        """
        if hasattr(t, "_sequence_nr"):  # the node of a gradient edge
            return bool(t._sequence_nr() < self.first_node)
        number = self.number_of(t)
        given = number is not None and number < 0 and -1 - number not in self.made
        return given and t is self.standins[-1 - number]  # type: ignore[operator]

    def keep(self, make: Callable[[], Tensor]) -> Tensor:
        """Make a tensor of data, here or in a region inside, and save it as an input (rule 3)."""
        return self.keep_made(make() if self.outer is None else self.outer.keep(make))

    def keep_made(self, t: Tensor) -> Tensor:
        """Save a tensor of data, which has been made, as an input (see `keep`)."""
        while _torch.level_of(t) > self.depth:
            t = _torch.inner_of(t)
        self.record.made.pop(_torch.storage_of(t), None)
        call = Call(DATA, [])
        self.log(call)
        number = call.kept = self.admit(t)
        self.made.add(number)
        self.held.append(t)
        return self.standins[number]


def _wanted(func: Any, args: Any, kwargs: Any) -> bool | None:
    """The value that a call sets ``requires_grad`` to; ``None`` if it sets something else."""
    if func not in SWITCHES:
        return _CHANGES[func]
    return bool(args[1] if len(args) > 1 else kwargs.get("requires_grad", True))


def _modes_entered() -> int:
    """The number of dispatch modes that are not ledgers."""
    depth = _torch.dispatch_depth()
    return depth and depth - len(all_ledgers())


# Part of torch's error for a write to a leaf. A stand-in is a leaf, even if the tensor that it
# stands for is not; so the error is replaced by one that tells the user what to do.
_WRITES_A_LEAF = "is being used in an in-place operation"
_LABEL = torch.ops.profiler._record_function_enter_new
_SPECIAL = {*ENGINE, *_CHANGES, _LABEL}
_MORE = _SPECIAL | READ  # calls of these are never `Call.is_plain`


def tape_of(tensors: list[Tensor], first: int) -> Any:
    """The nodes on the tapes of tensors, at all levels.

    Nodes of leaves are among them. Nodes that are older than ``first`` are yielded, but the walk
    does not go on from them.
    """
    todo: list[Any] = []
    for t in tensors:
        todo.append(t.grad_fn)
        while _torch.level_of(t) > 0:
            t = _torch.inner_of(t)
            todo.append(t.grad_fn)
    seen = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if hasattr(node, "variable") or node._sequence_nr() >= first:
            todo += [n for n, _ in node.next_functions]
