"""The autograd node of a region: keeps the inputs, and pulls back by running the region again."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from operator import or_
from typing import Any

import torch
from torch import Tensor

from functx import _torch, _torch_compiler, _torch_nodes
from functx._errors import RematError, ReplayError
from functx._remat._apart import edges_elsewhere, hides_history, hooked, nodes_apart, watch_results
from functx._remat._come_by import come_by
from functx._remat._constant import without
from functx._remat._dual_level import Duals, dual_frame, inside_a_transform
from functx._remat._holders import base_of
from functx._remat._hung_inside import watch_inside
from functx._remat._in_turn import each_alone, hung
from functx._remat._letting_go import can_go, hand_over, take
from functx._remat._observers import notify, observing
from functx._remat._one_by_one import Rest, let_go, of_the_body, rest_of, still_saved
from functx._remat._packed import Refusing
from functx._remat._past_torch import foreign_bits
from functx._remat._prune import placeholder
from functx._remat._pulled_back import gradients_of, gradients_with_tangents
from functx._remat._read_results import looked_at, packed_in, read_by, still_there
from functx._remat._region import Flat, Region
from functx._remat._replay import NOTHING
from functx._remat._watch import tell_of_a_constant
from functx._torch import dispatch_mode_depth
from functx._torch_globals import hooks_on_saved
from functx._torch_memory import Places, memory_of
from functx._torch_nodes import behind_a_node


class _Payload:
    """What a node needs beside tensors."""

    apart: Sequence[Tensor] = ()  # kept values that torch refuses to save
    bits: Sequence[int | None] = ()  # of memory that is not torch's own, `_constant`
    duals: Duals | None = None
    elsewhere = False  # whether its last edge leads there. NOTE [all of a tape] in `_apart`
    frames: Sequence[Any] = ()  # of inner levels, outermost first: a result here is a result there
    leaves: Sequence[int] = ()  # for each edge, where there are several results. `_in_turn`
    in_turn: Any = None  # weakly; NOTE [order of hooks] in `_in_turn`
    hooked = 0  # whether an input that a result depends on has a hook, as far as can be known
    passing: Sequence[int] = ()
    plainly, watched = True, False  # whether all levels do only that; whether the node has hooks
    levels = 1  # that differentiate; none if an input here may be several of the body
    memory: Places | None = None  # that is kept
    read: Mapping[Any, bool] = NOTHING  # NOTE [read results]
    rest: Rest | None = None  # NOTE [one by one]
    versions: Sequence[int] = ()  # of the memory that is kept, where torch does not compare them

    def __init__(
        self,
        frame: Any,
        tensors: Sequence[Tensor],
        cut: Sequence[bool],
        outs: Sequence[Tensor],
        places: Sequence[int],
    ) -> None:
        region: Region = frame.region
        self.level: int = frame.level
        self.region = region
        self.fn: Flat = frame.fn
        self.needed: list[bool] = frame.needed()
        self.absent: list[Any] = []
        self.n_kept = len(region.kept)
        self.outs: Sequence[Tensor] | None = outs
        self.tensors: Sequence[Tensor] = tensors
        self.cut, self.places = cut, places
        frames, dual = region.frames, None
        if len(frames) > 1:
            self.frames = frame.levels_inside()
            dual = dual_frame(frames) if self.level == 0 else None
            several = any(f.dual() for f in frames)
            self.levels = 0 if several else sum(f.differentiates() for f in frames)
            self.plainly = all(f.transparent() for f in frames)
        if dual is not None:
            self.duals = Duals(region, dual)
        # Where each input here is one input there.
        if len(places) > 1 and not (hides_history(region) or any(f.dual() for f in frames)):
            self.leaves = frame.leaves
        if region.passing and not region.left and not any(f.dual() for f in frames):
            self.passing = [i for i, p in enumerate(region.passing) if p]
        if len(places) > 1 and self.level == 0:
            self.rest = rest_of([of_the_body(self.frames, [p]) for p in places], region.reached)
        for t, c in zip(tensors, cut):
            if not c and t.requires_grad and (told := hooked(t, region.outer)):
                self.hooked = max(self.hooked, told)

    def lets_go(self) -> bool:
        """Whether the memory of cotangents goes when it has been read. ``NOTE [let go]``."""
        ledger = self.region.ledger
        return ledger is not None and not ledger.python_on_tape and self.duals is None

    def keeps_beside(self) -> list[Tensor] | None:
        """What a pullback reads beside what the node has saved; ``None`` if that is not known."""
        region = self.region
        if self.duals is not None or self.apart or self.n_kept:
            return None
        return [t for c in region.constants for t in c.held()]

    def want(
        self, wanted: Sequence[int], kept: Sequence[Tensor], passing: Sequence[int], asked: Any
    ) -> list[int]:
        """Results of the function for results of the node; the region is told."""
        places = [self.places[i] for i in wanted]
        self.region.want((*of_the_body(self.frames, places),), kept, passing, asked)
        return places


@_torch_compiler.uncompiled
def _given(of: weakref.ref[_Payload], cotangents: tuple[Tensor | None, ...]) -> Any:
    """What a node is given in place of cotangents. ``NOTE [let go]``.

    A hook on a node is hidden from the garbage collector, which has to see all that leads to the
    function of the region: an object that it closes over may hold a result. So this knows the node
    weakly.
    """
    watched = (payload := of()) is None or payload.watched or _torch.tracing()
    return None if watched else hand_over(payload, cotangents)


class RegionNode(_torch.SingleLevelFunction):
    """One node at one level; the results exist already."""

    @staticmethod
    def forward(ctx: Any, payload: _Payload, *edges: Tensor) -> tuple[Tensor, ...]:
        """Put the results behind the node."""
        outs, tensors = payload.outs, payload.tensors
        assert outs is not None
        payload.outs, payload.tensors = None, ()
        ctx.payload, region = payload, payload.region
        ctx.set_materialize_grads(False)
        kept = []
        needed = payload.needed
        for i, t in enumerate(tensors):
            if needed[i] and t.is_inference():
                needed[i] = False  # torch refuses to save it; it can't be written to
                payload.absent.append(functools.partial(_same, t))
            elif needed[i]:
                kept.append(t)
            else:
                # Its tape at this level is no matter: here it gets no gradient that is not zero.
                value = t if payload.level == 0 else _torch.unwrap_for_grad(t, payload.level)
                payload.absent.append(placeholder(value))
        bits = [foreign_bits(base_of(t)) for t in kept]
        if any(b is not None for b in bits):
            payload.bits = bits
        if payload.level:
            bases = [*map(base_of, kept)]
            payload.versions = [*map(_torch.version, bases)]
            payload.memory = Places(bases)
        elif hooks_on_saved(True) is None:
            payload.memory = Places(kept)
        values = region.kept
        if values and any(t.is_inference() for t in values):
            payload.apart, values = values, []
        if payload.duals is None:
            ctx.save_for_backward(*kept, *values)
        else:
            ctx.save_for_backward(*kept, *values, *payload.duals.tensors)
            payload.duals.tensors = []
        if payload.lets_go() and any(map(can_go, outs)):
            _torch_nodes.register_prehook(ctx, functools.partial(_given, weakref.ref(payload)))
        return tuple(outs)

    @staticmethod
    @_torch_compiler.uncompiled
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """The pullback, as a region of its own, at whatever level the engine runs."""
        payload = ctx.payload
        region: Region = payload.region
        cotangents, needs = take(payload, cotangents), ctx.needs_input_grad[1:]
        wanted = come_by(ctx, cotangents)
        if not wanted or not any(needs):
            return (None, *(None for _ in needs))
        try:
            saved = still_saved(ctx, payload, wanted)
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise _modified(region, str(error)) from error
        # No variable of this frame may hold one of them. ``NOTE [let go]``.
        if (memory := payload.memory) is not None:
            now = memory_of(map(base_of, saved) if payload.level else saved)
            if now != memory.keys:
                _refuse_if_moved(region, memory.keys, saved)
        if payload.versions:
            written = [
                t.shape for t, v in zip(saved, payload.versions) if _torch.version(base_of(t)) != v
            ]
            if written:
                raise _modified(region, f"one of shape {tuple(written[0])}, under a transform")
        if payload.bits:
            foreign = [(t, b) for t, b in zip(saved, payload.bits) if b is not None]
            changed = [t for t, b in foreign if b != foreign_bits(base_of(t))]
            if changed:
                raise _modified(region, f"one of shape {tuple(changed[0].shape)}, past torch")
            del foreign, changed
        duals = payload.duals
        if duals is not None:
            n = len(saved) - len(duals.inputs())
            saved, tensors = saved[:n], saved[n:]
            if duals.alive(tensors):
                n = len(payload.needed)
                gs = gradients_with_tangents(payload, saved, tensors, needs[:n], cotangents)
                return (None, *gs, *[None] * (len(needs) - n))
        # NOTE [gradients asked for]
        # Those that this backward pass does not ask for are not computed. Their inputs require grad
        # in the replay as ever: which operations run, which a record is compared with, depends on
        # that.
        asked = [n and _torch.will_be_reached(e) for n, (e, _) in zip(needs, ctx.next_functions)]
        those = [c for c in cotangents if c is not None]
        del cotangents
        if payload.passing:
            ctx.maybe_clear_saved_tensors()
        if payload.read or payload.elsewhere:
            gs = _and_read(ctx, payload, saved, needs, asked, wanted, those)
        else:
            cut = [*map(or_, needs, payload.cut)]
            gs = gradients_of(payload, saved, asked, wanted, those, cut)
        let_go(payload)
        return (None, *gs)


def _and_read(
    ctx: Any,
    payload: _Payload,
    saved: list[Tensor],
    needs: Sequence[bool],
    asked: Sequence[bool],
    wanted: Sequence[int],
    cotangents: list[Tensor],
) -> list[Tensor | None]:
    """``NOTE [read results]``: what flows to those comes last."""
    n = len(payload.needed)
    everywhere = payload.elsewhere and _torch.will_be_reached(ctx.next_functions[-1][0])
    cut_at = looked_at(payload, ctx.next_functions[n:])
    if cut_at is not None:
        asked = needs
    cut = [*map(or_, needs[:n], payload.cut)]
    gradients = gradients_of(
        payload, saved, asked[:n], wanted, cotangents, cut, cut_at, everywhere=everywhere
    )
    return [*gradients, *[None] * (len(needs) - len(gradients))]


def _refuse_if_moved(region: Region, before: Sequence[int], saved: Sequence[Tensor]) -> None:
    """Raise if what was kept is in other memory now, which no version tells: ``p.data = other``."""
    moved = [t.shape for t, a, b in zip(saved, before, memory_of(map(base_of, saved))) if a != b]
    if moved:
        raise _modified(region, f"the .data of one of shape {tuple(moved[0])} was assigned")


def _modified(region: Region, what: str) -> ReplayError:
    return ReplayError(
        f"remat: an input of the region {region.options.name!r} was modified in place between its "
        f"forward and its replay ({what}). Modify it after the backward, or give the region a "
        "clone."
    )


def _watched(register: Any) -> Any:
    """Hooks of a user's on a node are to see its real cotangents; and to be called if it has any.

    Without remat the engine would not come by, see `tell_of_hooks`.
    """

    @functools.wraps(register)
    def registering(node: Any, hook: Any) -> Any:
        @functools.wraps(hook)
        def called(*gradients: Any) -> Any:
            return None if all(g is None for g in gradients[-1]) else hook(*gradients)

        node.payload.watched = True
        return register(node, called)

    return registering


def _can_be_compiled(node: Any) -> None:
    """Compiled autograd adds up what comes by all edges, of which some get nothing."""
    each_alone(node)
    if len(node.next_functions) > len(node.payload.needed):
        raise RematError(
            f"remat: compiled autograd does not know that the {node.payload.region.options.name} "
            "hands nothing to the result that it reads. Turn it off for a second derivative: call "
            "backward outside of torch._dynamo.compiled_autograd._enable, or with "
            "torch._dynamo.config.compiled_autograd = False; or let go of the region's result."
        )


_torch_nodes.wrap_hook_registration(RegionNode, _watched)
_torch_nodes.tell_of_hooks(RegionNode, hung)
_torch_nodes.let_compiled_autograd_see(RegionNode, _can_be_compiled)


def _same(t: Tensor) -> Tensor:
    return t


def attach(
    frame: Any,
    tensors: Sequence[Tensor],
    outs: Sequence[Tensor | None],
    requires: Sequence[bool],
) -> list[Tensor | None]:
    """Put those results that require grad behind a node that keeps what its pullback reads.

    NOTE [edges]
    The node has an edge to an input only if a result depends on it. Otherwise the engine would come
    by, with nothing, where without remat it never does, and hooks would be handed ``None``. See
    also ``NOTE [nodes apart]`` in `_apart`.

    Args:
        frame: the level of the node: its function, of ``tensors``, is what is replayed.
        tensors: explicit inputs, then captures.
        outs: the results, not on the tape yet.
        requires: which of them require grad.
    """
    if not any(requires):
        return list(outs)
    region: Region = frame.region
    if region.before:  # what they have become may be on the throw-away tape
        tensors = [*map(region.as_it_was, tensors)]
    if region.outer is not None:
        for constant in without(region.constants, region.unread):
            tell_of_a_constant(constant.value)
    reached = frame.reached()
    asks = torch.is_grad_enabled() and not (dispatch_mode_depth() or _torch.tracing())
    elsewhere = getattr(region.reached, "elsewhere", ())
    taped: dict[int, Tensor] = {}
    read = read_by(frame) if region.options.replay else NOTHING
    allowed = _torch.get_single_level_function_allowed()
    _torch.set_single_level_function_allowed(True)
    try:
        for places, beyond in nodes_apart(frame, tensors, [i for i, r in enumerate(requires) if r]):
            cut, edges = [False] * len(tensors), tensors
            if beyond or not all(reached):
                cut = [
                    t.requires_grad and (not r or i in beyond)
                    for i, (t, r) in enumerate(zip(tensors, reached))
                ]
                edges = [frame.cut(t) if c else t for t, c in zip(tensors, cut)]
            if asks:
                edges = [*map(behind_a_node, edges)]
            results = [o for p in places if (o := outs[p]) is not None]
            payload = _Payload(frame, tensors, cut, results, places)
            if elsewhere and (nobodys := edges_elsewhere(frame, places)):
                payload.elsewhere = True
                edges = [*edges, *nobodys]
            if read:
                payload.read = read
                taped.update(zip(places, _and_reads(payload, edges), strict=True))
                continue
            taped.update(zip(places, _apply(payload, edges), strict=True))
    except NotImplementedError as error:  # of the engine's own Function
        raise inside_a_transform(region.options.name) from error
    finally:
        _torch.set_single_level_function_allowed(allowed)
    if region.outer is None and observing():
        kept = [t for t, need in zip(tensors, frame.needed()) if need]
        notify(kept, region.options.name, frame.level)
    given: list[Tensor | None] = [taped.get(i, o) for i, o in enumerate(outs)]
    known = dict(zip(taped, map(weakref.ref, taped.values())))
    region.taped = {**region.taped, frame.level: known}
    if len(given) > 1 and not _torch.tracing():
        watch_results(frame, given)
    if getattr(region.reached, "inside", None) and not _torch.tracing():
        watch_inside(frame, given)
    return given


def _and_reads(payload: _Payload, edges: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """With edges to the results of another region that the pullback reads."""
    packed = packed_in(payload.read, payload.level)
    held = [t for one in packed if (t := one.primal()) is not None]
    n = len(payload.needed)
    those = [*still_there(payload.read, payload.level), *held]
    results = _apply(payload, [*edges[:n], *those, *edges[n:]])
    if packed:
        refusing = Refusing(packed, payload.region.options.name)
        _torch_nodes.hang_before(results[0].grad_fn, refusing)
    return results


def _apply(payload: _Payload, edges: Sequence[Tensor]) -> tuple[Tensor, ...]:
    # Past the `apply` that regions observe: this node is the engine's own.
    apply = super(_torch.SingleLevelFunction, RegionNode).apply  # type: ignore[misc]
    if torch.is_grad_enabled():
        return tuple(apply(payload, *edges))
    with torch.enable_grad():  # the body has turned it on
        return tuple(apply(payload, *edges))
