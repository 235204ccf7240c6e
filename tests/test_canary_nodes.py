"""Torch's own part of letting memory go: what the engine counts on."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from functx import _torch, _torch_modules, _torch_nodes
from functx._remat._tapes import held_by_python


def test_a_hook_before_a_node_lets_the_engine_let_go():
    """Of the cotangent: the node's own arguments are then what the hook gave."""
    held = []

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            _torch_nodes.register_prehook(ctx, hook)
            return x.view_as(x)

        @staticmethod
        def backward(ctx, g):
            held.append(_torch.use_count(held.pop()))
            return g

    def hook(gradients):
        held.append(gradients[0])
        return (torch.zeros(()).expand(3),)

    (2 * Node.apply(torch.ones(3, requires_grad=True))).sum().backward()
    assert held == [1]


def an_alias_function():
    """A Function of its own each time: what is wrapped of its nodes stays wrapped."""

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, g):
            return g

    return Node


def test_registration_of_hooks_can_be_wrapped():
    Node, seen = an_alias_function(), []

    def wrapper(register):
        def registering(node, hook):
            seen.append(hook)
            return register(node, hook)

        return registering

    _torch_nodes.wrap_hook_registration(Node, wrapper)
    node = Node.apply(torch.ones(3, requires_grad=True)).grad_fn
    hooks = [lambda *_: None, lambda *_: None]
    try:
        node.register_prehook(hooks[0])
        node.register_hook(hooks[1])
    except RuntimeError:  # torch 2.11 lets nobody hang hooks on nodes of Functions
        assert torch.__version__.startswith("2.11")
    else:
        assert seen == hooks


def test_a_tensor_can_be_taken_off_its_memory():
    """An alias, also one that is a leaf of a tape; others are not concerned."""
    t = torch.ones(3)
    alias = t.detach().requires_grad_()
    doubled = 2 * alias
    count = _torch.storage_use_count(_torch.storage_key(t))
    alias.data = torch.zeros(()).expand(3)
    assert _torch.storage_use_count(_torch.storage_key(t)) == count - 1
    assert torch.equal(torch.autograd.grad(doubled.sum(), alias)[0], torch.full((3,), 2.0))


def test_hooks_of_a_tensor_are_known():
    x = torch.ones(2, requires_grad=True)
    for t in (x, x * 2):
        assert not _torch_nodes.has_hooks(t)
        handle = t.register_hook(lambda g: g)
        assert _torch_nodes.has_hooks(t)
        handle.remove()
        assert not _torch_nodes.has_hooks(t)


def test_the_engine_says_whether_a_tape_stays():
    """And a hook can be hung before nodes of torch's own and of custom Functions alike."""
    seen = []

    def hook(gradients):
        seen.append(_torch_nodes.graph_is_kept())

    x = torch.ones(3, requires_grad=True)
    y = an_alias_function().apply(x.sin())
    _torch_nodes.hang_before(y.grad_fn, hook)
    _torch_nodes.hang_before(y.grad_fn.next_functions[0][0], hook)
    for keeps in (True, False):
        y.sum().backward(retain_graph=keeps)
    assert seen == [True, True, False, False]


def test_nodes_run_by_their_number():
    """The highest first."""
    called = []
    x = torch.ones(3, requires_grad=True)
    first, second = x.sin(), x.cos()
    for name, t in (("first", first), ("second", second)):
        t.register_hook(lambda g, name=name: called.append(name))
    _torch_nodes.number(second.grad_fn, first.grad_fn._sequence_nr() - 1)
    (first + second).sum().backward()
    assert called == ["first", "second"]


def test_the_hooks_of_several_tensors_are_known():
    """They count how often they are called: not so where the first gradient is enough."""
    for mode, known in (("all", True), ("any", False)):
        ys = [torch.ones(2, requires_grad=True) * 2 for _ in range(2)]
        torch.autograd.graph.register_multi_grad_hook(ys, lambda g: None, mode=mode)
        for y in ys:
            (hook,) = y._backward_hooks.values()
            assert _torch_nodes.is_of_several(hook) == known
    assert not _torch_nodes.is_of_several(lambda g: None)


class _Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ran = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ran.append(func)
        return func(*args, **(kwargs or {}))


