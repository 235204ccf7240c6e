"""Runs that are like runs before have no ledger, and nothing is taken over from any other run."""

import gc
import sys
import weakref

import house
import pytest
import torch
from cases import numbers
from changes import CHANGES
from references import Operations, assert_same, count
from torch import nn
from torch.nn import functional

import functx
from functx._remat import _known_runs
from functx._remat._capture import FirstRun
from functx._remat._functions import known_of
from functx._remat._ledger import Ledger

sys.path.insert(0, str(house.ROOT))

from bench.counts import programs

pytestmark = pytest.mark.usefixtures("hooks")

X = numbers(3, 4)
W = numbers(4, 4, start=0.3)
RUNS = _known_runs.ALIKE + 4  # from the third of these on, a pullback is no replay


@pytest.fixture
def ledgers(monkeypatch):
    """How many ledgers have decided."""
    settle, found = Ledger.settle, []

    def counting(ledger, *args):
        found.append(ledger)
        return settle(ledger, *args)

    monkeypatch.setattr(Ledger, "settle", counting)
    monkeypatch.setattr(_known_runs, "_sightings", {})
    return found


@pytest.fixture
def told(monkeypatch):
    """Whether each run without a ledger was as expected."""
    recognized, found = FirstRun.recognized, []

    def noting(run, ordinary):
        known = recognized(run, ordinary)
        if run.sightings is not None and run.ledger is None:
            found.append(known is not None)
        return known

    monkeypatch.setattr(FirstRun, "recognized", noting)
    # A mode of the user's may change what runs: then there is always a ledger.
    monkeypatch.setattr(Operations, "only_observes", True, raising=False)
    monkeypatch.setattr(_known_runs, "_sightings", {})
    return found


def gradients(f, x, *leaves):
    x = x.detach().requires_grad_()
    out = f(x)
    return out, *torch.autograd.grad(out.sum(), [x, *leaves], allow_unused=True)


WAYS = {
    "autograd": lambda f, x: gradients(f, x),
    "backward": lambda f, x: backward(f, x),
    "grad": lambda f, x: functx.grad(lambda x: f(x).sum())(x),
    "vmap(grad)": lambda f, x: functx.vmap(functx.grad(lambda x: f(x).sum()))(x),
    "hessian": lambda f, x: functx.hessian(lambda x: f(x).sum())(x),
    "twice": lambda f, x: functx.grad(functx.grad(lambda x: f(x).sum()))(x[0, 0]),
}


def backward(f, x):
    x = x.detach().requires_grad_()
    f(x).sum().backward()
    return x.grad


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return x + self.down(self.drop(nn.functional.gelu(self.up(self.norm(x)))))


def block():
    torch.manual_seed(0)
    return Block().double()


@pytest.mark.parametrize("way", [way for way in WAYS if way != "twice"])
def test_the_same_from_run_to_run(way, told):
    """Values, draws, counts: with a ledger, and when there is none any more."""
    module = block()
    region = functx.remat(module)

    def run(f):
        torch.manual_seed(3)
        randomness = {"vmap(grad)": "different", "hessian": "same"}.get(way)
        if randomness is None:
            return WAYS[way](f, X)
        loss = functx.grad if way == "vmap(grad)" else functx.jacrev
        return functx.vmap(loss(lambda x: f(x).sum()), randomness=randomness)(X)

    expected = run(module)
    counts = []
    for _ in range(RUNS):
        assert_same(run(region), expected)
        counts.append(count(lambda f, x: run(f), region, X))
    assert told
    assert all([*told, *(c == counts[0] for c in counts)])


@pytest.mark.parametrize("way", ["autograd", "grad", "vmap(grad)"])
def test_counts_of_known_runs(way, told):
    for n, again, f in programs(torch.sin, functx.remat).values():
        for _ in range(RUNS):
            found = count(WAYS[way], f, numbers(2, 3))
            assert (found["sin"], found["cos"]) == (n + again, n)
    assert told
    assert all(told)


def test_code_that_ran_alike_has_no_ledger(ledgers):
    for i in range(RUNS):
        scale = numbers(4, start=float(i)).requires_grad_()
        gradients(functx.remat(lambda x, scale=scale: torch.sin(torch.exp(x)) * scale), X, scale)
        assert len(ledgers) == min(i + 1, _known_runs.ALIKE)


