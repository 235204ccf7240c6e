"""What a replay runs: exactly what its pullback reads.

Whatever changes between two calls (a flag, a branch, a shape, a dtype, a device), each replays what
it ran itself. `test_known_runs` has what is taken over from one call to the next.
"""

import sys

import house
import pytest
import torch
from cases import numbers
from references import assert_same, count

import functx
from functx.memory import profile

sys.path.insert(0, str(house.ROOT))

from bench.counts import programs

pytestmark = pytest.mark.usefixtures("hooks")

X = numbers(4)
PROGRAMS = programs(torch.sin, functx.remat)


def backward(f, x):
    leaf = x.detach().requires_grad_()
    f(leaf).sum().backward()
    return leaf.grad


def gradient(f, x):
    return functx.grad(lambda x: f(x).sum())(x)


def per_example(f, x):
    return functx.vmap(functx.grad(lambda x: f(x).sum()))(x[None])


WAYS = [backward, gradient, per_example]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_sines(name, way):
    n, again, f = PROGRAMS[name]
    counts = count(way, f, X)
    assert counts["sin"] == n + again
    assert counts["cos"] == n


WEIGHTS = [numbers(4, 4, start=i) for i in range(3)]


def mlp(x):
    for w in WEIGHTS:
        x = torch.sin(x @ w)
    return x


def block(x):
    return torch.nn.functional.gelu(x @ WEIGHTS[0]) @ WEIGHTS[1]


VIEWS = {
    "chunk": lambda h: h.chunk(2, -1),
    "split": lambda h: h.split([1, 3], -1),
    "unbind": lambda h: h.unbind(0),
    "slices": lambda h: (h[..., :2], h[..., 2:]),
    "a view of a view": lambda h: (h.transpose(0, 1), h.transpose(0, 1)[1:]),
    "itself": lambda h: (h, h.flatten()),
}


@pytest.mark.parametrize("way", WAYS)
class TestProducts:
    """Products of matrices whose result only feeds the region's are not computed again."""

    def extra(self, f, way):
        plain, ours = (count(way, g, numbers(2, 4)) for g in (f, functx.remat(f)))
        return {name: ours[name] - plain[name] for name in ("mm", "sin", "gelu")}

    def test_mlp(self, way):
        # The cosine of the last layer reads its product; no gradient reads the last sine.
        assert self.extra(mlp, way) == {"mm": 3, "sin": 2, "gelu": 0}

    def test_the_last_of_a_block(self, way):
        assert self.extra(block, way)["mm"] == 1

    def test_the_last_of_a_block_whose_result_is_a_view(self, way):
        """A linear layer gives a view of its product if a batch has several dimensions."""
        layers = torch.nn.Linear(4, 4).double(), torch.nn.Linear(4, 4).double()

        def f(x):
            x = x.expand(2, 3, *x.shape[-2:])
            return layers[1](torch.tanh(layers[0](x))).transpose(-1, -2)

        plain, ours = (count(way, g, numbers(2, 4)) for g in (f, functx.remat(f)))
        assert ours["addmm"] + ours["mm"] + ours["bmm"] == 1 + sum(
            plain[name] for name in ("addmm", "mm", "bmm")
        )

    def test_a_view_of_what_is_read_is_computed_again(self, way):
        counts = count(way, functx.remat(lambda x: torch.exp(x).flatten()), numbers(2, 4))
        assert counts["exp"] == 2

    @pytest.mark.parametrize("views", VIEWS)
    @pytest.mark.parametrize("read", [False, True], ids=["not read", "read"])
    def test_results_that_are_views_of_one(self, views, read, way):
        """What is cut into results is left out like one result, unless the tape holds a part."""
        last = torch.exp if read else torch.neg

        def parts(x):
            a, b = VIEWS[views](torch.tanh(torch.sin(x)))
            return a, b, last(b)

        def f(x, region=functx.remat):
            a, b, c = region(parts)(x)
            return torch.cat([a.flatten(), 2 * b.flatten(), 3 * c.flatten()])

        # The derivative of the hyperbolic tangent reads its result: that alone is computed again.
        x = numbers(2, 4)
        counts = count(way, f, x)
        assert (counts["sin"], counts["tanh"]) == (2, 2)
        assert counts["exp"] == 2 * read
        assert_same(way(f, x), way(lambda x: f(x, lambda g: g), x))

    @pytest.mark.parametrize("views", VIEWS)
    def test_results_that_are_views_of_what_is_not_read(self, views, way):
        def f(x):
            a, b = functx.remat(lambda x: VIEWS[views](torch.sin(x)))(x)
            return torch.cat([a.flatten(), 2 * b.flatten()])

        assert count(way, f, numbers(2, 4))["sin"] == 1

    def test_what_another_result_needs_is_left_out(self, way):
        def two(x):
            return torch.sin(torch.sin(x)), torch.exp(torch.exp(x)) @ WEIGHTS[2]

        def first(x):
            return functx.remat(two)(x)[0]

        counts = count(way, first, numbers(2, 4))
        assert (counts["sin"], counts["exp"], counts["mm"]) == (3, 2, 1)


