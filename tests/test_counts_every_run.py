"""The counts that are promised, in each of a region's first runs, however they are counted.

A mode that counts around everything makes every run one that is watched; one around the backward
pass only meets nodes of runs that were not; and a body that counts meets all that is known.
"""

import pytest
import torch
import torch.multiprocessing.reductions
from cases import numbers
from known import KNOWN
from references import Operations, count

import functx
from bench.counts import programs

pytestmark = pytest.mark.usefixtures("forgotten")

RUNS = KNOWN + 2
X = numbers(8)
PROGRAMS = {name: (n, again) for name, (n, again, _) in programs(torch.sin, functx.remat).items()}


def of(name, sin=torch.sin):
    return programs(sin, functx.remat)[name][2]


def sums(f):
    return lambda x: f(x).sum()


WAYS = {
    "autograd": lambda f: torch.autograd.grad(f(x := X.clone().requires_grad_()).sum(), x),
    "backward": lambda f: f(X.clone().requires_grad_()).sum().backward(),
    "grad": lambda f: functx.grad(sums(f))(X),
    "vmap(grad)": lambda f: functx.vmap(functx.grad(sums(f)))(X[:, None]),
    "grad(vmap)": lambda f: functx.grad(sums(functx.vmap(f)))(X),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_around_everything(name, way):
    n, again = PROGRAMS[name]
    f = of(name)
    counts = []
    for _ in range(RUNS):
        counts.append(count(WAYS[way], f)["sin"] - n)
        WAYS[way](f)  # as it is known where nobody counts
    assert counts == [again] * RUNS


@pytest.mark.parametrize("name", PROGRAMS)
def test_around_the_backward_pass(name):
    f, (_, again) = of(name), PROGRAMS[name]
    counts = []
    for _ in range(RUNS):
        x = X.clone().requires_grad_()
        out = f(x).sum()
        counts.append(count(out.backward)["sin"])
        counts.append(count(functx.vjp(f, X)[1], torch.ones_like(X))["sin"])
    assert counts == [again] * 2 * RUNS


def two_results(x, w):
    return torch.sin(x), torch.exp(x @ w).sin()


def mlp(x, *weights):
    for w in weights:
        x = torch.sin(x @ w)
    return x


def block(x, w, v):
    return torch.relu(x @ w) @ v


W = [numbers(8, 8, start=i) for i in range(3)]
ROWS = numbers(4, 8)
# Operations that a gradient computes again, of bodies with inputs.
AGAIN = {
    "two results, one used": (
        lambda f: lambda *x: f(*x)[0],
        two_results,
        W[:1],
        {"mm": 0, "exp": 0},
    ),
    "an MLP": (lambda f: f, mlp, W, {"mm": 3, "sin": 2}),
    "a linear end": (lambda f: f, lambda *x: mlp(*x) + 1, W, {"mm": 3, "sin": 2, "add": 0}),
    "a block": (lambda f: f, block, W[:2], {"mm": 1, "relu": 1}),
    "a linear map": (lambda f: f, lambda x: (x * 3).sum(1), [], {"mul": 0, "sum": 0}),
}


def gradient(f, *inputs):
    inputs = [t.clone().requires_grad_() for t in inputs]
    return torch.autograd.grad(f(*inputs).sum(), inputs, allow_unused=True)


def differentiated(f, *inputs):
    return functx.grad(lambda inputs: f(*inputs).sum())(inputs)


def mapped(f, x, *others):
    dims = 0, *[None] * len(others)
    return functx.vmap(functx.grad(lambda x, *o: f(x[None], *o).sum()), dims)(x, *others)


@pytest.mark.parametrize("way", [gradient, differentiated, mapped])
@pytest.mark.parametrize("name", AGAIN)
def test_operations(name, way):
    used, body, others, again = AGAIN[name]
    if way is mapped:
        again = {op: n for op, n in again.items() if op not in ("mm", "sum")}
    region = functx.remat(body)
    for _ in range(RUNS):
        plain, ours = (count(way, used(f), ROWS, *others) for f in (body, region))
        assert {op: ours[op] - plain[op] for op in again} == again
        way(used(region), ROWS, *others)


# Bodies, and which of their inputs a node keeps.
KEPT = {
    "a linear region": (lambda a, b: a * 3 - 2 * b, []),
    "one of two": (lambda a, b: torch.sin(a) + 3 * b, [0]),
    "both": (lambda a, b: a * b, [0, 1]),
    "a view": (lambda a, b: a.mT.reshape(-1) + b.mT.reshape(-1), []),
}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("at", ["base", "grad", "vmap(grad)"])
def test_inputs_that_are_kept(name, at):
    body, expected = KEPT[name]
    region, found = functx.remat(body), []

    def run(x):
        inputs = [x * 1, x * 2]
        memory = [torch.multiprocessing.reductions.StorageWeakRef(m) for m in map(storage, inputs)]
        out = region(*inputs)
        del inputs
        found.append([i for i, m in enumerate(memory) if not m.expired()])
        return out.sum()

    for _ in range(RUNS):
        if at == "base":
            run(ROWS.clone().requires_grad_()).backward()
        elif at == "grad":
            functx.grad(run)(ROWS)
        else:
            functx.vmap(functx.grad(run))(numbers(2, 4, 8))
    assert found == [expected] * RUNS


def storage(t):
    while torch._C._functorch.is_functorch_wrapped_tensor(t):
        t = torch._C._functorch.get_unwrapped(t)
    return t.untyped_storage()


def test_a_tensor_given_twice_is_kept_once():
    region = functx.remat(lambda a, b: a.sin() * b.cos())
    for counted in [True, False] * RUNS:
        x = ROWS.clone().requires_grad_()
        if not counted:
            region(x, x).sum().backward()
            continue
        with Operations() as operations:
            y = x * 1
            out = region(y, y)
            del y
            assert operations.live == x.nbytes + out.untyped_storage().nbytes()


def test_forward_mode_computes_nothing_again():
    region = functx.remat(mlp)
    for _ in range(RUNS):
        plain, ours = (
            count(lambda f=f: functx.jvp(lambda x: f(x, *W), (ROWS,), (ROWS,)))
            for f in (mlp, region)
        )
        assert all(ours[op] == plain[op] for op in ("sin", "cos", "mm", "mul"))
        gradient(region, ROWS, *W)
