"""Inputs of a region that go during its replay, with their last use.

For the gradients of inputs alone, nothing reads the input of a region that is being replayed after
its first product, as JAX's compiler knows; 10 activations, where torch's checkpoint takes 11.
"""

import ctypes

import pytest
import torch
from cases import deep_mlp, numbers
from references import assert_same, peak

import functx
from functx._remat import _letting_go, _region
from functx._remat._entry import Entry

WEIGHTS, X, _ = deep_mlp()
ACTIVATION = X.nbytes


def identity(f):
    return f


def block(x, weights):
    for w in weights:
        x = torch.tanh(x @ w)
    return x


def chained(x, region=functx.remat, run=block):
    for start in range(0, len(WEIGHTS), 4):
        x = region(run)(x, WEIGHTS[start : start + 4])
    return x.square().sum()


def autograd(f, x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(f(x), x)


def backward(f, x):
    x = x.detach().requires_grad_()
    f(x).backward()
    return x.grad


class Stack(torch.nn.Module):
    """Frames of modules hold their arguments."""

    def __init__(self, weights):
        super().__init__()
        self.layers = torch.nn.Sequential()
        for w in weights:
            self.layers.append(torch.nn.Linear(16, 16, bias=False))
            self.layers[-1].weight.data = w.T
            self.layers.append(torch.nn.Tanh())
        self.requires_grad_(False)

    def forward(self, x):
        return self.layers(x)


BLOCKS = [functx.remat(Stack(WEIGHTS[start : start + 4])) for start in range(0, 24, 4)]


def of_modules(x):
    for module in BLOCKS:
        x = module(x)
    return x.square().sum()


def keeps_its_argument(x, weights):
    given = x
    for w in weights:
        x = torch.tanh(x @ w)
    assert given.shape == x.shape
    return x


PROGRAMS = {
    "functions": chained,
    "modules": of_modules,
    "an argument that stays bound": lambda x: chained(x, run=keeps_its_argument),
}
STACKS = {
    "autograd": lambda f: autograd(f, X),
    "backward": lambda f: backward(f, X),
    "grad": lambda f: functx.grad(f)(X),
    "vmap(grad)": lambda f: functx.vmap(functx.grad(f))(X[:, None]),
    "grad(vmap)": lambda f: functx.grad(lambda x: functx.vmap(f)(x).sum())(X[:, None]),
}


class TestPeaks:
    @pytest.mark.parametrize(
        ("program", "stack"),
        [
            *(("functions", stack) for stack in STACKS),
            *(("modules", stack) for stack in ("backward", "vmap(grad)")),
            ("an argument that stays bound", "grad"),
        ],
    )
    def test_ten_activations(self, program, stack):
        values = 2 * 64 * 8  # the loss of each example, and its cotangent
        assert peak(STACKS[stack], PROGRAMS[program]) <= 10 * ACTIVATION + values

    def test_the_input_of_a_parent_is_kept_once(self):
        """What its children read is theirs."""

        def parent(x):
            return functx.remat(lambda x: chained(x) * x)(x).sum()

        assert peak(autograd, parent, X) <= 11.2 * ACTIVATION

    def test_without_letting_go(self, monkeypatch):
        """The bound can fail."""
        monkeypatch.setattr(_letting_go, "_WORTH", 1 << 20)
        assert peak(STACKS["grad"], chained) > 10.9 * ACTIVATION

    def test_a_graph_that_is_kept_keeps_inputs(self):
        x = X.detach().requires_grad_()
        loss = chained(x)
        first, second = (torch.autograd.grad(loss, x, retain_graph=again)[0] for again in (1, 0))
        assert_same(first, second)
        assert_same(first, autograd(lambda x: chained(x, identity), X)[0])


W, V = numbers(16, 16) / 2, numbers(16, 16, start=1.0) / 2
GIVEN = numbers(16, 16, start=2.0)
SMALL = numbers(16, 16, start=3.0)


def nested_constant(x, region):
    """A region inside reads what the outer one is given, as a constant."""
    return region(lambda x, c: region(lambda y: torch.tanh(y @ c))(x @ W) @ V)(x, GIVEN)


def nested_input(x, region):
    return region(lambda x, c: region(lambda y, c: torch.tanh(y @ c))(x @ W, c) @ V)(x, GIVEN)


def view(x, region):
    def body(x):
        transposed = x.T
        return torch.tanh(torch.sin(x @ W) @ V) @ transposed

    return region(body)(x)


def hook(x, region):
    def body(x, c):
        y = torch.tanh((x * c) @ W)
        y.register_hook(lambda g: g * c)
        return torch.tanh(y @ V)

    return region(body)(x, GIVEN)


def in_place(x, region):
    return region(lambda x: torch.sin(x @ W).mul_(2.0).cos() @ V)(x)


def result(x, region):
    """The input is a result, too, as is a view of it."""

    def body(x):
        return torch.sin(x @ W) @ V, x, x.T

    return sum(region(body)(x))


def inner_transform(x, region):
    def one(r):
        return torch.tanh(torch.sin(r @ W) @ V).sum()

    return region(lambda x: functx.vmap(functx.grad(one))(x.tanh()) + functx.grad(one)(x[0]))(x)


def mapped_later(x, region):
    """After its last use by itself, the input is read inside a transform."""

    def body(x):
        y = torch.tanh(torch.sin(x @ W) @ V)
        z = torch.func.vmap(lambda r: torch.sin(torch.cos(torch.sin(r) @ W) @ V))(x)
        return y + torch.func.vmap(torch.sin)(z)

    return region(body)(x)


def transform(x, region):
    """Of a region around transforms, no wrapper is its input."""

    def loss(x):
        for w in (W, V):
            x = torch.tanh(x @ w)
        return x.sum()

    return region(functx.grad(lambda x: functx.vmap(functx.vmap(loss))(x).sum()))(
        x.unflatten(0, (2, 2, 4))
    ).flatten(0, 2)


def strides(x, region):
    """The body looks at the layout of an argument that is gone."""

    def body(x):
        y = torch.sin(torch.tanh(x @ W) @ V)
        return y @ W if x.is_contiguous() and x.stride() == (16, 1) else y

    return region(body)(x)


def array(x, region):
    def body(x, c):
        mine = c.numpy()
        return torch.sin(x @ W) * torch.from_numpy(mine) + torch.tanh(x @ c)

    return region(body)(x, GIVEN.clone())


def pointer(x, region):
    """Python reads memory past torch, when torch has read it for the last time."""

    def body(x, c):
        y, address = torch.tanh(x @ c), c.data_ptr()
        y = torch.sin(y @ W)
        values = list((ctypes.c_double * c.numel()).from_address(address))
        return y * torch.tensor(values, dtype=y.dtype).reshape(c.shape)

    return region(body)(x, GIVEN.clone())


def left(x, region):
    kept = []

    def body(x):
        kept.append(x)
        return torch.sin(x @ W) @ V

    return region(body)(x) * kept[0]


ANYWHERE = {
    f.__name__: f
    for f in (
        *(nested_constant, nested_input, view, hook, in_place, result, inner_transform, strides),
        *(mapped_later, transform),
    )
}
EAGER = {f.__name__: f for f in (array, pointer, left)}
ORDERS = {
    "autograd": lambda f: autograd(f, SMALL),
    "grad": lambda f: functx.grad(f)(SMALL),
    "vmap(grad)": lambda f: functx.vmap(functx.grad(f))(torch.stack([SMALL, 2 * SMALL])),
    "grad(grad)": lambda f: functx.grad(lambda x: functx.grad(f)(x).square().sum())(SMALL),
    "twice": lambda f: autograd(
        lambda x: torch.autograd.grad(f(x), x, create_graph=True)[0].square().sum(), SMALL
    ),
}


def both(use, order):
    return [
        ORDERS[order](lambda x, region=region: use(x, region).square().sum())
        for region in (functx.remat, identity)
    ]


@pytest.mark.usefixtures("hooks")
@pytest.mark.parametrize("use", ANYWHERE)
@pytest.mark.parametrize("order", ORDERS)
def test_what_is_used_later_stays(use, order):
    assert_same(*both(ANYWHERE[use], order), eps=16)


@pytest.mark.parametrize("use", EAGER)
def test_what_python_reads_stays(use):
    assert_same(*both(EAGER[use], "autograd"))


def test_the_guard_is_needed(monkeypatch):
    """Without it, what a region inside closes over is gone when it runs again."""
    monkeypatch.setattr(_region, "may_pass", lambda *_: True)
    monkeypatch.setattr(_letting_go.Tensor, "untyped_storage", _letting_go.Tensor.untyped_storage)
    with pytest.raises(functx.ReplayError, match="was modified"):
        both(nested_constant, "autograd")


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_left_out_is_no_constant_of_a_region_inside(order, monkeypatch):
    """The outer region computes nothing again; the inner one is to find its constant."""
    monkeypatch.setattr(_letting_go, "_WORTH", 1 << 20)
    assert_same(*both(nested_constant, order), eps=16)


def test_of_two_that_one_operation_reads_last_the_second_goes_first(monkeypatch):
    """Tensors are told apart by what they are, not by their values."""
    tensors = [torch.zeros(3), torch.ones(3)]
    gone = []
    monkeypatch.setattr(_letting_go, "_can_go_now", lambda t, holders: t is tensors[1])
    monkeypatch.setattr(_letting_go, "let_go", gone.append)
    passing = _letting_go.Passing(
        [Entry(torch.add, (0, 1), ())], [("input", 0), ("input", 1)], tensors, [0, 1]
    )
    passing.after(0)
    passing.after(1)
    assert [id(t) for t in gone] == [id(tensors[1])]
