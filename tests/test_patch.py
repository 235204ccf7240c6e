"""patch_checkpoint: whoever calls torch's checkpoint, however they came by it, calls functx."""

import functools
import gc
import inspect
import pickle
import subprocess
import sys
import textwrap
import threading
import types

import pytest
import torch
import torch.utils.checkpoint as theirs
from cases import numbers
from references import assert_same
from torch import nn
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.checkpoint import checkpoint as imported_before
from torch.utils.checkpoint import checkpoint_sequential as sequential_imported_before

import functx

X = numbers(3, 4)


class Holder:
    method = staticmethod(imported_before)

    def __init__(self):
        self._gradient_checkpointing_func = functools.partial(imported_before, use_reentrant=True)


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.function = functools.partial(functools.partial(imported_before), use_reentrant=False)

    def forward(self, x):
        return self.function(torch.sin, x)


def closed_over(checkpoint=imported_before):
    return lambda x: checkpoint(torch.sin, x, use_reentrant=False)


def imports_later(x):
    module = types.ModuleType("later")
    exec("from torch.utils.checkpoint import checkpoint as theirs", vars(module))
    return module.theirs(torch.sin, x, use_reentrant=False)


WAYS = {
    "attribute of torch": lambda x: theirs.checkpoint(torch.sin, x, use_reentrant=False),
    "imported before": lambda x: imported_before(torch.sin, x, use_reentrant=False),
    "imported later": imports_later,
    "attribute of a class": lambda x: Holder.method(torch.sin, x, use_reentrant=True),
    "partial on an object": lambda x: Holder()._gradient_checkpointing_func(torch.sin, x),
    "partial of a partial on a module": Wrapped(),
    "default, closed over": closed_over(),
    "CheckpointFunction": lambda x: CheckpointFunction.apply(torch.sin, True, x),
    "checkpoint_sequential": lambda x: sequential_imported_before(
        [torch.sin, torch.abs], 2, x, use_reentrant=False
    ),
    "checkpoint_wrapper": lambda x: __import__(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper", fromlist=["x"]
    ).checkpoint_wrapper(nn.Softplus())(x),
}


def of_fewer(function, *args, use_reentrant=None, **kwargs):
    """An earlier torch's, say."""


def of_more(
    function,
    *args,
    use_reentrant=None,
    context_fn=None,
    determinism_check=None,
    debug=None,
    early_stop=None,
    unheard_of=None,
    **kwargs,
):
    """A later torch's, say."""


def works(f):
    """Whether ``vmap(grad)`` of ``f`` works, which it does if no hook of torch's is used."""
    try:
        functx.vmap(functx.grad(lambda x: f(x).sum()))(X)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("way", WAYS)
def test_every_reference(way):
    f = WAYS[way]
    assert not works(f)
    with functx.patch_checkpoint():
        assert works(f)
        ours = functx.vmap(functx.grad(lambda x: f(x).sum()))(X)
    assert not works(f)
    plain = {"checkpoint_sequential": lambda x: x.sin().abs(), "checkpoint_wrapper": nn.Softplus()}
    expected = plain.get(way, torch.sin)
    assert_same(ours, functx.vmap(functx.grad(lambda x: expected(x).sum()))(X))


@pytest.mark.parametrize("way", WAYS)
def test_it_makes_a_region(way):
    x = X.clone().requires_grad_()
    with functx.patch_checkpoint():
        out = WAYS[way](x).sum()
    nodes, names = [out.grad_fn], []
    while nodes:
        node = nodes.pop()
        names.append(node.name())
        nodes += [n for n, _ in node.next_functions if n is not None]
    assert "RegionNodeBackward" in names


def test_options_mean_what_they_mean_to_functx():
    with functx.patch_checkpoint():
        with pytest.raises(ValueError, match="Unexpected keyword arguments: scale"):
            imported_before(torch.sin, X, use_reentrant=True, scale=1)
        with pytest.raises(TypeError, match="two context managers"):
            imported_before(torch.sin, X, use_reentrant=False, context_fn=lambda: None)


def test_no_warning_about_a_choice_that_does_not_matter(recwarn):
    with functx.patch_checkpoint():
        imported_before(torch.sin, X.clone().requires_grad_())
    assert not recwarn


