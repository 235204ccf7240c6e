"""The transforms are torch.func's: names, signatures, results, errors; so is `linearize`."""

import inspect

import pytest
import torch
from cases import DTYPE, dense, identity, numbers
from references import assert_same
from torch import func as torch_func
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import functx

V, Y = numbers(4), numbers(4, start=1.0)
Z = torch.complex(V, Y)
PARAMS = {"w": numbers(3, 4), "bias": (numbers(3, start=1.0), numbers(1, start=2.0))}


def loss(x, y=None, scale=1.0):
    y = x if y is None else y
    return (x.sin() * y.exp() * scale).sum()


def tree_loss(params, data, *, power=2):
    return ((params["w"] @ data - params["bias"][0]) ** power).mean() + params["bias"][1].sum()


def test_every_public_name_is_here():
    assert {*torch_func.__all__, "value_and_grad"} <= {*functx.__all__}


@pytest.mark.parametrize("name", sorted(torch_func.__all__))
def test_signatures_are_those_of_torch(name):
    ours, theirs = (
        [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()]
        for f in (getattr(functx, name), getattr(torch_func, name))
    )
    assert ours == theirs


@pytest.mark.parametrize("argnums", [0, 1, -1, (0,), (0, 1), (1, 0), (-2, -1)])
@pytest.mark.parametrize("name", ["grad", "grad_and_value", "jacrev", "hessian"])
def test_argnums_choose_arguments(name, argnums):
    ours, theirs = (getattr(library, name)(loss, argnums)(V, Y) for library in (functx, torch_func))
    assert_same(ours, theirs, eps=2)


@pytest.mark.parametrize("name", ["grad", "grad_and_value"])
def test_keyword_arguments_and_pytrees_are_taken(name):
    ours, theirs = (
        getattr(library, name)(tree_loss)(PARAMS, V, power=3) for library in (functx, torch_func)
    )
    assert_same(ours, theirs, eps=2)


@pytest.mark.parametrize("chunk_size", [None, 1, 2, 3, 7, 100])
def test_chunks_of_jacrev_change_nothing(chunk_size):
    f = lambda x: (x.sin(), {"prod": x.prod(), "outer": x[:, None] * x})
    expected = torch_func.jacrev(f)(V)
    for preallocate in (False, True):
        options = {"chunk_size": chunk_size, "_preallocate_and_copy": preallocate}
        assert_same(functx.jacrev(f, **options)(V), expected)


def test_chunks_of_jacrev_take_less_and_the_last_frees_what_is_kept():
    weights = [numbers(64, 64) / 8 for _ in range(10)]

    f, x = lambda x: dense(weights, x).sum(0)[:8], numbers(512, 64)
    jacobian, kept = 8 * x.nbytes, 10 * x.nbytes
    for chunk_size in (1, 2, 4):
        peak = functx.memory.peak(functx.jacrev(f, chunk_size=chunk_size), x)
        assert peak <= max(kept + jacobian, 2 * jacobian) + (chunk_size + 1) * x.nbytes


@pytest.mark.parametrize("name", ["jacrev", "grad", "grad_and_value", "value_and_grad", "vjp"])
def test_values_and_aux_are_handed_out(name):
    def f(x):
        return (x**2).sum(), {"doubled": 2 * x}

    (value, aux), gradient = f(V), 2 * V
    expected = {
        "grad_and_value": (gradient, (value, aux)),
        "value_and_grad": ((value, aux), gradient),
        "vjp": (value, gradient, aux),
    }
    if name == "vjp":
        output, pullback, of_vjp = functx.vjp(f, V, has_aux=True)
        found = output, pullback(torch.ones_like(output))[0], of_vjp
    else:
        found = getattr(functx, name)(f, has_aux=True)(V)
    assert_same(found, expected.get(name, (gradient, aux)))
    tensors = pytree.tree_leaves(found)
    assert not any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors))
    if name.startswith(("grad_", "value_")):
        parts = {"grad_and_value": (gradient, value), "value_and_grad": (value, gradient)}
        assert_same(getattr(functx, name)(lambda x: f(x)[0])(V), parts[name])


