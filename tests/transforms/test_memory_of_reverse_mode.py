"""Lean reverse mode takes no more memory than torch.autograd.grad."""

import pytest
import torch
from cases import DTYPE, deep_mlp, numbers
from references import Operations, count, no_garbage_collection, peak
from torch import func as torch_func
from torch.utils._pytree import tree_map

import functx
import functx._transforms as transforms

WEIGHTS, X, LOSS = deep_mlp()


def network(x):
    for w in WEIGHTS:
        x = torch.tanh(x @ w)
    return x


def autograd(weights, x, **options):
    weights = [w.detach().requires_grad_() for w in weights]
    return torch.autograd.grad(LOSS(weights, x), weights, **options)


class TestPeak:
    @pytest.mark.parametrize("name", ["grad", "grad_and_value", "value_and_grad"])
    def test_of_grad_is_that_of_autograd(self, name):
        gradient = getattr(transforms, name)(LOSS)
        lean, expected = peak(gradient, WEIGHTS, X), peak(autograd, WEIGHTS, X)
        assert peak(torch.no_grad()(gradient), WEIGHTS, X) <= lean <= expected
        assert 2.8 * lean < peak(torch_func.grad(LOSS), WEIGHTS, X)  # the measure can fail

    def test_vjp_keeps_what_retain_graph_keeps(self):
        def lean(weights, x, **options):
            value, pullback = transforms.vjp(lambda w: LOSS(w, x), weights)
            return pullback(torch.ones_like(value), **options)

        retained = peak(autograd, WEIGHTS, X, retain_graph=True)
        freed = peak(autograd, WEIGHTS, X)
        assert peak(lean, WEIGHTS, X) <= retained
        assert peak(lean, WEIGHTS, X, retain_graph=False) <= freed < retained

    def test_of_vmap_of_grad_is_below_torchs(self):
        def per_example(library):
            return transforms.vmap(library.grad(LOSS), (None, 0))

        x = X[:16, None]
        assert peak(per_example(transforms), WEIGHTS, x) < 0.9 * peak(
            per_example(torch_func), WEIGHTS, x
        )

    def test_of_jacrev_is_that_of_a_batched_autograd(self):
        def batched(x):
            x = x.detach().requires_grad_()
            out = network(x)
            basis = torch.eye(out.numel(), dtype=DTYPE).view(-1, *out.shape)
            return torch.autograd.grad(out, x, basis, is_grads_batched=True)

        assert peak(transforms.jacrev(network), X[:4]) <= peak(batched, X[:4])

    def test_of_a_hessian_is_no_more_than_torchs(self):
        def energy(x):
            return LOSS(WEIGHTS, x)

        lean = peak(transforms.hessian(energy), X[:2])
        assert lean <= peak(transforms.jacfwd(transforms.grad(energy)), X[:2])
        assert lean <= peak(torch_func.hessian(energy), X[:2])

    def test_of_a_nested_grad_is_that_of_a_double_backward(self):
        def nested(library):
            return library.grad(lambda x: library.grad(lambda x: LOSS(WEIGHTS, x))(x).sum())

        def autograd_twice(x):
            x = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(LOSS(WEIGHTS, x), x, create_graph=True)
            return torch.autograd.grad(gradient.sum(), x)

        assert peak(nested(transforms), X) <= peak(autograd_twice, X)
        assert 2.5 * peak(nested(transforms), X) < peak(nested(torch_func), X)

    def test_no_operation_runs_twice(self):
        for name in ("grad", "jacrev", "hessian"):
            ours, theirs = (
                count(getattr(library, name)(lambda x: LOSS(WEIGHTS[:3], x)), X[:2])
                for library in (transforms, torch_func)
            )
            assert {op: ours[op] for op in ("mm", "bmm", "tanh")} == {
                op: theirs[op] for op in ("mm", "bmm", "tanh")
            }


RECORDED = {
    "an output that is not read": (torch.sin, 0),
    "one that is": (torch.tanh, 1),
    "two": (lambda x: (x.sin(), x.exp()), 1),
    "views": (lambda x: torch.cat([x, x]).chunk(2), 0),
    "of a region": (functx.remat(lambda x: torch.tanh(2 * x) * 2), 0),
    "of a region that is given what was computed": (lambda x: functx.remat(torch.sin)(x.sin()), 1),
}
"""Functions, and how many results of operations their pullbacks read."""


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("stack", ["vjp", "vmap", "has_aux", "linearize"])
def test_a_pullback_holds_what_it_reads_and_no_outputs(name, stack):
    """As that of jax.vjp; torch.func.vjp holds its output."""
    f, read = RECORDED[name]
    x = numbers(8, 8)

    def recorded(x):
        if stack == "linearize":
            return functx.linearize(f, x)
        if stack == "has_aux":
            return functx.vjp(lambda x: (f(x), None), x, has_aux=True)[:2]
        return functx.vjp(f, x)

    def measured(x):
        given = x if stack == "linearize" else tree_map(torch.ones_like, f(x))
        with no_garbage_collection(), Operations() as operations:
            out, pullback = recorded(x)
            del out
            held.append(operations.live)
        return pullback(given)

    held = []
    (functx.vmap(measured) if stack == "vmap" else measured)(x)
    assert held == [read * x.nbytes]
