"""Rules 6 and 7: a pullback recomputes what it reads, once; what saves nothing says so."""

import functools
import inspect
import random
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import dense
from references import Operations, count

import functx

from .programs import by_backward, identity, numbers, same

X = numbers(4)
W = [numbers(4, 4, start=float(i)) for i in range(4)]


def nested(regions, remat=functx.remat):
    """A chain of sines: ``"s"`` is one, a list is a region around a chain."""

    def chain(x):
        for one in regions:
            x = torch.sin(x) if one == "s" else remat(nested(one, remat))(x)
        return x

    return chain


def size(regions):
    return sum(1 if one == "s" else size(one) for one in regions)


def again(regions, inside=False):
    """How many sines are computed again: in a region, all that come before its last part; and what
    the regions in it compute again. The value of a last part is read by nobody."""
    own = size(regions[:-1]) if inside else 0
    return own + sum(again(one, True) for one in regions if one != "s")


def halves(n):
    """A region around the first half, each half built the same way."""
    if n <= 2:
        return ["s"] * n
    return [halves(n // 2), *halves(n // 2)]


def binomial(n):
    """A region around both halves together, each half built the same way."""
    return ["s"] if n == 1 else [[*binomial(n // 2), *binomial(n // 2)]]


def drawn(choose, depth):
    parts = choose.randint(1, 4)
    return ["s" if depth == 0 or choose.random() < 0.5 else drawn(choose, depth - 1)
            for _ in range(parts)]  # fmt: skip


PROGRAMS = {
    "two in one region": ([["s", "s"]], 1),
    "a region of a region": ([[["s", "s"]]], 1),
    "three deep": ([[[["s", "s"]]]], 1),
    "eight regions of one": ([["s"]] * 8, 0),
    "two regions of four": ([list("ssss")] * 2, 6),
    **{f"halves, {n}": (halves(n), count) for n, count in ((4, 1), (8, 5), (16, 17), (32, 49))},
    **{f"binomial, {n}": (binomial(n), count) for n, count in ((4, 4), (8, 12))},
}
LEVELS = {
    "backward": lambda f: lambda x: by_backward(lambda x: f(x).sum(), x),
    "grad": lambda f: functx.grad(lambda x: f(x).sum()),
    "vmap(grad)": lambda f: lambda x: functx.vmap(functx.grad(lambda x: f(x).sum()))(x[None])[0],
    "backward(vmap)": lambda f: lambda x: by_backward(lambda x: functx.vmap(f)(x[None]).sum(), x),
    "torch.func.grad": lambda f: torch.func.grad(lambda x: f(x).sum()),
    "jacrev": lambda f: functx.jacrev(lambda x: f(x).sum()),
}
OURS = [level for level in LEVELS if level != "torch.func.grad"]


@pytest.mark.parametrize(
    ("name", "level"),
    [
        pytest.param(n, v, marks=() if (i + j) % 5 in (0, 2) else pytest.mark.sweep)
        for i, n in enumerate(PROGRAMS)
        for j, v in enumerate(OURS)
    ],
)
def test_sines(name, level):
    regions, expected = PROGRAMS[name]
    assert again(regions) == expected
    gradient = LEVELS[level](nested(regions))
    counts = count(gradient, X)
    assert counts["sin"] == size(regions) + expected
    assert counts["cos"] == size(regions)
    same(gradient(X), LEVELS[level](nested(regions, identity))(X))


@pytest.mark.parametrize("seed", range(12))
def test_sines_in_random_nests(seed):
    regions = drawn(random.Random(seed), 4)
    for level in ("backward", "vmap(grad)"):
        counts = count(LEVELS[level](nested(regions)), X)
        assert counts["sin"] == size(regions) + again(regions)


layers = functools.partial(dense, W)


class TestLayers:
    @pytest.mark.parametrize("level", LEVELS)
    def test_whose_results_are_read_run_twice(self, level):
        x = numbers(4, 4)
        plain, ours = (count(LEVELS[level](remat(layers)), x) for remat in (identity, functx.remat))
        assert ours["tanh"] == 2 * len(W)
        assert ours["tanh_backward"] == plain["tanh_backward"]
        mm = [ours[name] - plain[name] for name in ("mm", "bmm") if plain[name]]
        assert sum(mm) == len(W)

    def test_run_once_where_nothing_is_differentiated(self):
        for f in (functx.remat(layers), functx.vmap(functx.remat(layers))):
            assert count(f, numbers(2, 4, 4))["tanh"] == len(W)
        with torch.no_grad():
            x = numbers(4, 4).requires_grad_()
            assert count(functx.remat(layers), x)["tanh"] == len(W)

    def test_run_once_in_forward_mode(self):
        x = numbers(4, 4)
        plain, ours = (
            count(lambda f=f: functx.jvp(f, (x,), (x,))) for f in (layers, functx.remat(layers))
        )
        assert ours["tanh"] == plain["tanh"] == len(W)
        assert ours["mm"] == plain["mm"]

    def test_run_again_for_each_pullback(self):
        def run():
            value, pullback = functx.vjp(functx.remat(layers), numbers(4, 4))
            pullback(value)
            pullback(value)

        assert count(run)["tanh"] == 3 * len(W)

    def test_run_again_once_for_all_rows_of_a_jacobian(self):
        assert count(functx.jacrev(functx.remat(layers)), numbers(2, 4))["tanh"] == 2 * len(W)

    def test_a_region_without_a_differentiated_input_runs_once(self):
        x = numbers(4, 4)
        f = lambda x, y: x.sum() * functx.remat(layers)(y).sum()
        assert count(functx.grad(f), x, x)["tanh"] == len(W)
        assert count(lambda: f(x.clone().requires_grad_(), x).backward())["tanh"] == len(W)


class TestWhatNobodyAsksFor:
    @staticmethod
    def two_branches(a, b):
        return a.sin().sin().sin() + b.exp().exp().exp()

    def test_a_branch_of_an_input_that_needs_no_gradient_is_not_computed_again(self):
        a, b = (X.clone().requires_grad_(r) for r in (True, False))
        f = functx.remat(self.two_branches)
        counts = count(lambda: torch.autograd.grad(f(a, b).sum(), a))
        assert (counts["sin"], counts["exp"]) == (5, 3)
        counts = count(functx.grad(lambda a, b: f(a, b).sum()), X, X)
        assert (counts["sin"], counts["exp"]) == (5, 3)

    def test_gradients_of_frozen_weights_are_not_computed(self):
        x = numbers(4, 4)
        plain, ours = (
            count(functx.grad(lambda x, f=f: f(x).sum()), x)["mm"]
            for f in (layers, functx.remat(layers))
        )
        assert ours == plain + len(W)

    def test_nor_those_of_inputs_that_a_call_does_not_ask_for(self):
        """Both need gradients; one is asked for. What plain autograd leaves out, a region does."""
        a, w = numbers(4, 4).requires_grad_(), numbers(4, 4, start=1.0).requires_grad_()

        def counts(remat, given, *asked):
            f = remat(lambda a, w: torch.tanh(a @ w))
            return count(lambda: torch.autograd.grad(f(given(a), given(w)).sum(), asked))["mm"]

        for given in (lambda t: t * 1, lambda t: t):  # the latter: leaves
            for asked in ((a,), (w,), (a, w)):
                assert counts(functx.remat, given, *asked) == counts(identity, given, *asked) + 1

    def test_a_result_that_nobody_reads_is_not_computed_again(self):
        f = lambda x: (x.sin().sin(), x.exp().exp().exp())
        x = X.clone().requires_grad_()
        counts = count(lambda: torch.autograd.grad(functx.remat(f)(x)[0].sum(), x))
        assert counts["sin"] == 3

    @pytest.mark.parametrize("level", LEVELS)
    def test_what_comes_after_a_first_state_of_zeros_is_not_computed_again(self, level):
        """Code that no mode sees may have filled them, but before they are read."""

        def layer(x):
            state = torch.zeros(4, 4, dtype=x.dtype)
            return torch.tanh(x @ W[0] + x @ state) @ W[1]

        products = lambda f: sum(count(LEVELS[level](f), X[None])[n] for n in ("mm", "bmm"))
        assert products(functx.remat(layer)) == products(layer) + 2

    def test_what_is_linear_is_not_computed_again(self):
        f = functx.remat(lambda x: (x @ W[0] * 2 + x) @ W[1])
        for level in ("backward", "vmap(grad)"):
            ours, plain = (count(LEVELS[level](g), numbers(4, 4))
                           for g in (f, lambda x: (x @ W[0] * 2 + x) @ W[1]))  # fmt: skip
            assert sum(ours[n] for n in ("mm", "bmm", "mul")) == sum(
                plain[n] for n in ("mm", "bmm", "mul")
            )


class TestSecondOrder:
    def test_of_a_chain_costs_a_replay_of_the_pullback(self):
        """Forward, replay, and for the outer pass each of the two once more."""
        f = functx.remat(layers)
        for second in (
            functx.grad(lambda x: functx.grad(lambda x: f(x).sum())(x).sum()),
            functx.vmap(functx.grad(lambda x: functx.grad(lambda x: f(x).sum())(x).sum())),
        ):
            assert 2 * len(W) < count(second, numbers(1, 4, 4))["tanh"] <= 4 * len(W)

    def test_of_a_chain_of_regions_grows_linearly(self):
        def sines(n):
            f = nested([["s", "s"]] * n)
            second = functx.grad(lambda x: functx.grad(lambda x: f(x).sum())(x).sum())
            return count(second, X)["sin"]

        assert sines(8) - sines(4) == 2 * (sines(4) - sines(2))


LARGE = numbers(64, 64)
BYTES = LARGE.numel() * LARGE.element_size()
WEIGHT = numbers(64, 64, start=1.0) / 8


body = functools.partial(dense, [WEIGHT] * 6)


def generator(x):
    yield body(x)


async def coroutine(x):
    return body(x)


async def asynchronous_generator(x):
    yield body(x)


FORMS = {
    "remat": lambda f, x: functx.remat(f)(x),
    "a partial": lambda f, x: functx.remat(functools.partial(f))(x),
    "checkpoint": lambda f, x: functx.checkpoint(f, x, use_reentrant=False),
}
LATER = [generator, coroutine, asynchronous_generator]


@pytest.mark.parametrize(("f", "form"), [*zip(LATER, FORMS, strict=True)])
def test_a_body_that_runs_after_the_call(f, form):
    x = LARGE.clone().requires_grad_()
    with pytest.warns(UserWarning, match=r"generator|coroutine") as caught:
        out = FORMS[form](f, x)
    assert any(w.filename == __file__ for w in caught)
    if inspect.iscoroutine(out):
        out.close()


def in_a_thread(f):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(f).result()


class Tagged(torch.Tensor):
    pass


LINEAR = torch.nn.Sequential(*[torch.nn.Linear(64, 64), torch.nn.Tanh()] * 6).double()
six_layers = functx.remat(body)


@torch.jit.script
def scripted_layers(x):
    w = x.detach() * 0 + 0.01
    for _ in range(6):
        x = torch.tanh(x @ w)
    return x


def within(context):
    """A six_layers of six layers that is called in a context."""

    def call(x):
        with context():
            return six_layers(x)

    return call


def no_hook(tensor):
    return tensor


WAYS = {
    "plainly": six_layers,
    "of a partial of a six_layers": functx.remat(six_layers),
    "of a module": functx.remat(LINEAR),
    "of a subclass of tensors": lambda x: six_layers(x.as_subclass(Tagged)),
    "of a scripted_layers function": functx.remat(scripted_layers),
    "of what runs in a thread": functx.remat(lambda x: in_a_thread(lambda: body(x))),
    "of what enables grad": functx.remat(torch.enable_grad()(body)),
    "under vmap": functx.vmap(functx.remat(lambda x: body(x[None])[0])),
    "under functionalize": torch.func.functionalize(six_layers),
    "with a hook on saved tensors": within(
        lambda: torch.autograd.graph.saved_tensors_hooks(no_hook, no_hook)
    ),
    "under autocast": within(lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_region_saves_memory_or_says_why_not(way):
    x = LARGE.clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            WAYS[way](x)
        except functx.RematError:
            return
    with warnings.catch_warnings(record=True) as caught, Operations() as operations:
        warnings.simplefilter("always")
        out = WAYS[way](x)
    said = any("remat" in str(w.message) for w in caught)
    assert out.requires_grad
    assert said or operations.live <= 2.5 * BYTES, f"{operations.live / BYTES} kept, and no word"


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_where_nothing_is_differentiated_nothing_is_said(context):
    with context(), warnings.catch_warnings():
        warnings.simplefilter("error")
        functx.remat(body)(LARGE)
        functx.vmap(functx.remat(lambda x: body(x[None])))(LARGE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not functx.remat(body)(LARGE).requires_grad
