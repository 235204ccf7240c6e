"""What leaves a region otherwise than by return, under transforms: right, freed, or an error."""

import ctypes
import weakref
from types import SimpleNamespace

import pytest
import torch
from cases import DTYPE, numbers
from nets import seeded
from programs import identity
from references import assert_same
from right import freed, right_or_raises
from torch import nn
from torch.func import functional_call

import functx
from functx._remat import _escape

pytestmark = pytest.mark.usefixtures("no_hooks")

X = numbers(2, 3, 4)
W = numbers(4, 4, start=1.0)


def backward(f):
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    return torch.autograd.grad(f(x, w), (x, w))


def mapped_inside(f):
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    return torch.autograd.grad(functx.vmap(f, (0, None))(x, w).sum(), (x, w))


WAYS = {
    "backward": backward,
    "grad": lambda f: functx.grad(f, (0, 1))(X, W),
    "torch's grad": lambda f: torch.func.grad(f, (0, 1))(X, W),
    "vmap of grad": lambda f: functx.vmap(functx.grad(f, (0, 1)), (0, None))(X, W),
    "backward of vmap": mapped_inside,
    "grad of grad": lambda f: functx.grad(lambda x: functx.grad(lambda x: f(x, W))(x).sin().sum())(
        X
    ),
    "jacrev of grad": lambda f: functx.jacrev(functx.grad(f))(X, W),
    "jvp of grad": lambda f: functx.jvp(functx.grad(lambda w: f(X, w)), (W,), (W.sin(),)),
    "in a region": lambda f: functx.grad(functx.remat(lambda x, w: f(x, w) * 1.5), (0, 1))(X, W),
    "jvp": lambda f: functx.jvp(f, (X, W), (X.cos(), W.sin())),
    "hessian": lambda f: functx.hessian(f)(X, W),
}


def both(h):
    return h, h.exp()


# What is left behind, and what is returned.
LEFT = {
    "a result of a linear layer": lambda x, w: both(nn.functional.linear(x, w, w[0])),
    "a view": lambda x, w: ((h := x @ w).mT, h.exp()),
    "a part": lambda x, w: ((h := x @ w)[..., :2], h[..., 2:].exp()),
    "what is returned too": lambda x, w: ((h := (x @ w).sin()), h),
    "what the tape holds too": lambda x, w: ((h := (x @ w).exp()), h.sin()),
    "written in place": lambda x, w: ((h := x @ w).sin_(), h.exp()),
    "of other inputs": lambda x, w: (w.sin().exp(), x.exp()),
    "detached": lambda x, w: ((h := x @ w).detach(), h.exp()),
    "an input": lambda x, w: (x, (x @ w).exp()),
}


def program_of(way, left):
    def program(remat):
        def f(x, w):
            aux = []

            def block(x):
                h, y = LEFT[left](x, w)
                aux.append(h)
                return y

            y = remat(block)(x)
            return y.sin().sum() + (aux[0] * aux[0].detach().cos()).sum()

        return WAYS[way](f)

    return program


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("left", LEFT)
def test_it_has_its_derivatives(left, way):
    program = program_of(way, left)
    # What has a tangent, or is a view of what is not the region's, is refused.
    if way in ("jvp", "jvp of grad", "hessian") or left == "an input":
        right_or_raises(program, match="otherwise than by return", eps=64)
    else:
        assert_same(program(functx.remat), program(identity), eps=64)


def test_two_views_of_the_same_are_refused():
    def f(x, w):
        aux = []

        def block(x):
            h = x @ w
            aux.append(h[0])
            return h

        return functx.remat(block)(x).sum() + aux[0].sum()

    with pytest.raises(functx.RematError, match="otherwise than by return"):
        backward(f)


@pytest.mark.parametrize("way", ["backward", "grad", "vmap of grad", "grad of grad"])
@pytest.mark.parametrize("kind", ["list", "dict", "default", "named default", "a child's"])
def test_nothing_keeps_it_alive(kind, way):
    """Neither a list that the region closes over nor anything else is a cycle with its node."""
    refs = []

    def f(x, w):
        aux = {} if kind == "dict" else []

        def leave(aux, h):
            if kind == "dict":
                aux[len(aux)] = h
            else:
                aux.append(h)
            return h.exp()

        def block(x):
            return leave(aux, (x @ w).sin()) + leave(aux, (x @ w).cos())

        def given(x, aux=aux):
            return leave(aux, (x @ w).sin()) + leave(aux, (x @ w).cos())

        def named(x, *, aux=aux):
            return given(x, aux)

        parent = {}
        parent["child"] = {"parent": parent, "aux": aux}

        def child(x):
            return given(x, parent["child"]["parent"]["child"]["aux"])

        y = functx.remat(
            {"default": given, "named default": named, "a child's": child}.get(kind, block)
        )(x)
        found = [*aux.values()] if kind == "dict" else aux
        refs.extend(map(weakref.ref, found))
        assert len(found) == 2
        parent.clear()  # a cycle of the test's own
        return y.sum() + sum(a.sum() for a in found)

    freed(lambda: WAYS[way](f), refs)


def test_what_a_replay_appends_is_not_in_the_users_list():
    aux = []

    def block(x):
        aux.append(x.sin())
        return sum(aux).exp()

    x = X.clone().requires_grad_()
    y = functx.remat(block)(x)
    (gradient,) = torch.autograd.grad(y.sum() + aux[0].sum(), x)
    assert len(aux) == 1
    assert_same(gradient, x.sin().exp() * x.cos() + x.cos(), eps=8)


