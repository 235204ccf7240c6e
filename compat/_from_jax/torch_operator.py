"""A JAX program as a torch operator, with a rule for each transform.

``torch.ops.functx.jax_call(tensors, handle)`` is an ordinary operator of the dispatcher, so torch's
modes (fake tensors, graph tracing, counting) see it like any other. torch never differentiates
through it: each rule calls the same operator with another program, which JAX derived.

=================  ============================================================================
forward mode       unpack the duals, call ``program.jvp`` once, and pack the results as duals
reverse mode       call ``program.forward``, and attach a node that saves inputs and residuals. Its
                   backward calls ``program.pullback``, or ``program.vjp`` if the backward itself is
                   recorded. NOTE [residuals] in ``programs``
vmap               call ``program.vmapped``
no data            find shapes by ``jax.eval_shape``
below all          pass the memory to JAX, and the memory of JAX's results to torch
inside `to_jax`    call the program directly
=================  ============================================================================

Forward and reverse mode share the kernel of the autograd key. Every level of ``torch.func``, and
then plain autograd, calls it with tensors of that level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch
from torch import Tensor
from torch.autograd import forward_ad

from functx import _torch
from functx._core import LoweringError, has_derivatives, is_only_transposed, uncompiled
from functx._torch.lowering import (
    SingleLevelFunction,
    apply_function,
    below_autograd,
    below_vmap,
    old_batch_in_front,
    old_vmap_level,
    redispatch,
    with_old_batch_in_front,
)
from functx.compat._bridge import (
    borrow,
    current_settings,
    give,
    restored,
    to_jax_dtype,
    torch_dtype_of,
)
from functx.compat._from_jax.programs import PROGRAMS, Program
from functx.compat._to_jax import rule

_library = torch.library.Library("functx", "FRAGMENT")
_library.define(
    "jax_call(Tensor[] tensors, str program) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,)
)
_operator = torch.ops.functx.jax_call.default

# Keeps programs alive that are in a graph of torch, since the graph contains only the handle.
_traced: dict[str, Program] = {}


def call(program: Program, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Run a program on tensors of any transform level."""
    return list(_operator(list(tensors), program.handle))


def program_of(handle: str) -> Program:
    """The program with a handle. Raises a ``LoweringError`` if it is not in this process."""
    program = PROGRAMS.get(handle)
    if program is None:
        raise LoweringError(
            f"the JAX function {handle!r} of this graph is not in this process. A graph with a"
            " function made by functx.compat.from_jax can't be saved and loaded in another process"
        )
    return program


@uncompiled
def _run(tensors: list[Tensor], handle: str) -> list[Tensor]:
    """The kernel below all transforms: run the program in JAX.

    JAX runs asynchronously, and torch may write to the tensors after this call, so wait for JAX.
    """
    program = program_of(handle)
    with restored(program.settings):
        arrays = [borrow(t, program.name) for t in tensors]
        outs = program(arrays)
        jax.block_until_ready(outs)
        device = tensors[0].device if tensors else None
        return [give(out, device) for out in outs]


@uncompiled
def _shapes(tensors: list[Tensor], handle: str) -> list[Tensor]:
    """The kernel for fake and meta tensors: JAX computes shapes and dtypes."""
    program = _traced[handle] = program_of(handle)
    with restored(program.settings):
        avals = [
            jax.ShapeDtypeStruct(tuple(map(int, t.shape)), to_jax_dtype(t.dtype)) for t in tensors
        ]
        outs = program.shapes(avals)
    device = tensors[0].device if tensors else torch.device("cpu")
    return [torch.empty(o.shape, dtype=torch_dtype_of(o.dtype), device=device) for o in outs]


@uncompiled
def _differentiate(keyset: Any, tensors: list[Tensor], handle: str) -> list[Tensor]:
    """The kernel for one level of autograd, in forward and reverse mode."""
    program = program_of(handle)
    needs = tuple(t.requires_grad for t in tensors)
    recorded = torch.is_grad_enabled() and any(needs)
    duals = _duals(tensors)
    if duals and not recorded:
        primals, tangents = zip(*duals)
        results, moved = _jvp(program, primals, tangents)
        return [
            out if tangent is None else forward_ad.make_dual(out, tangent)
            for out, tangent in zip(results, moved, strict=True)
        ]
    if not recorded:
        return _below(keyset, tensors, program)
    return _record(keyset, tensors, program, needs, [d.primal for d in duals])


