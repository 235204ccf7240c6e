"""Recompute in a graph of ``torch.fx`` that holds a forward and its backward.

`remat` takes graphs from anywhere: ``make_fx`` of a step, AOTAutograd, the joint export of
``torch.export``, a graph trainer. If the backward reads a value of the forward, and the region of
that value does not keep it, the new graph computes the value again right before its first use.
Nodes that have lost their last reader are removed.

NOTE [runs]
A graph is a sequence of runs: the forward, a backward pass, perhaps the next forward. A run begins
at a node that torch has marked as backward, at a node that makes ones in the shape of a
differentiated result, or at a node that reads an input named ``tangents_...``. A run may recompute
the values that it reads from earlier runs.

NOTE [gradients]
A later run may read results of an earlier backward pass: accumulated gradients, or parameters that
were updated with them. To recompute these would repeat the whole pass, so they are kept. Two rules
find them among the values that depend on the cotangent of a run:
(1) No node of the run itself reads the value.
(2) The value is alive at the place where the run has the least memory alive. That place lies
between a pass and the next forward.
Values inside a pass may be recomputed: a second derivative reads them just as any backward reads
its forward.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from functx import _torch
from functx._compile.backends import noticed
from functx._compile.tracing import base_of, written_by
from functx._core import checked_budget, tree
from functx._policies import Decision, Value, flops_of, is_dot
from functx._policies import policy as policies
from functx._remat import operator_of
from functx._torch import graphs

aten = torch.ops.aten
_ONES = {aten.ones_like.default, aten.full_like.default}
_SAME = {aten.detach.default, aten.alias.default}
_RECOMPUTE = {CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE}
_SAVE = {CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE}
_BLOCK = re.compile(r"(?:^|.*?\.)\d+(?=\.|$)")
Step = tuple[fx.Node, int]  # a node and the run in which it runs again; -1 for the original node
Steps = list[tuple[Step, dict[fx.Node, Step]]]  # each with the step that gives each of its operands
_COUNTS = (*range(1, 9), *range(10, 17, 2), *range(20, 65, 6))  # numbers of segments to try


def remat(gm: fx.GraphModule, *, policy: Any = None, budget: Any = None) -> fx.GraphModule:
    """Put recompute into a joint forward and backward graph.

    Args:
        gm: a graph of ATen operations, whose nodes have ``meta["val"]``, as tracers leave it.
            Several backward passes may be in it.
        policy: what regions keep in addition to their inputs, as for `functx.remat`. Random
            results are always kept. With ``None`` the tags of the nodes decide; without tags
            regions keep nothing.
        budget: the most bytes that may be live in addition to the inputs: an int, a text such as
            ``"2GiB"``, or a float as a share of the present peak. With a budget functx chooses the
            regions itself and ignores those in the graph.

    Returns:
        A graph module that gives the same results. ``gm`` is not changed. Recomputed nodes are
        named ``..._again_1``, where 1 is the run; their ``meta["custom"]["functx_phase"]`` is
        ``"replay"``.

    Raises:
        TypeError: ``gm`` is not a graph module.
        ValueError: the graph has no backward, or no regions; or the budget can't be met (the error
            gives the least possible one); or both a policy and a budget are given; or the policy
            offloads.

    Example:
        >>> import torch, functx
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> f = lambda w, x: torch.sin(torch.sin(x @ w)).sum()
        >>> joint = make_fx(torch.func.grad_and_value(f))(torch.ones(2, 2), torch.ones(3, 2))
        >>> less = functx.graph.remat(joint, policy=functx.checkpoint_policies.dots_saveable)
        >>> [node.name for node in less.graph.nodes if "again" in node.name]
        ['sin_again_1']

    Source:
        Chen et al., *Training deep nets with sublinear memory cost*, 2016.
    """
    if not isinstance(gm, fx.GraphModule):
        raise TypeError(f"functx.graph.remat: expected an fx.GraphModule, got {type(gm).__name__}.")
    if policy is not None and budget is not None:
        raise ValueError(
            "functx.graph.remat: a budget chooses what to keep; don't give a policy too."
        )
    joint = Joint(gm.graph)
    if budget is None:
        again = joint.not_kept(joint.regions(policy), _asked(policy))
    else:
        with noticed("functx.graph.remat: a budget", gm.graph):
            again = _within(joint, checked_budget(budget, "functx.graph.remat"))
    new = fx.GraphModule(gm, joint.rewritten(again))
    new.meta.update(gm.meta)
    return new


class Joint:
    """Facts about each node of a graph. The place of a node is its index in the graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        *self.nodes, self.output = graph.nodes
        self.place = {n: i for i, n in enumerate(self.nodes)}
        marked, starts = _starts(self.nodes)
        if not starts:
            raise ValueError(
                "functx.graph.remat: no node of the graph shows where a backward begins. "
                'Set node.meta["partitioner_tag"] = "is_backward" on the nodes of the backward.'
            )
        self.run = dict(zip(self.nodes, itertools.accumulate(int(n in starts) for n in self.nodes)))
        self.reads = {n: n.all_input_nodes for n in self.nodes}
        self.base = {n: base_of(n) for n in self.nodes}
        self.size = {n: _bytes(n) for n in self.nodes}
        self.stays = {n for n in self.nodes if n.op != "call_function" or n.is_impure()}
        self.memory = dict[fx.Node, fx.Node]()  # maps a node to the one that allocated its memory
        for node, base in self.base.items():
            self.memory[node] = node if base is None else self.memory[base]
        self.results = {self.memory[n] for n in self.output.all_input_nodes}
        self.gradients = self._gradients(marked)
        self.fixed = self._fixed()

    def _gradients(self, marked: set[fx.Node]) -> set[fx.Node]:
        """The memory that a backward pass leaves for later runs; see NOTE [gradients]."""
        pulled = set[fx.Node]()  # nodes that depend on a cotangent of their run
        for node in self.nodes:
            reads = [x for x in self.reads[node] if self.run[x] == self.run[node]]
            if node.op == "call_function" and (node in marked or not pulled.isdisjoint(reads)):
                pulled.add(node)
        ends, own = self._ends(self.nodes), self._ends(self.nodes, own_run=True)
        alive = [0] * (len(self.nodes) + 2)
        for memory, end in ends.items():
            alive[self.place[memory]] += self.size[memory]
            alive[end + 1] -= self.size[memory]
        alive = [*itertools.accumulate(alive)]
        least = dict[int, int]()  # by run, the place where the least memory is alive
        for i, node in enumerate(self.nodes):
            run = self.run[node]
            if alive[i] <= alive[least.setdefault(run, i)]:
                least[run] = i
        made = {self.memory[n] for n in pulled}
        return {
            m
            for m in made
            if self.place[m] <= least[self.run[m]] < ends[m] or own[m] == self.place[m] < ends[m]
        }

    def _ends(self, nodes: list[fx.Node], *, own_run: bool = False) -> dict[fx.Node, int]:
        """The last place at which each memory is read; with ``own_run``, by a node of its run.

        Taking a view does not count as a read.
        """
        ends = {self.memory[node]: self.place[self.memory[node]] for node in nodes}
        for node in nodes:
            for x in self.reads[node]:
                memory = self.memory[x]
                if memory is not self.memory[node] and not (
                    own_run and self.run[memory] != self.run[node]
                ):
                    ends[memory] = max(ends.get(memory, -1), self.place[node])
        if not own_run:
            ends |= {m: len(self.nodes) for m in self.results}
        return ends

    def _fixed(self) -> set[fx.Node]:
        """Nodes that can't run again."""
        writes = defaultdict(list)
        for node in self.nodes:
            for x in written_by(node):
                writes[self.memory[x]].append(self.place[node])
        fixed, last = set[fx.Node](), dict[fx.Node, int]()
        for node in reversed(self.nodes):
            # The last place at which this node may run again. A user in a later run stands there;
            # a user in the same run may itself be recomputed later.
            users = [u for u in node.users if u is not self.output]
            ends = [self.place[u] if self.run[u] > self.run[node] else last[u] for u in users]
            last[node] = max(ends, default=-1)
            read = {self.memory[x] for x in (node, *self.reads[node])}
            written = [at for m in read for at in writes[m]]
            if any(self.place[node] < at < last[node] for at in written) or not _is_pure(node):
                fixed.add(node)
        return fixed

    def regions(self, policy: Any) -> dict[fx.Node, Any]:
        """The region of each node that is in one.

        Tags of torch come first, then regions of functx, then modules whose path has a number.
        Without such notes, a policy makes the whole graph one region.
        """
        for find in (_by_tag, _by_region, _by_module):
            if found := find(self.nodes):
                return found
        if policy is None:
            raise ValueError(
                "functx.graph.remat: found no regions in the graph: no node has a recompute tag, "
                "belongs to a region of functx, or comes from a module with a number in its path. "
                "Give a policy or a budget."
            )
        return dict.fromkeys(self.nodes, "all")

    def not_kept(
        self, regions: dict[fx.Node, Any], keeps: Callable[[fx.Node], bool]
    ) -> set[fx.Node]:
        """The nodes of regions that are not kept, and so run again."""
        again, leaves = set[fx.Node](), set[fx.Node]()  # ``leaves``: memory read outside its region
        for node, region in regions.items():
            users = [u for u in node.users if self.run.get(u) == self.run[node]]
            if any(regions.get(u) != region for u in users):
                leaves.add(self.memory[node])
        stay = self.results | leaves | self.gradients
        for node in self.nodes:
            base = self.memory[node]  # a view runs again if its base does
            if node not in regions or node in self.fixed:
                continue
            redone = base in again if base is not node else not (node in stay or keeps(node))
            if redone:
                again.add(node)
        return again

    def steps(self, again: set[fx.Node]) -> Steps:
        """The nodes in their new order, each with the steps that give its operands."""
        made, copied = list[Step](), set[Step]()
        for node in self.nodes:
            run, new, todo = self.run[node], list[fx.Node](), [*self.reads[node]]
            while todo:
                x = todo.pop()
                if x in again and self.run[x] != run and (x, run) not in copied:
                    copied.add((x, run))
                    new.append(x)
                    todo += self.reads[x]
            made += [(x, run) for x in sorted(new, key=self.place.__getitem__)]
            made.append((node, -1))
        # Drop steps whose results are not read.
        read, live = {(n, -1) for n in self.output.all_input_nodes}, []
        for node, number in reversed(made):
            if (node, number) in read or (number < 0 and node in self.stays):
                run = number if number >= 0 else self.run[node]
                reads = {x: (x, run if (x, run) in copied else -1) for x in self.reads[node]}
                read |= {*reads.values()}
                live.append(((node, number), reads))
        return live[::-1]

    def rewritten(self, again: set[fx.Node]) -> fx.Graph:
        """A copy of the graph in which the nodes in ``again`` are recomputed."""
        graph, made = graphs.empty_like(self.graph), dict[Step, fx.Node]()
        for (node, number), reads in self.steps(again):
            copies = {x: made[step] for x, step in reads.items()}
            new = made[node, number] = graph.node_copy(node, copies.__getitem__)
            if number >= 0:
                new.meta["custom"] = {**node.meta.get("custom", {}), "functx_phase": "replay"}
                new.name = f"{node.name}_again_{number}"
                if "partitioner_tag" in new.meta:  # AOTAutograd cuts the graph by this tag
                    new.meta["partitioner_tag"] = "is_backward"
            # functx has done the recompute that this tag asks for; torch must not do it again.
            if new.meta.get("recompute") in _RECOMPUTE:
                del new.meta["recompute"]
        graph.output(fx.map_arg(self.output.args[0], lambda x: made[x, -1]))
        graph.lint()
        return graph

    def peak(self, steps: Steps) -> int:
        """The peak memory of the steps in bytes, without the inputs."""
        # ``memory`` maps a step to the one that allocated its memory, and ``ends`` maps that one to
        # the last step that reads the memory, after which it is freed.
        memory, ends = dict[Step, Step](), dict[Step, int]()
        changes, sizes = [0] * (len(steps) + 2), dict[Step, int]()
        taken = dict[tuple[Step, Any], Step]()  # the single results of nodes that return several
        for i, (step, reads) in enumerate(steps):
            node, base = step[0], self.base[step[0]]
            if base is None:
                memory[step] = step
                sizes[step] = self.size[node]
                changes[i] += self.size[node]
            elif node.target is operator.getitem and memory[reads[base]] == reads[base]:
                # One of several results. All are allocated at once, but each is freed by itself.
                first = memory[step] = taken.setdefault((reads[base], node.args[1]), step)
                if first is step:
                    sizes[step] = _bytes(node)
                    sizes[reads[base]] -= sizes[step]
            else:
                memory[step] = memory[reads[base]]
            ends |= {memory[x]: i for x in (*reads.values(), step)}
        ends |= {memory[n, -1]: len(steps) for n in self.output.all_input_nodes}
        for step, i in ends.items():
            changes[i + 1] -= sizes[step]
        return max(itertools.accumulate(changes))