BY_OTHER_MEANS = {"another constant", "another constant by keyword", "left behind"}
# What torch.vmap has not.
UNBATCHED = {"a shape that values decide", "looked at", "a list in place of a tuple"}


@pytest.mark.parametrize(
    ("change", "way"),
    [
        (change, way)
        for change in CHANGES
        for way in ("autograd", "backward", "grad", "vmap(grad)")
        if not (change in UNBATCHED and way == "vmap(grad)")
    ],
)
def test_a_change_meets_no_stale_plan(change, way, told):
    """After runs without a ledger, and back again; all that was not the same is computed anew."""
    body = CHANGES[change]
    flag = {0: False}  # in no key, as what is in a list would be
    region, refused = functx.remat(lambda x: body(x, flag[0])), False
    for now in [False] * RUNS + [True] * RUNS + [False]:
        flag[0] = now
        try:
            expected = WAYS[way](lambda x, now=now: body(x, now), X)
        except RuntimeError:
            refused = True
            with pytest.raises(RuntimeError):  # as without remat
                WAYS[way](region, X)
            continue
        assert_same(WAYS[way](region, X), expected)
    # Some run was not as expected; unless torch refuses it, or what differs is told by other means.
    assert False in told or refused or change in BY_OTHER_MEANS


def test_what_is_left_behind_keeps_its_gradient():
    """A run like those before, but for what somebody holds now."""
    flag, log = {0: False}, []

    def body(x):
        log.clear()
        h = torch.exp(x * 2)
        if flag[0]:
            log.append(h)
        return torch.sin(x)

    region = functx.remat(body)
    x = X.clone().requires_grad_()
    for _ in range(RUNS):
        gradients(region, X)
    flag[0] = True
    region(x)
    (g,) = torch.autograd.grad(log[0].sin().sum(), x)
    y = X.clone().requires_grad_()
    (expected,) = torch.autograd.grad((y * 2).exp().sin().sum(), y)
    assert_same(g, expected)


def test_what_is_left_behind_detached_is_computed_in_replays_too():
    """A replay runs the body, which may show it to somebody again."""
    flag, log = {0: False}, []

    def body(x):
        h = torch.exp(x * 2).detach()
        if flag[0]:
            log.append(h)
        return torch.sin(x) * x

    region = functx.remat(body)
    for _ in range(RUNS):
        gradients(region, X)
    flag[0] = True
    gradients(region, X)
    assert log
    assert all(torch.equal(h, (X * 2).exp()) for h in log)


def test_other_kernels_meet_no_stale_plan(told):
    def body(q):
        return nn.functional.scaled_dot_product_attention(q, q.sin(), q.cos())

    region, q = functx.remat(body), numbers(1, 2, 4, 4)
    for _ in range(RUNS):
        assert_same(gradients(region, q), gradients(body, q))
    told.clear()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert_same(gradients(region, q), gradients(body, q))
    assert not told  # it had a ledger


@pytest.mark.parametrize("chunk", [None, 2])
def test_another_batch_meets_no_stale_plan(chunk):
    """Of a body that is given nothing of it, and draws numbers for each."""
    x = numbers(4)
    body = lambda x: x * torch.rand(4, dtype=x.dtype) + 1  # noqa: E731

    def run(remat, n):
        torch.manual_seed(0)

        def of(x):
            batch = functx.vmap(
                lambda i: (remat(body)(x) * i).sum(), randomness="different", chunk_size=chunk
            )
            return batch(torch.arange(1.0, n + 1, dtype=x.dtype)).sum()

        return functx.grad(of)(x)

    for n in [1] * RUNS + [3] * RUNS + [5, 1]:
        assert_same(run(functx.remat, n), run(lambda f: f, n))


def test_shared_memory_meets_no_stale_plan():
    """Two inputs that are views of one tensor, where they were two tensors before."""

    def body(x, y):
        return torch.exp(x) + y * 2

    region = functx.remat(body)
    for _ in range(RUNS):
        gradients(lambda x: region(x, x.detach().clone()), X)
    memory = numbers(6, 4)
    x = memory.clone().requires_grad_()
    out = region(x[:3], x[:3].detach())
    (g,) = torch.autograd.grad(out.sum(), x)
    assert_same(g[:3], torch.exp(memory[:3]))


