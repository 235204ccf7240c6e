"""What is kept, by counts of the operations that a pullback runs again, and errors of policies."""

import pytest
import torch
import torch.nn.functional as F
from cases import numbers
from references import Operations, count, no_garbage_collection

import functx
from functx import checkpoint_policies as cp

X = numbers(4, 5)


def attention(x, dropout=0.0):
    q = x.reshape(1, 2, 2, 5)
    return F.scaled_dot_product_attention(q.sin(), q, q, dropout_p=dropout).exp()


def again(f, *args, policy=None):
    """Operations of a pullback that the one without remat does not run."""
    found = []
    for g in (functx.remat(f, policy=policy), f):
        leaves = [t.clone().requires_grad_() for t in args]
        value = g(*leaves).sum()
        found.append(count(torch.autograd.grad, value, leaves))
    return found[0] - found[1]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_everything_recomputes_nothing_but_draws(dropout):
    ran = again(lambda x: attention(x @ x.mT @ x, dropout), X, policy=cp.everything_saveable)
    assert not {"mm", "bmm", "sin", "exp", "_safe_softmax"} & ran.keys()
    assert not any("attention" in name for name in ran)
    assert ("bernoulli_" in ran) == bool(dropout)


def test_attention_without_dropout_is_kept_as_a_product():
    assert not any("attention" in name for name in again(attention, X, policy=cp.dots_saveable))
    assert any("attention" in name for name in again(attention, X))


def test_a_named_result_is_kept_without_a_copy():
    f = functx.remat(
        lambda x: functx.checkpoint_name(F.linear(x.sin(), X[:, :4].T), "h").tanh().exp(),
        policy=cp.save_only_these_names("h"),
    )
    counts = count(f, numbers(2, 3, 4).requires_grad_())
    assert "clone" not in counts


def test_what_is_kept_and_written_later_is_kept_as_it_was():
    ran = again(lambda x: (x @ x.mT).relu_().exp() * x.sum(), X, policy=cp.dots_saveable)
    assert ran["mm"] == 0


def test_a_kept_result_that_is_modified_after_the_forward_raises():
    x = X.clone().requires_grad_()
    y = functx.remat(torch.tanh, policy=cp.everything_saveable)(x)
    z = y * 1
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(functx.ReplayError, match="modified by an in-place operation"):
        z.sum().backward()


def test_of_several_results_only_those_that_are_read_are_kept():
    x = X.clone().requires_grad_()
    with no_garbage_collection(), Operations() as operations:
        y = functx.remat(lambda x: x.sort()[0] + 1, policy=cp.everything_saveable)(x)
        assert operations.live == y.nbytes + x.numel() * 8  # the indices


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (lambda ctx, op, *args, **kwargs: 1 / 0, "division by zero"),
        (lambda ctx, op, *args, **kwargs: "yes", "returned 'yes'; expected a bool"),
    ],
)
def test_an_error_of_a_policy_names_the_operator_and_the_line(policy, message):
    region = functx.remat(lambda x: x.sin().exp(), policy=policy)
    for run in (region, functx.grad(lambda x: region(x).sum())):
        with pytest.raises(
            functx.RematError, match=rf"{__name__.split('.')[-1]}.*aten\.sin.*{message}"
        ):
            run(X.clone().requires_grad_())