def _asked(policy: Any) -> Callable[[fx.Node], bool]:
    """A function that says whether a region keeps the result of a node."""
    if policy is None:
        return _is_tagged_to_save
    asked = policies.as_policy(policy)

    def keeps(node: fx.Node) -> bool:
        names = frozenset(node.meta.get("custom", {}).get("functx_names", ()))
        decision = asked.decide(Value(node.target, *_given(node), node.meta.get("val"), names))
        if decision is Decision.OFFLOAD:
            raise ValueError("functx.graph.remat: a graph can't offload; save or recompute.")
        return bool(decision)

    return keeps


def _given(node: fx.Node) -> tuple[Any, Any]:
    """The positional and keyword arguments of a node, as fake values of the trace."""
    return fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))


def _is_tagged_to_save(node: fx.Node) -> bool:
    said = node.meta.get("recompute"), node.meta.get("custom", {}).get("functx_decision")
    return said[0] in _SAVE or said[1] == "save"


def _by_tag(nodes: list[fx.Node]) -> dict[fx.Node, Any]:
    tagged = [n for n in nodes if isinstance(n.meta.get("recompute"), CheckpointPolicy)]
    return {n: n.meta.get("ac_graph_id", 0) for n in tagged}


def _by_region(nodes: list[fx.Node]) -> dict[fx.Node, Any]:
    names = ((n.meta.get("custom", {}).get("functx_region"), n) for n in nodes)
    runs = enumerate(itertools.groupby(names, lambda named: named[0]))
    return {n: number for number, (name, run) in runs if name is not None for _, n in [*run]}


