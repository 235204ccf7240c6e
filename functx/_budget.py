"""``remat(f, budget=)``: a function as a program in blocks, run as a plan says.

NOTE [what was made for it]
A peak is beside what was there before. What goes into a function called in the middle of another
one was not: an operation made it, and its tape keeps it until the function has been pulled back. So
inputs that some tape knows the operation of are counted, in plans and in what is measured without
regions alike; leaves, and views of leaves, are not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from functx import _torch, _tree, memory
from functx._costs import Options, pull_back, undisturbed, walk
from functx._errors import RematError
from functx._flags import no_casts_kept
from functx._plan import Plan, budget_in_bytes, chosen, nested_lists, set_function_planner
from functx._program import Program
from functx._record import record
from functx._remat._function import on_budget
from functx._remat._tracker import SILENT, active_tracker, tracking
from functx._surroundings import UNDER_GRAD, Slots, Surroundings, number_of
from functx._torch_edges import is_computed, requires_grad_anywhere
from functx._unforeseen import Bytes, How, watch

_plans: OrderedDict[Any, Plan] = OrderedDict()
REMEMBERED = 256
NONE_NEEDED = "no plan"


@on_budget
def run_planned(f: Callable[..., Any], args: Any, kwargs: Any, o: Options) -> Any:
    """``f(*args, **kwargs)``, recomputing what the plan for it says."""
    program, inputs = record(f, args, kwargs, o.name)
    plan = o.budget
    watching = None
    outer = active_tracker()
    slot = None if outer is None or outer.inside is None else outer.inside.begins()
    if slot is not None and slot.plan is not None:
        plan = slot.plan  # a replay of a region around it does what its forward did
        if plan is NONE_NEEDED:
            return program.run(inputs)
    if not isinstance(plan, Plan):
        with tracking(SILENT):  # what taking apart takes is no operation of a region around it
            around = Surroundings.now()
            parts = [around.take_apart(t) for t in (*inputs, *program.outside)]
            held = held_for_it((*inputs, *program.outside), parts)
        recorded = any(t.requires_grad or around.pulls_back(slots) for t, slots in parts)
        if not (recorded and torch.is_grad_enabled()):  # forward mode keeps nothing
            if slot is not None:
                slot.plan = NONE_NEEDED
            return program.run(inputs)  # the function itself would draw, and count, once more
        taped = tuple((slots, t.requires_grad) for t, slots in parts)
        key = (program.signature(), taped, held, plan, around)
        plan = _plans.get(key)
        if plan is None:
            plan = _plans[key] = plan_of(program, inputs, o.budget, o.name, around)
            if len(_plans) > REMEMBERED:
                _plans.popitem(last=False)
        if not _torch.tracing():
            measure = _measured_later(program, parts, held, around, plan, o)
            watching = around, taped, key, o.name, measure
    if slot is not None:
        slot.plan = plan
    blocks = program.blocks()
    if len(blocks) != plan.blocks or plan.names != names_of(blocks):
        raise RematError(
            f"remat: the plan was made for another function, or for other shapes: {o.name!r} runs "
            f"{len(blocks)} blocks of operations, and the plan has {plan.blocks}."
        )
    state = walk(nested_lists(plan.tree), *blocks, dict(enumerate(inputs)), options=o)
    result = program.finish(state)
    if watching is not None:
        with tracking(SILENT):
            watch(_tree.leaves(result), *watching)
    return result


def _measured_later(
    program: Program,
    parts: Sequence[tuple[Tensor, Slots]],
    held: int,
    around: Surroundings,
    plan: Plan,
    o: Options,
) -> Bytes:
    """What the plan takes in other ways, on values of the same shapes; it holds no tensor."""
    program = program.without_tensors()
    like = [(t.shape, t.stride(), t.dtype, t.device, t.requires_grad, slots) for t, slots in parts]
    blocks, tree, budget = plan.blocks, nested_lists(plan.tree), o.budget

    def measure(how: How) -> tuple[int, int]:
        with (
            tracking(SILENT),
            _torch.without_dispatch_modes(),
            undisturbed([]),
            torch.no_grad(),
            program.flags.entered(),
            program.undrawn(),
        ):
            made = []
            for shape, stride, dtype, device, requires_grad, slots in like:
                t = torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()
                made.append((t.requires_grad_(requires_grad), slots))
            peak_of = _peaks_under(how.around(around), program, made, held, how.pull)
            most = peak_of(list(range(blocks))) if isinstance(budget, float) else 0
            return peak_of(tree), budget_in_bytes(budget, most, "remat")

    return measure


def plan_of(
    program: Program, inputs: Sequence[Tensor], budget: Any, name: str, around: Surroundings
) -> Plan:
    """The plan for a program called on such inputs, with such transforms around it."""
    with tracking(SILENT):
        parts = [around.take_apart(t) for t in (*inputs, *program.outside)]
        held = held_for_it((*inputs, *program.outside), parts)
    with (
        tracking(SILENT),
        _torch.without_dispatch_modes(),
        undisturbed([]),
        program.undrawn(),
    ):
        # Buffers may be written to, by operations that do not say so.
        outside = [_stand_in(t, not requires_grad_anywhere(t)) for t in program.outside]
        blocks = program.blocks(outside)
        values = {i: _stand_in(t, False) for i, t in enumerate(inputs)}
        measures = [_peaks_under(around, program, parts, held)]
        if not around.levels and not any(t.requires_grad for t, _ in parts):
            # All that can be differentiated may be: by plain autograd, or by `grad`.
            wanted = [t.is_floating_point() or t.is_complex() for t in inputs]
            wanted += [False] * len(program.outside)
            plain = [(t.detach().requires_grad_(w), ()) for (t, _), w in zip(parts, wanted)]
            under_grad = [(t, (w,)) for (t, _), w in zip(parts, wanted)]
            measures = [
                _peaks_under(around, program, plain, held),
                _peaks_under(UNDER_GRAD, program, under_grad, held),
            ]
        api = f"a budget for {name!r}"
        return chosen(
            blocks,
            values,
            budget,
            names_of(blocks),
            api,
            lambda tree: max(measure(tree) for measure in measures),
        )


def _peaks_under(
    around: Surroundings,
    program: Program,
    parts: Sequence[tuple[Tensor, Slots]],
    held: int,
    pull: Callable[[Any, Any], Any] = pull_back,
) -> Callable[[Any], int]:
    """What measures the peak of a tree, called on such plain tensors under some transforms.

    Args:
        around: the transforms.
        program: what is cut into regions.
        parts: of what it is called on, and what they are to the transforms.
        held: bytes of that which were made for the call. NOTE [what was made for it]
        pull: gets the gradients of the outermost results.
    """
    slots = [slot for _, slot in parts]
    own = [
        (t.detach() if t.requires_grad else t.detach().clone()).requires_grad_(t.requires_grad)
        for t, _ in parts
    ]
    takes = program.takes

    def peak_of(tree: Any) -> int:
        def body(*tensors: Tensor) -> list[Tensor]:
            blocks = program.blocks(tensors[takes:])
            state = walk(tree, *blocks, dict(enumerate(tensors[:takes])))
            return [t for t in _tree.leaves(program.finish(state)) if isinstance(t, Tensor)]

        run = around.under(body, slots)

        def there_and_back() -> Any:
            leaves = [t.detach().requires_grad_(t.requires_grad) for t in own]
            outs = list(run(*leaves))
            if around.differentiates(slots) and any(t.requires_grad for t in outs):
                outs = [number_of(outs)]
            return pull(outs, leaves)

        with torch.enable_grad(), no_casts_kept():
            return held + memory.peak(there_and_back)

    return peak_of


def held_for_it(tensors: Sequence[Tensor], parts: Sequence[tuple[Tensor, Slots]]) -> int:
    """Bytes of those tensors that were computed. ``NOTE [what was made for it]``."""
    computed = [t for whole, (t, _) in zip(tensors, parts) if is_computed(whole)]
    return sum({_torch.storage_key(t): t.untyped_storage().nbytes() for t in computed}.values())


def names_of(blocks: Sequence[Any]) -> tuple[str, ...]:
    """What the blocks of a program run."""
    return tuple(block.__qualname__ for block in blocks)


def _stand_in(t: Tensor, copied: bool) -> Tensor:
    """A plain tensor of one example's shape; call it below all transforms."""
    if _torch.is_wrapped(t):
        value = torch.zeros(t.shape, dtype=t.dtype, device=t.device)
    else:
        value = t.detach().clone() if copied else t.detach()
    return value.requires_grad_(requires_grad_anywhere(t))


@set_function_planner
def plan_function(f: Callable[..., Any], args: Any, kwargs: Any, budget: Any) -> Plan:
    """The plan for a call."""
    name = getattr(f, "__qualname__", type(f).__name__)
    program, inputs = record(f, args, kwargs, name)
    return plan_of(program, inputs, budget, name, Surroundings.now())