def test_code_that_seldom_does_the_same_twice_always_has_a_ledger(ledgers):
    flag = {0: 0}
    region = functx.remat(lambda x: x.sin() * x if flag[0] % 2 else x.exp() * x)
    for flag[0] in range(2 * _known_runs._PATIENCE):
        gradients(region, X)
    flag[0] = 0
    del ledgers[:]
    for _ in range(RUNS):
        gradients(region, X)
    assert len(ledgers) == RUNS


@pytest.mark.parametrize(("name", "most"), [("_MANY", 4), ("_OPERATIONS", 8)])
def test_little_is_remembered_and_the_oldest_is_forgotten(name, most, monkeypatch):
    """Each run has two entries: what is called, and the result."""
    monkeypatch.setattr(_known_runs, "_sightings", {})
    monkeypatch.setattr(_known_runs, name, most)
    for n in range(1, 12):
        gradients(functx.remat(torch.sin), numbers(n))
    assert len(_known_runs._sightings) == 4
    shapes = [p[0] for k in _known_runs._sightings for p in k if str(p).startswith("(torch.Size")]
    assert shapes == [(8,), (9,), (10,), (11,)]


def test_more_code_than_is_remembered_leaves_room_for_the_last(monkeypatch, told):
    monkeypatch.setattr(_known_runs, "_OPERATIONS", 8)
    for n in range(1, 12):
        gradients(functx.remat(torch.sin), numbers(n))
    for _ in range(_known_runs.ALIKE + 2):
        gradients(functx.remat(torch.sin), numbers(11))
    assert told == [True, True, True]


def test_nothing_of_a_call_is_remembered():
    module = block().eval()
    region = functx.remat(module)
    found = []
    for _ in range(RUNS):
        x = X.clone().requires_grad_()
        found.append(weakref.ref(x))
        region(x).sum().backward()
        w = X.clone().requires_grad_()
        found.append(weakref.ref(w))
        functx.remat(w.mul)(x).sum().backward()
    parameters = [weakref.ref(p) for p in module.parameters()]
    del x, w, module, region
    gc.collect()
    assert not any(ref() is not None for ref in found + parameters)


def test_no_class_is_remembered_with_what_it_holds():
    """A parametrized module has a class of its own, which holds it; so may any local class."""

    def a_model():
        module = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), Block())
        module = module.double()
        held = numbers(3)

        class Scale:
            of = held

            def __call__(self, x):
                return x * 2

        scale = Scale()
        inner = functx.remat(module[0])
        for _ in range(RUNS):
            gradients(functx.remat(lambda x: scale(module(x))), X)
            gradients(inner, X)
        return [*map(weakref.ref, [*module.parameters(), held, Scale])]

    found = a_model()
    gc.collect()
    assert not any(ref() is not None for ref in found)


COMPUTE = ("layer_norm", "group_norm", "softmax", "log_softmax", "mse_loss", "cross_entropy")
MAY_WRITE = ("relu", "silu", "embedding", "batch_norm", "instance_norm", "normalize")
RUN_OTHERS = ("triplet_margin_with_distance_loss",)
MAY_DRAW = ("dropout", "alpha_dropout", "rrelu", "gumbel_softmax", "multi_head_attention_forward")


def test_functions_of_torch_that_only_compute():
    """Those whose arguments can make them do more are looked at each time."""

    def ordinary(names):
        return [known_of(getattr(functional, name)).ordinary for name in names]

    assert all(ordinary(COMPUTE))
    assert not any(ordinary((*MAY_WRITE, *MAY_DRAW, *RUN_OTHERS)))


@pytest.mark.parametrize("of", [torch.sin, torch.cumsum], ids=["by place", "by keyword"])
def test_what_is_written_by_keyword_is_written_once(of):
    """``out`` is a buffer of the caller's; it is read before it is written, in replays too."""
    given = {} if of is torch.sin else {"dim": 0}
    buffers = []
    for remat in (lambda f: f, functx.remat):
        buffer = torch.zeros_like(X)

        def body(x, buffer=buffer):
            h = x * buffer.sum()
            of(x.detach(), **given, out=buffer)
            return torch.exp(h) * buffer

        found = [gradients(remat(body), X) for _ in range(RUNS)]
        buffers.append((buffer, found))
    assert_same(*buffers)
