"""Every private name that functx._torch uses still exists, and means what it is used for."""

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils import checkpoint

from functx import (
    _torch,
    _torch_compiler,
    _torch_edges,
    _torch_fake,
    _torch_globals,
    _torch_norms,
    _torch_observed,
    _torch_operators,
    _torch_vmap,
    memory,
)

NAMES = sorted(
    name for name, value in vars(_torch).items() if not name.startswith("__") and value is not None
)


@pytest.mark.parametrize("name", NAMES)
def test_exists(name):
    assert getattr(_torch, name) is not None


def test_operators_have_schemas():
    add = torch.ops.aten.add.Tensor
    assert _torch_operators.takes_tensor_first(add)
    assert _torch_operators.returns_one(add)
    assert not _torch_operators.returns_one_list(add)
    assert _torch_operators.returns_one_list(torch.ops.aten.split.Tensor)
    assert _torch_operators.is_mutable(torch.ops.aten.add_.Tensor)
    assert not _torch_operators.is_mutable(add)


def test_operators_of_a_name_say_together_what_they_write_to():
    packet, aten = _torch_operators.packet_of, torch.ops.aten
    assert packet(torch.sort) is aten.sort
    assert packet(aten.add) is aten.add
    assert packet(torch.is_tensor) is None
    for name in ("add", "sort", "sum", "matmul", "cummax", "native_layer_norm", "dropout"):
        assert not any(_torch_operators.packet_writes(getattr(aten, name)))
    running = frozenset({3, 4}), frozenset({"running_mean", "running_var"})
    assert _torch_operators.packet_writes(aten.native_batch_norm) == running
    assert _torch_operators.packet_writes(aten._native_batch_norm_legit) == running


def test_the_list_is_not_empty():
    assert {"wrap_for_grad", "run_backward", "SingleLevelFunction", "use_count"} <= set(NAMES)


def test_levels_are_numbered_from_one():
    level = _torch.enter_grad_level()
    try:
        assert level == _torch.interpreter_depth() == 1
        assert _torch.current_interpreter().level() == 1
    finally:
        _torch.exit_grad_level()
    assert _torch.peek_interpreter_stack() is None


def test_wrapping_and_unwrapping_give_the_same_object():
    t = torch.ones(2)
    level = _torch.enter_grad_level()
    try:
        wrapper = _torch.wrap_for_grad(t, level)
        assert _torch.is_wrapped(wrapper)
        assert _torch.wrapper_level(wrapper) == level
        assert _torch.unwrap_for_grad(wrapper, level) is t
        assert _torch.unwrap_for_grad(t, level) is t
    finally:
        _torch.exit_grad_level()
    assert _torch.unwrap_if_dead(wrapper) is t


def test_a_batch_dimension_comes_back():
    t = torch.ones(2, 3)
    level = _torch.enter_vmap_level(3, "error")
    try:
        batched = _torch.add_batch_dim(t, 1, level)
        value, dim = _torch.unwrap_batched(batched, level)
    finally:
        _torch.exit_vmap_level()
    assert value is t
    assert dim == 1


def test_a_cleared_stack_comes_back():
    _torch.enter_grad_level()
    try:
        with _torch.cleared_interpreter_stack():
            assert _torch.peek_interpreter_stack() is None
        assert _torch.interpreter_depth() == 1
    finally:
        _torch.exit_grad_level()


def test_nodes_are_numbered_in_order():
    x = torch.ones(2, requires_grad=True)
    start = _torch.next_sequence_number()
    first = x.sin()
    second = first.cos()
    numbers = [_torch.sequence_number(t.grad_fn) for t in (first, second)]
    assert start <= numbers[0] < numbers[1] < _torch.next_sequence_number()


def test_what_a_tape_saves_shows_in_the_counts():
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    before = _torch.use_count(y), _torch.storage_use_count(_torch.storage_key(y))
    z = y.sin()
    after = _torch.use_count(y), _torch.storage_use_count(_torch.storage_key(y))
    assert before[0] == 1
    assert after[0] > before[0]
    e = x.exp()  # saves its own result, as another tensor on the same memory
    assert _torch.storage_use_count(_torch.storage_key(e)) > before[1]
    del z


def test_a_weak_reference_knows_that_memory_is_gone():
    t = torch.ones(2)
    ref = _torch.StorageWeakRef(t.untyped_storage())
    view = t.view(2, 1)
    del t
    assert not ref.expired()
    del view
    assert ref.expired()


