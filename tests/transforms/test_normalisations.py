"""Nested derivatives of normalisation layers, against central differences in float64."""

import itertools

import pytest
import torch
from cases import DTYPE, numbers
from torch.nn import functional as F

import functx

X = numbers(2, 4, 3)
ROWS = (numbers(3, start=1.0) + 1.5, numbers(3, start=2.0))
CHANNELS = (numbers(4, start=1.0) + 1.5, numbers(4, start=2.0))
STATISTICS = numbers(4), numbers(4).exp()
LAYERS = {
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (3,), w, b), ROWS),
    "layer_norm of matrices": (
        lambda x, w, b: F.layer_norm(x, (4, 3), w, b),
        (numbers(4, 3, start=1.0) + 1.5, numbers(4, 3, start=2.0)),
    ),
    "layer_norm without weight": (lambda x: F.layer_norm(x, (3,)), ()),
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), CHANNELS),
    "batch_norm in eval": (
        lambda x, w, b: F.batch_norm(x, *(t.to(x.dtype) for t in STATISTICS), w, b),
        CHANNELS,
    ),
    "batch_norm without weight": (lambda x: F.batch_norm(x, None, None, training=True), ()),
    "instance_norm": (lambda x, w, b: F.instance_norm(x, None, None, w, b), CHANNELS),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), CHANNELS),
    "rms_norm": (lambda x, w, b: F.rms_norm(x, (3,), w) + b, ROWS),
}


@pytest.fixture(params=LAYERS)
def layer(request):
    return LAYERS[request.param]


def loss(f):
    return lambda *args: (f(*args).sin() * numbers(*X.shape, start=0.3)).sum()


def differences(gradient, x, h=1e-5):
    """The matrix of second derivatives, column by column, by central differences."""
    units = h * torch.eye(len(x), dtype=DTYPE)
    return torch.stack([(gradient(x + u) - gradient(x - u)) / (2 * h) for u in units], 1)


WAYS = {
    "hessian": functx.hessian,
    "jacrev of jacrev": lambda f: functx.jacrev(functx.jacrev(f)),
    "jacrev of grad": lambda f: functx.jacrev(functx.grad(f)),
    "jacfwd of grad": lambda f: functx.jacfwd(functx.grad(f)),
    "jacrev of jacfwd": lambda f: functx.jacrev(functx.jacfwd(f)),
    "jacfwd of jacfwd": lambda f: functx.jacfwd(functx.jacfwd(f)),
    "torch.func inside": lambda f: functx.jacrev(torch.func.jacrev(f)),
}
PAIRS = [*itertools.product(LAYERS, WAYS)]
IN_REGIONS = [(i + i // len(WAYS)) % 2 == 0 for i in range(len(PAIRS))]  # half of them


@pytest.mark.parametrize(("pair", "remat"), [*zip(PAIRS, IN_REGIONS)])
def test_second_derivatives_are_those_of_the_definition(pair, remat):
    f, rest = LAYERS[pair[0]]
    args = (X, *rest)

    def of_all(numbers_of):
        parts = numbers_of.split([a.numel() for a in args])
        return loss(f)(*(part.view_as(a) for part, a in zip(parts, args)))

    at = torch.cat([a.flatten() for a in args])
    found = WAYS[pair[1]](functx.remat(of_all) if remat else of_all)(at)
    expected = differences(functx.grad(of_all), at)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("remat", [lambda f: f, functx.remat])
def test_a_third_order_in_reverse_is_that_of_the_definition(remat):
    a, c = torch.tensor([1.0, -1.0, 0.5]), torch.tensor([1.0, 2.0, 4.0])
    f = remat(lambda s: (F.layer_norm(a * s + a**2, (3,)) * c).sum())
    third = functx.grad(functx.grad(functx.grad(f)))(torch.tensor(0.7))
    torch.testing.assert_close(third, torch.tensor(4.716), rtol=1e-3, atol=0)


@pytest.mark.parametrize("outer", ["grad", "jvp", "backward"])
def test_per_example_gradients_are_differentiable(layer, outer):
    f, rest = loss(layer[0]), layer[1]
    args = (torch.stack([X, X.cos()]), *rest)
    numbers_of = tuple(range(len(args)))
    gradient = functx.grad(f, argnums=numbers_of)
    batched = lambda x, *rest: functx.vmap(gradient, in_dims=(0, *(None for _ in rest)))(x, *rest)
    looped = lambda x, *rest: [torch.stack(g) for g in zip(*(gradient(one, *rest) for one in x))]

    def derivative(of):
        value = lambda *args: sum((g * numbers(*g.shape, start=0.7)).sum() for g in of(*args))
        if outer == "jvp":
            return functx.jvp(value, args, tuple(a.cos() for a in args))[1]
        if outer == "grad":
            return functx.grad(value, argnums=numbers_of)(*args)
        leaves = [a.clone().requires_grad_() for a in args]
        return torch.autograd.grad(value(*leaves), leaves)

    torch.testing.assert_close(derivative(batched), derivative(looped), rtol=1e-10, atol=1e-11)


PER_EXAMPLE = {
    "vmap(grad)": lambda f: functx.vmap(functx.grad(f)),
    "vmap(jacrev)": lambda f: functx.vmap(functx.jacrev(f)),
    "vmap(jacfwd)": lambda f: functx.vmap(functx.jacfwd(f)),
    "remat(vmap(grad))": lambda f: functx.remat(functx.vmap(functx.grad(f))),
}


@pytest.mark.parametrize("remat", [lambda f: f, functx.remat])
@pytest.mark.parametrize("way", PER_EXAMPLE)
def test_plain_autograd_follows_to_a_weight_of_the_closure(way, remat):
    rows = torch.stack([X, X.cos()])

    def derivatives(transform, remat):
        w = ROWS[0].clone().requires_grad_()
        f = remat(loss(lambda x: F.layer_norm(x.sin(), (3,), w)))
        (first,) = torch.autograd.grad(transform(f)(rows).sin().sum(), w, create_graph=True)
        return first, torch.autograd.grad(first.sin().sum(), w)[0]

    def looped(f):
        return lambda rows: torch.stack([functx.grad(f)(x) for x in rows])

    expected = derivatives(looped, lambda f: f)
    torch.testing.assert_close(derivatives(PER_EXAMPLE[way], remat), expected)


@pytest.mark.parametrize(
    ("dtype", "remat"), [(torch.float32, functx.remat), (torch.bfloat16, lambda f: f)]
)
def test_first_derivatives_are_those_of_torch_bit_by_bit(layer, dtype, remat):
    f, args = layer[0], [t.to(dtype) for t in (torch.stack([X, X.cos()]), *layer[1])]

    def gradients(transforms, f):
        each = transforms.grad(lambda *args: f(*args).float().sin().sum(), tuple(range(len(args))))
        return transforms.vmap(each, (0, *(None for _ in args[1:])))(*args)

    for found, expected in zip(gradients(functx, remat(f)), gradients(torch.func, f)):
        assert torch.equal(found, expected)