def kept(f, *args):
    """Bytes that tapes keep beyond the arguments, and the sum of those that regions keep."""
    found = []
    with functx._remat.on_region(lambda tensors, *_: found.extend(tensors)):
        f(*args)
    return sum(t.nbytes for t in found)


class TestKept:
    def test_a_linear_region_keeps_nothing(self):
        a = X.clone().requires_grad_()
        assert kept(functx.remat(lambda a: 3 * a + a.sum()), a) == 0
        assert kept(functx.remat(lambda a: (a[None] @ WEIGHTS[0]).T), a) == 0

    def test_only_what_is_read(self):
        a, b = X.clone().requires_grad_(), X.clone().requires_grad_()
        assert kept(functx.remat(lambda a, b: torch.sin(a) + 3 * b), a, b) == a.nbytes

    def test_the_same_tensor_is_kept_once(self):
        a = X.clone().requires_grad_()
        assert kept(functx.remat(lambda a, b: torch.sin(a) * torch.exp(b)), a, a) == a.nbytes

    @pytest.mark.parametrize("frozen", [True, False])
    def test_frozen_parameters_cost_nothing(self, frozen):
        """Neither a copy nor a gradient; regions keep what is between them, as ever."""
        weights = [w.clone().requires_grad_(not frozen) for w in WEIGHTS]
        x = numbers(64, 4).requires_grad_()

        def forward():
            h = x
            for w in weights:
                h = functx.remat(lambda h, w: torch.tanh(h @ w))(h, w)
            return h

        assert profile(forward).kept == 2 * x.nbytes
        counts = count(lambda: torch.autograd.grad(forward().sum(), x))
        # Forward, replay of what a tanh reads, and of the backward only what is asked for.
        assert counts["mm"] == 3 + 3 + 3

    def test_not_by_a_region_and_the_one_around_it(self):
        x = numbers(64, 4).requires_grad_()
        inner = functx.remat(lambda x: torch.sin(torch.sin(x)))

        def outer(x):
            return inner(inner(x))

        assert profile(lambda: outer(x)).kept == x.nbytes  # what is between the two
        assert profile(lambda: functx.remat(outer)(x)).kept == 0

    def test_not_by_a_node_and_a_closure(self):
        x = numbers(64, 4).requires_grad_()
        y = torch.exp(x)

        def forward():
            h = torch.exp(x)
            return functx.remat(lambda: torch.sin(torch.sin(h)))()

        assert profile(forward).kept == y.nbytes