@pytest.mark.parametrize("f", [torch.sin, _torch_edges._Same.apply], ids=["torch's", "custom"])
def test_an_edge_stands_for_its_tensor(f):
    x = torch.ones(2, requires_grad=True)
    edge = _torch_edges.gradient_edge(f(x))
    one = torch.ones(2)
    (gradient,) = _torch.run_backward(
        (edge,), (one,), False, False, (x,), allow_unreachable=True, accumulate_grad=False
    )
    assert torch.equal(gradient, x.cos() if f is torch.sin else one)
    assert _torch_edges.gradient_edge(x) is x


def test_the_engine_numbers_its_runs():
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x.sin()
    y.register_hook(lambda g: seen.append(_torch.current_graph_task_id()))
    y.sum().backward()
    assert _torch.current_graph_task_id() == -1
    assert seen[0] >= 0


def test_torch_func_wraps_where_it_is_observed():
    seen = []
    wrap = _torch.wrap_for_grad
    _torch_observed.observe_wrapping(lambda t, level: seen.append(t) or wrap(t, level))
    try:
        x = torch.ones(2)
        torch.func.grad(lambda x: x.sum())(x)
    finally:
        _torch_observed.stop_observing_wrapping()
    assert any(t is x for t in seen)
    seen.clear()
    torch.func.grad(lambda x: x.sum())(x)
    assert not seen


def test_a_name_in_a_profile():
    """And no operation that a mode could see."""
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        torch.profiler.profile(activities=activities, acc_events=True) as profile,
        Mode(),
        _torch.record_function("mine"),
    ):
        pass
    assert "mine" in [event.name for event in profile.events()]
    assert not seen


def test_the_settings_of_torchs_checkpoint():
    assert _torch_compiler.checkpoint_overrules() == (None, None)
    with checkpoint.set_checkpoint_early_stop(False):
        assert _torch_compiler.checkpoint_overrules() == (False, None)
    with checkpoint.set_checkpoint_debug_enabled(True):
        assert _torch_compiler.checkpoint_overrules() == (None, True)


def test_the_policy_of_selective_contexts():
    policy = lambda *_: True  # noqa: E731
    contexts = checkpoint.create_selective_checkpoint_contexts(policy)
    assert _torch_compiler.selective_policy(contexts[0]) is policy
    assert _torch_compiler.selective_policy(contexts[1]) is None


def test_torchs_checkpoint_is_found():
    function = _torch_compiler.torch_checkpoint()
    assert function.__name__ == "checkpoint"
    assert not function.__code__.co_freevars


def test_views_are_told_by_their_schema():
    aten = torch.ops.aten
    assert _torch_operators.is_view(aten.view.default)
    assert _torch_operators.is_view(aten.split.Tensor)
    assert not _torch_operators.is_view(aten.add_.Tensor)
    assert not _torch_operators.is_view(aten.clone.default)


def test_zeros_without_memory_and_negatives_as_flags():
    assert _torch_operators.is_zero_tensor(torch._efficientzerotensor(3))
    assert not _torch_operators.is_zero_tensor(torch.zeros(3))
    assert torch.equal(_torch_operators.neg_view(torch.ones(3)), -torch.ones(3))


def test_the_engine_says_which_node_it_runs():
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x.sin()
    y.register_hook(lambda g: seen.append(_torch.current_node_number()))
    y.sum().backward()
    assert seen == [_torch.sequence_number(y.grad_fn)]
    assert _torch.current_node_number() == -1
    assert _torch.current_node() is None


def test_a_custom_function_is_called_by_a_higher_order_operator():
    from torch._functorch.autograd_function import custom_function_call

    assert isinstance(custom_function_call, _torch.HigherOrderOperator)


def test_what_the_compiler_is_not_to_look_into():
    @_torch_compiler.uncompiled
    def broken(x):
        return torch.sin(x) if torch.compiler.is_compiling() else torch.cos(x)

    compiled = torch.compile(lambda x: broken(x), backend="eager")
    assert torch.equal(compiled(torch.ones(2)), torch.ones(2).cos())
    torch._dynamo.reset()


def test_what_counts_collectives():
    assert not _torch_operators.hooks_modules()
    with CommDebugMode():
        assert _torch_operators.hooks_modules()


def test_the_older_vmap():
    t = torch.arange(6.0).view(3, 2)
    assert _torch_vmap.legacy_vmap_level() == 0
    level = _torch_vmap.enter_legacy_vmap()
    try:
        assert _torch_vmap.legacy_vmap_level() == level == 1
        batched = _torch_vmap.add_legacy_batch_dim(t, 0, level)
        assert _torch_vmap.is_legacy_batched(batched)
        assert not _torch.is_wrapped(batched)
        assert torch.equal(_torch_vmap.remove_legacy_batch_dim(batched * 2, level, 0, 0), t * 2)
        with _torch_vmap.outside_legacy_vmap():
            assert _torch_vmap.legacy_vmap_level() == 0
            torch.rand(1)
        assert _torch_vmap.legacy_vmap_level() == 1
    finally:
        _torch_vmap.exit_legacy_vmap()


