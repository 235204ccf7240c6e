"""The transforms are torch.func's: names, signatures, results, errors."""

import inspect

import pytest
import torch
from cases import DTYPE, numbers
from references import assert_same
from torch import func as torch_func
from torch.fx.experimental.proxy_tensor import make_fx

import functx
import functx._transforms as transforms


def loss(x, y=None, scale=1.0):
    y = x if y is None else y
    return (x.sin() * y.exp() * scale).sum()


def tree_loss(params, data, *, power=2):
    return ((params["w"] @ data - params["bias"][0]) ** power).mean() + params["bias"][1].sum()


PARAMS = {"w": numbers(3, 2), "bias": (numbers(3, start=1.0), numbers(1, start=2.0))}


def test_every_public_name_of_torch_func_is_here():
    assert not [name for name in torch_func.__all__ if not hasattr(functx, name)]
    assert all(callable(getattr(transforms, name)) for name in transforms.__all__)


def test_names_are_exported_by_the_package():
    for name in transforms.__all__:
        assert getattr(functx, name) is getattr(transforms, name), name


@pytest.mark.parametrize("name", sorted(torch_func.__all__))
def test_signatures_are_those_of_torch(name):
    ours = inspect.signature(getattr(functx, name)).parameters
    theirs = inspect.signature(getattr(torch_func, name)).parameters
    assert list(ours) == list(theirs)
    for parameter, expected in zip(ours.values(), theirs.values(), strict=True):
        assert (parameter.kind, parameter.default) == (expected.kind, expected.default)


@pytest.mark.parametrize("argnums", [0, 1, -1, (0,), (0, 1), (1, 0), (-2, -1)])
@pytest.mark.parametrize("name", ["grad", "grad_and_value", "jacrev", "hessian"])
def test_argnums(name, argnums):
    x, y = numbers(3), numbers(3, start=1.0)
    ours = getattr(transforms, name)(loss, argnums)(x, y)
    assert_same(ours, getattr(torch_func, name)(loss, argnums)(x, y), eps=2)


@pytest.mark.parametrize("name", ["grad", "grad_and_value"])
def test_keyword_arguments_and_pytrees(name):
    data = numbers(2, 4)
    ours = getattr(transforms, name)(tree_loss)(PARAMS, data[:, 0], power=3)
    assert_same(ours, getattr(torch_func, name)(tree_loss)(PARAMS, data[:, 0], power=3), eps=2)


def test_jacrev_of_pytrees_to_pytrees():
    def f(params, x):
        return {"out": params["w"] @ x, "rest": [params["bias"][0].sin(), params["bias"][1] ** 2]}

    for argnums in (0, 1, (0, 1), (1, 0)):
        ours = transforms.jacrev(f, argnums)(PARAMS, numbers(2))
        assert_same(ours, torch_func.jacrev(f, argnums)(PARAMS, numbers(2)))


@pytest.mark.parametrize("preallocate", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 1, 2, 3, 7, 100])
def test_jacrev_chunks(chunk_size, preallocate):
    def f(x):
        return x.sin(), {"prod": x.prod(), "outer": x[:, None] * x}

    options = {"chunk_size": chunk_size, "_preallocate_and_copy": preallocate}
    x = numbers(3)
    assert_same(transforms.jacrev(f, **options)(x), torch_func.jacrev(f)(x))


@pytest.mark.parametrize("chunk_size", [None, 1, 4])
def test_jacrev_of_an_empty_output(chunk_size):
    jacobian = transforms.jacrev(lambda x: x[:0], chunk_size=chunk_size)(numbers(3))
    assert jacobian.shape == (0, 3)


def test_jacrev_in_a_loop_needs_no_batching_rules():
    def f(x):
        return x * torch.tensor([1.0 if value > 0 else 2.0 for value in x.detach().tolist()])

    x = numbers(3).float()
    assert transforms.jacrev(f, chunk_size=1)(x).shape == (3, 3)


@pytest.mark.parametrize("name", ["jacrev", "grad", "grad_and_value", "vjp"])
def test_aux(name):
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


def test_aux_may_hold_anything():
    gradient, aux = transforms.grad(lambda x: (x.sum(), ("a", 1, None)), has_aux=True)(numbers(2))
    assert aux == ("a", 1, None)
    assert_same(gradient, torch.ones(2, dtype=DTYPE))


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


def test_vjp_without_create_graph_is_not_recorded():
    x = numbers(3).requires_grad_()
    cotangent = torch.ones(3, dtype=DTYPE)
    _, pullback = transforms.vjp(torch.sin, x)
    assert pullback(cotangent)[0].requires_grad
    assert not pullback(cotangent, create_graph=False)[0].requires_grad


def test_unused_and_constant_outputs_have_zero_gradients():
    x, y = numbers(3), numbers(2)
    assert_same(transforms.grad(lambda x, y: x.sum(), 1)(x, y), torch.zeros(2, dtype=DTYPE))
    assert_same(transforms.grad(lambda x: torch.tensor(1.0))(x), torch.zeros(3, dtype=DTYPE))
    assert_same(
        transforms.grad(lambda x: (x > 0).sum())(x), torch_func.grad(lambda x: (x > 0).sum())(x)
    )
    assert_same(transforms.vjp(lambda x: x, x)[1](y := x * 2)[0], y)


