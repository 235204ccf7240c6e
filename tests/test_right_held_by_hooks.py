"""What a hook appends to it does not read; what it reads is compared."""

import numpy as np
import pytest
import torch
from cases import DTYPE

import functx

X = torch.linspace(0.1, 1, 3, dtype=DTYPE)


def appends(log):
    return lambda g: log.append(g.numpy().copy())


def appends_in_a_function(log):
    return lambda g: [log.append(a) for a in [g.numpy().copy()]].clear()


def appends_and_reads(log):
    def hook(g):
        log.append(np.full(3, 2.0))
        return g * torch.from_numpy(log[-1])

    return hook


@pytest.mark.parametrize("hook_of", [appends, appends_in_a_function])
def test_a_hook_that_appends_to_a_list_does_not_read_it(hook_of):
    """Of several regions: those replayed last find what hooks of the others have put there."""

    def program(remat):
        log, gradients = [], []

        def f(x):
            y = x.sin()
            y.register_hook(hook_of(log))
            return y * y

        g = remat(f)
        for _ in range(8):
            x = X.clone().requires_grad_()
            gradients += torch.autograd.grad(g(g(g(x))).sum(), x)
        return torch.stack([*gradients, *map(torch.from_numpy, log)])

    assert torch.equal(program(functx.remat), program(lambda f: f))


def test_one_that_reads_it_too_is_compared():
    runs = []

    def f(x):
        runs.append(1)
        y = x.sin()
        y.register_hook(appends_and_reads([np.full(3, float(len(runs)))]))
        return y

    with pytest.raises(functx.ReplayError, match="holds other values"):
        torch.autograd.grad(functx.remat(f)(x := X.clone().requires_grad_()).sum(), x)