def _by_module(nodes: list[fx.Node]) -> dict[fx.Node, Any]:
    found = {}
    for node in nodes:
        modules = [*(node.meta.get("nn_module_stack") or {}).values()]
        if modules and (block := _BLOCK.match(str(modules[-1][0]))):
            found[node] = block[0]
    return found


def _within(joint: Joint, budget: int | float) -> set[fx.Node]:
    """The nodes to recompute: of the tried segmentations within the budget, the least work."""
    whole = joint.peak(joint.steps(set()))
    most = int(whole * budget) if isinstance(budget, float) else budget
    if whole <= most:
        return set()
    found, least = list[tuple[int, int, set[fx.Node]]](), whole
    # Each segmentation is tried twice: once it keeps matrix products, once it keeps nothing.
    of_segments = (lambda node: is_dot(node.target)), (lambda node: False)
    for segments, keeps in itertools.product(_segments(joint), of_segments):
        again = joint.not_kept(segments, keeps)
        steps = joint.steps(again)
        peak = joint.peak(steps)
        least = min(least, peak)
        if peak <= most:
            work = sum(_flops(node) for (node, run), _ in steps if run >= 0)
            found.append((work, len(found), again))
    if not found:
        raise ValueError(
            f"functx.graph.remat: the budget is {most:,} bytes; the least possible is {least:,}."
        )
    return min(found)[2]


