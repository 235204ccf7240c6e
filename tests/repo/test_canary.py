"""Every private name of torch that functx uses still exists, and means what it is used for."""

import ast
import contextlib
import importlib
import sys

import pytest
import torch
from torch._higher_order_ops import wrap
from torch.utils.checkpoint import checkpoint

from functx import _torch
from functx._torch import compiler, control_flow, process_patches, slots

from . import house


def chains(module):
    """The names that a module reaches by attribute from what it imports: ``_C._functorch``."""
    for node in ast.walk(ast.parse(house.sources()[module].read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            chain = ast.unparse(node)
            if chain.partition(".")[0] in vars(importlib.import_module(module)):
                yield chain


@pytest.mark.parametrize(
    "module",
    [
        "functx._torch",
        *(f"functx._torch.{n}" for n in ("compiler", "graphs", "lowering", "pytrees")),
    ],
)
def test_each_name_exists(module):
    """Those that are reached as the module is imported exist if it can be."""
    found = {*chains(module)}
    for chain in found:
        eval(chain, dict(vars(importlib.import_module(module))))
    assert any(house.is_private(chain.partition(".")[2]) for chain in found)


def test_a_name_that_is_gone_is_found():
    with pytest.raises(AttributeError):
        eval("_C._no_such_name", vars(_torch).copy())


def test_levels_are_numbered_from_one_and_wrap_what_they_give_back():
    t = torch.ones(2)
    level = _torch.enter_grad()
    try:
        assert level == _torch.functorch_depth() == _torch.current_interpreter().level() == 1
        wrapper = _torch.wrap_grad(t, level)
        assert _torch.is_wrapped(wrapper)
        assert _torch.level_of(wrapper) == level
        assert _torch.unwrap_grad(wrapper, level) is _torch.inner_of(wrapper) is t
        with _torch.cleared_interpreter_stack():
            assert _torch.peek_interpreter() is None
    finally:
        _torch.leave_grad()
    assert _torch.alive(wrapper) is t


def test_a_backward_pass_clears_the_permission_to_call_requires_grad_():
    """What `functx._reverse_mode` puts back after its own, and knows others' by."""
    x = torch.ones(2)
    with _torch.RequiresGradAllowed():
        torch.func.vmap(lambda x: x.requires_grad_())(x)
        assert _torch.requires_grad_is_allowed()
        x.clone().requires_grad_().sum().backward()
        assert not _torch.requires_grad_is_allowed()
    with pytest.raises(RuntimeError, match=r"attempting to call Tensor\.requires_grad_"):
        torch.func.vmap(lambda x: x.requires_grad_())(x)


def test_what_a_tape_saves_shows_in_the_count_of_its_storage():
    y = torch.ones(2, requires_grad=True) * 2
    before = _torch.storage_use_count(_torch.storage_address(y))
    z = y.exp()  # saves its own result, as another tensor on the same memory
    assert _torch.storage_use_count(_torch.storage_address(z)) > before


def test_a_detached_tensor_counts_its_writes_with_the_other():
    class Mode(_torch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            made.append((out, _torch.detached_below_autograd(out)))
            return out

    made = []
    t = torch.ones(2)
    with Mode():
        t.sin()
    original, other = made[-1]
    original.add_(1)
    assert other._version == original._version


def test_torch_s_checkpoint_runs_what_its_attribute_names_and_its_graph_operator_calls_it():
    """`functx._torch.compiler.replace_checkpoint`, and how it knows calls of the operator."""
    called = []

    def replacement(*args, **options):
        called.append(sys._getframe(2).f_globals["__name__"])
        return args[0](*args[1:])

    def body(x):
        return (x.sin(),)

    compiler.replace_checkpoint(replacement)
    try:
        checkpoint(body, torch.ones(2), use_reentrant=False)
        graph = torch.fx.symbolic_trace(body)
        wrap.tag_activation_checkpoint(graph, torch.ones(2))
        wrap.wrap_activation_checkpoint(graph, torch.ones(2))
    finally:
        compiler.replace_checkpoint(None)
    assert called == [__name__, wrap.__name__, wrap.__name__]


def test_guards_of_torch_know_what_a_tensor_is_and_that_none_is_given_twice():
    x = torch.ones(2, 3)
    guards = compiler.TensorGuards(
        x, dynamic_dims_sizes=[[None, 3]], dynamic_dims_strides=[[None, None]]
    )
    assert guards.check(torch.zeros(4, 3))
    others = x[:, :2], x.double(), x.clone().requires_grad_(), torch.nn.Parameter(x)
    assert not any(map(guards.check, others))
    pair = compiler.TensorGuards(
        x, x + 1, dynamic_dims_sizes=[[2, 3]] * 2, dynamic_dims_strides=[[3, 1]] * 2
    )
    assert pair.check(x, torch.zeros(2, 3))
    assert not pair.check(x, x)
    z = torch.ones(2, dtype=torch.complex64)
    guards = compiler.TensorGuards(z, dynamic_dims_sizes=[[2]], dynamic_dims_strides=[[1]])
    assert not guards.check(z.conj())


def test_hooks_of_all_modules_are_in_dicts_that_stay():
    modules = torch.nn.modules.module
    registers = (
        *(modules.register_module_forward_hook, modules.register_module_forward_pre_hook),
        *(
            modules.register_module_full_backward_hook,
            modules.register_module_buffer_registration_hook,
        ),
    )
    for register in registers:
        handle = register(lambda *args: None)
        try:
            assert any(compiler.HOOKS_OF_ALL_MODULES)
        finally:
            handle.remove()
        assert not any(compiler.HOOKS_OF_ALL_MODULES)


def test_a_compile_is_told_and_distributions_check_nothing_then():
    before = torch.distributions.Distribution._validate_args
    with compiler.compiling():
        assert torch.compiler.is_compiling()
        torch.distributions.Normal(0.0, -1.0)  # which it would refuse
    assert not torch.compiler.is_compiling()
    assert torch.distributions.Distribution._validate_args is before


def test_a_module_reads_its_tensors_from_the_dicts_that_slots_are_in():
    layer = torch.nn.LSTM(2, 2)
    layer.register_buffer("scale", torch.ones(2))
    for name, store in (("weight_ih_l0", layer._parameters), ("scale", layer._buffers)):
        slot, value = slots.Slot(layer, name), torch.zeros(())
        assert slot.store is store
        slot.put(value)
        assert getattr(layer, name) is value


def test_recurrent_layers_note_the_weights_that_they_were_called_with():
    layer = torch.nn.LSTM(2, 2)
    own, other = layer.weight_ih_l0, torch.zeros(8, 2)
    ((_, state),) = slots.recurrent_states([layer])
    assert state["_flat_weights"][0] is own
    assert state["_flat_weight_refs"][0]() is own
    slots.Slot(layer, "weight_ih_l0").put(other)
    layer(torch.ones(1, 2))
    assert layer._flat_weights[0] is other


def test_the_body_of_apply_looks_up_what_unwraps_its_arguments_at_each_call(monkeypatch):
    """See docs/process_patches.md: under whatever name, and with nothing else in between."""
    code = torch.autograd.Function.apply.__func__.__code__
    assert process_patches.APPLY.__code__ is code
    given = []

    def shown(args):
        caller = sys._getframe(1)
        given.append((caller.f_code is code, caller.f_locals["cls"], args))
        return args

    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, n):
            return x.sin()

        @staticmethod
        def backward(ctx, g):
            return g, None

    apply, x = Sine.apply, torch.ones(2, requires_grad=True)
    monkeypatch.setattr(torch._functorch.utils, "unwrap_dead_wrappers", shown)
    apply(x, 3)
    assert given == [(True, Sine, (x, 3))]


def test_control_flow_operators_prepare_their_compilation_in_one_function(monkeypatch):
    """See docs/process_patches.md. They hand what they are given to the operator in eager."""
    before, given = torch._higher_order_ops.utils.setup_compilation_env, []

    @contextlib.contextmanager
    def shown():
        with control_flow.compiler_off(), Shows():
            yield "eager"

    class Shows(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            given.append(func)
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(torch._higher_order_ops.utils, "setup_compilation_env", shown)
    assert before is not torch._higher_order_ops.utils.setup_compilation_env
    torch.cond(torch.tensor(True), torch.sin, torch.cos, (torch.ones(2),))
    assert control_flow.cond_op in given


def test_a_node_of_a_region_is_made_without_that_body():
    assert not hasattr(_torch.SingleLevelFunction.apply, "__func__")  # it is C, of the base class