def test_vjp_takes_its_options():
    output, pullback = functx.vjp(lambda x: {"sin": x.sin()}, V)
    assert_same(output, {"sin": V.sin()})
    assert_same(pullback({"sin": Y}), (V.cos() * Y,))
    with pytest.raises(RuntimeError, match="pytree structure of cotangents"):
        pullback(Y)
    assert_same(pullback({"sin": Y}, retain_graph=False), (V.cos() * Y,))
    with pytest.raises(RuntimeError, match="retain_graph=False"):
        pullback({"sin": Y})


def test_unused_and_constant_outputs_have_zero_gradients():
    for f in (lambda x: Y.sum(), lambda x: torch.tensor(1.0), lambda x: (x > 0).sum()):
        assert_same(functx.grad(f)(V), torch.zeros_like(V))
    assert_same(functx.vjp(lambda x: x, V)[1](Y)[0], Y)


def test_complex_inputs_are_as_in_torch():
    f = lambda z: (z * z.sin()).abs().sum()
    assert_same(functx.grad(f)(Z), torch_func.grad(f)(Z))
    assert_same(functx.vjp(torch.sin, Z)[1](Z), torch_func.vjp(torch.sin, Z)[1](Z))
    for library in (functx, torch_func):
        with pytest.raises(RuntimeError, match="real scalar"):
            library.grad(lambda z: z.sum())(Z)
        with pytest.raises(RuntimeError, match="jacrev: Expected all inputs to be real"):
            library.jacrev(f)(Z)
        with pytest.raises(RuntimeError, match="jacrev: Expected all outputs to be real"):
            library.jacrev(lambda x: torch.complex(x, x))(V)


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("name", ["grad", "jacrev", "hessian"])
def test_it_can_be_traced_and_functionalized(name, tracing_mode):
    transformed = getattr(functx, name)(lambda x: torch.sin(x) if name == "jacrev" else loss(x))
    for traced in (transformed, functx.functionalize(transformed)):
        graph = make_fx(traced, tracing_mode=tracing_mode)(V)
        assert_same(graph(V + 1), transformed(V + 1), eps=4)


def test_the_name_and_documentation_are_those_of_the_function():
    def documented(x):
        """A docstring."""

    for name in EVERY:
        transformed = getattr(functx, name)(documented)
        assert (transformed.__name__, transformed.__doc__) == ("documented", "A docstring.")
    assert not hasattr(functx.grad(torch.nn.Linear(2, 2)), "_parameters")


X = numbers(2)
EVERY = ("grad", "grad_and_value", "value_and_grad", "jacrev", "hessian")
SCALAR = EVERY[:3]
NO_ARGNUMS = ("x", 0.5, [0], (), (0, 0), ("x",), None)
NO_TENSORS = (1.0, None, "x", {"a": [torch.ones(1), 2]})
ONE = torch.ones(())


def gives(output, **options):
    return lambda t: t(lambda x: output, **options)(X)


