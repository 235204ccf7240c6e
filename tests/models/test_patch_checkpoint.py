"""patch_checkpoint: code that calls torch's checkpoint runs functx's.

The kind: every way in which code can hold torch's function, and every library that calls it, is
covered, whenever it got hold of it; torch's function and all modules stay as they are. Where hooks
of something else are met under the patch, the error does not advise the patch.
"""

import functools
import gc
import pickle
import sys
import types

import pytest
import torch
import torch.utils.checkpoint as theirs
from cases import numbers
from references import assert_same
from torch import nn
from torch.distributed._composable import checkpoint as composable
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint
from torch.utils.checkpoint import checkpoint_sequential as sequential

import functx
from functx._models import patch as _patch
from functx._torch import compiler

X = numbers(3, 4)
# Where no module has it as a name.
ORIGINAL = [checkpoint]
PARTIAL = functools.partial(checkpoint, use_reentrant=True)
WRAPPED = checkpoint_wrapper(nn.Softplus())


def imported_before(x):
    return checkpoint(torch.sin, x, use_reentrant=False)


def imported_later(x):
    module = types.ModuleType("later")
    exec("from torch.utils.checkpoint import checkpoint as theirs", vars(module))
    return module.theirs(torch.sin, x, use_reentrant=False)


def test_hooks_that_ask_embeddings_for_gradients_work_under_transforms_with_it_and_without():
    embedding = nn.Linear(4, 4).double()

    def hook(module, args, out):
        out.requires_grad_(True)

    f = functx.vmap(functx.grad(lambda x: checkpoint(torch.sin, embedding(x)).sum()))
    with functx.patch_checkpoint():
        expected = f(X)
        embedding.register_forward_hook(hook)
        assert_same(f(X), expected)
    ones = functx.vmap(functx.grad(lambda x: embedding(x).sum()))(X)
    assert_same(ones, embedding.weight.sum(0).expand(3, 4), eps=4)


WAYS = {
    "attribute of torch": lambda x: theirs.checkpoint(torch.sin, x, use_reentrant=False),
    "imported before": imported_before,
    "imported later": imported_later,
    "reentrant": lambda x: checkpoint(torch.sin, x, use_reentrant=True),
    "held in a list": lambda x: ORIGINAL[0](torch.sin, x, use_reentrant=False),
    "partial made before": lambda x: PARTIAL(torch.sin, x),
    "keyword argument": lambda x: checkpoint(function=lambda: x.sin(), use_reentrant=False),
    "partial made later": lambda x: functools.partial(checkpoint, use_reentrant=True)(torch.sin, x),
    "checkpoint_sequential": lambda x: sequential(
        [torch.sin, torch.abs], 2, x, use_reentrant=False
    ),
    "checkpoint_wrapper made before": lambda x: WRAPPED(x),
    "checkpoint_wrapper made later": lambda x: checkpoint_wrapper(nn.Softplus())(x),
}
if hasattr(theirs, "_CheckpointedFunction"):  # since torch 2.14
    DECORATED = checkpoint(use_reentrant=False)(torch.sin)
    WAYS["decorated before"] = lambda x: DECORATED(x)
    WAYS["decorated later"] = lambda x: checkpoint(use_reentrant=True)(torch.sin)(x)


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
    expected = plain.get(way.partition(" ")[0], torch.sin)
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


class TestHooksThatAreNotOfCheckpoint:
    def offloaded(self, x):
        with torch.autograd.graph.save_on_cpu():
            return x.sin()

    def composed(self, x):
        return composable(nn.Softplus())(x)

    def hooked(self, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            return x.sin()

    @pytest.mark.parametrize("name", ["composed", "offloaded", "hooked"])
    @pytest.mark.parametrize("transform", [functx.grad, functx.hessian, torch.func.grad])
    def test_under_the_patch_the_error_does_not_advise_it(self, name, transform):
        f = lambda x: getattr(self, name)(x).sum()
        if transform is functx.grad:
            with pytest.raises(RuntimeError, match=r"call it under functx\.patch_checkpoint"):
                transform(f)(X)
        with functx.patch_checkpoint(), pytest.raises(RuntimeError) as info:
            transform(f)(X)
        said = "\n".join([str(info.value), *getattr(info.value, "__notes__", ())])
        assert "support saved tensor hooks" in said
        assert "call it under functx.patch_checkpoint" not in said
        if transform is not torch.func.grad:
            assert "functx.apply_remat(model, [module])" in said

    def test_what_the_error_advises_works(self):
        model = nn.Sequential(nn.Linear(4, 4).double(), nn.Softplus())
        expected = functx.grad(lambda x: model(x).sum())(X)
        functx.apply_remat(model, [model[1]])
        assert_same(functx.grad(lambda x: model(x).sum())(X), expected)

    def test_plain_autograd_and_transforms_without_a_tape_work_through_composable(self):
        module, x = composable(nn.Softplus()), X.clone().requires_grad_()
        with functx.patch_checkpoint():
            with pytest.raises(RuntimeError):
                functx.grad(lambda x: module(x).sum())(X)
            assert_same(functx.vmap(module)(X), nn.Softplus()(X))
            module(x).sum().backward()
        assert_same(x.grad, X.sigmoid(), eps=4)


def test_a_function_that_another_library_put_there_is_an_error_that_names_it(monkeypatch):
    def theirs_of_old(function, *args):
        return function(*args)

    monkeypatch.setattr(compiler, "_decorator", theirs_of_old)
    monkeypatch.setattr(compiler, "_checkpoint_body", None)
    with pytest.raises(RuntimeError, match=r"theirs_of_old.*another library.*apply_remat"):
        functx.patch_checkpoint()
    assert _patch._active == 0


class TestUndo:
    def test_torch_s_function_and_every_module_stay_as_they_are(self):
        def names():
            modules = {**sys.modules}
            of_torch = [k for k in modules if k.startswith("torch.utils.checkpoint")]
            return {k: dict(vars(modules[k])) for k in ("torch", __name__, *of_torch)}

        before, code = names(), ORIGINAL[0].__code__
        with functx.patch_checkpoint():
            assert theirs.checkpoint is checkpoint is ORIGINAL[0]
            assert ORIGINAL[0].__code__ is code
            assert names() == before
        assert names() == before

    def test_a_pickle_made_under_it_holds_torch_s_function(self):
        with functx.patch_checkpoint():
            pickled = pickle.dumps(functools.partial(checkpoint, use_reentrant=False))
        assert pickle.loads(pickled).func is ORIGINAL[0]

    @pytest.mark.parametrize("called", [True, False], ids=["called before", "never called before"])
    def test_what_torch_runs_is_what_it_ran_before(self, called):
        body = ORIGINAL[0].__wrapped__
        vars(body).pop("__dynamo_disable", None)
        if called:
            imported_before(X)
        before = dict(vars(body))
        with functx.patch_checkpoint():
            imported_before(X)
        assert dict(vars(body)) == before
        assert_same(imported_before(X), X.sin())

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
