"""A JAX function in torch is its torch twin under any composition of transforms, traced once."""

import jax
import jax.numpy as jnp
import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import functx
from functx.compat import from_jax

# torch.func.linearize warns so of any function with more than one operation.
pytestmark = pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")

TRACES = []


def jax_twin(w, x):
    TRACES.append(w.shape)
    return jnp.tanh(w * x) + jnp.sin(x) * w


def torch_twin(w, x):
    return torch.tanh(w * x) + torch.sin(x) * w


W = torch.linspace(-1, 2, 3, dtype=torch.float64)
X = torch.linspace(-2, 1, 15, dtype=torch.float64).reshape(5, 3)
x = X[1]


def backward(f):
    leaves = [t.clone().requires_grad_() for t in (W, x)]
    f(*leaves).sum().backward()
    return [t.grad for t in leaves]


def double_backward(f):
    leaves = [t.clone().requires_grad_() for t in (W, x)]
    (g,) = torch.autograd.grad(f(*leaves).square().sum(), leaves[0], create_graph=True)
    return torch.autograd.grad(g.sin().sum(), leaves)


def total(f):
    return lambda *args: f(*args).sum()


# `t` is torch.func or functx, `f` the function.
COMPOSED = {
    "forward": lambda t, f: f(W, x),
    "backward": lambda t, f: backward(f),
    "double backward": lambda t, f: double_backward(f),
    "grad": lambda t, f: t.grad(total(f), argnums=(0, 1))(W, x),
    "vjp": lambda t, f: t.vjp(f, W, x)[1](x),
    "vmap (0, None)": lambda t, f: t.vmap(f, in_dims=(0, None))(X, x),
    "vmap(grad)": lambda t, f: t.vmap(t.grad(total(f), (0, 1)), in_dims=(None, 0))(W, X),
    "grad(vmap)": lambda t, f: t.grad(lambda w: t.vmap(f, (None, 0))(w, X).sum())(W),
    "jvp": lambda t, f: t.jvp(f, (W, x), (x, W)),
    "vmap(jvp)": lambda t, f: t.vmap(lambda x, v: t.jvp(lambda x: f(W, x), (x,), (v,)))(X, 2 * X),
    "jvp(vmap)": lambda t, f: t.jvp(lambda X: t.vmap(f, (None, 0))(W, X), (X,), (X + 1,)),
    "jacrev": lambda t, f: t.jacrev(f, (0, 1))(W, x),
    "jacfwd": lambda t, f: t.jacfwd(f, (0, 1))(W, x),
    "hessian": lambda t, f: t.hessian(total(f), (0, 1))(W, x),
    "vmap(hessian)": lambda t, f: t.vmap(t.hessian(total(f), (0, 1)), (None, 0))(W, X),
    "remat under grad": lambda t, f: t.grad(total(functx.remat(f)), (0, 1))(W, x),
    "checkpoint, reentrant": lambda t, f: backward(
        lambda *args: checkpoint(f, *args, use_reentrant=True)
    ),
    "checkpoint, not reentrant": lambda t, f: backward(
        lambda *args: checkpoint(f, *args, use_reentrant=False)
    ),
    "jacfwd of jacrev of jacrev": lambda t, f: t.jacfwd(t.jacrev(t.jacrev(f)))(W, x),
    "grad of vmap of grad": lambda t, f: t.grad(
        lambda w: t.vmap(t.grad(lambda x: f(w, x).sum()))(X).sin().sum()
    )(W),
    "grad of jvp": lambda t, f: t.grad(lambda x: t.jvp(lambda x: f(W, x), (x,), (W,))[1].sum())(x),
    "jvp of grad": lambda t, f: t.jvp(t.grad(lambda x: f(W, x).sum()), (x,), (W,)),
    "linearize": lambda t, f: t.linearize(lambda x: f(W, x), x)[1](W),
    "vmap(grad) of remat": lambda t, f: t.vmap(t.grad(total(functx.remat(f)), (0, 1)), (None, 0))(
        W, X
    ),
    "hessian of remat": lambda t, f: t.hessian(total(functx.remat(f)), (0, 1))(W, x),
    "double backward of remat": lambda t, f: double_backward(functx.remat(f)),
    "remat of grad": lambda t, f: backward(functx.remat(lambda w, x: t.grad(total(f), 1)(w, x))),
    "captured by remat": lambda t, f: backward(lambda w, x: functx.remat(lambda x: f(w, x))(x)),
    "functionalize": lambda t, f: t.functionalize(t.grad(total(f)))(W, x),
    "vmap in chunks": lambda t, f: t.vmap(f, (None, 0), chunk_size=2)(W, X),
}


@pytest.fixture(scope="module")
def converted():
    return from_jax(jax_twin, enable_x64=True)


def compared(name, transforms, converted):
    got, expected = (tree_leaves(COMPOSED[name](transforms, f)) for f in (converted, torch_twin))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", COMPOSED)
def test_a_composition_is_that_of_the_twin(name, converted):
    """Transforms of torch.func and of functx in turn."""
    compared(name, (torch.func, functx)[list(COMPOSED).index(name) % 2], converted)


@pytest.mark.sweep
@pytest.mark.parametrize("transforms", [torch.func, functx], ids=["torch.func", "functx"])
@pytest.mark.parametrize("name", COMPOSED)
def test_every_composition_is_that_of_the_twin(name, transforms, converted):
    compared(name, transforms, converted)


def test_a_function_is_traced_once_for_each_signature():
    TRACES.clear()
    f = from_jax(jax_twin, enable_x64=True)
    for name in ("double backward", "vmap(grad)", "jvp(vmap)", "hessian", "hessian of remat"):
        COMPOSED[name](torch.func, f)
    assert TRACES == [(3,)]
    f(X, X)
    f(X, X)
    assert TRACES == [(3,), (5, 3)]
    f(W.float(), x.float())
    assert len(TRACES) == 3


def test_a_function_is_compiled_once():
    count = []

    def g(x):
        return jnp.sin(x)

    f = from_jax(g)
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **kwargs: count.append(name) if "backend_compile" in name else None
    )
    for _ in range(3):
        t = torch.ones(7, requires_grad=True)
        f(t).sum().backward()
    forward_and_backward = len(count)
    for _ in range(3):
        t = torch.ones(7, requires_grad=True)
        f(t).sum().backward()
    assert 1 <= forward_and_backward <= 2
    assert len(count) == forward_and_backward
    jax.monitoring.clear_event_listeners()
