"""Backward passes inside a user's own ``forward_ad.dual_level``: gradients have tangents."""

import pytest
import torch
from cases import DTYPE, numbers
from nets import seeded
from programs import identity
from references import assert_same
from right import X
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call

import functx

V = X.cos()
W = numbers(4, 4, start=1.0)


class Own(torch.autograd.Function):
    """A derivative of its own, alike in both modes."""

    @staticmethod
    def forward(a, b):
        return a.sin() * b

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, cotangent):
        a, b = ctx.saved_tensors
        return cotangent * (a * b).cos(), cotangent * (a - b).sin()

    @staticmethod
    def jvp(ctx, da, db):
        a, b = ctx.saved_tensors
        return da * (a * b).cos() + db * (a - b).sin()


def body(x):
    return (x.sin() * x.exp()).tanh()


def parts(*tensors):
    """Primals, and tangents where there are any, before their level ends."""
    duals = [forward_ad.unpack_dual(t) for t in tensors if t is not None]
    return [
        [None if p is None else p.detach().clone() for p in (d.primal, d.tangent)] for d in duals
    ]


def leaves():
    """A vector and a matrix that want gradients, and the same as duals."""
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    return x, w, forward_ad.make_dual(x, V), forward_ad.make_dual(w, W.sin())


def captured(remat, create_graph):
    x, w, dual, weight = leaves()
    y = remat(lambda x: (x @ weight).sin())(dual)
    cotangent = forward_ad.make_dual(V, X)
    return parts(y, *torch.autograd.grad(y, [x, w], cotangent, create_graph=create_graph))


def only_weights(remat, create_graph):
    x, w, _, weight = leaves()
    y = remat(lambda x, w: (x @ w).sin())(x, weight)
    return parts(*torch.autograd.grad(y.sum(), [x, w], create_graph=create_graph))


def only_the_cotangent(remat, create_graph):
    x = X.clone().requires_grad_()
    y = remat(body)(x)
    cotangent = forward_ad.make_dual(V, X)
    return parts(*torch.autograd.grad(y, [x], cotangent, create_graph=create_graph))


def nested(remat, create_graph):
    x, w, dual, weight = leaves()
    inner = remat(lambda x: (x @ weight).sin())
    y = remat(lambda x: inner(inner(x) * x) + nn.functional.dropout(x, 0.4))(dual)
    return parts(*torch.autograd.grad(y.sum(), [x, w], create_graph=create_graph))


def chained(remat, create_graph):
    x, _, dual, _ = leaves()
    y = remat(lambda x: x.cos() * dual)(remat(body)(dual))
    return parts(*torch.autograd.grad(y.sum(), [x], create_graph=create_graph))


def custom_function(remat, create_graph):
    x, w, dual, weight = leaves()
    y = remat(lambda x: Own.apply(x, weight[0]).tanh())(dual)
    return parts(*torch.autograd.grad(y.sum(), [x, w], create_graph=create_graph))


def of_primal_and_tangent(remat, create_graph):
    x, w, dual, weight = leaves()
    y = forward_ad.unpack_dual(remat(lambda x: (x @ weight).sin())(dual))
    value = (y.primal * X).sum() + (y.tangent * V).sum()
    return parts(*torch.autograd.grad(value, [x, w], create_graph=create_graph))


def thrice(remat, create_graph):
    x, _, dual, _ = leaves()
    y = remat(body)(dual)
    found = []
    for _ in range(3):
        (y,) = torch.autograd.grad(y.sum(), [x], create_graph=True)
        found += parts(y)
    return found


def into_grad(remat, create_graph):
    x, _, dual, _ = leaves()
    remat(body)(dual).sum().backward(create_graph=create_graph)
    return parts(x.grad)


def a_module_whose_buffers_advance(remat, create_graph):
    net = seeded(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    ).to(DTYPE)
    params = dict(net.named_parameters())
    duals = {k: forward_ad.make_dual(p, p.detach().cos()) for k, p in params.items()}
    y = functional_call(remat(net), duals, (W,))
    gradients = torch.autograd.grad(y.square().sum(), params.values(), create_graph=create_graph)
    return parts(*gradients), [b.clone() for b in net.buffers()]


def a_gradient_inside(remat, create_graph):
    x, _, dual, _ = leaves()

    def f(x):
        return torch.autograd.grad((x.sin() * x).sum(), x, create_graph=True)[0]

    return parts(*torch.autograd.grad(remat(f)(dual).sum(), [x], create_graph=create_graph))


def a_write_inside(remat, create_graph):
    x, _, dual, _ = leaves()

    def f(x):
        h = x * 1
        h.mul_(x.cos())
        return h.sin(), x

    y, z = remat(f)(dual)
    value = y.sum() + z.sin().sum()
    return parts(*torch.autograd.grad(value, [x], create_graph=create_graph))


