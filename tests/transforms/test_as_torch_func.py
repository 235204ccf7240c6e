"""The transforms are torch.func's: names, signatures, results, errors; so is `linearize`."""

import inspect

import pytest
import torch
from cases import DTYPE, identity, numbers
from references import assert_same
from torch import func as torch_func
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import functx
import functx as transforms


def loss(x, y=None, scale=1.0):
    y = x if y is None else y
    return (x.sin() * y.exp() * scale).sum()


def tree_loss(params, data, *, power=2):
    return ((params["w"] @ data - params["bias"][0]) ** power).mean() + params["bias"][1].sum()


PARAMS = {"w": numbers(3, 2), "bias": (numbers(3, start=1.0), numbers(1, start=2.0))}


def test_every_public_name_is_here():
    assert {*torch_func.__all__, "value_and_grad"} <= {*functx.__all__}


@pytest.mark.parametrize("name", sorted(torch_func.__all__))
def test_signatures_are_those_of_torch(name):
    ours = inspect.signature(getattr(functx, name)).parameters
    theirs = inspect.signature(getattr(torch_func, name)).parameters
    assert list(ours) == list(theirs)
    for parameter, expected in zip(ours.values(), theirs.values(), strict=True):
        assert (parameter.kind, parameter.default) == (expected.kind, expected.default)


@pytest.mark.parametrize("argnums", [0, 1, -1, (0,), (0, 1), (1, 0), (-2, -1)])
@pytest.mark.parametrize("name", ["grad", "grad_and_value", "jacrev", "hessian"])
def test_argnums_choose_arguments(name, argnums):
    x, y = numbers(3), numbers(3, start=1.0)
    ours = getattr(transforms, name)(loss, argnums)(x, y)
    assert_same(ours, getattr(torch_func, name)(loss, argnums)(x, y), eps=2)


@pytest.mark.parametrize("name", ["grad", "grad_and_value"])
def test_keyword_arguments_and_pytrees_are_taken(name):
    data = numbers(2)
    ours = getattr(transforms, name)(tree_loss)(PARAMS, data, power=3)
    assert_same(ours, getattr(torch_func, name)(tree_loss)(PARAMS, data, power=3), eps=2)


@pytest.mark.parametrize("preallocate", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 1, 2, 3, 7, 100])
def test_chunks_of_jacrev_change_nothing(chunk_size, preallocate):
    f = lambda x: (x.sin(), {"prod": x.prod(), "outer": x[:, None] * x})
    options = {"chunk_size": chunk_size, "_preallocate_and_copy": preallocate}
    x = numbers(3)
    assert_same(transforms.jacrev(f, **options)(x), torch_func.jacrev(f)(x))


def test_chunks_of_jacrev_take_less_and_the_last_frees_what_is_kept():
    weights = [numbers(64, 64) / 8 for _ in range(10)]

    def f(x):
        for w in weights:
            x = torch.tanh(x @ w)
        return x.sum(0)[:8]

    x = numbers(512, 64)
    jacobian, kept = 8 * x.nbytes, 10 * x.nbytes
    for chunk_size in (1, 2, 4):
        peak = functx.memory.peak(transforms.jacrev(f, chunk_size=chunk_size), x)
        assert peak <= max(kept + jacobian, 2 * jacobian) + (chunk_size + 1) * x.nbytes


@pytest.mark.parametrize("name", ["jacrev", "grad", "grad_and_value", "vjp"])
def test_aux_is_handed_out(name):
    def f(x):
        value = (x**2).sum()
        return value, {"doubled": 2 * x, "value": value}

    x = numbers(3)
    if name == "vjp":
        value, pullback, aux = transforms.vjp(f, x, has_aux=True)
        assert_same(pullback(torch.ones_like(value)), (2 * x,))
    else:
        result = getattr(transforms, name)(f, has_aux=True)(x)
        assert_same(result, getattr(torch_func, name)(f, has_aux=True)(x))
        aux = result[1][1] if name == "grad_and_value" else result[1]
    assert_same(aux, {"doubled": 2 * x, "value": (x**2).sum()})
    assert not torch._C._functorch.is_functorch_wrapped_tensor(aux["doubled"])


def test_value_and_grad_has_the_value_first():
    x = numbers(3)
    value, gradient = transforms.value_and_grad(loss)(x)
    assert_same((gradient, value), torch_func.grad_and_value(loss)(x))
    (value, aux), gradient = transforms.value_and_grad(lambda x: (loss(x), x * 2), has_aux=True)(x)
    assert_same((value, aux), (loss(x), x * 2))
    assert_same(gradient, torch_func.grad(loss)(x))