def test_a_leaf_is_made_over_a_tensor_unseen():
    """Over the same memory, whose writes it counts; a tensor, also over a parameter."""
    t = torch.nn.Parameter(torch.ones(3))
    with _Seen() as seen:
        leaf = _torch_nodes.tensor_over(t, True)
    assert seen.ran == []
    assert type(leaf) is torch.Tensor
    assert leaf.is_leaf
    assert leaf.requires_grad
    assert leaf.data_ptr() == t.data_ptr()
    assert not leaf._is_view()
    assert type(_torch_nodes.tensor_over(leaf, True, torch.nn.Parameter)) is torch.nn.Parameter
    with torch.no_grad():
        t.add_(1)
    assert leaf._version == t._version == 1
    (gradient,) = torch.autograd.grad(leaf.square().sum(), leaf)
    assert torch.equal(gradient, torch.full((3,), 4.0))
    assert t.grad is None


def test_the_engine_runs_inside_a_backward_as_torch_calls_it():
    """And what torch leaves for the threads of other devices is there afterwards."""
    x, left = torch.ones(2, requires_grad=True), []

    def hook(gradient):
        left.append(torch._C._is_key_in_tls("context"))
        with torch.enable_grad():
            edge, cotangent = (x.sin(),), (gradient,)
        (inner,) = _torch.run_backward(
            edge, cotangent, False, False, (x,), allow_unreachable=True, accumulate_grad=False
        )
        left.append(torch._C._is_key_in_tls("context"))
        return inner

    y = x * 1.0
    y.register_hook(hook)
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(2).cos())
    assert left[0] == left[1]


def test_python_and_tapes_count_as_the_engine_believes():
    """Each reference of Python's counts, a variable or none; all that C++ holds counts as none."""
    x = torch.ones(3, requires_grad=True)
    made = weakref.ref(x.sin())
    assert made() is None
    held = [x.sin()]
    made = weakref.ref(held[0])
    assert held_by_python([made()]) == 1
    held *= 2
    assert held_by_python([made()]) == 2
    tape = held[0].sin().grad_fn, held[0].cos().grad_fn
    assert held_by_python([made()]) == 2
    held.clear()
    assert held_by_python([made()]) == 0
    assert tape


def test_a_tensor_becomes_another_one():
    """Whoever holds it; also a wrapper whose level has ended. Not where C++ holds it."""
    held = []

    def inner(x):
        held.append(x.sin())
        return x.sum()

    def outer(x):
        torch.func.grad(inner)(x)
        (left,) = held
        assert _torch.is_grad_wrapper(left)
        assert _torch_nodes.can_become(left)
        assert _torch_nodes.become(left, x.cos())
        return (held[0] * x).sum()

    x = torch.arange(3.0)
    torch.testing.assert_close(torch.func.grad(outer)(x), x.cos() - x * x.sin())
    t = torch.ones(3, requires_grad=True).sin()
    tape = t.sin()
    assert not _torch_nodes.become(t, torch.ones(3))
    assert tape.grad_fn is not None


def test_a_leaf_behind_a_node_gets_its_gradient_as_it_is():
    """Also a sparse one; and what is no leaf, or on no tape, stays what it is."""
    leaf = torch.ones(3, requires_grad=True)
    behind = _torch_nodes.behind_a_node(leaf)
    assert behind.grad_fn.next_functions[0][0].variable is leaf
    weight = torch.ones(3, 2, requires_grad=True)
    table = _torch_nodes.behind_a_node(weight)
    (g,) = torch.autograd.grad(
        torch.nn.functional.embedding(torch.tensor([1]), table, sparse=True).sum(), weight
    )
    assert g.is_sparse
    for other in (leaf * 2, torch.ones(3), torch.eye(2).to_sparse().requires_grad_()):
        assert _torch_nodes.behind_a_node(other) is other


def test_whether_a_leaf_is_asked_for_is_an_exception_but_not_behind_a_node():
    told = []

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            return tensors[0] * 2

        @staticmethod
        def backward(ctx, g):
            for node, _ in ctx.next_functions:
                try:
                    told.append(torch._C._will_engine_execute_node(node))
                except RuntimeError:
                    told.append("raises")
            return (g,) * 4

    asked, other = (torch.ones(3, requires_grad=True) for _ in range(2))
    behind = map(_torch_nodes.behind_a_node, (asked, other))
    torch.autograd.grad(Node.apply(asked, other, *behind).sum(), asked)
    assert told == ["raises", False, True, False]


