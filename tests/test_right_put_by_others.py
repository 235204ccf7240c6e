"""What another thread puts into a list, while a region that changes it is replayed, stays there."""

from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch
from cases import numbers
from torch import nn

import functx
from functx._remat._module_state import ModuleState

pytestmark = pytest.mark.usefixtures("no_hooks")

GLOBAL = []
OUTSIDE = torch.ones(2)


class Net(nn.Module):
    """Logs what it computes, and calls something as it runs."""

    def __init__(self, log, logs):
        super().__init__()
        self.linear = nn.Linear(3, 3).double()
        self.log, self.logs = log, logs
        self.meanwhile = [lambda: None]

    def forward(self, x):
        h = self.linear(x)
        self.logs(self, h)
        y = h.sin()
        self.meanwhile[0]()
        return y.exp()


POOL = []


@pytest.fixture(scope="module", autouse=True)
def pool():
    """A thread that is there all the time."""
    with ThreadPoolExecutor(1) as found:
        POOL.append(found)
        yield
    POOL.clear()


def elsewhere(f):
    """``f()``, in another thread, while this one waits."""
    return lambda: POOL[0].submit(f).result()


def append(thing):
    return lambda net, h: net.log.append(thing(net, h))


def in_dict(net, h):
    net.log[f"{len(net.log)} of ours"] = h.detach()


OURS = {
    "a result": append(lambda net, h: h),
    "detached": append(lambda net, h: h.detach()),
    "a number": append(lambda net, h: h.sum().item()),
    "a tuple": append(lambda net, h: ("h", h.detach())),
    "NumPy's": append(lambda net, h: torch.from_numpy(h.detach().numpy())),
    "a tensor from outside": append(lambda net, h: OUTSIDE),
    "a parameter": append(lambda net, h: net.linear.weight),
    "a new parameter": append(lambda net, h: nn.Parameter(torch.ones(2))),
    "two": lambda net, h: net.log.extend([h.detach(), h.detach().sin()]),
}
THEIRS = {
    "with history": lambda: numbers(3).requires_grad_() * 2,
    "detached": lambda: numbers(3) * 2,
    "a number": lambda: 5.0,
    "a string": lambda: "metric",
    "a dict": lambda: {"loss": numbers(2)},
}


def trained(net, theirs, when, runs=1):
    """What the log holds after forward and backward, and what another thread has put there."""
    given = []

    def put():
        given.append(theirs())
        if isinstance(net.log, dict):
            net.log[f"{len(given)} of theirs"] = given[-1]
        elif isinstance(net.log, set):
            net.log.add(given[-1])
        else:
            net.log.append(given[-1])

    region = functx.remat(net)
    for _ in range(runs):
        x = numbers(2, 3).requires_grad_()
        net.meanwhile[0] = elsewhere(put) if "forward" in when else lambda: None
        y = region(x)
        before = [*net.log.values()] if isinstance(net.log, dict) else [*net.log]
        net.meanwhile[0] = elsewhere(put) if "backward" in when else lambda: None
        y.sum().backward()
    after = [*net.log.values()] if isinstance(net.log, dict) else [*net.log]
    return before, after, given


def trained_or_error(*of):
    try:
        return trained(*of)
    except functx.RematError as error:
        return str(error)


def is_there(x, those):
    return any(x is one for one in those)


@pytest.mark.parametrize("ours", OURS)
@pytest.mark.parametrize("theirs", THEIRS)
def test_what_comes_while_a_region_is_replayed(ours, theirs):
    """It stays, or it is an error: never is it lost, nor what the region put there doubled."""
    net = Net([], OURS[ours])
    found = trained_or_error(net, THEIRS[theirs], "backward")
    if isinstance(found, str):
        assert "another thread put something" in found
        assert ours in ("NumPy's", "a new parameter")
        return
    before, after, given = found
    assert len(given) == 1
    assert len(after) == len(before) + 1
    assert all(is_there(x, after) for x in (*before, *given))


@pytest.mark.parametrize("ours", OURS)
def test_nothing_is_put_there_twice(ours):
    """By one thread, however often: in runs that are known, too."""
    before, after, _ = trained(Net([], OURS[ours]), None, "", runs=8)
    assert len(before) == len(after) == (16 if ours == "two" else 8)
    assert all(is_there(x, after) for x in before)


@pytest.mark.parametrize("kind", [list, deque, dict, OrderedDict, set])
def test_other_containers(kind):
    if issubclass(kind, dict):
        net = Net(kind(), in_dict)
    elif kind is set:
        net = Net(set(), lambda net, h: net.log.add(h.detach()))
    else:
        net = Net(kind(), OURS["detached"])
    before, after, given = trained(net, THEIRS["with history"], "backward")
    assert len(given) == 1
    assert len(after) == len(before) + 1 == 2
    assert all(is_there(x, after) for x in (*before, *given))


def test_a_long_list():
    net = Net([0.0] * 10_000, OURS["detached"])
    before, after, given = trained(net, THEIRS["with history"], "backward")
    assert len(after) == len(before) + 1 == 10_002
    assert after[-1] is given[0]


@pytest.mark.parametrize("theirs", ["with history", "detached", "a string"])
def test_what_comes_in_both_passes(theirs):
    """What came while the forward ran is not taken for the body's own, or it is an error."""
    net = Net([], OURS["detached"])
    found = trained_or_error(net, THEIRS[theirs], ("forward", "backward"))
    if isinstance(found, str):
        assert "another thread put something" in found
        assert theirs == "detached"
        return
    before, after, given = found
    assert theirs != "detached"
    if theirs == "with history":
        assert len(after) == len(before) + 1
        assert all(is_there(x, after) for x in (*before, *given))