class TestUndo:
    def test_everything_is_as_it_was(self):
        function = inspect.unwrap(imported_before)
        before = {
            "code": function.__code__,
            "defaults": (function.__defaults__, dict(function.__kwdefaults__)),
            "names": dict(vars(theirs)),
            "class": dict(vars(CheckpointFunction)),
        }
        with functx.patch_checkpoint():
            assert function.__code__ is not before["code"]
            assert theirs.checkpoint is imported_before
        assert function.__code__ is before["code"]
        assert (function.__defaults__, function.__kwdefaults__) == before["defaults"]
        assert vars(theirs) == before["names"]
        assert vars(CheckpointFunction) == before["class"]

    def test_after_an_exception(self):
        with pytest.raises(KeyError), functx.patch_checkpoint():
            raise KeyError
        assert not works(closed_over())

    def test_permanent(self):
        patch = functx.patch_checkpoint()
        try:
            assert works(closed_over())
            assert "in place" in repr(patch)
        finally:
            patch.undo()
        assert not works(closed_over())
        patch.undo()  # once is enough
        assert "undone" in repr(patch)

    def test_a_handle_that_is_dropped_stays_in_place(self):
        code = """
            import gc, torch, functx
            from torch.utils.checkpoint import checkpoint
            functx.patch_checkpoint()
            gc.collect()
            loss = lambda x: checkpoint(torch.sin, x, use_reentrant=False).sum()
            functx.vmap(functx.grad(loss))(torch.zeros(2, 3))
        """
        subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)

    def test_a_decorator(self):
        @functx.patch_checkpoint()
        def decorated():
            return works(closed_over())

        assert not works(closed_over())
        assert decorated()
        assert decorated.__name__ == "decorated"
        assert not works(closed_over())

    def test_nested(self):
        with functx.patch_checkpoint():
            with functx.patch_checkpoint():
                assert works(closed_over())
            assert works(closed_over())
        assert not works(closed_over())

    def test_in_any_order(self):
        first, second = functx.patch_checkpoint(), functx.patch_checkpoint()
        first.undo()
        assert works(closed_over())
        second.undo()
        assert not works(closed_over())

    def test_again(self):
        patch = functx.patch_checkpoint()
        patch.undo()
        with patch:
            assert works(closed_over())
            with patch:
                pass
        assert not works(closed_over())

    def test_names_that_were_rebound_meanwhile(self, monkeypatch):
        module = types.ModuleType("third_party")
        module.checkpoint = imported_before
        own = lambda f, *args, **options: f(*args)  # noqa: E731
        with functx.patch_checkpoint():
            monkeypatch.setattr(theirs, "checkpoint", own)
            module.checkpoint = own
        assert theirs.checkpoint is own
        assert module.checkpoint is own
        assert not works(closed_over())

    def test_a_name_that_was_rebound_before(self, monkeypatch):
        own = lambda f, *args, **options: imported_before(f, *args, use_reentrant=False)  # noqa: E731
        monkeypatch.setattr(theirs, "checkpoint", own)
        with functx.patch_checkpoint():
            assert works(lambda x: theirs.checkpoint(torch.sin, x))
        assert theirs.checkpoint is own

    def test_code_that_somebody_else_exchanged_is_theirs(self):
        function = inspect.unwrap(imported_before)
        was, other = function.__code__, (lambda *args, **kwargs: "mine").__code__
        try:
            with functx.patch_checkpoint():
                function.__code__ = other
            assert function.__code__ is other
        finally:
            function.__code__ = was

    def test_backward_after_it(self):
        x = X.clone().requires_grad_()
        with functx.patch_checkpoint():
            out = imported_before(lambda x: imported_before(torch.sin, x), x)
        out.sum().backward()
        assert_same(x.grad, X.cos())


class TestIdentity:
    def test_signature(self):
        before = inspect.signature(imported_before)
        with functx.patch_checkpoint():
            assert inspect.signature(imported_before) == before

    def test_pickles_name_the_function(self):
        partial = functools.partial(imported_before, use_reentrant=False)
        with functx.patch_checkpoint():
            data = pickle.dumps(partial)
        assert pickle.loads(data).func is imported_before

    @pytest.mark.parametrize("other", [of_fewer, of_more])
    def test_a_signature_that_is_not_known(self, monkeypatch, other):
        monkeypatch.setattr(functx._patch._torch_compiler, "torch_checkpoint", lambda: other)
        with pytest.raises(RuntimeError, match=r"use_reentrant.*functx\.checkpoint"):
            functx.patch_checkpoint()
        monkeypatch.undo()
        assert not works(closed_over())
        with functx.patch_checkpoint():
            assert works(closed_over())

    def test_a_function_that_was_replaced_before_functx_was_imported(self):
        code = """
            import torch.utils.checkpoint
            torch.utils.checkpoint.checkpoint = lambda f, *args: f(*args)
            import functx
            try:
                functx.patch_checkpoint()
            except RuntimeError as error:
                assert "Import functx before" in str(error)
            else:
                raise AssertionError
        """
        subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)


def test_threads():
    """Patches of many threads overlap; each sees functx inside its own, and torch at the end."""
    failures = []

    def work():
        for _ in range(20):
            with functx.patch_checkpoint():
                if not works(closed_over()):
                    failures.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert not works(closed_over())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_keeps_the_compilers_implementation(backend):
    def f(x):
        return imported_before(lambda x: torch.sin(x.sin()), x, use_reentrant=False).sum()

    expected = functx.grad(lambda x: x.sin().sin().sum())(X)
    torch._dynamo.reset()
    x = X.clone().requires_grad_()
    with functx.patch_checkpoint():
        torch.compile(f, backend=backend, fullgraph=True)(x).backward()
    assert_same(x.grad, expected, eps=4)
    torch._dynamo.reset()
    gc.collect()


def test_saved_tensors_hooks_that_are_to_be_respected():
    """No hook sees what a region keeps: an error, where there are both."""
    contexts = functools.partial(
        theirs.create_selective_checkpoint_contexts,
        [torch.ops.aten.sin.default],
    )
    x = X[0].clone().requires_grad_()

    def call(respect, **options):
        return functx.checkpoint(
            torch.sin, x, use_reentrant=False, respect_saved_tensors_hooks=respect, **options
        )

    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    call(True, context_fn=contexts)
    with hooks:
        call(True)
        call(None, context_fn=contexts)
        with pytest.raises(functx.RematError, match="offload"):
            call(True, context_fn=contexts)
    with pytest.raises(ValueError, match="respect_saved_tensors_hooks"):
        functx.checkpoint(torch.sin, x, use_reentrant=True, respect_saved_tensors_hooks=True)
