"""``remat(f, budget=)``: a function as a program in blocks, run as a plan says."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from functx import _torch
from functx._costs import Options, undisturbed, walk
from functx._errors import RematError
from functx._plan import Plan, chosen, nested_lists, set_function_planner
from functx._program import Program
from functx._record import record, requires_grad
from functx._remat._function import on_budget
from functx._remat._tracker import SILENT, tracking

_plans: OrderedDict[Any, Plan] = OrderedDict()
REMEMBERED = 256


@on_budget
def run_planned(f: Callable[..., Any], args: Any, kwargs: Any, o: Options) -> Any:
    """``f(*args, **kwargs)``, recomputing what the plan for it says."""
    program, inputs = record(f, args, kwargs, o.name)
    plan = o.budget
    if not isinstance(plan, Plan):
        taped = tuple(requires_grad(t) for t in (*inputs, *program.outside))
        key = (program.signature(), taped, plan, _examples())
        plan = _plans.get(key)
        if plan is None:
            plan = _plans[key] = plan_of(program, inputs, _per_example(o.budget), o.name)
            if len(_plans) > REMEMBERED:
                _plans.popitem(last=False)
    blocks = program.blocks()
    if len(blocks) != plan.blocks or plan.names != names_of(blocks):
        raise RematError(
            f"remat: the plan was made for another function, or for other shapes: {o.name!r} runs "
            f"{len(blocks)} blocks of operations, and the plan has {plan.blocks}."
        )
    state = walk(nested_lists(plan.tree), *blocks, dict(enumerate(inputs)), options=o)
    return program.finish(state)


def plan_of(program: Program, inputs: Sequence[Tensor], budget: Any, name: str) -> Plan:
    """The plan for a program called on such inputs."""
    with tracking(SILENT), _torch.without_dispatch_modes(), undisturbed([]):
        # Buffers may be written to, by operations that do not say so.
        outside = [_stand_in(t, not requires_grad(t)) for t in program.outside]
        blocks = program.blocks(outside)
        values = {i: _stand_in(t, False) for i, t in enumerate(inputs)}
        return chosen(blocks, values, budget, names_of(blocks), f"a budget for {name!r}")


def names_of(blocks: Sequence[Any]) -> tuple[str, ...]:
    """What the blocks of a program run."""
    return tuple(block.__qualname__ for block in blocks)


def _stand_in(t: Tensor, copied: bool) -> Tensor:
    """A plain tensor of one example's shape; call it below all transforms."""
    if _torch.is_wrapped(t):
        value = torch.zeros(t.shape, dtype=t.dtype, device=t.device)
    else:
        value = t.detach().clone() if copied else t.detach()
    return value.requires_grad_(requires_grad(t))


def _examples() -> int:
    """How many examples of all active ``vmap`` levels there are."""
    return math.prod(
        _torch.coerced(interpreter).batch_size()  # type: ignore[attr-defined]
        for interpreter in _torch.interpreters()
        if interpreter.key() == _torch.TransformType.Vmap
    )


def _per_example(budget: Any) -> Any:
    examples = _examples()
    if isinstance(budget, int) and not isinstance(budget, bool) and examples > 1:
        return max(budget // examples, 1)
    return budget


@set_function_planner
def plan_function(f: Callable[..., Any], args: Any, kwargs: Any, budget: Any) -> Plan:
    """The plan for a call."""
    name = getattr(f, "__qualname__", type(f).__name__)
    program, inputs = record(f, args, kwargs, name)
    return plan_of(program, inputs, budget, name)
