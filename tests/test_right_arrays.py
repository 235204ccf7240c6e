"""Memory that is not torch's and that a region writes to: once, and replays find what it found."""

import numpy as np
import pytest
import torch
from cases import numbers
from programs import identity
from references import assert_same

import functx

STEPS = 3


class State:
    def __init__(self):
        self.count = np.zeros(3)


READ = {
    "from_numpy": torch.from_numpy,
    "as_tensor": torch.as_tensor,
    "copied": lambda a: torch.from_numpy(a.copy()),
    "tensor": torch.tensor,
    "item": lambda a: float(a[0]),
}
WAYS = {
    "backward": lambda f, x: _backward(f, x),
    "grad": lambda f, x: functx.grad(f)(x),
    "vmap(grad)": lambda f, x: functx.vmap(functx.grad(f))(torch.stack([x, x * 2])),
    "grad(grad)": lambda f, x: functx.grad(lambda x: functx.grad(f)(x).sin().sum())(x),
}


def _backward(f, x):
    x = x.clone().requires_grad_()
    f(x).backward()
    return x.grad


def held(where, array):
    """What changes the array when it is called, and gives it."""
    state = State()
    state.count = array

    def own():
        state.count += 1
        return state.count

    def closed_over():
        array[...] = array + 1
        return array

    def in_a_list(those=(array,)):
        np.add(those[0], 1, out=those[0])
        return those[0]

    return {"attribute": own, "closure": closed_over, "default": in_a_list}[where]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("where", ["attribute", "closure", "default"])
def test_a_region_that_counts_in_an_array(where, read, way):
    def run(remat):
        array = np.zeros(3)
        change = held(where, array)
        f = remat(lambda x: x.sin() * READ[read](change()))
        found = [WAYS[way](lambda x: f(x).sum(), numbers(3)) for _ in range(STEPS)]
        return found, torch.tensor(array)

    assert_same(run(functx.remat), run(identity), eps=8)


def test_two_names_of_one_memory_and_nested_regions():
    def run(remat):
        array = np.zeros((2, 3))
        row = array[1]

        def inner(x):
            row[:] += 1
            return x.sin() * torch.tensor(array[1])

        def outer(x):
            array[0] += 2
            return remat(inner)(x) * torch.tensor(row + array[0])

        found = [_backward(lambda x: remat(outer)(x).sum(), numbers(3)) for _ in range(STEPS)]
        return found, torch.tensor(array)

    assert_same(run(functx.remat), run(identity), eps=8)


def test_an_array_that_a_constant_is_of():
    def run(remat):
        array = np.ones(3)
        t = torch.from_numpy(array)

        def f(x):
            array[...] *= 2
            return x.sin() * t

        return [_backward(lambda x: remat(f)(x).sum(), numbers(3)) for _ in range(STEPS)], t

    assert_same(run(functx.remat), run(identity), eps=8)


def program_that_writes(of):
    if of == "a buffer":
        memory = bytearray(np.ones(3).tobytes())
        t = torch.frombuffer(memory, dtype=torch.float64)

        def change():
            memory[:] = (np.frombuffer(memory) * 2).tobytes()
    elif of == "much memory":
        array = np.ones((3, 1 << 17))
        t = torch.from_numpy(array)[:, 0]

        def change():
            array[...] *= 2
    else:
        t = torch.ones(3, dtype=torch.float64)

        def change():
            with torch._C.DisableTorchFunction():
                t.mul_(2)

    def f(x):
        change()
        return x.sin() * t

    return f


@pytest.mark.parametrize("of", ["a buffer", "a tensor, unseen"])
def test_what_can_not_be_put_back_is_an_error(of):
    """Written to before anything reads it: so it is, at the first look, what it is afterwards."""
    f = program_that_writes(of)
    x = numbers(3).requires_grad_()
    with pytest.raises(functx.RematError, match="in a way functx can't see beforehand"):
        functx.remat(f)(x).sum().backward()


def test_much_memory_is_compared_by_what_comes_of_it():
    f = functx.remat(program_that_writes("much memory"), determinism_check="values")
    with pytest.raises(functx.ReplayError):
        f(numbers(3).requires_grad_()).sum().backward()


def test_what_is_only_read_is_not_kept(monkeypatch):
    """Neither arrays that a region leaves as they are, nor such that none can write to."""
    read, fixed = np.ones(3), np.ones(3)
    fixed.flags.writeable = False
    objects = np.array([object()])
    f = functx.remat(lambda x: x.sin() * torch.tensor(read) * torch.tensor(fixed) * len(objects))
    kept = []
    keep = functx._remat._environment.Environment._keep
    monkeypatch.setattr(
        functx._remat._environment.Environment,
        "_keep",
        lambda self, key, *ways: kept.append((self, key)) or keep(self, key, *ways),
    )
    f(numbers(3).requires_grad_())
    arrays = [(e, key) for e, key in kept if isinstance(key, int)]
    assert [key for _, key in arrays] == [id(read)]
    assert all(key not in e._random for e, key in arrays)
