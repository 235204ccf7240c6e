"""Private names of modes, modules and memory still exist, and mean what they are used for."""

import importlib
import threading

import pytest
import torch
from torch import nn
from torch.utils import _python_dispatch

from functx import (
    _torch,
    _torch_compiler,
    _torch_kernels,
    _torch_memory,
    _torch_modes,
    _torch_modules,
    _torch_observed,
)


def test_modes_are_entered_and_left_as_torch_does():
    class Observer(_torch.TorchDispatchMode):
        ran = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.ran += 1
            return func(*args, **(kwargs or {}))

    def flags():
        python_dispatch = torch.utils._python_dispatch
        return [value for name, value in vars(python_dispatch).items() if name.startswith("_is_in")]

    assert _torch_modes.LEAN
    outside, mode = flags(), Observer()
    with mode:
        inside = flags()
    before = _torch_modes.enter_dispatch_mode(mode)
    assert flags() == inside != outside
    torch.ones(2)
    _torch_modes.leave_dispatch_mode(before)
    assert flags() == outside
    torch.ones(2)
    assert mode.ran == 1


def test_function_modes_see_nothing_where_none_is_to():
    seen = []

    class Observer(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    with Observer():
        x.untyped_storage()
        assert seen
        seen.clear()
        with _torch.without_function_modes():
            x.untyped_storage()
    assert not seen


def test_function_modes_are_not_shown_what_sets_memory():
    """So functx tells regions of it: `_torch_observed.observe_set`."""
    seen = []

    class Observer(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    told = []
    x, y, before = torch.ones(2), torch.zeros(2), torch.Tensor.set_
    _torch_observed.observe_set(lambda: told.append(True))
    try:
        with Observer():
            assert x.set_(y) is x
        assert not seen
        assert told
        assert x.data_ptr() == y.data_ptr()
    finally:
        torch.Tensor.set_ = before


def test_modules_of_a_module():
    inner = nn.Linear(2, 2)
    module = nn.Sequential(nn.Sequential(inner), inner)
    assert set(_torch_modules.modules_of(module, []).values()) == set(module.modules())


def test_weak_references_to_memory():
    refs, first, second = _torch_memory.Memories(), torch.ones(2), torch.ones(2)
    for t in (first, second):
        memory, key = _torch_memory.storage_and_key(t)
        assert key == _torch.storage_key(t) == _torch_memory.storage_keys([t])[0]
        refs.add(memory, key)
    del t, memory, first
    assert refs.alive() == [_torch.storage_key(second)]
    refs.clear()
    assert not refs.alive()


def test_places_of_memory():
    """A weak reference is the key, and memory that is gone leaves nothing else in its place."""
    tensors = [torch.ones(2), torch.ones(2)]
    places = _torch_memory.Places(tensors)
    assert places.keys == _torch_memory.memory_of(tensors) == _torch_memory.storage_keys(tensors)
    for _ in range(4):
        tensors[0].data = torch.ones(2)
        assert _torch_memory.memory_of(tensors)[0] != places.keys[0]
    assert _torch_memory.memory_of([torch.ones(2).to_sparse()]) == []


def test_buffers_of_a_module():
    module = nn.BatchNorm1d(2)
    assert _torch_modules.buffers_of(module)["running_mean"] is module.running_mean


def test_recurrent_modules_keep_a_list_of_weights_that_they_can_bring_up_to_date():
    module = torch.nn.GRU(2, 2)
    lent = {name: p.detach() for name, p in module.named_parameters()}
    torch.func.functional_call(module, lent, (torch.ones(1, 2),))
    assert module._flat_weights[0] is lent["weight_ih_l0"]
    _torch_modules.forget_lent_weights()
    assert module._flat_weights[0] is module.weight_ih_l0


def test_nothing_is_compiled_until_told():
    compiler = importlib.import_module("torch._dynamo.eval_frame")
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    block = torch.compile(torch.sin, backend=backend, fullgraph=True)
    before = compiler._stance
    _torch_compiler.stay_eager()
    try:
        block(torch.ones(2))
    finally:
        _torch_compiler.compile_again()
    assert not graphs
    assert compiler._stance is before
    _torch_compiler.compile_again()  # told twice, as where the compiler was not loaded before
    block(torch.ones(2))
    assert len(graphs) == 1


def test_graphs_are_counted_and_made_again_where_hooks_change():
    module = torch.nn.Identity()
    before = _torch_compiler.graphs_compiled()
    with _torch_compiler.hooks_guarded():
        compiled = torch.compile(lambda x: module(x) + 1, backend="eager")
        compiled(torch.ones(2))
        compiled(torch.ones(2))
        assert _torch_compiler.graphs_compiled() == before + 1
        module.register_forward_hook(lambda module, args, out: out * 2)
        assert compiled(torch.ones(2)).tolist() == [3, 3]
        assert _torch_compiler.graphs_compiled() == before + 2
    torch._dynamo.reset()


def test_flags_of_modes_do_not_stay_after_threads():
    """Entered in one thread, then in another, and left in the same order."""

    class Observer(_torch.TorchDispatchMode):
        pass

    turns = [threading.Event() for _ in range(3)]

    def first():
        before = _torch_modes.enter_dispatch_mode(Observer())
        turns[0].set()
        turns[1].wait()
        _torch_modes.leave_dispatch_mode(before)
        turns[2].set()

    def second():
        turns[0].wait()
        before = _torch_modes.enter_dispatch_mode(Observer())
        turns[1].set()
        turns[2].wait()
        _torch_modes.leave_dispatch_mode(before)

    threads = [threading.Thread(target=f) for f in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not _python_dispatch.is_in_torch_dispatch_mode()
    assert not _python_dispatch.is_in_torch_dispatch_mode(include_infra_modes=False)
    assert not _python_dispatch._is_in_any_mode_without_ignore_compile_internals


def test_whether_subclasses_override_functions_is_a_setting():
    before = _torch_kernels.settings()
    with torch._C.DisableTorchFunctionSubclass():
        off = _torch_kernels.settings()
        assert sum(a != b for a, b in zip(before, off)) == 1
        _torch_kernels.put_back(before)
        assert torch._C._is_torch_function_enabled()
    _torch_kernels.put_back(off)
    assert not torch._C._is_torch_function_enabled()
    assert not torch._C._is_torch_function_all_disabled()
    _torch_kernels.put_back(before)


def test_settings_of_kernels_are_put_back(monkeypatch):
    """All of them, also those that apply because they are set for more."""
    # Torch's database of operators, which other tests import, forbids to set what is set here.
    flags = torch.backends.flags_frozen.__globals__
    monkeypatch.setitem(flags, "__allow_nonbracketed_mutation_flag", True)
    before, precision = _torch_kernels.settings(), torch.backends.fp32_precision
    try:
        torch.set_float32_matmul_precision("medium")
        torch.set_flush_denormal(True)
        torch.backends.opt_einsum.enabled = not torch.backends.opt_einsum.enabled
        assert sum(a != b for a, b in zip(before, _torch_kernels.settings())) >= 3
        _torch_kernels.put_back(before)
        wanted = ["ieee" if each == "none" else each for each in before]
        assert ["ieee" if e == "none" else e for e in _torch_kernels.settings()] == wanted
        assert "enabled" not in vars(torch.backends.opt_einsum)
        torch.backends.fp32_precision = "tf32"
        _torch_kernels.put_back(before)
        assert ["ieee" if e == "none" else e for e in _torch_kernels.settings()] == wanted
    finally:
        torch.backends.fp32_precision = precision
        torch.set_float32_matmul_precision("highest")
        torch.set_flush_denormal(False)
        vars(torch.backends.opt_einsum).pop("enabled", None)


def test_second_derivatives_of_det_are_not_right_under_modes():
    """Torch's own, which README has among the limits: by an SVD, where singular values repeat."""

    class Nothing(_torch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def second(first):
        w = (3 * torch.eye(4, dtype=torch.float64)).requires_grad_()
        return torch.autograd.grad(first(w)[0, 0] + first(w)[1, 2], w)[0]

    def first(w):
        return torch.autograd.grad(torch.linalg.det(w), w, create_graph=True)[0]

    def under_a_mode(w):
        with Nothing():
            return first(w)

    right = torch.zeros(4, 4, dtype=torch.float64)  # of the cofactors: 27, at first
    right[1, 1] = right[2, 2] = right[3, 3] = 9
    right[2, 1] = -9
    torch.testing.assert_close(second(first), right)
    assert not torch.allclose(second(under_a_mode), right)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "mine"])
def test_which_compilers_replay_random_numbers(backend):
    """Asked while the compiler traces; torch tells its checkpoint in a graph to keep no states."""
    found = []

    def ask():
        found.append(_torch_compiler.replays_numbers())
        return True

    ask._dynamo_marked_constant = True
    compiler = (lambda graph, example: graph.forward) if backend == "mine" else backend
    torch._dynamo.reset()
    torch.compile(lambda x: x.sin() if ask() else x, backend=compiler)(torch.ones(2))
    assert found == [backend == "aot_eager"]