# Transforms, the error (which says NAME, that of the transform), and what meets it.
REFUSED = [
    (EVERY, TypeError, r"NAME: .* a callable.*shape \(2,\)", [lambda t: t(X)(X)]),
    (
        (*EVERY, "jacfwd"),
        *(RuntimeError, "NAME.*argnums"),
        [lambda t, n=n: t(loss, n)(X) for n in NO_ARGNUMS],
    ),
    (
        EVERY,
        *(RuntimeError, "positional inputs"),
        [lambda t, n=n: t(loss, n)(X) for n in (1, -2, (0, 1), (0, -1))],
    ),
    (
        EVERY,
        *(ValueError, "must be a Tensor.* in argument 0"),
        [lambda t, x=x: t(lambda x: ONE)(x) for x in NO_TENSORS],
    ),
    (EVERY, RuntimeError, "floating point", [lambda t: t(torch.sum)(torch.arange(3))]),
    (SCALAR, RuntimeError, r"scalar.*shape \(2,\).*vjp or jac", [lambda t: t(torch.sin)(X)]),
    (
        SCALAR,
        RuntimeError,
        r"Expected f\(\*args\) to return a Tensor, got",
        [*map(gives, (1.0, None, [ONE]))],
    ),
    (
        SCALAR,
        *(RuntimeError, r"tuple: \(output, aux\)"),
        [gives(output, has_aux=True) for output in (1.0, (1, 2, 3), [ONE, 1])],
    ),
    (("vjp",), TypeError, "NAME: .* a callable, got 3 of type int", [lambda t: t(3, X)]),
    (("vjp",), ValueError, "must be a Tensor", [lambda t: t(torch.add, X, 1.0)]),
    (("vjp",), RuntimeError, "has non-empty output", [lambda t: t(lambda x: None, X)]),
    (("vjp",), RuntimeError, "has non-empty output", [lambda t: t(lambda x: (), X)]),
    (("vjp",), RuntimeError, "floating-point", [lambda t: t(lambda x: x > 0, X)]),
    (("jacrev",), RuntimeError, "floating-point", [gives(X > 0)]),
    (("jacrev",), ValueError, "greater than 0, got 0", [lambda t: t(torch.sin, chunk_size=0)]),
]


@pytest.mark.parametrize(("names", "kind", "match", "calls"), REFUSED)
def test_an_error_says_what_is_wrong(names, kind, match, calls):
    for name in names:
        for call in calls:
            with pytest.raises(kind, match=match.replace("NAME", name)):
                call(getattr(functx, name))


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


@pytest.mark.parametrize("remat", [functx.remat, identity])
class TestLinearize:
    @pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
    @pytest.mark.parametrize("case", CASES)
    def test_values_and_tangents_are_those_of_torch(self, case, remat):
        f, primals = CASES[case]
        tangents = pytree.tree_map(lambda t: t.flip(0), primals)
        value, linear = functx.linearize(remat(f), *primals)
        expected, expected_linear = torch_func.linearize(f, *primals)
        assert_same(value, expected)
        for _ in range(2):
            assert_same(linear(*tangents), expected_linear(*tangents), eps=16)

    def test_it_runs_once_and_every_call_is_of_the_same_function(self, remat):
        runs = []
        noisy = lambda x: torch.nn.functional.dropout(x.sin().exp(), 0.5) * x
        value, linear = functx.linearize(remat(lambda x: [runs.append(1), noisy(x)][1]), V)
        jacobian = functx.vmap(linear)(torch.eye(4, dtype=DTYPE))
        assert_same(jacobian.diagonal() == 0, value == 0)
        assert_same(jacobian @ Y, linear(Y), eps=8)
        assert len(runs) == 1 or remat is functx.remat  # which runs it again in each call

    def test_it_works_under_transforms(self, remat):
        f = remat(lambda x: x.sin())
        derivative = lambda x: functx.linearize(f, x)[1](torch.ones_like(x))
        assert_same(functx.vmap(derivative)(V), V.cos(), eps=4)
        assert_same(functx.grad(lambda x: derivative(x).sum())(V), -V.sin(), eps=4)
        with torch.no_grad():
            assert_same(derivative(V), V.cos(), eps=4)

    def test_tangents_that_do_not_fit_are_an_error(self, remat):
        linear = functx.linearize(remat(torch.sin), V)[1]
        for tangents, match in (
            ((V[:2],), "the shape"),
            ((V.float(),), "the dtype"),
            ((V, V), "same argspec"),
            ((), "argspec"),
        ):
            with pytest.raises(RuntimeError, match=match):
                linear(*tangents)