def test_modes_that_only_observe_do_not_keep_fused_kernels_from_running():
    class Mode(torch.overrides.TorchFunctionMode):
        only_observes = True

        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    class Subclass(torch.Tensor):
        pass

    original, t = torch.overrides.has_torch_function, torch.ones(2)
    _torch_observed.observe_wrapping(_torch.wrap_for_grad)
    try:
        with Mode():
            assert not torch.overrides.has_torch_function((t, None))
            assert not torch.overrides.has_torch_function((3, 1.0))  # as torch.sym_max asks
            assert torch.overrides.has_torch_function((t, t.as_subclass(Subclass)))
            # A Function under transforms is one call of an operator that takes functions.
            assert torch.overrides.has_torch_function((torch.autograd.Function, t))
            with torch.device("cpu"):
                assert torch.overrides.has_torch_function((t,))
        assert not torch.overrides.has_torch_function((t,))
    finally:
        _torch_observed.stop_observing_wrapping()
    assert torch.overrides.has_torch_function is original


def test_hooks_for_what_tapes_save_can_be_set_aside():
    seen = []
    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(1) or t, lambda t: t):
        assert _torch_globals.foreign_saved_tensors_hooks()
        with _torch_globals.without_saved_tensors_hooks():
            assert not _torch_globals.foreign_saved_tensors_hooks()
            x.exp()
        assert not seen
        x.exp()
    assert seen
    with torch.autograd.graph.save_on_cpu():
        assert _torch_globals.foreign_saved_tensors_hooks()

    def checkpointed(x):
        assert _torch_globals.hooks_on_saved(True) is not None
        assert not _torch_globals.foreign_saved_tensors_hooks()
        return x.exp()

    checkpoint.checkpoint(checkpointed, x, use_reentrant=False)


def test_fake_tensors():
    with _torch_fake.FakeTensorMode():
        t = torch.empty(3)
        assert isinstance(t, _torch_fake.FakeTensor)
        with pytest.raises(_torch_fake.DataDependentOutputException):
            bool(t.sum() > 0)
        with pytest.raises(_torch_fake.DynamicOutputShapeException):
            t.nonzero()


def test_dispatch_modes_can_be_set_aside():
    with memory.LiveStorages() as storages, _torch.without_dispatch_modes():
        torch.ones(3)
    assert not storages.operations


def test_interpreters_know_their_transform():
    def f(x):
        (vmap,) = _torch.interpreters()
        assert _torch.coerced(vmap).batch_size() == 3
        return x

    torch.func.vmap(f)(torch.ones(3))


def test_what_batching_rules_run_below_vmap_is_on_what_is_inside():
    t = torch.ones(2, 3)
    level = _torch.enter_vmap_level(2, "error")
    try:
        inside, dim = _torch.unwrap_batched(_torch.add_batch_dim(t, 0, level), level)
        with _torch_norms.below_vmap(_torch_norms.BATCHED), _torch_norms.unseen():
            assert dim == 0
            assert (inside * 2).shape == (2, 3)
    finally:
        _torch.exit_vmap_level()


def test_a_node_learns_which_of_its_edges_a_backward_pass_comes_by():
    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            return sum(tensors)

        @staticmethod
        def backward(ctx, cotangent):
            reached.append([_torch.will_be_reached(node) for node, _ in ctx.next_functions])
            return (cotangent,) * 3

    reached = []
    leaf, other, constant = torch.ones(2, requires_grad=True), torch.ones(2), torch.ones(2)
    inner = other.requires_grad_() * 2
    out = Asks.apply(leaf, inner, constant).sum()
    for inputs in ([leaf], [other], [inner]):
        torch.autograd.grad(out, inputs, retain_graph=True)
    out.backward()
    assert reached == [
        [True, False, False],
        [False, True, False],
        [False, True, False],
        [True, True, False],
    ]


def test_a_backward_pass_without_compiled_autograd():
    """As `torch.func.grad` has its own."""
    x = torch.ones(2, requires_grad=True)
    with _torch_compiler.without_compiled_autograd():
        (gradient,) = torch.autograd.grad(x.sin().sum(), x)
    assert torch.equal(gradient, x.cos())
