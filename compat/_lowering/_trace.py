"""From a torch function and the shapes of its inputs to a functional ATen graph.

Invariant: the graph's placeholders are the inputs, then every tensor that the function closed over
or made from data (``captures``); no tensor is baked in.  Nothing in the graph writes to memory.
Inputs are traced as fake tensors, without data: were a traced value ever taken for a constant, the
constant would be fake and is refused, so it can't be silently wrong.

Passes: (1) run the function under the tracer with operations decomposed to those with rules,
regions kept as nodes; (2) lift constants to placeholders; (3) while any node's schema is mutable,
functionalize the graph and trace again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.func import functionalize
from torch.fx import GraphModule, Node

from functx._errors import LoweringError
from functx.compat._lowering._observe import Observer, UserDetach
from functx.compat._lowering._table import decompositions
from functx.compat._torch import FakeTensor, FakeTensorMode, is_mutable, make_fx

_MOST_PASSES = 4
_NO_DATA = "data is not allocated yet"


@dataclass(frozen=True)
class Spec:
    """Shape, dtype and device of one tensor input."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str = "cpu"


@dataclass(frozen=True)
class Program:
    """A torch function as a functional ATen graph.

    Attributes:
        module: its graph; placeholders are the inputs, then the captures.
        inputs: the specs of the inputs.
        captures: the tensors met while tracing, in the order of their placeholders.
    """

    module: GraphModule
    inputs: tuple[Spec, ...]
    captures: tuple[torch.Tensor, ...]


