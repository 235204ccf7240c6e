"""Budgets of pullbacks that are called in other ways: for rows, again, recorded, by torch's own."""

import warnings
import weakref

import pytest
import torch
from references import assert_same, peak
from torch.utils import _pytree as pytree

import functx
from functx import _rows

pytestmark = pytest.mark.usefixtures("no_hooks")

WEIGHTS = [torch.randn(16, 16, generator=torch.Generator().manual_seed(i)) / 4 for i in range(6)]
X = torch.randn(30, 16, generator=torch.Generator().manual_seed(100))


def f(weights, x):
    for w in weights:
        x = torch.tanh(x @ w)
    return x.square().sum(0)[:5]


FORESEEN = {
    "jacrev": lambda f: lambda x: functx.jacrev(f, 1)(WEIGHTS, x),
    "chunks of 2": lambda f: lambda x: functx.jacrev(f, 1, chunk_size=2)(WEIGHTS, x),
    "chunks of 1": lambda f: lambda x: functx.jacrev(f, 1, chunk_size=1)(WEIGHTS, x),
    "of another function": lambda f: functx.jacrev(lambda x: f(WEIGHTS, 2 * x)[:3].sin()),
    "has_aux": lambda f: functx.jacrev(lambda x: (f(WEIGHTS, x)[:3], x.sum()), has_aux=True),
    "vmap(jacrev)": lambda f: (
        lambda x: functx.vmap(functx.jacrev(f, 1), (None, 0))(WEIGHTS, x.reshape(3, 10, 16))
    ),
    "jacrev(vmap)": lambda f: functx.jacrev(
        lambda x: functx.vmap(f, (None, 0))(WEIGHTS, x.reshape(3, 10, 16)).sum(0)
    ),
    "jacrev(grad)": lambda f: (
        lambda x: functx.jacrev(functx.grad(lambda s: f(WEIGHTS, x * s.sum()).sum()))(torch.ones(4))
    ),
    "hessian": lambda f: (
        lambda x: functx.hessian(lambda s: f(WEIGHTS, x * s.sum()).sum())(torch.ones(3))
    ),
}


@pytest.mark.parametrize("name", FORESEEN)
def test_jacobians_keep_a_budget(name):
    transform = FORESEEN[name]
    most = peak(transform(f), X)
    budget = int(0.85 * most)
    planned = transform(functx.remat(f, budget=budget))
    leaves = [pytree.tree_leaves(g(X)) for g in (planned, transform(f))]
    assert_same(*leaves, 64)
    assert peak(planned, X) <= budget


def test_planned_for_one_row_it_would_be_exceeded(monkeypatch):
    monkeypatch.setattr(_rows, "_total", lambda wanted: -1)
    transform = FORESEEN["jacrev"]
    budget = int(0.85 * peak(transform(f), X))
    planned = transform(functx.remat(f, budget=budget))
    with pytest.warns(functx.BudgetWarning, match="for 5 rows at once"):
        planned(X)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert peak(planned, X) > budget


def test_rows_that_depend_on_values_are_not_known():
    planned = functx.remat(f, budget=int(0.85 * peak(functx.jacrev(f, 1), WEIGHTS, X)))

    def chosen(x):
        y = planned(WEIGHTS, x)
        return y[:4] if x.sum() < 1e9 else y

    with pytest.warns(functx.BudgetWarning, match=r"for 4 rows at once.*chunk_size|functx.jacrev"):
        jacobian = functx.jacrev(chosen)(X)
    assert_same(jacobian, functx.jacrev(lambda x: f(WEIGHTS, x)[:4])(X), 64)


def test_what_would_keep_a_fake_is_an_error():
    kept = []

    def loses(x):
        kept.append(x * 2)
        return functx.remat(f, budget=0.9)(WEIGHTS, x)

    with pytest.raises(functx.RematError, match="keeps a tensor otherwise than by return"):
        functx.jacrev(loses)(X)


def plain(pull):
    def of(f):
        def run(x):
            x = x.clone().requires_grad_()
            return pull(f(WEIGHTS, x), x)

        return run

    return of