def test_vjp_takes_its_options():
    x = numbers(3)
    output, pullback = transforms.vjp(lambda x: {"sin": x.sin()}, x)
    cotangent = {"sin": numbers(3, start=1.0)}
    expected = (x.cos() * cotangent["sin"],)
    assert_same(output, {"sin": x.sin()})
    assert_same(pullback(cotangent), expected)
    assert_same(pullback(cotangent, retain_graph=False), expected)
    with pytest.raises(RuntimeError, match="retain_graph=False"):
        pullback(cotangent)
    with pytest.raises(RuntimeError, match="pytree structure of cotangents"):
        transforms.vjp(lambda x: {"sin": x.sin()}, x)[1](numbers(3))


def test_unused_and_constant_outputs_have_zero_gradients():
    x, y = numbers(3), numbers(2)
    assert_same(transforms.grad(lambda x, y: x.sum(), 1)(x, y), torch.zeros(2, dtype=DTYPE))
    assert_same(transforms.grad(lambda x: torch.tensor(1.0))(x), torch.zeros(3, dtype=DTYPE))
    assert_same(
        transforms.grad(lambda x: (x > 0).sum())(x), torch_func.grad(lambda x: (x > 0).sum())(x)
    )
    assert_same(transforms.vjp(lambda x: x, x)[1](y := x * 2)[0], y)


def test_complex_inputs_are_as_in_torch():
    z = torch.complex(numbers(3), numbers(3, start=1.0))
    f = lambda z: (z * z.sin()).abs().sum()
    assert_same(transforms.grad(f)(z), torch_func.grad(f)(z))
    _, ours = transforms.vjp(torch.sin, z)
    _, theirs = torch_func.vjp(torch.sin, z)
    assert_same(ours(z), theirs(z))
    for library in (transforms, torch_func):
        with pytest.raises(RuntimeError, match="only for real scalar"):
            library.grad(lambda z: z.sum())(z)
        with pytest.raises(RuntimeError, match="jacrev: Expected all inputs to be real"):
            library.jacrev(f)(z)
        with pytest.raises(RuntimeError, match="jacrev: Expected all outputs to be real"):
            library.jacrev(lambda x: torch.complex(x, x))(z.real)


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("name", ["grad", "jacrev", "hessian"])
def test_it_can_be_traced_and_functionalized(name, tracing_mode):
    transformed = getattr(transforms, name)(lambda x: torch.sin(x) if name == "jacrev" else loss(x))
    x = numbers(3)
    for traced in (transformed, transforms.functionalize(transformed)):
        graph = make_fx(traced, tracing_mode=tracing_mode)(x)
        assert_same(graph(x + 1), transformed(x + 1), eps=4)


def test_the_name_and_documentation_are_those_of_the_function():
    def documented(x):
        """A docstring."""
        return x.sum()

    for name in ("grad", "grad_and_value", "value_and_grad", "jacrev", "hessian"):
        transformed = getattr(transforms, name)(documented)
        assert (transformed.__name__, transformed.__doc__) == ("documented", "A docstring.")
    module = torch.nn.Linear(2, 2)
    assert not hasattr(transforms.grad(module), "_parameters")


X = numbers(2)
EVERY = ("grad", "grad_and_value", "value_and_grad", "jacrev", "hessian")
SCALAR = EVERY[:3]
NO_ARGNUMS = ("x", 0.5, [0], (), (0, 0), ("x",), None)
NO_TENSORS = (1.0, None, "x", {"a": [torch.ones(1), 2]})
ONE = torch.ones(())


def refused(names, kind, match, *calls):
    return [(name, kind, match, call) for name in names for call in calls]


def gives(output, **options):
    return lambda t: t(lambda x: output, **options)(X)


# The error says NAME, which is that of the transform.
REFUSED = [
    *refused(EVERY, TypeError, r"NAME: .* a callable.*shape \(2,\)", lambda t: t(X)(X)),
    *refused(
        (*EVERY, "jacfwd"),
        *(RuntimeError, "NAME.*argnums"),
        *(lambda t, n=n: t(loss, n)(X) for n in NO_ARGNUMS),
    ),
    *refused(
        EVERY,
        *(RuntimeError, "positional inputs"),
        *(lambda t, n=n: t(loss, n)(X) for n in (1, -2, (0, 1), (0, -1))),
    ),
    *refused(
        EVERY,
        *(ValueError, "must be a Tensor.* in argument 0"),
        *(lambda t, x=x: t(lambda x: ONE)(x) for x in NO_TENSORS),
    ),
    *refused(EVERY, RuntimeError, "floating point", lambda t: t(torch.sum)(torch.arange(3))),
    *refused(SCALAR, RuntimeError, "got tensor with 1 .*vjp or jac", lambda t: t(torch.sin)(X)),
    *refused(SCALAR, RuntimeError, "to return a Tensor", *map(gives, (1.0, None, [ONE]))),
    *refused(
        SCALAR,
        *(RuntimeError, r"tuple: \(output, aux\)"),
        *(gives(output, has_aux=True) for output in (1.0, (1, 2, 3), [ONE, 1])),
    ),
]