def _duals(tensors: Sequence[Tensor]) -> list[Any]:
    """Primals and tangents of tensors; an empty list if no tensor is a dual at this level."""
    if _torch.dual_level() < 0:
        return []
    duals = [forward_ad.unpack_dual(t) for t in tensors]
    return duals if any(d.tangent is not None for d in duals) else []


def _below(keyset: Any, tensors: Sequence[Tensor], program: Program) -> list[Tensor]:
    with below_autograd():
        return list(redispatch(_operator, keyset, list(tensors), program.handle))


def _jvp(
    program: Program, primals: Sequence[Tensor], tangents: Sequence[Tensor | None]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The results, and for each its tangent or ``None``."""
    jvp = program.jvp(tuple(t is not None for t in tangents))
    outs = call(jvp, [*primals, *(t for t in tangents if t is not None)])
    results, moved = outs[: len(jvp.info)], iter(outs[len(jvp.info) :])
    return results, [next(moved) if has else None for has in jvp.info]


def _record(
    keyset: Any,
    tensors: Sequence[Tensor],
    program: Program,
    needs: tuple[bool, ...],
    primals: Sequence[Tensor],
) -> list[Tensor]:
    residuals, rest = None, []
    if not program.irreversible:
        forward = program.forward(needs)
        try:
            outs = _below(keyset, tensors, forward)
        except (TypeError, ValueError, NotImplementedError):
            # JAX can't differentiate it in reverse mode. That is an error only in a backward pass.
            program.irreversible = True
        else:
            residuals = forward.info
            outs, rest = outs[: len(residuals.results)], outs[len(residuals.results) :]
    if residuals is None:
        outs = _below(keyset, tensors, program)
    if not any(map(has_derivatives, outs)):
        return outs
    node = _Node(program, needs, residuals, primals, is_only_transposed())
    return list(apply_function(JaxCall, node, outs, rest, *tensors))


@dataclass
class _Node:
    """The data of a node in addition to tensors."""

    program: Program  # the program that ran
    needs: tuple[bool, ...]  # which of its inputs are differentiated
    residuals: Any  # the `ForwardResiduals`, if there is a forward half
    primals: Sequence[Tensor]  # the primals of the inputs, if these are duals at the node's level
    transposes: bool = False  # whether `functx.linearize` recorded it, to transpose its backward


class JaxCall(SingleLevelFunction):
    """A node at one level; the results exist already."""

    @staticmethod
    @uncompiled
    def forward(
        ctx: Any, node: _Node, outs: list[Tensor], rest: list[Tensor], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Make the results outputs of the node."""
        ctx.node = node
        ctx.set_materialize_grads(False)
        results = outs if node.residuals is not None else ()
        ctx.save_for_backward(*tensors, *results, *rest)
        ctx.mark_non_differentiable(*(o for o in outs if not has_derivatives(o)))
        return tuple(outs)

    @staticmethod
    @uncompiled
    def jvp(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        """Tangents of the results, if inputs are duals at the level that records the node."""
        node: _Node = ctx.node
        primals, node.primals = node.primals, ()
        return tuple(_jvp(node.program, primals, given[3:])[1])

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """The pullback, as a call at the level at which the engine runs. NOTE [residuals]."""
        node: _Node = ctx.node
        needs = ctx.needs_input_grad[3:]
        wanted = tuple(i for i, c in enumerate(cotangents) if c is not None)
        if not wanted or not any(needs):
            return (None,) * (3 + len(needs))
        wrapped = ctx.saved_tensors
        saved = [_torch.alive(t) for t in wrapped]
        grads = [_torch.alive(c) for c in cotangents if c is not None]
        inputs = saved[: len(needs)]
        level_is_alive = inputs[0] is wrapped[0]
        again = node.residuals is None or (level_is_alive and _is_recorded([*inputs, *grads]))
        try:
            if again:
                gradients = call(node.program.vjp(needs, wanted), [*inputs, *grads])
            else:
                starts = {"input": 0, "result": len(needs), "rest": len(needs) + len(cotangents)}
                arrays = [saved[starts[kind] + i] for kind, i in node.residuals.sources]
                still = tuple(need for need, had in zip(needs, node.needs, strict=True) if had)
                pullback = node.program.pullback(node.residuals, still, wanted)
                gradients = call(pullback, [*arrays, *grads])
        except (TypeError, ValueError, NotImplementedError):
            if not node.transposes:  # JAX can't differentiate it in reverse mode
                raise
            gradients = apply_function(JaxTranspose, node.program, needs, wanted, inputs, *grads)
        results = iter(gradients)
        return (None, None, None, *(next(results) if need else None for need in needs))


class JaxTranspose(SingleLevelFunction):
    """The gradient, for cotangents of zero, of a program without reverse mode.

    Its backward is the transpose of the gradient, that is the program's forward mode.
    """

    @staticmethod
    @uncompiled
    def forward(
        ctx: Any,
        program: Program,
        needs: tuple[bool, ...],
        wanted: tuple[int, ...],
        inputs: Sequence[Tensor],
        *cotangents: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return zeros, since the cotangents are zeros."""
        ctx.set_materialize_grads(False)
        ctx.arguments = program, needs, wanted, inputs
        return tuple(torch.zeros_like(x) for x, need in zip(inputs, needs) if need)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *moved: Tensor | None) -> tuple[Tensor | None, ...]:
        """Forward mode of the program: the tangents of the ``wanted`` results."""
        program, needs, wanted, inputs = ctx.arguments
        tangents = iter(moved)
        along = [next(tangents) if need else None for need in needs]
        _, results = _jvp(program, inputs, [t if t is None else _torch.alive(t) for t in along])
        return (None, None, None, None, *(results[i] for i in wanted))


def _is_recorded(tensors: Sequence[Tensor]) -> bool:
    """Whether this level records operations on one of ``tensors``."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return True
    return bool(_duals(tensors))


@uncompiled
def _batch(keyset: Any, tensors: list[Tensor], handle: str) -> list[Tensor]:
    """The kernel for one level of vmap."""
    interpreter: Any = _torch.current_interpreter()
    level = interpreter.level()
    values, dims = zip(*(_torch.unwrap_batch(t, level) for t in tensors))
    program = program_of(handle)
    if all(dim is None for dim in dims):
        with below_vmap():
            return call(program, values)
    batched = program.vmapped(dims, interpreter.batch_size())
    with below_vmap():
        outs = call(batched, values)
    return [
        out if dim is None else _torch.wrap_batch(out, dim, level)
        for out, dim in zip(outs, batched.info, strict=True)
    ]


@uncompiled
def _batch_old(keyset: Any, tensors: list[Tensor], handle: str) -> list[Tensor]:
    """The kernel for the old vmap, which ``torch.autograd.grad(is_grads_batched=True)`` uses."""
    return _batch_old_levels(program_of(handle), tensors, old_vmap_level())


def _batch_old_levels(program: Program, tensors: Sequence[Tensor], level: int) -> list[Tensor]:
    if level == 0:
        return call(program, tensors)
    values = [old_batch_in_front(t, level) for t in tensors]
    sizes = [t.shape[0] for t in values]
    size = next((n for n in sizes if n != 1), 1)
    dims = tuple(0 if n == size else None for n in sizes)
    batched = program.vmapped(dims, size)
    values = [v if dim == 0 else v[0] for v, dim in zip(values, dims, strict=True)]
    outs = _batch_old_levels(batched, values, level - 1)
    return [
        out if dim is None else with_old_batch_in_front(out, level)
        for out, dim in zip(outs, batched.info, strict=True)
    ]


@rule("functx::jax_call")
def _inline(arrays: Sequence[Any], handle: str) -> list[Any]:
    """Inside a function that is lowered to JAX, call the program directly."""
    program = program_of(handle)
    if program.settings != current_settings():
        raise LoweringError(
            f"to_jax: {program.name}, made by from_jax, runs under other JAX settings (64-bit"
            " types, precision) than the function around it. Call both under the same settings"
        )
    return list(program.inner(*arrays))


_library.impl("jax_call", _run, "CompositeExplicitAutograd")
_library.impl("jax_call", _differentiate, "Autograd", with_keyset=True)
_library.impl("jax_call", _batch, "FuncTorchBatched", with_keyset=True)
_library.impl("jax_call", _batch_old, "Batched", with_keyset=True)
torch.library.register_fake("functx::jax_call", _shapes, lib=_library)
