"""A JAX function in torch: all compositions of transforms, each traced once.

The function and its torch twin are compared in float64, in the transforms of torch.func and of
functx.
"""

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


# The 25: `t` is torch.func or functx, `f` the function.
PLAIN = {
    "forward": lambda t, f: f(W, x),
    "backward": lambda t, f: backward(f),
    "double backward": lambda t, f: double_backward(f),
    "grad": lambda t, f: t.grad(total(f), argnums=(0, 1))(W, x),
    "vjp": lambda t, f: t.vjp(f, W, x)[1](x),
    "vmap": lambda t, f: t.vmap(f)(X, X),
    "vmap in_dims=1": lambda t, f: t.vmap(f, in_dims=1)(X.T, X.T),
    "vmap (0, None)": lambda t, f: t.vmap(f, in_dims=(0, None))(X, x),
    "vmap of vmap": lambda t, f: t.vmap(t.vmap(f, in_dims=(None, 0)), in_dims=(0, None))(X, X),
    "vmap(grad)": lambda t, f: t.vmap(t.grad(total(f), (0, 1)), in_dims=(None, 0))(W, X),
    "grad(vmap)": lambda t, f: t.grad(lambda w: t.vmap(f, (None, 0))(w, X).sum())(W),
    "jvp": lambda t, f: t.jvp(f, (W, x), (x, W)),
    "vmap(jvp)": lambda t, f: t.vmap(lambda x, v: t.jvp(lambda x: f(W, x), (x,), (v,)))(X, 2 * X),
    "jvp(vmap)": lambda t, f: t.jvp(lambda X: t.vmap(f, (None, 0))(W, X), (X,), (X + 1,)),
    "jacrev": lambda t, f: t.jacrev(f, (0, 1))(W, x),
    "jacfwd": lambda t, f: t.jacfwd(f, (0, 1))(W, x),
    "hessian": lambda t, f: t.hessian(total(f), (0, 1))(W, x),
    "jacrev twice": lambda t, f: t.jacrev(t.jacrev(f))(W, x),
    "vmap(hessian)": lambda t, f: t.vmap(t.hessian(total(f), (0, 1)), (None, 0))(W, X),
    "remat": lambda t, f: backward(functx.remat(f)),
    "remat under grad": lambda t, f: t.grad(total(functx.remat(f)), (0, 1))(W, x),
    "checkpoint, reentrant": lambda t, f: backward(
        lambda *args: checkpoint(f, *args, use_reentrant=True)
    ),
    "checkpoint, not reentrant": lambda t, f: backward(
        lambda *args: checkpoint(f, *args, use_reentrant=False)
    ),
    "compile": lambda t, f: torch.compile(lambda *a: 2 * f(*a), backend=COMPILER, fullgraph=True)(
        W, x
    ),
    "compile with backward": lambda t, f: backward(
        torch.compile(lambda *a: 2 * f(*a), backend=COMPILER, fullgraph=True)
    ),
}

# Beyond them: deeper stacks.
DEEPER = {
    "jacfwd of jacrev of jacrev": lambda t, f: t.jacfwd(t.jacrev(t.jacrev(f)))(W, x),
    "grad of vmap of grad": lambda t, f: t.grad(
        lambda w: t.vmap(t.grad(lambda x: f(w, x).sum()))(X).sin().sum()
    )(W),
    "vmap of grad of grad": lambda t, f: t.vmap(
        t.grad(lambda x: t.grad(lambda x: f(W, x).square().sum())(x).sin().sum())
    )(X),
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
# The front end's work, and tracing forward and backward; code generation is inductor's.
COMPILER = "aot_eager"


@pytest.fixture(scope="module")
def converted():
    return from_jax(jax_twin, enable_x64=True)


@pytest.mark.parametrize("transforms", [torch.func, functx], ids=["torch.func", "functx"])
@pytest.mark.parametrize("name", [*PLAIN, *DEEPER])
def test_composition(name, transforms, converted):
    composed = {**PLAIN, **DEEPER}[name]
    torch._dynamo.reset()
    got, expected = (tree_leaves(composed(transforms, f)) for f in (converted, torch_twin))
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_there_are_25():
    assert len(PLAIN) == 25


def test_traced_once_for_all_of_them():
    TRACES.clear()
    f = from_jax(jax_twin, enable_x64=True)
    for composed in {**PLAIN, **DEEPER}.values():
        for _ in range(2):
            composed(torch.func, f)
    assert TRACES == [(3,)]
    f(X, X)
    f(X, X)
    assert TRACES == [(3,), (5, 3)]
    f(W.float(), x.float())
    assert len(TRACES) == 3


def test_compiled_once():
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


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_other_compilers(backend, converted):
    torch._dynamo.reset()
    compiled = torch.compile(lambda *a: 2 * converted(*a), backend=backend, fullgraph=True)
    expected = backward(lambda *args: 2 * torch_twin(*args))
    for a, b in zip(backward(compiled), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    gradient = torch.compile(
        torch.func.grad(lambda *a: converted(*a).sum()), backend=backend, fullgraph=True
    )
    torch.testing.assert_close(gradient(W, x), torch.func.grad(total(torch_twin))(W, x))