class TestNothingIsStale:
    """One function, called again in other circumstances: each call replays what it ran."""

    @staticmethod
    def both(f, calls):
        region = functx.remat(f)
        outs = [(region(*args), f(*args), x) for args, x in calls()]
        for ours, plain, x in outs:
            assert_same(torch.autograd.grad(ours.sum(), x), torch.autograd.grad(plain.sum(), x))

    def test_flag(self):
        def f(x, deep):
            h = torch.sin(torch.exp(x)) if deep else torch.exp(torch.sin(x))
            return torch.tanh(h)

        xs = [X.clone().requires_grad_() for _ in range(4)]
        self.both(f, lambda: [((x, i % 2 == 0), x) for i, x in enumerate(xs)])

    def test_branch_that_takes_another_of_two_like_tensors(self):
        """The same operations in the same order, on other tensors."""

        def f(x, which):
            a, b = torch.sin(x), torch.cos(x)
            return torch.exp((a, b)[which])

        xs = [X.clone().requires_grad_() for _ in range(4)]
        self.both(f, lambda: [((x, i % 2), x) for i, x in enumerate(xs)])
        region = functx.remat(f)
        for which, name in ((0, "sin"), (1, "cos"), (0, "sin")):
            x = X.clone().requires_grad_()
            out = region(x, which)
            replayed = count(lambda out=out: out.sum().backward())
            assert replayed["exp"] == 1
            assert replayed[name] >= 1

    @pytest.mark.parametrize(
        "inputs",
        [
            [numbers(4), numbers(2, 3), numbers(4)],
            [numbers(4), numbers(4).float(), numbers(4)],
            [numbers(6, 2), numbers(2, 6).T, numbers(6, 2)],
        ],
        ids=["shape", "dtype", "strides"],
    )
    def test_inputs(self, inputs):
        xs = [x.detach().requires_grad_() for x in inputs]
        self.both(lambda x: torch.sin(torch.exp(x)) * x, lambda: [((x,), x) for x in xs])

    def test_device(self):
        region = functx.remat(lambda x: torch.sin(torch.exp(x)) * x)
        for device in ("cpu", "meta", "cpu"):
            x = X.to(device).detach().requires_grad_()
            (gradient,) = torch.autograd.grad(region(x).sum(), x)
            assert gradient.device.type == device

    def test_grad_mode_inside(self):
        def f(x, taped):
            with torch.set_grad_enabled(taped):
                h = torch.exp(x)
            return torch.sin(h) * x

        xs = [X.clone().requires_grad_() for _ in range(3)]
        self.both(f, lambda: [((x, i % 2 == 0), x) for i, x in enumerate(xs)])


class TestCountedWork:
    """What planning takes is one record an operation, or nothing; no call waits for a plan."""

    @staticmethod
    def records(f, x):
        seen = []
        before = functx._remat._ledger.Ledger.settle

        def settle(ledger, *args):
            seen.append(len(ledger.steps))
            return before(ledger, *args)

        functx._remat._ledger.Ledger.settle = settle
        try:
            f(x)
        finally:
            functx._remat._ledger.Ledger.settle = before
        return seen

    def test_closures_made_anew_cost_what_the_first_did_and_then_less(self, monkeypatch):
        monkeypatch.setattr(functx._remat._known_runs, "_sightings", {})

        def step(x):
            scale = torch.ones(())
            return functx.remat(lambda x: torch.sin(torch.exp(x)) * scale)(x).sum()

        x = X.clone().requires_grad_()
        assert [self.records(step, x) for _ in range(5)] == [[3], [3], [3], [], []]

    def test_pullbacks_that_nobody_differentiates_keep_no_record(self):
        assert self.records(lambda x: per_example(PROGRAMS["remat(sin, sin)"][2], x), X) == [2]

    def test_a_replay_is_watched_only_where_something_is_left_out(self, monkeypatch):
        """The last operation of this body is; the other twenty run as they are."""
        entered = []
        enter = functx._remat._prune.Pruned.__enter__
        monkeypatch.setattr(
            functx._remat._prune.Pruned,
            "__enter__",
            lambda self: entered.append(self) or enter(self),
        )

        def f(x):
            for _ in range(20):
                x = torch.sin(x)
            return torch.exp(x) * 3

        x = X.clone().requires_grad_()
        out = functx.remat(f)(x).sum()
        counts = count(lambda: out.backward())
        assert (counts["sin"], counts["exp"]) == (20, 1)
        assert len(entered) == 1


def nest(depth):
    f = torch.sin
    for _ in range(depth):
        f = functx.remat(f)
    return f


class TestDepth:
    def test_fifty_in_plain_autograd(self):
        assert_same(backward(nest(50), X), torch.cos(X))

    def test_twenty_under_three_transforms(self):
        f = nest(20)
        second = functx.grad(lambda x: functx.grad(lambda x: f(x).sum())(x).sum())
        assert_same(functx.vmap(second)(X[None]), -torch.sin(X)[None])

    @pytest.mark.parametrize(("way", "depth"), [(backward, 120), (gradient, 120)])
    def test_deeper_is_an_error_that_says_how_deep(self, way, depth):
        with pytest.raises(functx.RematError, match=r"nested \d+ deep.*getrecursionlimit"):
            way(nest(depth), X)

    def test_closures_nested_too_deep(self):
        with pytest.raises(functx.RematError, match=r"close over others, \d+ deep"):
            backward(nest(600), X)

    def test_a_body_that_never_ends_is_not_a_nest(self):
        def forever(x):
            return forever(torch.sin(x))

        with pytest.raises(RecursionError):
            backward(functx.remat(forever), X)
