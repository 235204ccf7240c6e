"""An option that JAX or torch has, and functx has not, is an error that says what to write instead.

The kind: someone ports a program and keeps an option's name. Python's error says that there is no
such option, and leaves it to the reader to find out that it has another name here, or is not
needed. Here are all transforms and all ways to make them; what each error names is right.
"""

import functools

import pytest
import torch

import functx

X = torch.tensor([1.0, 2.0])
DERIVATIVES = ("grad", "value_and_grad", "grad_and_value", "jacrev", "jacfwd", "hessian")
PER_SAMPLE = ("grads", "norms", "clipped_sum", "jacobian", "gram", "map_reduce")
CASES = [
    ("vmap", "in_axes", "in_dims"),
    ("vmap", "out_axes", "out_dims"),
    ("vmap", "axis_size", r"torch.arange\(size\)"),
    ("vmap", "axis_name", "named axes"),
    ("vmap", "spmd_axis_name", "named axes"),
    *((name, "holomorphic", "functx.vjp") for name in DERIVATIVES),
    *((name, "allow_int", "argnums") for name in DERIVATIVES),
    *((name, "argnum", "argnums") for name in DERIVATIVES),
    ("vjp", "reduce_axes", "leave it out"),
    *(("jit", name, "signature") for name in ("static_argnums", "static_argnames")),
    *(("jit", name, "leave it out") for name in ("donate_argnums", "device", "inline")),
    ("jit", "fullgraph", "TracingError"),
    ("remat", "concrete", "leave it out"),
    ("remat", "use_reentrant", "functx.checkpoint"),
    ("remat", "context_fn", "policy"),
    *((f"per_sample.{name}", "in_axes", "in_dims") for name in PER_SAMPLE),
]


def transform_of(name):
    return functools.reduce(getattr, name.split("."), functx)


@pytest.mark.parametrize(("name", "option", "instead"), CASES)
def test_the_error_names_what_to_write_instead(name, option, instead):
    api = name.rpartition(".")[2]
    said = rf"{api}\(\) got an unexpected keyword argument '{option}'.*{instead}"
    args = (X,) if name == "vjp" else ()
    with pytest.raises(TypeError, match=said):
        transform_of(name)(torch.sum, *args, **{option: False})


@pytest.mark.parametrize("name", ["jit", "remat"])
def test_decorators_and_unknown_options_are_checked_likewise(name):
    transform = transform_of(name)
    with pytest.raises(TypeError, match=r"device|concrete"):
        transform(**{"device" if name == "jit" else "concrete": None})
    for f in ((torch.sum,), ()):
        with pytest.raises(TypeError, match=r"unexpected keyword argument 'polcy'$"):
            transform(*f, polcy=None)


def test_what_the_errors_name_works():
    mapped = functx.vmap(lambda x, y: x * y, in_dims=(0, None), out_dims=0)
    torch.testing.assert_close(mapped(X, X), torch.outer(X, X))
    repeated = functx.vmap(lambda _: X.sum())(torch.arange(3))
    torch.testing.assert_close(repeated, torch.full((3,), 3.0))
    z = torch.tensor([1 + 2j])
    out, pullback = functx.vjp(torch.square, z)
    torch.testing.assert_close(pullback(torch.ones_like(out))[0].conj(), 2 * z)
    torch.testing.assert_close(functx.grad(lambda z: (z * z.conj()).real.sum())(z), 2 * z)


@pytest.mark.parametrize("option", ["policy", "budget", "prevent_cse", "static_argnums"])
def test_checkpoint_hands_options_of_remat_to_the_function_and_says_so(option):
    with pytest.raises(TypeError, match=option) as caught:
        functx.checkpoint(lambda x: x.sum(), X, **{option: None})
    assert "functx.remat(function, ...)" in caught.value.__notes__[-1]
    taken = functx.checkpoint(lambda x, **given: x.sum() * len(given), X, **{option: None})
    torch.testing.assert_close(taken, X.sum())


def test_an_error_of_the_function_itself_is_left_alone():
    def f(x, policy):
        raise TypeError("of another cause")

    with pytest.raises(TypeError, match="of another cause") as caught:
        functx.checkpoint(f, X, policy=None)
    assert not getattr(caught.value, "__notes__", [])
