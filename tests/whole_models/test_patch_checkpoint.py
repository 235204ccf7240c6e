"""patch_checkpoint: modules that call torch's checkpoint call functx."""

import functools
import gc
import sys
import types

import pytest
import torch
import torch.utils.checkpoint as theirs
from cases import numbers
from references import assert_same
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.checkpoint import checkpoint_sequential as sequential

import functx
from functx import _patch

X = numbers(3, 4)
ORIGINAL = [checkpoint]  # where no patch finds it


def imported_before(x):
    return checkpoint(torch.sin, x, use_reentrant=False)


def imported_later(x):
    module = types.ModuleType("later")
    exec("from torch.utils.checkpoint import checkpoint as theirs", vars(module))
    return module.theirs(torch.sin, x, use_reentrant=False)


def test_hooks_that_ask_embeddings_for_gradients_work_under_transforms_while_it_lasts():
    embedding = nn.Linear(4, 4).double()

    def hook(module, args, out):
        out.requires_grad_(True)

    f = functx.vmap(functx.grad(lambda x: checkpoint(torch.sin, embedding(x)).sum()))
    with functx.patch_checkpoint():
        expected = f(X)
        embedding.register_forward_hook(hook)
        assert_same(f(X), expected)
    with pytest.raises(RuntimeError, match="requires_grad_"):
        functx.vmap(functx.grad(lambda x: embedding(x).sum()))(X)


WAYS = {
    "attribute of torch": lambda x: theirs.checkpoint(torch.sin, x, use_reentrant=False),
    "imported before": imported_before,
    "imported later": imported_later,
    "reentrant": lambda x: checkpoint(torch.sin, x, use_reentrant=True),
    "partial made later": lambda x: functools.partial(checkpoint, use_reentrant=True)(torch.sin, x),
    "checkpoint_sequential": lambda x: sequential(
        [torch.sin, torch.abs], 2, x, use_reentrant=False
    ),
    "checkpoint_wrapper": lambda x: __import__(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper", fromlist=["x"]
    ).checkpoint_wrapper(nn.Softplus())(x),
}


def works(f=imported_before):
    """Whether ``vmap(grad)`` of ``f`` works, which it does if no hook of torch's is used."""
    try:
        functx.vmap(functx.grad(lambda x: f(x).sum()))(X)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_call_it_makes_a_region(way):
    f = WAYS[way]
    assert not works(f)
    with functx.patch_checkpoint():
        assert works(f)
        ours = functx.vmap(functx.grad(lambda x: f(x).sum()))(X)
        out = f(X.clone().requires_grad_()).sum()
    assert not works(f)
    plain = {"checkpoint_sequential": lambda x: x.sin().abs(), "checkpoint_wrapper": nn.Softplus()}
    expected = plain.get(way, torch.sin)
    assert_same(ours, functx.vmap(functx.grad(lambda x: expected(x).sum()))(X))
    nodes, names = [out.grad_fn], []
    while nodes:
        node = nodes.pop()
        names.append(node.name())
        nodes += [n for n, _ in node.next_functions if n is not None]
    assert "RegionNodeBackward" in names


def test_options_mean_what_they_mean_to_functx():
    with functx.patch_checkpoint():
        with pytest.raises(ValueError, match="Unexpected keyword arguments: scale"):
            checkpoint(torch.sin, X, use_reentrant=True, scale=1)
        with pytest.raises(TypeError, match="two context managers"):
            checkpoint(torch.sin, X, use_reentrant=False, context_fn=lambda: None)


class TestUndo:
    def test_every_module_is_as_it_was(self):
        def names():
            modules = {**sys.modules}
            return {k: dict(vars(m)) for k, m in modules.items() if k in ("torch", __name__)}

        before, code = names(), ORIGINAL[0].__code__
        with functx.patch_checkpoint():
            assert theirs.checkpoint is checkpoint is not ORIGINAL[0]
            assert ORIGINAL[0].__code__ is code
        assert theirs.checkpoint is checkpoint is ORIGINAL[0]
        assert names() == before

    def test_without_a_context_it_stays_in_place(self):
        patch = functx.patch_checkpoint()
        try:
            assert works()
        finally:
            patch.undo()
        assert not works()
        patch.undo()  # once is enough

    def test_a_handle_that_is_dropped_stays_in_place(self):
        functx.patch_checkpoint()
        gc.collect()
        try:
            assert works()
        finally:
            last = functx.patch_checkpoint()
            _patch._active -= 1  # for the first one, whose handle is gone
            last.undo()
        assert not works()

    def test_an_exception_undoes_it(self):
        with pytest.raises(ZeroDivisionError), functx.patch_checkpoint():
            raise ZeroDivisionError
        assert not works()

    def test_patches_nest_and_end_in_any_order(self):
        first, second = functx.patch_checkpoint(), functx.patch_checkpoint()
        with functx.patch_checkpoint():
            assert works()
        first.undo()
        assert works()
        second.undo()
        assert not works()

    def test_regions_outlive_it(self):
        call = lambda f, x: checkpoint(f, x, use_reentrant=False)
        x = X.clone().requires_grad_()
        with functx.patch_checkpoint():
            out = call(lambda x: x.sin().sin(), x)
            nested = call(lambda x: call(torch.sin, x).sin(), x)
        out.sum().backward()
        assert_same(x.grad, X.cos() * X.sin().cos(), eps=4)
        with pytest.raises(functx.ReplayError):  # torch's checkpoint would run inside
            nested.sum().backward()


# The compiler takes seconds.
def test_compiled_code_keeps_the_compilers_implementation():
    f = lambda x: checkpoint(lambda x: torch.sin(x.sin()), x, use_reentrant=False).sum()
    expected = functx.grad(lambda x: x.sin().sin().sum())(X)
    torch._dynamo.reset()
    x = X.clone().requires_grad_()
    with functx.patch_checkpoint():
        torch.compile(f, backend="aot_eager", fullgraph=True)(x).backward()
    assert_same(x.grad, expected, eps=4)
    torch._dynamo.reset()
    gc.collect()