def trace(f: Callable[..., Sequence[torch.Tensor]], specs: Sequence[Spec]) -> Program:
    """Trace ``f``, which takes flat tensors and returns a flat sequence of tensors.

    Args:
        f: the function; closed-over tensors become captures.
        specs: one per input.

    Returns:
        The functional program.

    Raises:
        LoweringError: for custom autograd Functions, data-dependent operations, writes to inputs or
            captures, and traced values that the tracer lost.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    observer = Observer()
    with mode:
        inputs = [torch.empty(s.shape, dtype=s.dtype, device=s.device) for s in specs]

    used = [False] * len(inputs)

    def observed(*tensors: torch.Tensor) -> list[torch.Tensor]:
        with UserDetach(), observer:
            out = list(f(*tensors))
        for i, t in enumerate(tensors):
            used[i] = id(t) in observer.seen or any(o is t for o in out)
        return out

    try:
        with mode, _keep_regions():
            module = make_fx(observed, decomposition_table=decompositions())(*inputs)
    except RuntimeError as err:
        if _NO_DATA in str(err):
            raise LoweringError(
                "an operation reads the values of a tensor while the function is traced (indices"
                " or sizes given as a tensor, for example): pass them as Python numbers"
            ) from err
        raise
    _assert_nothing_lost(module, used)
    captures = _lift_constants(module, mode)
    module = _functional(module, mode, len(specs))
    return Program(module, tuple(specs), tuple(captures))


def _assert_nothing_lost(module: GraphModule, used: Sequence[bool]) -> None:
    # Before dead code goes: until then every operation that took an input is a user of it.
    lost = [i for i, p in enumerate(placeholders(module)) if used[i] and not p.users]
    if lost:
        raise LoweringError(
            f"the function uses its inputs {lost} (in flattened order), but the graph lost them: a"
            " transform inside took them for constants, and results would be silently wrong"
        )


def _keep_regions() -> AbstractContextManager[None]:
    try:
        from functx._remat import keep_regions
    except ImportError:
        return nullcontext()
    return keep_regions()


def is_region(node: Node) -> bool:
    """Whether a node is the call of a kept region: its first argument is a graph module."""
    first = node.args[0] if node.op == "call_function" and node.args else None
    if not (isinstance(first, Node) and first.op == "get_attr"):
        return False
    return isinstance(_attribute(first), GraphModule)


def _attribute(node: Node) -> Any:
    value: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value


def body_of(node: Node) -> GraphModule:
    """The graph module that a region node calls."""
    assert isinstance(node.args[0], Node)
    body = _attribute(node.args[0])
    assert isinstance(body, GraphModule)
    return body


def modules_of(module: GraphModule) -> Iterator[GraphModule]:
    """The module and, recursively, the bodies of the regions in it."""
    yield module
    for node in module.graph.nodes:
        if is_region(node):
            yield from modules_of(body_of(node))


def placeholders(module: GraphModule) -> list[Node]:
    """The placeholder nodes in order."""
    return [n for n in module.graph.nodes if n.op == "placeholder"]


def _lift_constants(module: GraphModule, mode: FakeTensorMode) -> list[torch.Tensor]:
    """Make every tensor attribute a placeholder, inside regions first; return the tensors."""
    graph = module.graph
    for node in list(graph.nodes):
        if not is_region(node):
            continue
        for i, tensor in enumerate(_lift_constants(body_of(node), mode)):
            name = f"_lifted_{node.name}_{i}"
            setattr(module, name, tensor)
            with graph.inserting_before(node):
                constant = graph.get_attr(name)
            node.args = (*node.args, constant)
    lifted: dict[int, tuple[torch.Tensor, Node]] = {}
    last = ([None, *placeholders(module)])[-1]
    for node in list(graph.nodes):
        if node.op != "get_attr" or not isinstance(_attribute(node), torch.Tensor):
            continue
        tensor = _attribute(node)
        if isinstance(tensor, FakeTensor):
            raise LoweringError(
                "the tracer lost track of a value that depends on the inputs"
                f" ({', '.join(str(u.target) for u in node.users)} uses it); baked in as a"
                " constant it would make results silently wrong"
            )
        if id(tensor) not in lifted:
            where = graph.inserting_after(last) if last else graph.inserting_before(None)
            with where:
                last = graph.placeholder(f"capture_{len(lifted)}")
            last.meta["val"] = mode.from_tensor(tensor.detach())
            lifted[id(tensor)] = (tensor, last)
        node.replace_all_uses_with(lifted[id(tensor)][1])
        graph.erase_node(node)
    module.recompile()
    return [tensor for tensor, _ in lifted.values()]


def _is_functional(module: GraphModule) -> bool:
    return not any(is_mutable(node.target) for m in modules_of(module) for node in m.graph.nodes)


def _functional(module: GraphModule, mode: FakeTensorMode, n_inputs: int) -> GraphModule:
    """Trace a graph again, functionalized, until no node writes."""
    for _ in range(_MOST_PASSES):
        if _is_functional(module):
            break
        specs = [p.meta["val"] for p in placeholders(module)]
        with mode:
            inputs = [torch.empty(s.shape, dtype=s.dtype, device=s.device) for s in specs]
        try:
            with mode, _keep_regions(), torch.no_grad():
                run = functionalize(module, remove="mutations")
                again = make_fx(run, decomposition_table=decompositions())(*inputs)
        except RuntimeError as err:
            raise LoweringError(f"an in-place operation has no functional form: {err}") from err
        _keep_marks(module, again)
        module = again
        _writes_to_inputs(module, n_inputs)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _keep_marks(before: GraphModule, after: GraphModule) -> None:
    """Mark regions in a graph that was traced again as they were (name, policy, replay)."""
    old, new = ([n for n in m.graph.nodes if is_region(n)] for m in (before, after))
    if len(old) != len(new):
        raise LoweringError(
            f"{len(old)} remat regions became {len(new)} when the graph was traced again; please"
            " report this"
        )
    for a, b in zip(old, new):
        b.meta["functx_region"] = a.meta.get("functx_region")
        _keep_marks(body_of(a), body_of(b))


def _writes_to_inputs(module: GraphModule, n_inputs: int) -> None:
    """Drop writes to inputs with a warning; refuse writes to what the function closes over."""
    written = [
        node
        for node in module.graph.nodes
        if node.target is torch.ops.aten.copy_.default
        and isinstance(node.args[0], Node)
        and node.args[0].op == "placeholder"
    ]
    inputs = placeholders(module)[:n_inputs]
    closed_over = sum(node.args[0] not in inputs for node in written)
    if closed_over:
        raise LoweringError(
            f"the function writes to {closed_over} tensors that it closes over (buffers,"
            " parameters), and JAX has no place to keep the new values. Pass them as arguments and"
            " return the new values; for normalisation statistics call module.eval()"
        )
    if written:
        warnings.warn(
            f"the function writes to {len(written)} of its arguments: JAX arrays never change, so"
            " the caller will not see it. Return the new values if they are needed",
            stacklevel=2,
        )
    for node in reversed(written):
        node.replace_all_uses_with(node.args[1])
        module.graph.erase_node(node)
