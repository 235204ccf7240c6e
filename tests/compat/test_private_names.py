"""Canaries: the private names that ``compat`` relies on exist and behave."""

import ast
import pathlib

import jax
import jax.numpy as jnp
import pytest
import torch

import functx.compat
from functx.compat import _jax, _torch

HERE = pathlib.Path(functx.compat.__file__).parent
FILES = sorted(HERE.rglob("*.py"))


@pytest.mark.parametrize("name", _torch.__all__)
def test_torch_name_exists(name):
    assert getattr(_torch, name) is not None


def private_imports(source):
    """Modules with a private part, of torch or JAX, that a file imports."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{a.name}" for a in node.names]
        for name in names:
            root, *rest = name.split(".")
            private = any(p.startswith("_") and p != "__future__" for p in rest)
            if root in ("torch", "jax", "jaxlib") and (private or "experimental" in rest):
                found.append(name)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_private_names_live_in_one_file(path):
    if path.name not in ("_torch.py", "_jax.py"):
        assert not private_imports(path.read_text())


def test_the_check_can_fail():
    assert private_imports("from torch._ops import OpOverload\nimport jax._src.core")


def test_saved_residuals_are_pairs_of_a_value_and_words():
    (x, source), *rest = _jax.saved_residuals(jnp.sin, jnp.ones(3))
    assert isinstance(source, str)
    assert x.shape == (3,)
    assert not rest


def test_a_custom_function_is_seen_while_it_applies():
    seen = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(_torch.function_being_applied())
            return x * 1

        @staticmethod
        def backward(ctx, g):
            return g

    Probe.apply(torch.ones(1))
    assert seen == [Probe]
    assert _torch.function_being_applied() is None


def test_mutability_and_version():
    assert _torch.is_mutable(torch.ops.aten.add_.Tensor)
    assert not _torch.is_mutable(torch.ops.aten.add.Tensor)
    x = torch.zeros(1)
    before = _torch.version_of(x)
    x.add_(1)
    assert _torch.version_of(x) > before
    with torch.inference_mode():
        assert _torch.version_of(torch.zeros(1)) == -1


def test_base_of():
    x = torch.ones(2, 2)
    seen = []
    torch.vmap(torch.func.grad(lambda t: seen.append(_torch.base_of(t)) or t.sum()))(x)
    assert seen[0].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_batching_tracers_give_their_array():
    seen = []

    def f(x):
        seen.append(_jax.concrete(x))
        return x

    a = jnp.ones((2, 3))
    jax.vmap(f)(a)
    assert _jax.buffer_pointer(seen[0]) == _jax.buffer_pointer(a)


def test_x64_is_read_from_the_thread():
    assert not _jax.x64_enabled()
    with jax.enable_x64(True):
        assert _jax.x64_enabled()


def test_batch_dimensions_of_jax_are_seen():
    seen = []
    jax.jit(
        lambda x, y: jax.vmap(
            lambda x, y: seen.extend(map(_jax.batch_dim_of, (x, y))) or x, in_axes=(1, None)
        )(x, y)
    )(jnp.ones((2, 3)), jnp.ones(2))
    assert seen == [1, None]


def test_static_arguments_are_those_of_jit():
    def f(a, b, c):
        return a

    assert _jax.static_arguments(f, None, None) == ((), ())
    assert _jax.static_arguments(f, 1, None) == ((1,), ("b",))
    assert _jax.static_arguments(f, None, "c") == ((2,), ("c",))
    assert _jax.static_arguments(jax.jit(f, static_argnums=1), None, None) == ((1,), ("b",))


def test_batched_backward_passes_use_the_old_vmap():
    seen = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, g):
            level = _torch.old_vmap_level()
            front = _torch.old_batch_in_front(g, level)
            seen.append((level, front.shape))
            return _torch.with_old_batch_in_front(front, level)

    x = torch.ones(3, requires_grad=True)
    (g,) = torch.autograd.grad(Probe.apply(x), x, torch.eye(3), is_grads_batched=True)
    assert seen == [(1, (3, 3))]
    assert torch.equal(g, torch.eye(3))
    assert _torch.old_vmap_level() == 0


def test_jax_tells_whether_it_is_tracing():
    seen = []
    f = lambda x: seen.append(_jax.is_tracing()) or x  # noqa: E731
    f(1.0)
    jax.vmap(f)(jnp.ones(2))
    jax.jit(f)(1.0)
    jax.grad(f)(1.0)
    assert seen == [False, True, True, True]


def test_numbers_give_way_to_arrays():
    seen = jax.jit(lambda x: _jax.weakly_typed(x) * jnp.ones(2, jnp.bfloat16))(jnp.float32(2))
    assert seen.dtype == jnp.bfloat16
    assert _jax.weakly_typed(jnp.bool_(True)).dtype == jnp.bool_
