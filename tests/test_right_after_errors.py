"""After an exception, wherever it came from, everything is as before; names in a profile."""

import contextlib

import pytest
import torch
from cases import numbers
from programs import identity
from references import Operations, assert_same, no_garbage_collection
from right import X, settings
from torch.autograd import forward_ad
from torch.nn.functional import dropout

import functx

pytestmark = pytest.mark.usefixtures("no_hooks")

ERRORS = [ValueError, torch.OutOfMemoryError, MemoryError, KeyboardInterrupt, SystemExit]
STACKS = ["backward", "double backward", "grad", "vmap(grad)", "jvp", "hessian", "dual", "nested"]


class Faulty:
    """Raises at a given run of its body."""

    def __init__(self, error, at):
        self.error, self.at, self.runs = error, at, 0

    def __call__(self, x):
        self.runs += 1
        y = dropout(x.sin(), 0.5)
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            scale = x.exp()
            if self.runs == self.at:
                raise self.error("on purpose")
        return y * scale


def take(stack, f):
    x = X.clone().requires_grad_()
    if stack == "backward":
        return torch.autograd.grad(f(x).sum(), x)
    if stack == "double backward":
        (first,) = torch.autograd.grad(f(x).sin().sum(), x, create_graph=True)
        return torch.autograd.grad(first.sum(), x)
    if stack == "nested":
        return torch.autograd.grad(functx.remat(lambda x: functx.remat(f)(x.sin()))(x).sum(), x)
    if stack == "dual":
        with forward_ad.dual_level():
            return tuple(forward_ad.unpack_dual(f(forward_ad.make_dual(X, X))))
    if stack == "jvp":
        return functx.jvp(f, (X,), (X,))
    if stack == "hessian":
        return functx.jacrev(functx.grad(lambda x: f(x).sin().sum()))(X)
    gradient = functx.grad(lambda x: f(x).sum())
    if stack == "vmap(grad)":
        return functx.vmap(gradient, randomness="different")(numbers(3, 4))
    return gradient(X)


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: e.__name__)
@pytest.mark.parametrize("stack", STACKS)
def test_everything_is_as_before(stack, error):
    """Whichever run of the body fails: the forward, a replay, a replay of a replay."""
    sound = Faulty(None, 0)
    torch.manual_seed(2)
    expected = take(stack, functx.remat(sound))
    for at in range(1, sound.runs + 1):
        torch.manual_seed(2)
        take(stack, functx.remat(Faulty(None, 0)))  # first calls of torch set things up
        torch.manual_seed(2)
        before = settings()
        with pytest.raises(error, match="on purpose"):
            take(stack, functx.remat(Faulty(error, at)))
        assert settings() == before
        torch.manual_seed(2)
        assert_same(take(stack, functx.remat(Faulty(None, 0))), expected)


def test_the_generator_is_where_the_forward_left_it():
    """An interrupted forward has drawn what it drew; an interrupted replay has drawn nothing."""
    for at in (1, 2):
        states = []
        for remat in (functx.remat, identity):
            torch.manual_seed(2)
            f = Faulty(ValueError, at)
            x = X.clone().requires_grad_()
            try:
                out = remat(f)(x)
                torch.rand(3)
                out.sum().backward()
            except ValueError:
                pass
            states.append(torch.get_rng_state())
        assert_same(*states)


@pytest.mark.parametrize("stack", ["backward", "grad", "vmap(grad)", "hessian"])
def test_errors_in_a_replay_come_out_unchanged_with_a_note(stack):
    class MineError(Exception):
        def __init__(self, code):
            super().__init__(f"code {code}")
            self.code = code

    original = MineError(7)
    runs = []

    def f(x):
        runs.append(1)
        if len(runs) > 1:
            raise original
        return x.sin().exp()

    with pytest.raises(MineError) as caught:
        take(stack, functx.remat(f))
    assert caught.value is original
    assert caught.value.code == 7
    notes = [n for n in caught.value.__notes__ if "functx" in n]
    assert len(notes) == 1
    assert "f" in notes[0]


def test_errors_of_torch_in_the_forward_have_no_note():
    with pytest.raises(RuntimeError, match="shapes") as caught:
        functx.remat(lambda x: x @ torch.ones(7, 7))(X.clone().requires_grad_())
    assert not getattr(caught.value, "__notes__", [])


@pytest.mark.parametrize("at", [1, 2])
def test_nothing_is_kept_by_a_failed_run(at):
    """Once the exception is gone, so is what the run had made."""
    with no_garbage_collection(), Operations() as operations:
        with contextlib.suppress(ValueError):
            take("backward", functx.remat(Faulty(ValueError, at)))
        assert operations.live == 0


def test_a_failed_backward_can_be_tried_again():
    runs = []

    def f(x):
        runs.append(1)
        if len(runs) == 2:
            raise torch.OutOfMemoryError("on purpose")
        return x.sin().exp()

    x = X.clone().requires_grad_()
    value = functx.remat(f)(x).sum()
    with pytest.raises(torch.OutOfMemoryError):
        value.backward(retain_graph=True)
    value.backward()
    assert_same(x.grad, X.cos() * X.sin().exp(), eps=4)


class TestProfile:
    """Forward and replay show under their own names."""

    def names(self, work):
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            work()
        return [event.name for event in profile.events()]

    @pytest.mark.parametrize("stack", ["backward", "grad", "vmap(grad)"])
    def test_names(self, stack):
        def attention(x):
            return x.sin().exp()

        names = self.names(lambda: take(stack, functx.remat(attention)))
        ours = {name for name in names if "attention" in name}
        replays = {name for name in ours if "replay" in name}
        assert len(replays) == 1
        assert len(ours - replays) == 1

    def test_names_of_modules(self):
        region = functx.remat(torch.nn.Linear(4, 4).double())
        names = self.names(lambda: take("backward", region))
        assert any("Linear" in name and "replay" in name for name in names)
        assert any("Linear" in name and "replay" not in name for name in names)


@pytest.mark.parametrize("nested", [False, True])
def test_an_error_on_the_tape_of_a_replay_says_so_once(nested):
    held = {}

    def f(x):
        h, key = x.sin(), object()
        held[key] = h.detach(), "of this run"
        h.register_hook(lambda g: held.pop(key)[0] * g)
        return h.exp()

    x = numbers(3).requires_grad_()
    y = functx.remat((lambda x: functx.remat(f)(x) * 2) if nested else f)(x).sum()
    with pytest.raises(KeyError) as caught:
        y.backward()
    (note,) = caught.value.__notes__
    assert "on the tape of its second run" in note
