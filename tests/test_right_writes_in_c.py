"""What functions in C write to by position: schemas say it, a list, and names that end in ``_``."""

import pytest
import torch
from cases import DTYPE, numbers
from programs import identity
from references import assert_same

import functx

pytestmark = pytest.mark.usefixtures("no_hooks")


@pytest.mark.parametrize(
    "name", ["native_batch_norm", "_native_batch_norm_legit", "_batch_norm_impl_index"]
)
@pytest.mark.parametrize("packet", [False, True])
def test_statistics(name, packet):
    operator = getattr(torch.ops.aten if packet else torch, name)
    more = (False,) if name == "_batch_norm_impl_index" else ()

    def program(remat):
        mean, variance = torch.zeros(3, dtype=DTYPE), torch.ones(3, dtype=DTYPE)

        def f(x):
            y = operator(x, None, None, mean, variance, True, 0.5, 1e-5, *more)[0]
            return (y.sin() * mean * x).sum()

        x = numbers(5, 3).requires_grad_()
        return torch.autograd.grad(remat(f)(x), x)[0], mean, variance

    assert_same(program(functx.remat), program(identity), 64)


def test_ranges_of_quantization():
    def program(remat):
        fake = torch.ao.quantization.FusedMovingAvgObsFakeQuantize(
            observer=torch.ao.quantization.MovingAverageMinMaxObserver,
            quant_min=0,
            quant_max=255,
        )
        x = numbers(8, 3).float().requires_grad_()
        fake(x.detach() * 0.1)
        out = remat(lambda x: fake(x).sin().sum())(x)
        return torch.autograd.grad(out, x)[0], fake.activation_post_process.max_val

    ours, expected = program(functx.remat), program(identity)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected))


def test_all_operators_of_a_name():
    """The kernel writes without a word; the schema of one of them says so."""
    library = torch.library.Library("functx_writes", "DEF")
    library.define("accumulate(Tensor x, Tensor(a!) total) -> Tensor")

    def accumulate(x, total):
        total.add_(x.detach().sum())
        return x * 2

    library.impl("accumulate", accumulate, "CompositeExplicitAutograd")

    def program(remat):
        total, x = torch.zeros((), dtype=DTYPE), numbers(4).requires_grad_()

        def f(x):
            with torch.no_grad():
                torch.ops.functx_writes.accumulate(x, total)
            return (x.sin() * total).sum()

        return torch.autograd.grad(remat(f)(x), x)[0], total

    try:
        assert_same(program(functx.remat), program(identity))
    finally:
        library._destroy()


@pytest.mark.parametrize("twice", [False, True])
def test_names_that_look_like_writes(twice):
    """``~t``, ``int(t)`` and a loop over it write nothing: it may be reached by two names."""
    mask = torch.tensor([True, False, True, False])

    def body(x, a, b):
        rows = sum(x.sin() * row for row in a)
        return rows.masked_fill(~a, 0.5) * x.masked_fill(~b, int(a[0])).cos()

    x = numbers(4).requires_grad_()
    region = functx.remat(body)
    args = x, mask, mask[:] if twice else mask.clone()
    assert_same(
        torch.autograd.grad(region(*args).sum(), x), torch.autograd.grad(body(*args).sum(), x)
    )
    y = region(*args)
    mask.logical_not_()
    with pytest.raises(functx.RematError, match="modified in place"):
        y.sum().backward()  # no copy was kept from before
