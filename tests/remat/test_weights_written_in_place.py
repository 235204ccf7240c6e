"""Rule 2: weights that a region writes where autograd does not record it, masked or clamped say.

The values, the gradients and the weights are those without remat, bit by bit.
"""

from types import SimpleNamespace

import pytest
import torch
from cases import numbers, unchanged
from references import assert_same
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import functx

from .refusals import refused

RUNS = 3  # the later ones may follow what the first one has left
MASK = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
TOKENS = torch.tensor([1, 2, 1])


def under_no_grad(write):
    def f(w):
        with torch.no_grad():
            write(w)

    return f


WRITES = {
    "masked": under_no_grad(lambda w: w.mul_(MASK)),
    "clamped": under_no_grad(lambda w: w.clamp_(-0.4, 0.5)),
    "copied": under_no_grad(lambda w: w.copy_((w * MASK).sin())),
    "filled by a mask": under_no_grad(lambda w: w.masked_fill_(MASK == 0, 0.25)),
    "an item": under_no_grad(lambda w: w.__setitem__((..., 1), 0.125)),
    "a view": under_no_grad(lambda w: w[..., 1:].mul_(0.5)),
    "renormalised": under_no_grad(lambda w: w.div_(w.norm())),
    "out=": under_no_grad(lambda w: torch.mul(w, 0.5, out=w)),
    "twice": under_no_grad(lambda w: w.mul_(MASK).add_(0.25).mul_(0.5)),
    "data masked": lambda w: w.data.mul_(MASK),
    "data clamped": lambda w: w.data.clamp_(-0.4, 0.5),
    "data copied": lambda w: w.data.copy_(w.data * MASK),
    "detached": lambda w: w.detach().mul_(MASK),
    "by torch.nn.init": lambda w: nn.init.constant_(w, 0.75),
}
C = SimpleNamespace(w=None)


def layer(write, before=False):
    """Reads a captured weight, writes it, and reads it; or reads a copy before, as torch allows."""

    def f(x):
        h = x * C.w.clone() if before else x.exp()
        write(C.w)
        return (h * C.w).sin() * C.w

    return f


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("name", WRITES)
def test_values_gradients_and_weights_are_those_without_remat(name, before):
    def program(remat):
        region, found = remat(layer(WRITES[name], before)), []
        C.w = numbers(3, start=1.0).requires_grad_()
        for step in range(RUNS):
            x = numbers(3, start=step).requires_grad_()
            region(x).sum().backward()
            found.append((x.grad, C.w.grad.clone(), C.w.detach().clone(), C.w._version))
            with torch.no_grad():
                C.w.add_(0.125 * C.w.grad)  # the step of an optimizer
        return found

    unchanged(program)


@pytest.mark.parametrize("name", WRITES)
def test_derivatives_of_second_order_reach_the_weight(name):
    def program(remat):
        region, found = remat(layer(WRITES[name], True)), []
        C.w = numbers(3, start=1.0).requires_grad_()
        for step in range(RUNS):
            x = numbers(3, start=step).requires_grad_()
            first = torch.autograd.grad(region(x).sum(), (x, C.w), create_graph=True)
            second = torch.autograd.grad(sum(t.square().sum() for t in first), (x, C.w))
            found.append((first, second, C.w.detach().clone()))
        return found

    unchanged(program, eps=16)


@pytest.mark.parametrize("name", ["masked", "data clamped", "a view"])
def test_a_backward_may_come_twice_and_row_by_row(name):
    def program(remat):
        region = remat(layer(WRITES[name]))
        C.w, x = numbers(3, start=1.0).requires_grad_(), numbers(3).requires_grad_()
        out = region(x)
        rows = [torch.autograd.grad(out[i], (x, C.w), retain_graph=True) for i in range(3)]
        return rows, C.w.detach()

    unchanged(program)


