"""What may differ from a known run, though the same functions are called on the same tensors."""

import threading

import pytest
import torch
from known import KNOWN, Calls, W, X, known, pulled, wrong
from references import assert_same

import functx
from functx._remat import _known_pullbacks, _known_runs, _straight_line

pytestmark = pytest.mark.usefixtures("forgotten")


class Choice:
    """What a body asks which way to go; in no key, as a flag among the arguments would be."""

    now = 0


class List(list):
    """A list of the user's."""


def same_each_step(body, *inputs, steps=KNOWN + 4, change=KNOWN + 1):
    """Gradients of all steps, of which the last ones go the other way."""
    choice = Choice()
    region = functx.remat(lambda *args: body(choice, *args))
    for step in range(steps):
        choice.now = int(step >= change)
        expected = pulled(lambda *args: body(choice, *args), *inputs)
        assert_same(pulled(region, *inputs), expected)


@pytest.mark.parametrize(
    "body",
    [
        lambda c, x: x.permute(List([[0, 1], [1, 0]][c.now])).reshape(3, 4).exp() * x,
        lambda c, x: x.exp().sum(List([c.now]), keepdim=True).sum() * x,
        lambda c, x: torch.stack(List([x, x.exp()][:: 1 - 2 * c.now]))[0] * x,
        lambda c, x: torch.roll(x.exp(), List([1 + c.now, 0]), List([0, 1])) * x,
        lambda c, x: torch.tensor(List([2.0 + c.now] * 4)).double() * x.exp(),
        lambda c, x: x.new_tensor([2.0 + c.now] * 4) * x.exp(),
        lambda c, x: torch.nn.functional.triplet_margin_with_distance_loss(
            x.exp(), x.sin(), x * 2, distance_function=(torch.sub, torch.add)[c.now], margin=9.0
        ),
    ],
)
def test_what_arguments_hold(body):
    """Lists of the user's classes, functions: what is in them is compared, or nothing is known."""
    same_each_step(body, X)


def test_tensors_that_are_numbers_of_a_tensor():
    """Torch reads them where nobody sees it."""
    number = torch.ones(())
    body = lambda x: x * torch.tensor([number, number, number, number])  # noqa: E731
    region = functx.remat(body)
    for step in range(KNOWN + 4):
        number.fill_(1 + max(0, step - KNOWN))
        assert_same(pulled(region, X), pulled(body, X))


def test_results_with_nodes_of_their_own():
    """They share a key in nothing: which result it is, is told by its place in the region."""

    def body(a, b):
        return a * b.sin(), b.exp()

    region = functx.remat(body)

    def gradient(f, place):
        a, b = X.clone().requires_grad_(), (X + 1).requires_grad_()
        a.register_hook(lambda g: None)
        return torch.autograd.grad(f(a, b)[place].sum(), b)

    for step in range(KNOWN + 6):
        assert_same(gradient(region, step > KNOWN), gradient(body, step > KNOWN))


def test_memory_that_is_no_longer_shared():
    """Two parameters had the same memory when it was written down."""

    def run(f, untied):
        memory = torch.stack([W, W * 3])
        w, v = (torch.nn.Parameter(memory[0]) for _ in range(2))
        out = f(X, w, v)
        if untied:
            v.data = memory[1]
        return torch.autograd.grad(out.sum(), [w, v])

    body = lambda x, w, v: torch.tanh(x @ w) @ v  # noqa: E731
    region = functx.remat(body)
    for step in range(KNOWN + 4):
        # What is there when it is pulled back is read, as by a replay.
        untied = step > KNOWN
        ordinary = run(functx.remat(body, determinism_check="none"), untied)
        assert_same(run(region, untied), ordinary)


def test_formulas_that_values_choose_are_not_written_down():
    body = lambda x: x.prod() * 1.0  # noqa: E731
    region = functx.remat(body)
    for step in range(KNOWN + 4):
        x = torch.ones(4, dtype=X.dtype)
        if step > KNOWN:
            x = torch.tensor([1e-200, 1e-200, 1e150, 1.0], dtype=X.dtype)
        assert_same(pulled(region, x), pulled(body, x))


@pytest.mark.parametrize(
    "body",
    [
        lambda x: x.exp().masked_fill(X > 0, x[0, 0]),
        lambda x: x.exp().max() * x,
        lambda x: x.exp().min() * x,
        lambda x: x.exp().cumprod(0),
    ],
)
def test_sums_in_another_order_are_not_written_down(body):
    """A mode has another formula, whose last bits differ for some numbers."""
    region = functx.remat(body)
    for step in range(KNOWN + 6):
        x = torch.rand(3, 4, dtype=X.dtype)
        scale = float("inf") if step > KNOWN + 3 else 1.0
        found, expected = (pulled(f, x, cotangent=lambda c, s=scale: c * s) for f in (region, body))
        assert_same(found[0].nan_to_num(3.0), expected[0].nan_to_num(3.0))


