"""Byte and operation counts against sums done by hand. N float32 numbers are ``4 * N`` bytes."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jvp, vmap

from functx.memory import LiveStorages, Profile, count, peak, plot, profile

N = 1000
B = 4 * N


@pytest.fixture
def x():
    return torch.linspace(0, 1, N)


def test_peak_of_a_chain_is_two_links(x):
    assert peak(lambda x: x.sin().sin().sin().sin(), x) == 2 * B


def test_peak_counts_what_is_held(x):
    def f(x):
        held = [x.sin()]
        for _ in range(4):
            held.append(held[-1].sin())
        return held

    assert peak(f, x) == 5 * B


def test_a_free_between_operations_counts_at_once(x):
    def f(x):
        y = x + 1
        del y
        return x + 2

    assert peak(f, x) == B


def test_what_was_live_before_is_not_counted(x):
    assert peak(lambda: x) == 0
    assert peak(lambda: x.mul_(2)) == 0
    assert peak(lambda: x.view(10, -1).t()[3]) == 0


def test_views_add_nothing_and_keep_their_storage(x):
    p = profile(lambda: (x + 1)[:1])
    assert (p.peak, p.returned, p.kept) == (B, B, 0)


def test_in_place_operations_add_nothing(x):
    assert peak(lambda: (x + 1).mul_(2).sin_()) == B


def test_out_argument(x):
    def f():
        out = torch.empty(N)
        return torch.sin(x, out=out)

    assert peak(f) == B


def test_resize_grows_and_shrinks(x):
    def f():
        y = torch.empty(N)
        y.resize_(3 * N)
        y.untyped_storage().resize_(B)
        y.resize_(N)  # touches it: the shrunk size is seen
        return y

    p = profile(f)
    assert p.peak == 3 * B
    assert [event.live for event in p.timeline] == [B, 3 * B, B]


def test_growth_of_an_older_storage_is_counted_above_what_it_had():
    y = torch.empty(N)
    with LiveStorages() as storages:
        y.resize_(3 * N)
        assert storages.live == 2 * B
    del y
    assert storages.live == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(N),
        lambda: torch.ones(N),
        lambda: torch.empty(N),
        lambda: torch.randn(N),
        lambda: torch.arange(N, dtype=torch.float32),
        lambda: torch.full((N,), 2.0),
        lambda: torch.tensor([1.0] * N),
        lambda: torch.as_tensor([1.0] * N),
        lambda: torch.eye(N // 2, 2),
        lambda: torch.empty(2).new_zeros(N - 2),
        lambda: torch.nn.Parameter(torch.empty(N)),
    ],
)
def test_factory_functions(make):
    assert peak(make) == B


def test_dtypes():
    assert peak(lambda: torch.zeros(N, dtype=torch.float64)) == 8 * N
    assert peak(lambda: torch.zeros(N, dtype=torch.bool)) == N
    assert peak(lambda: torch.zeros(N, dtype=torch.complex64)) == 8 * N


def test_several_outputs_and_lists(x):
    p = profile(lambda: x.sort())
    assert p.returned == B + 8 * N
    assert peak(lambda: torch.stack([x, x])) == 2 * B
    assert profile(lambda: {"a": [x + 1, (x + 2,)], "b": None}).returned == 2 * B


def test_result_that_shares_a_storage_is_counted_once(x):
    def f():
        y = x + 1
        return y, y[1:], y.view(10, -1)

    assert profile(f).returned == B


def test_kept_is_what_autograd_saves(x):
    w = x.clone().requires_grad_()
    assert profile(lambda: w.sin()).kept == 0  # saves w itself
    p = profile(lambda: w.sin().sin().sin())  # saves the two in between
    assert (p.kept, p.returned) == (2 * B, B)
    with torch.no_grad():
        assert profile(lambda: w.sin().sin().sin()).kept == 0


def test_backward_is_seen(x):
    def f(w):
        w.sin().sum().backward()

    w = x.clone().requires_grad_()
    # Backward: the sum and its gradient, 4 bytes each, are live; the latter is expanded, a view;
    # then cos(w), and the product of both, which becomes w.grad.
    p = profile(f, w)
    assert p.operations["cos"] == 1
    assert p.peak == 2 * B + 8
    assert p.kept == B
    assert w.grad is not None


def test_same_bytes_at_every_run(x):
    def f(x):
        return grad(lambda x: (x.sin() * x.exp()).sum())(x)

    first, second = profile(f, x), profile(f, x)
    assert first.timeline == second.timeline
    assert first.at_peak == second.at_peak


def test_every_stack_is_seen_at_its_base():
    x = torch.linspace(0, 1, 12).reshape(3, 4)

    def f(x):
        return x.sin().sum()

    assert count(vmap(f), x) == {"sin": 1, "sum": 1}
    assert count(vmap(grad(f)), x)["cos"] == 1
    assert peak(lambda: vmap(lambda x: x.sin())(x)) == 48
    assert profile(vmap(grad(f)), x).returned == 48
    assert count(grad(lambda x: vmap(f)(x).sum()), x)["cos"] == 1
    assert count(lambda: jvp(f, (x,), (x,)))["cos"] == 1
    # The Hessian of one row: jacfwd batches 4 tangents, so one `sin` of 4 is the second derivative.
    assert count(vmap(hessian(f)), x)["cos"] >= 1
    assert profile(vmap(hessian(f)), x).returned == 3 * 4 * 4 * 4
    assert profile(vmap(jacfwd(grad(f))), x).returned == 3 * 4 * 4 * 4


def test_inside_a_transform():
    x = torch.linspace(0, 1, 12).reshape(3, 4)
    seen = []

    def f(row):
        p = profile(lambda: row.sin())
        seen.append((p.peak, p.returned, dict(p.operations)))
        return p.result.sum()

    vmap(f)(x)
    assert seen == [(48, 48, {"sin": 1})]
    seen.clear()
    vmap(grad(f))(x)
    assert seen == [(48, 48, {"sin": 1})]


def test_nested_contexts_each_count(x):
    with LiveStorages() as outer:
        y = x + 1
        with LiveStorages() as inner:
            z = y + 1
        assert (outer.live, inner.live) == (2 * B, B)
        del z
        assert (outer.live, inner.live) == (B, 0)
    assert (outer.peak, inner.peak) == (2 * B, B)
    assert outer.operations == {"add": 2}


def test_context_entered_again_goes_on(x):
    storages = LiveStorages()
    with storages:
        y = x + 1
    z = x + 2  # not seen
    with storages:
        w = x + 3
    assert storages.live == 2 * B
    del y, z, w
    assert storages.live == 0


def test_exception_inside_leaves_nothing_behind(x):
    def f():
        held = x + 1
        raise ValueError(held.shape)

    enabled = gc.isenabled()
    with pytest.raises(ValueError, match="1000"):
        profile(f)
    assert gc.isenabled() == enabled
    assert peak(lambda: x + 1) == B  # no mode is left on the stack
    with LiveStorages() as storages, pytest.raises(RuntimeError):
        torch.ones(2) + torch.ones(3)
    assert storages.operations == {"ones": 2}


def test_no_tensor_and_no_context_is_kept_alive(x):
    y = x + 1
    alive = weakref.ref(y)
    gc.disable()
    try:
        with LiveStorages() as storages:
            z = y + 1
        context = weakref.ref(storages)
        del y, storages
        assert alive() is None
        assert context() is None
        del z
    finally:
        gc.enable()


def test_a_reference_cycle_counts_until_collected(x):
    def f():
        held = [x + 1]
        held.append(held)

    p = profile(f)
    assert p.kept == B
    with LiveStorages() as storages:
        f()
    gc.collect()
    assert storages.live == 0


def test_deepcopy_and_clone_of_a_storage(x):
    with LiveStorages() as storages:
        y = x.clone()
        z = torch.empty(0).set_(y.untyped_storage(), 0, (N,))
        assert storages.live == B
        del y
        assert storages.live == B
        del z
    assert storages.live == 0


def test_sparse_tensors(x):
    p = profile(lambda: torch.eye(10).to_sparse())
    assert p.returned == 2 * 10 * 8 + 10 * 4


def test_tensors_without_memory_count_nothing():
    assert peak(lambda: torch.empty(N, device="meta") + 1) == 0


def test_tensors_made_of_tensors(x):
    class Pair(torch.Tensor):
        @staticmethod
        def __new__(cls, a, b):
            return torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)

        def __init__(self, a, b):
            self.a, self.b = a, b

        def __tensor_flatten__(self):
            return ["a", "b"], None

        @staticmethod
        def __tensor_unflatten__(inner, meta, size, stride):
            return Pair(inner["a"], inner["b"])

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            a, b = args[0].a, args[0].b
            return Pair(func(a, *args[1:]), func(b, *args[1:]))

    p = profile(lambda: Pair(x, x + 1) + 1)
    assert p.operations == {"add": 3}
    assert (p.returned, p.peak) == (2 * B, 3 * B)


def test_inference_mode_sees_the_operations_it_does_not_take_apart():
    x, w, b = torch.ones(3, 4), torch.ones(5, 4), torch.ones(5)
    with torch.inference_mode():
        operations = count(torch.nn.functional.linear, x, w, b)
    assert operations["addmm"] == 1
    assert "linear" not in operations


def test_names():
    with LiveStorages() as storages:
        torch.zeros(2).add_(1)
        torch.ops.prims.sin(torch.zeros(2))
    assert storages.operations["add_"] == 1
    assert storages.operations["prims::sin"] == 1


def test_timeline_and_peak_by_origin(x):
    p = profile(lambda: (x.sin() + x.cos()).sum())
    assert p.timeline == ((0, "sin", B), (1, "cos", 2 * B), (2, "add", 3 * B), (3, "sum", B + 4))
    assert dict(p.at_peak) == {"sin": B, "cos": B, "add": B}
    assert p.operations == {"sin": 1, "cos": 1, "add": 1, "sum": 1}


def test_prints_as_a_table(x):
    text = str(profile(lambda: x.sin().sum()))
    assert "2 operations" in text
    assert "peak" in text
    assert "4,004 bytes" in text


def test_plot_writes_a_file(tmp_path, x):
    p = profile(lambda: x.sin().sum())
    assert p.plot(tmp_path / "one.png").stat().st_size > 1000
    assert plot({"a": p, "b": p}, tmp_path / "two.svg").read_text().lstrip().startswith("<?xml")
    with pytest.raises(ValueError, match="no profile"):
        plot({}, tmp_path / "none.png")


def test_plot_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"functx\[demo\]"):
        Profile(None, 0, 0, 0, (), ()).plot(tmp_path / "a.png")


@pytest.mark.parametrize("measure", [profile, peak, count])
def test_not_callable(measure):
    with pytest.raises(TypeError, match=f"functx.memory.{measure.__name__}: expected a callable"):
        measure(torch.ones(3))


@pytest.mark.parametrize("measure", [profile, peak, count])
def test_arguments_pass_through(measure):
    calls = []
    measure(lambda *args, **kwargs: calls.append((args, kwargs)), 1, "two", f=3, self=4)
    assert calls == [((1, "two"), {"f": 3, "self": 4})]


def test_compiled_functions_are_refused_on_cpu(x):
    """Each operation is followed by a mode, under which they run in eager."""
    for compiled in (torch.compile(torch.sin), torch.compile(torch.nn.Linear(3, 3))):
        with pytest.raises(TypeError, match=r"functx.memory.peak: .* is compiled"):
            peak(compiled, x)