def rows_at_once(remat, create_graph):
    x, _, dual, _ = leaves()
    rows = torch.eye(4, dtype=DTYPE)
    y = remat(body)(dual)
    return parts(
        *torch.autograd.grad(y, [x], rows, is_grads_batched=True, create_graph=create_graph)
    )


def a_recurrent_net(remat, create_graph):
    net = seeded(lambda: nn.GRU(4, 4, batch_first=True)).to(DTYPE)
    x = W[None].clone().requires_grad_()
    y = remat(lambda x: net(x)[0])(forward_ad.make_dual(x, x.detach().cos()))
    return parts(*torch.autograd.grad(y.sum(), [x], create_graph=create_graph))


def by_a_transform(remat, create_graph):
    x, _, dual, _ = leaves()
    gradient = functx.grad(lambda x: remat(body)(x).sum())(dual)
    return parts(
        gradient, *torch.autograd.grad(gradient.sum(), [x], create_graph=create_graph)
    ) + parts(functx.vmap(functx.grad(lambda x: remat(body)(x).sum()))(torch.stack([dual, -dual])))


PROGRAMS = [
    *(captured, only_weights, only_the_cotangent, nested, chained, custom_function),
    *(of_primal_and_tangent, thrice, into_grad, a_module_whose_buffers_advance),
    *(a_gradient_inside, a_write_inside, rows_at_once, a_recurrent_net, by_a_transform),
]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("create_graph", [True, False])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_as_without_remat(program, create_graph):
    found = []
    for remat in (functx.remat, identity):
        torch.manual_seed(3)
        with forward_ad.dual_level():
            found.append(program(remat, create_graph))
    assert_same(*found, eps=128)


def test_a_backward_after_its_level_has_no_tangents_of_it():
    def program(remat):
        x = X.clone().requires_grad_()
        with forward_ad.dual_level():
            y = remat(body)(forward_ad.make_dual(x, V))
        (plain,) = torch.autograd.grad(y.sum(), [x], retain_graph=True)
        with forward_ad.dual_level():
            (g,) = torch.autograd.grad(y, [x], forward_ad.make_dual(V, X))
            return plain, parts(g)

    assert_same(program(functx.remat), program(identity), eps=16)


def test_a_policy_keeps_nothing_wrong():
    def program(remat, **options):
        with forward_ad.dual_level():
            x, _, dual, _ = leaves()
            y = remat(body, **options)(dual)
            return parts(*torch.autograd.grad(y.sum(), [x], create_graph=True))

    policy = functx.checkpoint_policies.everything_saveable
    assert_same(program(functx.remat, policy=policy), program(identity), eps=16)


def test_writes_to_an_input_are_refused_where_duals_are_pulled_back():
    with forward_ad.dual_level():
        x, _, dual, _ = leaves()
        y = functx.remat(lambda h: h.mul_(2).sin())(dual * 2)
        with pytest.raises(functx.RematError, match="in place"):
            torch.autograd.grad(y.sum(), [x], create_graph=True)


def test_duals_made_inside_of_a_transform_raise():
    def loss(x):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            return forward_ad.unpack_dual(functx.remat(torch.sin)(dual)).tangent.sum()

    with pytest.raises(functx.RematError, match=r"inside functx\.grad.*functx\.jvp"):
        functx.grad(loss)(numbers(3))


@pytest.mark.parametrize("what", ["both", "primal and weight"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_formula_that_has_no_derivative_of_its_own(what, nested, create_graph):
    """Torch takes another one where cotangents of tangents come along, as they do here."""
    x = numbers(2, 4, 5)

    def program(remat):
        a, w = x.clone().requires_grad_(), W[0].clone().requires_grad_()

        def f(a):
            return nn.functional.group_norm(a, 2, w, w).sin()

        with forward_ad.dual_level():
            a_dual = forward_ad.make_dual(a, x.cos())
            out = remat(lambda a: remat(f)(a) if nested else f(a))(a_dual)
            primal, tangent = forward_ad.unpack_dual(out)
            loss = (primal * tangent + (primal * w[:, None] if what != "both" else 0)).sum()
            first = torch.autograd.grad(loss, (a, w), create_graph=create_graph)
            assert all(g.requires_grad == create_graph for g in first)
            second = ()
            if create_graph:
                second = torch.autograd.grad(sum(g.square().sum() for g in first), (a, w))
            return [p for pair in parts(*first, *second) for p in pair if p is not None]

    assert_same(program(functx.remat), program(identity), eps=256)