def elsewhere(region, expected):
    """Another thread pulls it back, and this one waits for it."""
    found = []
    thread = threading.Thread(target=lambda: found.append(pulled(region, X)))
    thread.start()
    thread.join()
    assert_same(found, [expected])


@pytest.fixture
def wrong_code(monkeypatch):
    """What is written down gives other gradients."""
    written = _straight_line.written
    monkeypatch.setattr(_straight_line, "written", lambda *of: wrong(written(*of)))


@pytest.mark.usefixtures("wrong_code")
def test_another_thread_that_writes_it_down_as_well(monkeypatch):
    """What is in its place has not run yet, whoever has written it."""
    written = _known_pullbacks._to_be_written
    region, expected, others = functx.remat(torch.sin), pulled(torch.sin, X), []

    def met(*args):
        if not others:
            others.append(args)
            elsewhere(region, expected)
        return written(*args)

    monkeypatch.setattr(_known_pullbacks, "_to_be_written", met)
    for _ in range(KNOWN + 2):
        assert_same(pulled(region, X), expected)
    assert others


@pytest.mark.usefixtures("wrong_code")
def test_another_thread_that_comes_by_while_it_is_compared(monkeypatch):
    """It must not run what is being compared."""
    tried = _known_pullbacks.Known.tried
    region, expected, busy = functx.remat(torch.sin), pulled(torch.sin, X), []

    def met(*args):
        if not busy:
            busy.append(args)
            elsewhere(region, expected)
            busy.clear()
        return tried(*args)

    monkeypatch.setattr(_known_pullbacks.Known, "tried", met)
    for _ in range(KNOWN + 2):
        assert_same(pulled(region, X), expected)


def test_a_sum_keeps_no_more_than_itself():
    """Not the memory of which a summand is a part."""
    calls = known(lambda x: torch.cat([x, x * 2]).exp(), X)
    x = X.clone().requires_grad_()
    out = calls.region(x)
    (g,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert g.untyped_storage().nbytes() == x.nbytes


def test_code_counts_as_what_is_remembered(monkeypatch):
    known(lambda x: x.sin().exp().tanh(), X)
    found = [s for s in _known_runs._sightings.values() if s.operations()]
    assert [s.operations() for s in found] == [4 + 7]


def test_a_cotangent_is_not_added_to():
    """Where it is the gradient, torch must see that somebody holds it."""
    x, g = torch.ones(8, 8, requires_grad=True), torch.ones(8, 8)
    region = functx.remat(lambda x: x + 1)
    for _ in range(KNOWN + 3):
        region(x).backward(g)
    assert g.eq(1).all()
    assert x.grad.eq(KNOWN + 3).all()


def test_indices_that_torch_reads_past_everything():
    indices = torch.tensor([1, 2])
    body = lambda x, i: x.exp().tensor_split(i)[1].sum() * x  # noqa: E731
    region = functx.remat(body)
    for _ in range(KNOWN + 2):
        assert_same(pulled(region, X, indices), pulled(body, X, indices))
    inside = lambda x: x.exp().tensor_split(torch.arange(2) + 1)[1].sum() * x  # noqa: E731
    assert_same(pulled(functx.remat(inside), X), pulled(inside, X))


def test_no_pullback_is_another_regions():
    """Each call of a region has its own values, in whatever order they are pulled back."""
    calls = Calls(torch.sin)
    for _ in range(KNOWN + 2):
        xs = [(X + i).requires_grad_() for i in range(3)]
        outs = [calls.region(x) for x in xs]
        found = [torch.autograd.grad(outs[i].sum(), xs[i])[0] for i in (1, 0, 2)]
        assert_same(found, [(X + i).cos() for i in (1, 0, 2)])


class Sometimes:
    """Whose attributes no key of a code has."""

    now = False


SETS = {
    "a tensor": lambda a, b, part: a.set_(part),
    "a part": lambda a, b, part: a.set_(b, 1, a.shape, a.stride()),
    "a storage": lambda a, b, part: a.set_(b.untyped_storage(), 0, a.shape, a.stride()),
}


@pytest.mark.parametrize("way", SETS)
def test_memory_is_set_in_some_runs(way):
    """``set_`` with a tensor is the one method of tensors that function modes are not shown."""
    sometimes = Sometimes()

    def body(x):
        a, b = x.detach().clone(), torch.cat([x.detach() * 3, x.detach()])
        part = b[:3]
        if sometimes.now:
            SETS[way](a, b, part)
        return a * x

    region = functx.remat(body)
    for step in range(KNOWN + 9):
        sometimes.now = step in (1, KNOWN + 1, KNOWN + 2)
        assert_same(pulled(region, X), pulled(body, X))
