"""Python may read what a function closes over or makes of numbers, and nothing of its arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import functx
from functx._core.errors import LoweringError
from functx.compat import to_jax

X = jnp.arange(3.0)


def masked(x):
    mask = torch.zeros(3)
    mask[1:].fill_(1.0)  # a view: what it shares is known as well
    return x * mask.sum().item()


def filled(x, make):
    one = make(torch.arange(2))
    one.fill_(1)
    return x * make(torch.arange(2)).copy_(one).sum().item()


READ = {
    "item": lambda x, sizes: x * sizes[0].item(),
    "float": lambda x, sizes: x * float(sizes.float().mean()),
    "a list": lambda x, sizes: x * sizes.tolist()[0],
    "NumPy": lambda x, sizes: x * float(sizes.numpy()[0]),
    "a branch": lambda x, sizes: x if sizes[0] > 1 else -x,
    "a size": lambda x, sizes: torch.arange(int(sizes.sum())) + x.sum(),
    "repeats": lambda x, sizes: torch.repeat_interleave(x, sizes),
    "a mask": lambda x, sizes: x[sizes > 1] * 2,
    "a mask among others": lambda x, sizes: torch.outer(x, x)[:, sizes > 1][None, ..., 0],
    "an equality, and a write": lambda x, sizes: x.clone().mul_(
        2 if torch.equal(sizes, torch.tensor([1, 2, 3])) else 3
    ),
    "places": lambda x, sizes: x[(sizes > 1).nonzero()[:, 0]],
    "a list of tensors": lambda x, sizes: x * torch.tensor([sizes[0], sizes.sum()])[1].item(),
}


@pytest.mark.parametrize("name", READ)
def test_what_is_closed_over_is_read_and_another_value_traces_again(name):
    sizes = torch.tensor([1, 2, 3])
    lowered = to_jax(lambda x: READ[name](x, sizes))
    for change in (0, 1):
        sizes.add_(change)
        expected = READ[name](torch.arange(3.0), sizes)
        np.testing.assert_allclose(lowered(X), expected, rtol=1e-6)


def test_what_is_made_of_numbers_is_read():
    np.testing.assert_array_equal(to_jax(masked)(X), 2 * X)


@pytest.mark.parametrize("make", [torch.empty_like, lambda t: t.new(2), lambda t: t.new_empty(2)])
def test_what_was_uninitialised_is_read_once_it_is_overwritten(make):
    np.testing.assert_array_equal(to_jax(lambda x: filled(x, make))(X), 2 * X)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.fft.fftfreq(3, 0.5),
        lambda: torch.kaiser_window(3),
        torch.no_grad()(lambda: torch.fft.rfftfreq(5)),
    ],
)
def test_a_constant_without_a_rule_is_made_while_tracing(make):
    f = lambda x: (functx.remat(lambda x: x * make())(x) * x).sum()
    expected = functx.grad(f)(torch.arange(3.0))
    np.testing.assert_allclose(jax.jit(jax.grad(to_jax(f)))(X), expected, rtol=1e-6)


def test_an_inverse_stft_reads_whether_its_window_covers_the_signal():
    window = torch.hann_window(8)

    def there_and_back(x):
        spectrum = torch.stft(x, 8, 4, window=window, return_complex=True)
        return torch.istft(spectrum * 2, 8, 4, window=window)

    x = torch.linspace(-1, 1, 32)
    np.testing.assert_allclose(to_jax(there_and_back)(jnp.asarray(x)), 2 * x, atol=1e-6)


UNKNOWN = {
    "an argument": lambda x: x * x.sum().item(),
    "written with one": lambda x: (
        x * torch.zeros(3).index_fill_(0, torch.tensor(0), x[0]).sum().item()
    ),
    "a view of that": lambda x: (lambda m: (m[1:].copy_(x[1:]), x * m.sum().item()))(torch.ones(3)),
    "uninitialised": lambda x: x * torch.empty(3).sum().item(),
    "a view of new memory": lambda x: (
        lambda m, view: (m.fill_(1), view.copy_(x[1:]), x * m.sum().item())
    )(*(lambda m: (m, m[1:]))(torch.empty(3))),
    "uninitialised in part": lambda x: (lambda m: (m[1:].zero_(), x * m.sum().item()))(
        torch.empty(3)
    ),
    "drawn in place": lambda x: x * torch.zeros(3).uniform_().sum().item(),
    "drawn": lambda x: x * torch.rand(3).sum().item(),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_depends_on_arguments_or_draws_is_not_read(name):
    with pytest.raises(LoweringError, match="needs the value of a tensor"):
        to_jax(UNKNOWN[name])(X)