def test_nodes_of_torch_show_what_they_saved():
    """All of it; nodes of Functions, and those that torch does not generate, show nothing."""
    a, b = (torch.ones(3, requires_grad=True) for _ in range(2))
    product = a * b
    assert [t.data_ptr() for t in _torch_nodes.saved_by(product.grad_fn)] == [
        t.data_ptr() for t in (b, a)
    ]
    result = a.tanh()
    (saved,) = _torch_nodes.saved_by(result.grad_fn)
    assert saved.data_ptr() == result.data_ptr()
    assert _torch_nodes.saved_by(a.sum().grad_fn) == []
    assert len(_torch_nodes.saved_by(torch.stack([a, b]).prod(0).grad_fn)) == 2
    index = torch.tensor([0, 1])
    shown = [t.data_ptr() for t in _torch_nodes.saved_by(a[index].grad_fn)]
    assert shown == [index.data_ptr()]
    (accumulator, _), *_ = product.grad_fn.next_functions
    assert _torch_nodes.saved_by(accumulator) == []
    written = a.sin()
    view = written[:1]
    view.mul_(2)
    assert type(written.grad_fn).__name__ == "CopySlices"
    assert _torch_nodes.saved_by(written.grad_fn) is None
    assert _torch_nodes.saved_by(an_alias_function().apply(a).grad_fn) is None


def test_nodes_are_told_of_hooks_on_their_results():
    """The first one on each, with the dict that later ones are added to."""
    function, told, called = an_alias_function(), [], []
    _torch_nodes.tell_of_hooks(function, lambda *those: told.append(those))
    y = function.apply(torch.ones(3, requires_grad=True))
    assert not told
    y.register_hook(lambda g: called.append("a user's"))
    y.register_hook(lambda g: None)
    ((node, t, hooks, hang),) = told
    assert (node, len(hooks)) == (y.grad_fn, 2)
    assert t is y
    assert hooks is _torch_nodes.hooks_of(y)
    hang(y, {0: lambda g: called.append("another")})
    assert hooks is _torch_nodes.hooks_of(y)
    y.retain_grad()
    assert len(told) == 1
    y.sum().backward()
    assert called == ["a user's", "another"]


def test_hooks_that_are_hung_elsewhere_are_not_hung_on_a_node():
    function, called = an_alias_function(), []
    _torch_nodes.tell_of_hooks(function, lambda *those: True)
    y = function.apply(torch.ones(3, requires_grad=True))
    y.register_hook(called.append)
    y.sum().backward()
    assert not called


def test_a_hook_before_a_node_can_take_what_comes_there():
    """What it answers ``None`` for does not come further, and nothing is multiplied by zero."""
    x = torch.zeros(3, requires_grad=True)
    y = x.sqrt()
    _torch_nodes.hang_before(y.grad_fn, lambda gradients: (None,))
    (gradient,) = torch.autograd.grad(y.sum() + x.sum(), x)
    assert gradient.tolist() == [1, 1, 1]
    assert not _torch_nodes.is_of_python(y.grad_fn)
    assert _torch_nodes.is_of_python(an_alias_function().apply(x).grad_fn)


def test_hooks_of_all_modules():
    """Where they are; and that torch refuses to say of a leaf whether it will be reached."""
    assert not _torch_modules.global_hooks
    hook = torch.nn.modules.module.register_module_forward_pre_hook(lambda module, args: None)
    try:
        assert _torch_modules.global_hooks
    finally:
        hook.remove()
    assert not _torch_modules.global_hooks
    x = torch.ones(2, requires_grad=True)
    torch.autograd.graph.register_multi_grad_hook([x], lambda gradients: None)
    with pytest.raises(RuntimeError, match="leaf node"):
        torch.autograd.grad(x.sum(), x)


def test_what_is_called_when_a_pass_has_ended():
    """After all nodes of the pass that the thread is in, and not of the one around it."""
    seen = []

    def hook(g):
        _torch_nodes.when_the_pass_has_ended(lambda: seen.append("ended"))
        seen.append("hook")

    x = torch.ones(2, requires_grad=True)
    h = x * 2
    h.register_hook(hook)
    x.register_hook(lambda g: seen.append("last"))
    torch.autograd.grad(h.sum(), x)
    assert seen == ["hook", "last", "ended"]


def test_hooks_are_exchanged_by_their_handles():
    x = torch.ones(2, requires_grad=True)
    h = x * 2
    handles = [h.register_hook(lambda g: g * 3), h.grad_fn.register_prehook(lambda g: (g[0] * 5,))]
    for handle in handles:
        _torch_nodes.exchange_hook(handle, lambda hook: lambda g: hook(hook(g)))
    assert torch.equal(torch.autograd.grad(h.sum(), x, retain_graph=True)[0], x * 2 * 9 * 25)
    for handle in handles:
        handle.remove()
        _torch_nodes.exchange_hook(handle, lambda hook: 1 / 0)  # it hangs no more
    assert torch.equal(torch.autograd.grad(h.sum(), x)[0], x * 2)
    one, other = {1}, {2}
    assert _torch_nodes.belongs_to(handles[0], one) is None
    assert _torch_nodes.belongs_to(handles[0], other) is one
    del one
    assert _torch_nodes.belongs_to(handles[0], other) is None