def _segments(joint: Joint) -> Iterator[dict[fx.Node, int]]:
    """Segments of equal bytes, then segments cut nearby where the least memory crosses the cut."""
    last = joint.run[joint.nodes[-1]]
    nodes = [n for n in joint.nodes if joint.run[n] < last]
    sizes = [joint.size[n] if joint.memory[n] is n else 0 for n in nodes]
    made, changes = [*itertools.accumulate(sizes)], [0] * (len(nodes) + 1)
    ends = dict[fx.Node, int]()  # the last place at which the run of each memory reads it
    for i, node in enumerate(nodes):
        ends |= {joint.memory[x]: i for x in joint.reads[node] if joint.run[x] == joint.run[node]}
    for i, node in enumerate(nodes):
        changes[i] += sizes[i]
        changes[ends.get(node, i)] -= sizes[i]
    handed_on = [*itertools.accumulate(changes)]
    for count in _COUNTS:
        step, places = max(made[-1] / count, 1.0), range(len(nodes))
        yield {node: int(n / step) for node, n in zip(nodes, made)}
        near = itertools.groupby(places, [round(n / step) for n in made].__getitem__)
        cuts = {min(group, key=handed_on.__getitem__) for j, group in near if 0 < j < count}
        yield dict(zip(nodes, itertools.accumulate(int(i - 1 in cuts) for i in places)))