class Net(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.write = write
        self.first, self.second = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(numbers(*p.shape, start=i))

    def forward(self, x):
        self.write(self.first.weight)
        self.write(self.second.weight)
        return self.second(self.first(x).tanh())


@pytest.mark.parametrize("name", ["masked", "clamped", "data masked", "detached", "an item"])
@pytest.mark.parametrize("around", ["nothing", "a region", "a region inside", "two calls"])
@pytest.mark.parametrize("policy", [None, functx.checkpoint_policies.dots_saveable])
def test_modules_and_nests_of_regions(name, around, policy):
    def program(remat):
        net = Net(WRITES[name])
        region = remat(net, policy=policy)
        f = {
            "nothing": region,
            "a region": remat(lambda x: region(x.sin()).exp()),
            "a region inside": remat(lambda x: remat(region)(x.sin()).exp()),
            "two calls": lambda x: region(region(x.sin())),
        }[around]
        found = []
        for step in range(RUNS):
            x = numbers(2, 3, start=step).requires_grad_()
            found.append(torch.autograd.grad(f(x).sum(), (x, *net.parameters())))
            found.append([p.detach().clone() for p in net.parameters()])
            with torch.no_grad():
                for p in net.parameters():
                    p.add_(0.25)
        return found

    if around == "two calls" and "data" not in name:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            program(lambda f, **_: f)  # torch's error: the first call has saved the weight
    else:
        unchanged(program)


@pytest.mark.parametrize("part", ["leaf", "no leaf", "constant"])
@pytest.mark.parametrize("name", WRITES)
def test_arguments_and_what_functional_call_puts_there(name, part):
    def program(remat):
        net, found = Net(WRITES[name]), []
        region = remat(net)
        for step in range(RUNS):
            x, w = numbers(2, 3, start=step).requires_grad_(), numbers(3, 3, start=step + 1.0)
            leaf = w.requires_grad_(part != "constant")
            given = leaf * 1 if part == "no leaf" else leaf
            out = functx.functional_call(region, {"first.weight": given}, (x,))
            leaves = (x,) if part == "constant" else (x, leaf)
            found += [torch.autograd.grad(out.sum(), leaves), given.detach().clone()]
        return found

    unchanged(program)


@pytest.mark.parametrize("norm_type", [2.0, 1.0])
@pytest.mark.parametrize("way", ["module", "functional", "with a region around"])
def test_embeddings_of_a_largest_norm(way, norm_type):
    def program(remat):
        table = nn.Embedding(4, 3, max_norm=0.3, norm_type=norm_type, dtype=torch.float64)
        with torch.no_grad():
            table.weight.copy_(numbers(4, 3, start=2.0))
        if way == "functional":
            f = remat(lambda x: F.embedding(TOKENS, table.weight, None, 0.3, norm_type) * x)
        else:
            f = remat(lambda x: (table(TOKENS) * x).sin())
        region = remat(lambda x: f(x).exp()) if way == "with a region around" else f
        found = []
        for step in range(RUNS):
            x = numbers(3, start=step).requires_grad_()
            region(x).sum().backward()
            found.append((x.grad, table.weight.grad.clone(), table.weight.detach().clone()))
            with torch.no_grad():
                table.weight.add_(0.25)
        return found

    unchanged(program)


def test_an_embedding_bag_of_a_largest_norm():
    def program(remat):
        weight, found = numbers(4, 3, start=2.0).requires_grad_(), []
        bag = lambda x: F.embedding_bag(
            TOKENS[None], weight, max_norm=0.3, norm_type=2.0, mode="sum"
        )
        region = remat(lambda x: (bag(x) * x).sin())
        for step in range(RUNS):
            x = numbers(3, start=step).requires_grad_()
            found.append(torch.autograd.grad(region(x).sum(), (x, weight)))
            found.append(weight.detach().clone())
        return found

    unchanged(program)


def test_tied_weights_and_other_views_of_the_memory():
    """Two inputs of one memory: both are as they were, and both as they are after the write."""

    def program(remat):
        w = numbers(3, 3, start=1.0).requires_grad_()
        constant, found = w.detach()[1], []

        def f(x):
            h = (x @ w.clone()) * constant.clone()
            with torch.no_grad():
                w.mul_(MASK)
            return (h @ w.t()) * constant

        region = remat(f)
        for step in range(RUNS):
            x = numbers(2, 3, start=step).requires_grad_()
            first = torch.autograd.grad(region(x).sum(), (x, w), create_graph=True)
            second = torch.autograd.grad(first[1].square().sum(), (x, w))
            found.append((first, second, w.detach().clone()))
            with torch.no_grad():
                w.add_(0.5)
        return found

    unchanged(program, eps=16)


WAYS = {
    "grad": lambda lib, f, w, x: lib.grad(f)(w, x),
    "grad, of both": lambda lib, f, w, x: lib.grad(f, (0, 1))(w, x),
    "vjp": lambda lib, f, w, x: lib.vjp(f, w, x)[1](torch.ones((), dtype=w.dtype)),
    "vmap(grad)": lambda lib, f, w, x: lib.vmap(lib.grad(f))(
        torch.stack([w, w + 1]), torch.stack([x, x.cos()])
    ),
    "vmap(grad), of the other": lambda lib, f, w, x: lib.vmap(lib.grad(f, 1))(
        torch.stack([w, w + 1]), torch.stack([x, x.cos()])
    ),
    "grad(vmap)": lambda lib, f, w, x: lib.grad(
        lambda w: lib.vmap(f, (None, 0))(w, torch.stack([x, x.cos()])).sum()
    )(w),
    "jacrev": lambda lib, f, w, x: lib.jacrev(f)(w, x),
    "grad(grad)": lambda lib, f, w, x: lib.grad(lambda x: lib.grad(f)(w * 1, x).square().sum())(x),
    "jvp": lambda lib, f, w, x: lib.jvp(f, (w, x), (w.sin(), x.cos())),
    "jvp(grad)": lambda lib, f, w, x: lib.jvp(lambda x: lib.grad(f)(w * 1, x), (x,), (x.cos(),)),
}


@pytest.mark.filterwarnings("ignore:.*not yet implemented the batching rule:UserWarning")
@pytest.mark.parametrize("library", [functx, torch.func], ids=["functx", "torch.func"])
@pytest.mark.parametrize("name", ["masked", "clamped", "an item"])
@pytest.mark.parametrize("way", WAYS)
def test_inside_of_transforms_a_weight_is_an_argument(way, name, library):
    """torch refuses a captured one there."""

    def program(remat):
        def f(w, x):
            h = x * w.clone()
            WRITES[name](w)
            return ((h * w).sin() * w).sum()

        region, found = remat(f), []
        for step in range(RUNS):
            w, x = numbers(3, start=1.0), numbers(3, start=step)
            found += [WAYS[way](library, region, w, x), w]
        return found

    unchanged(program, eps=32)


def test_inside_of_transforms_torch_refuses_a_captured_weight():
    C.w = numbers(3).requires_grad_()
    f = functx.remat(lambda x: layer(WRITES["masked"])(x).sum())
    with pytest.raises(RuntimeError, match=r"in-place|writes in place"):
        functx.grad(f)(numbers(3))


# -- what stays an error (rule 4)


@pytest.mark.parametrize("runs", [0, 2])
@pytest.mark.parametrize("kind", ["an argument with history", "a captured one", "a view of it"])
def test_a_write_that_autograd_records_is_refused(kind, runs):
    C.on = False

    def write(t):
        if C.on:
            (t[1:] if kind == "a view of it" else t).mul_(2)
        return t.sin()

    f = write if "argument" in kind else lambda x: write(C.w) * x
    region, x = functx.remat(f), numbers(3).requires_grad_()
    for C.on in [False] * runs + [True]:
        C.w = x * 1
        if not C.on:
            region(x * 1)
            continue
        with refused("region(x * 1)", "x.clone", shape=(2,) if "view" in kind else (3,)):
            region(x * 1)


def test_a_write_to_what_the_tape_has_saved_is_torchs_error():
    """As without remat: the product has saved the weight, which is another one by then."""

    def f(x):
        y = (x * C.w).sin()
        with torch.no_grad():
            C.w.mul_(MASK)
        return y

    for remat in (functx.remat, lambda f: f):
        C.w, x = numbers(3, start=1.0).requires_grad_(), numbers(3).requires_grad_()
        out = remat(f)(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out.sum(), (x, C.w))


def test_the_duals_of_a_jvp_with_a_gradient_are_right_or_refused():
    def f(w, x):
        with torch.no_grad():
            w.mul_(MASK)
        return (w * x).sin().sum()

    w, x = numbers(3, start=1.0), numbers(3)
    of = lambda f: functx.jvp(lambda w: functx.grad(f, 1)(w, x), (w.clone(),), (x.cos(),))
    expected = of(f)
    try:
        found = of(functx.remat(f))
    except functx.RematError as error:
        assert "x.clone" in str(error)  # noqa: PT017
    else:
        assert_same(found, expected, 16)


def test_in_a_traced_graph_a_write_to_a_weight_is_refused():
    from torch.fx.experimental.proxy_tensor import make_fx

    def f(x, w):
        def body(x):
            with torch.no_grad():
                w.mul_(MASK)
            return (x * w).sin()

        return torch.autograd.grad(functx.remat(body)(x).sum(), (x, w))

    x, w = numbers(3).requires_grad_(), numbers(3, start=1.0).requires_grad_()
    with pytest.raises(RuntimeError, match=r"writes in place|leaf Variable"):
        make_fx(f)(x, w)


class Halved(nn.Module):
    def forward(self, w):
        return w * 0.5


def test_a_parametrized_weight_whose_original_is_masked():
    def program(remat):
        m, found = nn.Linear(3, 3).double(), []
        with torch.no_grad():
            m.weight.copy_(numbers(3, 3))
            m.bias.zero_()
        parametrize.register_parametrization(m, "weight", Halved())
        original = m.parametrizations.weight.original

        def f(x):
            with torch.no_grad():
                original.mul_(MASK)
            return m(x).sin()

        region = remat(f)
        for step in range(RUNS):
            x = numbers(2, 3, start=step).requires_grad_()
            found.append(torch.autograd.grad(region(x).sum(), (x, *m.parameters())))
            found.append(original.detach().clone())
        return found

    unchanged(program)