@pytest.mark.parametrize(("name", "kind", "match", "call"), REFUSED)
def test_an_error_says_what_is_wrong(name, kind, match, call):
    with pytest.raises(kind, match=match.replace("NAME", name)):
        call(getattr(transforms, name))


def test_vjp_and_jacrev_say_what_is_wrong():
    for output, message in (
        (None, r"non-empty output \(got \[None\]\)"),
        ((), "non-empty output"),
        (1.0, "only tensors"),
        (X > 0, "floating"),
    ):
        with pytest.raises(RuntimeError, match=message):
            transforms.vjp(lambda x, output=output: output, X)
    with pytest.raises(TypeError, match="vjp: expected a callable, got 3 of type int"):
        transforms.vjp(3, X)
    with pytest.raises(ValueError, match="must be a Tensor"):
        transforms.vjp(torch.add, X, 1.0)
    with pytest.raises(ValueError, match="greater than 0, got 0"):
        transforms.jacrev(torch.sin, chunk_size=0)
    with pytest.raises(RuntimeError, match="floating-point"):
        transforms.jacrev(lambda x: x > 0)(X)


V, Y = numbers(4), numbers(4, start=1.0)
Z = torch.complex(V, Y)
CASES = {
    "one": (torch.sin, (V,)),
    "two": (lambda x, y: {"a": x * y, "b": (x.sum(), torch.tensor(3), x > 0)}, (V, Y)),
    "a tree": (lambda d: d["a"] * d["b"][0].exp(), ({"a": V, "b": [Y]},)),
    "complex": (lambda z: z * z.conj() + z.exp(), (Z,)),
    "complex to real": (torch.abs, (Z,)),
    "real to complex": (lambda x: torch.complex(x, x.sin()), (V,)),
    "constant": (lambda x: torch.ones(2, dtype=DTYPE), (V,)),
    "no tensors": (lambda x: (x * 2, None, 3), (V,)),
}


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("remat", [functx.remat, identity])
def test_values_and_tangents_are_those_of_torch(case, remat):
    f, primals = CASES[case]
    tangents = pytree.tree_map(lambda t: t.flip(0), primals)
    value, linear = functx.linearize(remat(f), *primals)
    expected, expected_linear = torch.func.linearize(f, *primals)
    assert_same(value, expected)
    for _ in range(2):
        assert_same(linear(*tangents), expected_linear(*tangents), eps=16)


def body(x):
    return torch.nn.functional.dropout(x.sin().exp(), 0.5) * x


class TestRegions:
    @pytest.mark.parametrize("remat", [functx.remat, identity])
    def test_it_runs_once_and_every_call_is_of_the_same_function(self, remat):
        runs = []
        value, linear = functx.linearize(remat(lambda x: [runs.append(1), body(x)][1]), V)
        jacobian = functx.vmap(linear)(torch.eye(4, dtype=DTYPE))
        assert_same(jacobian.diagonal() == 0, value == 0)
        assert_same(jacobian @ Y, linear(Y), eps=8)
        assert len(runs) == 1 or remat is functx.remat  # which runs it again in each call

    @pytest.mark.parametrize("remat", [functx.remat, identity])
    def test_it_works_under_transforms(self, remat):
        f = remat(lambda x: x.sin())
        derivative = lambda x: functx.linearize(f, x)[1](torch.ones_like(x))
        assert_same(functx.vmap(derivative)(V), V.cos(), eps=4)
        assert_same(functx.grad(lambda x: derivative(x).sum())(V), -V.sin(), eps=4)
        with torch.no_grad():
            assert_same(derivative(V), V.cos(), eps=4)


@pytest.mark.parametrize(
    ("tangents", "match"),
    [
        ((V[:2],), "shape"),
        ((V.float(),), "dtype"),
        ((V, V), "structure"),
        ((), "structure"),
    ],
)
def test_tangents_that_do_not_fit_are_an_error(tangents, match):
    linear = functx.linearize(torch.sin, V)[1]
    with pytest.raises(RuntimeError, match=match):
        linear(*tangents)
