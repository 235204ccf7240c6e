"""Torch's own part of letting memory go: what the engine counts on."""

import torch

from functx import _torch, _torch_nodes


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


def test_registration_of_hooks_can_be_wrapped():
    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, g):
            return g

    seen = []

    def wrapper(register):
        def registering(node, hook):
            seen.append(hook)
            return register(node, hook)

        return registering

    _torch_nodes.wrap_hook_registration(Node, wrapper)
    node = Node.apply(torch.ones(3, requires_grad=True)).grad_fn
    hooks = [lambda *_: None, lambda *_: None]
    node.register_prehook(hooks[0])
    node.register_hook(hooks[1])
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

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, g):
            return g

    seen = []

    def hook(gradients):
        seen.append(_torch_nodes.graph_is_kept())

    x = torch.ones(3, requires_grad=True)
    y = Node.apply(x.sin())
    _torch_nodes.hang_before(y.grad_fn, hook)
    _torch_nodes.hang_before(y.grad_fn.next_functions[0][0], hook)
    for keeps in (True, False):
        y.sum().backward(retain_graph=keeps)
    assert seen == [True, True, False, False]