def _starts(nodes: list[fx.Node]) -> tuple[set[fx.Node], set[fx.Node]]:
    """The nodes that are marked as backward, and those at which a run begins; see NOTE [runs]."""
    for is_backward in (_is_marked, _is_cotangent, _reads_tangents, _is_marked_by_functx):
        marked = {n for n in nodes if is_backward(n)}
        if found := {n for n in marked if n.prev not in marked}:
            return marked, found
    return set(), set()


def _is_marked(node: fx.Node) -> bool:
    said, phase = node.meta, node.meta.get("custom", {}).get("phase")
    tagged = said.get("partitioner_tag") == "is_backward" or said.get("autograd_backward")
    return node.op != "placeholder" and bool(tagged or phase == "backward")


def _is_marked_by_functx(node: fx.Node) -> bool:
    return node.meta.get("custom", {}).get("functx_phase") in ("backward", "replay")


def _reads_tangents(node: fx.Node) -> bool:
    return any(str(x.target).startswith("tangents") for x in node.all_input_nodes)


def _is_cotangent(node: fx.Node) -> bool:
    """Whether a node makes ones in the shape of a differentiated result."""
    if node.target not in _ONES or (node.target is aten.full_like.default and node.args[1] != 1):
        return False
    of: Any = node.args[0]
    value = of.meta.get("val")
    return (isinstance(value, Tensor) and value.dim() == 0) or _is_final(of)


def _is_final(node: fx.Node) -> bool:
    """Whether only nodes that make ones read a node, perhaps through an alias."""
    others = [u for u in node.users if u.op != "output" and u.target not in _ONES]
    return all(u.target in _SAME and _is_final(u) for u in others)


def _is_pure(node: fx.Node) -> bool:
    """Whether a node gives the same result each time, and has no other effect."""
    if node.target is operator.getitem:
        return True
    if node.op != "call_function" or not isinstance(node.target, _torch.OpOverload):
        return False
    known = operator_of(node.target)
    drawn = known.draws and not known.draws_nothing(node.args)
    return not (drawn or known.writes or node.is_impure(impure_random=False))


def _bytes(node: fx.Node) -> int:
    """The bytes of the results of a node; 0 for inputs."""
    if node.op in ("placeholder", "get_attr"):
        return 0
    tensors = [t for t in tree.leaves(node.meta.get("val")) if isinstance(t, Tensor)]
    return sum(int(t.numel()) * t.element_size() for t in tensors)


def _flops(node: fx.Node) -> int:
    if node.op != "call_function" or base_of(node) is not None:
        return 0
    return flops_of(node.target, *_given(node), node.meta.get("val"))