def test_what_came_while_the_forward_ran_alone():
    """A replay puts less there then."""
    before, after, given = trained(Net([], OURS["detached"]), THEIRS["detached"], ("forward",))
    assert len(given) == 1
    assert len(before) == len(after) == 2


def test_what_can_t_be_told_is_an_error():
    """Two of the same kind, of which the region put one there, that are no tensors."""

    class Record:
        pass

    net = Net([], append(lambda net, h: Record()))
    with pytest.raises(functx.RematError, match="what is whose can't be told"):
        trained(net, Record, "backward")
    assert len(net.log) == 1


def test_a_global():
    GLOBAL.clear()
    region = functx.remat(lambda x: [GLOBAL.append(x.sin()), meanwhile[0](), x.cos()][-1])
    meanwhile, theirs = [lambda: None], numbers(2)
    y = region(numbers(3).requires_grad_())
    meanwhile[0] = elsewhere(lambda: GLOBAL.append(theirs))
    y.sum().backward()
    assert len(GLOBAL) == 2
    assert GLOBAL[1] is theirs


def test_known_code_leaves_lists_as_they_are(monkeypatch):
    """It runs nothing that could read them, and other threads find what is there."""
    put_back, restored = [], ModuleState.restored

    def watched(self, *of):
        put_back.append(len(counts))
        return restored(self, *of)

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls, self.log = 0, []

        def forward(self, x):
            self.calls += 1
            self.log.append(self.calls)
            return x.sin().exp()

    monkeypatch.setattr(ModuleState, "restored", watched)
    net, counts = Counting(), []
    region = functx.remat(net)
    for _ in range(9):
        region(numbers(3).requires_grad_()).sum().backward()
        counts.append((net.calls, len(net.log)))
    assert counts == [(n, n) for n in range(1, 10)]
    assert {*put_back} == {0, 1, 2, 3, 4}


LISTS = {
    "what it is given": lambda log, x: log.append(x),
    "in a tuple": lambda log, x: log.append((x,)),
    "detached": lambda log, x: log.append(x.detach()),
    "a result": lambda log, x: log.append(x.cos()),
    "what it has written to": lambda log, x: log.append(x.mul_(2)),
}
NESTS = {
    "one in another": lambda inside, x: inside(x * 2),
    "given the very same": lambda inside, x: inside(x),
    "given a constant": lambda inside, x: inside(torch.ones(3).double()) * x,
    "one in two others": lambda inside, x: functx.remat(lambda y: inside(y.cos()) * y)(x * 2),
    "vmap": lambda inside, x: functx.vmap(inside)(x.expand(2, 3) * 2).sum(0),
    "what vmap is given": lambda inside, x: functx.vmap(inside)(x.expand(2, 3) * 1),
    "of jvp": lambda inside, x: inside(functx.jvp(lambda y: y.sin() * y, (x,), (x.cos(),))[1]),
    "of torch.func": lambda inside, x: inside(torch.func.grad(lambda y: (y.sin() * x).sum())(x)),
}


REFUSED = {
    ("given the very same", "what it has written to"),  # by torch, in the second derivative
    # A wrapper with a history can't leave a region.
    *product(("vmap", "what vmap is given"), ("a result", "what it has written to")),
}


def logged(inside, nest, remat, within):
    """How much a list holds after a forward and two derivatives, and what these are."""
    log, x, lengths = [], numbers(3).requires_grad_() * 1, []
    body = within(lambda y: [inside(log, y), y.sin()][-1])
    y = remat(lambda x: nest(body, x).exp())(x).sum()
    lengths.append(len(log))
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    lengths.append(len(log))
    (second,) = torch.autograd.grad(first.sum(), x)
    return [*lengths, len(log)], (y, first, second)


@pytest.mark.parametrize("within", [functx.remat, lambda f: f], ids=["nested", "one region"])
@pytest.mark.parametrize(("nest", "inside"), [c for c in product(NESTS, LISTS) if c not in REFUSED])
def test_what_is_the_region_s_own_in_a_nest(nest, inside, within):
    """It was taken for the other thread's, and stayed; or it was an error."""
    expected, values = logged(LISTS[inside], NESTS[nest], lambda f: f, lambda f: f)
    found, ours = logged(LISTS[inside], NESTS[nest], functx.remat, within)
    assert found == expected
    torch.testing.assert_close(ours, values, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("theirs", ["with history", "detached"])
def test_what_comes_while_a_nest_is_replayed(theirs):
    """Of a tensor of the region inside, and another thread's, it is known whose is whose."""
    log, given, meanwhile = [], [], [lambda: None]
    inner = functx.remat(lambda y: [log.append(y), log.append(y.detach()), y.sin()][-1])
    region = functx.remat(lambda x: [inner(x * 2), meanwhile[0]()][0].exp())
    y = region(numbers(3).requires_grad_())
    before = [*log]

    def put():
        given.append(THEIRS[theirs]())
        log.append(given[-1])

    meanwhile[0] = elsewhere(put)
    y.sum().backward()
    assert len(given) == 1
    assert len(log) == 3
    assert all(is_there(x, log) for x in (*before, *given))