def test_complex_functions():
    z = torch.complex(numbers(3), numbers(3, start=1.0))

    def f(z):
        return (z * z.sin()).abs().sum()

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


def test_a_function_writes_to_an_argument_that_is_not_differentiated():
    def f(x, buffer):
        buffer.add_(x.detach())
        return (x * buffer).sum()

    x = numbers(3)
    ours, theirs = torch.zeros(3, dtype=DTYPE), torch.zeros(3, dtype=DTYPE)
    assert_same(transforms.grad(f)(x, ours), torch_func.grad(f)(x, theirs))
    assert_same(ours, theirs)


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("name", ["grad", "jacrev", "hessian"])
def test_traced_and_functionalized(name, tracing_mode):
    def f(x):
        return torch.sin(x) if name == "jacrev" else loss(x)

    transformed = getattr(transforms, name)(f)
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


@pytest.mark.parametrize("name", ["grad", "grad_and_value", "value_and_grad", "jacrev", "hessian"])
class TestErrors:
    def test_not_callable(self, name):
        with pytest.raises(TypeError, match=rf"{name}: expected a callable.*shape \(2,\)"):
            getattr(transforms, name)(torch.ones(2))

    @pytest.mark.parametrize("argnums", ["x", 0.5, [0], (), (0, 0), ("x",), None])
    def test_argnums_that_name_nothing(self, name, argnums):
        with pytest.raises(RuntimeError, match=f"{name}.*argnums"):
            getattr(transforms, name)(loss, argnums)

    @pytest.mark.parametrize("argnums", [1, -2, (0, 1), (0, -1)])
    def test_argnums_out_of_range(self, name, argnums):
        with pytest.raises(RuntimeError, match="positional inputs"):
            getattr(transforms, name)(loss, argnums)(numbers(2))

    @pytest.mark.parametrize("bad", [1.0, None, "x", {"a": [torch.ones(1), 2]}])
    def test_leaves_that_are_no_tensors(self, name, bad):
        with pytest.raises(ValueError, match=r"must be a Tensor.* in argument 0"):
            getattr(transforms, name)(lambda x: torch.ones(()))(bad)

    def test_integer_argument(self, name):
        with pytest.raises(RuntimeError, match=r"floating point"):
            getattr(transforms, name)(lambda x: x.sum())(torch.arange(3))


@pytest.mark.parametrize("name", ["grad", "grad_and_value", "value_and_grad"])
class TestScalarErrors:
    def test_output_with_dimensions(self, name):
        with pytest.raises(
            RuntimeError, match=r"scalar Tensor, got tensor with 1 dims.*vjp or jac"
        ):
            getattr(transforms, name)(torch.sin)(numbers(3))

    @pytest.mark.parametrize("output", [1.0, None, [torch.ones(())]])
    def test_output_that_is_no_tensor(self, name, output):
        with pytest.raises(RuntimeError, match="to return a Tensor"):
            getattr(transforms, name)(lambda x: output)(numbers(3))

    @pytest.mark.parametrize("output", [1.0, (1, 2, 3), [torch.ones(()), 1]])
    def test_no_pair_with_aux(self, name, output):
        with pytest.raises(RuntimeError, match=r"tuple: \(output, aux\)"):
            getattr(transforms, name)(lambda x: output, has_aux=True)(numbers(3))


@pytest.mark.parametrize("argnums", ["x", 0.5, [0], (), (0, 0), ("x",), None])
def test_argnums_of_jacfwd_that_name_nothing(argnums):
    with pytest.raises(RuntimeError, match=r"jacfwd.*argnums"):
        transforms.jacfwd(loss, argnums)(numbers(2))


def test_vjp_errors():
    x = numbers(2)
    with pytest.raises(RuntimeError, match=r"non-empty output \(got \[None\]\)"):
        transforms.vjp(lambda x: None, x)
    with pytest.raises(TypeError, match="vjp: expected a callable, got 3 of type int"):
        transforms.vjp(3, x)
    for output, message in (((), "non-empty output"), (1.0, "only tensors"), (x > 0, "floating")):
        with pytest.raises(RuntimeError, match=message):
            transforms.vjp(lambda x, output=output: output, x)
    with pytest.raises(ValueError, match="must be a Tensor"):
        transforms.vjp(torch.add, x, 1.0)


def test_jacrev_errors():
    with pytest.raises(ValueError, match="greater than 0, got 0"):
        transforms.jacrev(torch.sin, chunk_size=0)
    with pytest.raises(RuntimeError, match="floating-point"):
        transforms.jacrev(lambda x: x > 0)(numbers(2))


def test_mismatched_batch_sizes():
    with pytest.raises(ValueError, match="same size in the mapped dimension"):
        transforms.vmap(transforms.grad(loss))(numbers(2, 3), numbers(4, 3))
