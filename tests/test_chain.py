"""The dynamic programme against every tree there is, on chains of odd sizes."""

import random

import pytest
from plans import all_trees

from functx._chain import Block, Chain, nondominated, thinned, tree_of, work_again


def memory(tree, blocks, leaving, end, later):
    """What a tree needs: go through it once, as it runs and as it is pulled back."""
    if not tree:
        return 0
    first, *rest = tree
    if isinstance(first, list):
        start, cut = bounds(first)
        inside = memory(first, blocks, leaving, cut, later)
        return (
            start % 3 + leaving[start][cut] + max(inside, memory(rest, blocks, leaving, end, later))
        )
    block = blocks[first]
    alone = end == first + 1 < len(blocks)
    backward = block.backward - block.cotangents * alone
    own = max(block.forward, block.saved + backward + later[first + 1])
    kept = block.saved if alone else block.kept
    return max(own, kept + memory(rest, blocks, leaving, end, later))


def bounds(tree):
    start, end = tree[0], tree[-1]
    while isinstance(start, list):
        start = start[0]
    while isinstance(end, list):
        end = end[-1]
    return start, end + 1


def odd_chain(n, seed):
    draw = random.Random(seed)
    blocks = [
        Block(
            kept=draw.randint(20, 60),
            saved=draw.randint(5, 20),
            forward=draw.randint(5, 90),
            backward=draw.randint(15, 60),
            cotangents=draw.randint(1, 15),
            gradients=draw.randint(0, 8),
            work=draw.choice([1, 3, 20, 400]),
        )
        for _ in range(n)
    ]
    out = [draw.randint(2, 30) for _ in range(n + 1)]
    leaving = [
        [out[j] + 2 * (j - i > 2) if j > i else 0 for j in range(n + 1)] for i in range(n + 1)
    ]
    return blocks, leaving, [i % 3 for i in range(n)]


@pytest.mark.parametrize("seed", range(6))
def test_the_frontier_is_that_of_all_trees(seed):
    blocks, leaving, unsaved = odd_chain(7, seed)
    later = [sum(b.gradients for b in blocks[i:]) + leaving[0][-1] for i in range(7)] + [0]
    work = [b.work for b in blocks]
    best = {}
    for tree in all_trees(0, len(blocks)):
        need = memory(tree, blocks, leaving, len(blocks), later)
        best[need] = min(work_again(tree, work), best.get(need, 10**9))
    frontier, least = [], 10**9
    for need in sorted(best):
        if best[need] < least:
            least = best[need]
            frontier.append((need, least))
    ours = Chain(blocks, leaving, unsaved).frontier()
    assert [(p.memory, p.work) for p in ours] == frontier
    for point in ours:
        tree = tree_of(point.tree)
        assert memory(tree, blocks, leaving, len(blocks), later) == point.memory
        assert work_again(tree, work) == point.work


def test_thinned_frontiers_stay_close():
    """At most 5 % more work than the frontier that nothing was left out of."""
    blocks, leaving, unsaved = odd_chain(14, 7)
    close = Chain(blocks, leaving, unsaved).frontier()
    exact = Chain(blocks, leaving, unsaved, finest=10**6).frontier()
    assert len(exact) > 20
    for point in exact:
        fits = [p.work for p in close if p.memory <= point.memory]
        assert not fits or min(fits) <= 1.05 * point.work
    assert close[-1].work == exact[-1].work == 0


def test_thinning_keeps_the_ends():
    points = Chain(*odd_chain(10, 3)).frontier()
    some = thinned(points, 5)
    assert len(some) <= 6
    assert (some[0], some[-1]) == (points[0], points[-1])
    assert nondominated(points) == points