OLD = {
    "spectral_norm": nn.utils.spectral_norm,
    "spectral_norm, frozen": lambda m: nn.utils.spectral_norm(m).eval(),
    "weight_norm": nn.utils.weight_norm,
}


def by_parameters(remat, module):
    block = remat(module)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = module

        def forward(self, x):
            return block(x)

    parameters = {f"module.{k}": p.detach() for k, p in module.named_parameters()}
    return lambda p, x: functional_call(Net(), p, (x,)).sin().sum(), parameters


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("way", ["grad", "vmap", "jvp", "jacrev", "hessian", "by name", "each"])
@pytest.mark.parametrize("kind", OLD)
def test_a_weight_that_a_hook_computes(kind, way):
    """Parametrizations of the old style store it on the module."""
    rows = numbers(5, 4)

    def program(remat):
        module = seeded(lambda: OLD[kind](nn.Linear(4, 3, dtype=DTYPE)))
        block = remat(module)

        def f(x):
            return block(x).sin().sum()

        if way == "grad":
            out = functx.grad(f)(rows)
        elif way == "vmap":
            out = functx.vmap(functx.grad(f))(rows)
        elif way == "jvp":
            out = functx.jvp(f, (rows,), (rows.cos(),))
        elif way == "jacrev":
            out = functx.jacrev(lambda x: block(x).sin().sum(0))(rows)
        elif way == "hessian":
            out = functx.hessian(f)(rows)
        else:
            g, parameters = by_parameters(remat, module)
            if way == "by name":
                out = functx.grad(g)(parameters, rows)
            else:
                out = functx.vmap(functx.grad(g), (None, 0))(parameters, rows[:, None])
        return out, dict(module.named_buffers())

    assert_same(program(functx.remat), program(identity), eps=64)


@pytest.mark.parametrize("way", ["backward", "grad", "vmap of grad", "jacrev of grad"])
@pytest.mark.parametrize("again", ["as much", "less"])
def test_an_inner_region_leaves_less_behind_in_a_replay(again, way):
    """What the outer one leaves behind is not taken for something else."""

    def program(remat):
        def f(x, w):
            first, second = [], []
            runs = ctypes.c_int()  # of which functx knows nothing

            def inner(x):
                h = (x @ w).sin()
                runs.value += 1
                if again != "less" or runs.value == 1:
                    first.append(h)
                return h.exp()

            def outer(x):
                y = remat(inner)(x)
                second.append(y.sin())
                return second[-1].cos() * y

            out = remat(outer)(x)
            return out.sum() + 3 * second[0].sum()

        return WAYS[way](f)

    if again == "less":
        with pytest.raises(functx.ReplayError, match="does not leave behind"):
            program(functx.remat)
    else:
        assert_same(program(functx.remat), program(identity), eps=64)


@pytest.mark.parametrize("found", [True, False])
def test_what_leaves_at_every_step_is_looked_for_in_cycles_at_most_once(found, monkeypatch):
    """The garbage collector takes as long as thousands of operations."""
    collected = []
    monkeypatch.setattr(_escape.gc, "collect", lambda *a: collected.append(a))
    log = []

    def body(x):
        h = x.sin()
        log.append(h if found else frozenset([h]))
        return h.exp()

    body = functx.remat(body)
    for _ in range(4):
        x = X.clone().requires_grad_()
        y = body(x)
        (h,) = [log[-1]] if found else log[-1]
        (y.sum() + 2 * h.sum()).backward()
        assert_same(x.grad, X.sin().exp() * X.cos() + 2 * X.cos(), eps=4)
    assert collected == ([] if found else [(0,), (1,), (2,)])


@pytest.mark.parametrize(
    ("transform", "what"),
    [
        (transform, what)
        for transform in ("grad", "vmap(grad)", "grad(grad)", "jvp")
        for what in ("detached", "made", "no_grad")
        if (transform, what) != ("jvp", "no_grad")  # which has a tangent
    ],
)
@pytest.mark.parametrize("factor", [False, True])
def test_the_caller_writes_to_what_has_left_without_a_derivative(transform, what, factor):
    """What it is then, torch lets the code of a transform write to."""

    def run(remat):
        def loss(x):
            box = []

            def body(x):
                with torch.set_grad_enabled(what != "no_grad"):
                    h = torch.ones_like(x) if what == "made" else x.sin()
                    box.append(h.detach() * 2 if what == "detached" else h * 2)
                return x.exp()

            y = remat(body)(x)
            box[0].mul_(x if factor else 3)
            return (y * box[0]).sum()

        if transform == "grad(grad)":
            return functx.grad(lambda x: functx.grad(loss)(x).square().sum())(numbers(3))
        if transform == "jvp":
            return functx.jvp(loss, (numbers(3),), (numbers(3, start=1.0),))
        f = functx.grad(loss)
        return functx.vmap(f)(numbers(2, 3)) if transform == "vmap(grad)" else f(numbers(3))

    assert_same(run(functx.remat), run(identity), eps=16)


def test_views_of_one_tensor_may_be_stored_as_clones():
    def gradient(remat, store):
        held = SimpleNamespace()

        def body(x):
            held.a, held.b = map(store, (x.sin() * 2).chunk(2))
            return x.cos()

        x = numbers(4).requires_grad_()
        y = remat(body)(x)
        loss = y.sum() + (held.a * held.b).sum()
        return torch.autograd.grad(loss, x)[0]

    with pytest.raises(functx.RematError, match=r"store a \.clone\(\) of it"):
        gradient(functx.remat, lambda t: t)
    assert_same(gradient(functx.remat, torch.clone), gradient(identity, torch.clone))