def double_backward(out, x):
    (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return g, *torch.autograd.grad(g.square().sum(), x)


def twice(out, x):
    loss = out.sum()
    return *torch.autograd.grad(loss, x, retain_graph=True), *torch.autograd.grad(loss, x)


def batched(out, x):
    return torch.autograd.grad(out, x, torch.eye(5), is_grads_batched=True)


UNFORESEEN = {
    "create_graph": (plain(double_backward), "with create_graph=True.*functx.grad"),
    "retain_graph": (plain(twice), "with retain_graph=True.*functx.vjp"),
    "is_grads_batched": (plain(batched), "for 5 rows at once.*functx.jacrev"),
    "torch.func.jacrev": (
        lambda f: torch.func.jacrev(lambda x: f(WEIGHTS, x)),
        "for 5 rows at once.*functx.jacrev",
    ),
    "vmap of a pullback": (
        lambda f: lambda x: functx.vmap(functx.vjp(lambda x: f(WEIGHTS, x), x)[1])(torch.eye(5)),
        "for 5 rows at once.*functx.jacrev",
    ),
    "grad of a pullback": (
        lambda f: (
            lambda x: functx.grad(
                lambda c: functx.vjp(lambda x: f(WEIGHTS, x), x)[1](c)[0].square().sum()
            )(torch.ones(5))
        ),
        "that began later|not measured",
    ),
    "grad over a pullback": (
        lambda f: (
            lambda x: functx.grad(lambda c, pull: pull(c)[0].square().sum())(
                torch.ones(5), functx.vjp(lambda x: f(WEIGHTS, x), x)[1]
            )
        ),
        "that began later|not measured",
    ),
}


@pytest.mark.parametrize("name", UNFORESEEN)
def test_what_nobody_could_know_warns_before_it_takes_more(name):
    transform, message = UNFORESEEN[name]
    budget = int(0.7 * peak(transform(f), X))
    planned = transform(functx.remat(f, budget=budget))
    with pytest.warns(functx.BudgetWarning, match=message):
        found = planned(X)
    assert_same(found, transform(f)(X), 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(functx.BudgetWarning):
            planned(X)


@pytest.mark.parametrize("name", list(UNFORESEEN)[:5])
def test_it_does_not_where_it_fits(name):
    transform, _ = UNFORESEEN[name]
    most = peak(transform(f), X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planned = transform(functx.remat(f, budget=2 * most))
        assert_same(planned(X), transform(f)(X), 64)
        assert_same(transform(functx.remat(f, budget=1.0))(X), transform(f)(X), 64)


@pytest.mark.parametrize(
    "stack",
    [
        lambda f: functx.grad(lambda x: f(WEIGHTS, x).sum()),
        lambda f: functx.grad(lambda x: functx.grad(lambda x: f(WEIGHTS, x).sum())(x).sum()),
        lambda f: lambda x: functx.vjp(lambda x: f(WEIGHTS, x), x)[1](torch.ones(5)),
        lambda f: functx.remat(functx.grad(lambda x: f(WEIGHTS, x).sum())),
        lambda f: functx.grad(functx.remat(lambda x: f(WEIGHTS, x).sum())),
        plain(lambda out, x: torch.autograd.grad(out.sum(), x)),
        lambda f: plain(lambda out, x: torch.autograd.grad(out.sum(), x))(functx.remat(f)),
        lambda f: torch.func.grad(lambda x: f(WEIGHTS, x).sum()),
        lambda f: torch.func.hessian(lambda s: f(WEIGHTS, X * s.sum()).sum()),
    ],
)
def test_ordinary_pullbacks_do_not_warn(stack):
    x = torch.ones(2) if stack(f).__name__ == "hessian" else X
    with warnings.catch_warnings():
        warnings.simplefilter("error", functx.BudgetWarning)
        stack(functx.remat(f, budget=0.9))(x)


@pytest.mark.parametrize("around", ["grad", "autograd", "vmap", "hessian"])
def test_a_region_around_it_does_the_same_in_its_replays(around):
    planned = functx.remat(f, budget=0.8)
    stack = {
        "grad": lambda g: functx.grad(lambda x: g(WEIGHTS, x).sum()),
        "autograd": lambda g: plain(lambda out, x: torch.autograd.grad(out.sum(), x))(g),
        "vmap": lambda g: (
            lambda x: functx.vmap(functx.grad(lambda x: g(WEIGHTS, x).sum()))(x.reshape(3, 10, 16))
        ),
        "hessian": lambda g: (
            lambda x: functx.hessian(lambda s: g(WEIGHTS, x * s.sum()).sum())(torch.ones(2))
        ),
    }[around]

    def twice(g):
        return lambda w, x: g(w, torch.sin(x * g(w, x).sum()))

    assert_same(stack(functx.remat(planned))(X), stack(f)(X), 64)
    assert_same(stack(functx.remat(twice(planned)))(X), stack(twice(f))(X), 64)


def test_nothing_is_held_for_it():
    """The hook knows shapes, and holds no tensors."""

    def called():
        inner = torch.ones(1000)
        x = X.clone()

        def held(w):
            return f([w], x * inner.sum())

        out = functx.remat(held, budget=1.0)(WEIGHTS[0].clone().requires_grad_())
        return out, weakref.ref(inner), weakref.ref(x)

    out, *gone = called()
    assert out.requires_grad
    assert [ref() for ref in gone] == [None, None]
