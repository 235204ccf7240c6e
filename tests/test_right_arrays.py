"""Memory that is not torch's and that a region writes to: once, and replays find what it found."""

import sys

import numpy as np
import pytest
import torch
from cases import numbers
from programs import identity
from references import assert_same

import functx
from functx._remat import _large_arrays

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


@pytest.mark.parametrize("check", ["default", "values"])
def test_much_memory_that_is_written_to_is_an_error(check):
    f = functx.remat(program_that_writes("much memory"), determinism_check=check)
    with pytest.raises(functx.ReplayError, match="writes to a NumPy array of 3,145,728 bytes"):
        f(numbers(3).requires_grad_()).sum().backward()


LARGE = 1 << 18
READS_OF_LARGE = {
    "from_numpy": lambda a: torch.from_numpy(a)[:3],
    "closed over": None,
    "copied": lambda a: torch.from_numpy(a[:3].copy()),
    "item": lambda a: float(a[0]),
    "reversed": lambda a: torch.from_numpy(a[::-1].copy())[:3],
}
CHANGES_OF_LARGE = {
    "a few entries": lambda a: a.__setitem__(slice(3), a[:3] + 1),
    "all": lambda a: a.__imul__(2),
    "places in a row": lambda a: a.__setitem__([0, 5], a[[5, 0]]),
    "rows": lambda a: a.__setitem__(
        [*range(512), *range(5120, 5632)], a[[*range(5120, 5632), *range(512)]]
    ),
    "places": lambda a: a.__setitem__([0, 99_999], a[[99_999, 0]]),
}


def large():
    return np.arange(1.0, LARGE + 1) / LARGE


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("change", CHANGES_OF_LARGE)
@pytest.mark.parametrize("read", READS_OF_LARGE)
def test_a_region_that_writes_to_a_large_array(read, change):
    array = large()
    of = READS_OF_LARGE[read]
    t = torch.from_numpy(array) if of is None else None

    def f(x):
        CHANGES_OF_LARGE[change](array)
        return x.sin() * (t[:3] if of is None else of(array))

    y = functx.remat(f)(numbers(3).requires_grad_()).sum()
    after = array.copy()
    with pytest.raises(functx.ReplayError, match=r"NumPy array of 2,097,152 bytes.*outside"):
        y.backward()
    assert (array == after).all()


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("numpy", [True, False])
@pytest.mark.parametrize("change", CHANGES_OF_LARGE)
@pytest.mark.parametrize("given", ["argument", "constant"])
def test_large_memory_that_changes_between_forward_and_backward(monkeypatch, given, change, numpy):
    array = large()
    t = torch.from_numpy(array)
    if not numpy:
        monkeypatch.delitem(sys.modules, "numpy")
    region = functx.remat(lambda x, t=t: x.sin() * t[:3])
    for changed in (False, True):
        x = numbers(3).requires_grad_()
        y = region(x, t).sum() if given == "argument" else region(x).sum()
        if changed:
            CHANGES_OF_LARGE[change](array)
            with pytest.raises(functx.ReplayError, match="modified in place"):
                y.backward()
        else:
            y.backward()
            assert_same(x.grad, x.detach().cos() * t[:3])


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("who", ["region", "others"])
def test_pages_of_the_largest_are_compared(who):
    array = np.zeros(1 << 22)
    t = torch.from_numpy(array)

    def f(x):
        if who == "region":
            array[...] += 1
        return (x * t[7]).sin()

    y = functx.remat(f)(numbers(3).requires_grad_()).sum()
    array[...] += 1
    with pytest.raises(functx.ReplayError):
        y.backward()


def test_how_much_of_large_arrays_is_read(monkeypatch):
    read = []
    bits = _large_arrays.bits_of_much
    monkeypatch.setattr(_large_arrays, "bits_of_much", lambda *a: read.append(a[1:]) or bits(*a))
    one, two, three, largest = *(np.zeros(LARGE) for _ in range(3)), np.zeros(1 << 20)
    region = functx.remat(lambda x: x.sin() * len(one) * len(two) * len(three) * len(largest))
    region(numbers(3).requires_grad_()).sum().backward()
    whole, pages = (one.nbytes, one.nbytes, 128), (one.nbytes, 0, 128)
    assert sorted(read) == [*2 * [pages], *4 * [whole], *2 * [(largest.nbytes, 0, 128)]]


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
