"""State that a function changes at each call, and what comes of it."""

import torch


class State:
    pass


class Named(State):
    """With attributes of its own."""

    def __init__(self):
        self.ema = torch.zeros(())


def of_two_steps(f):
    """Gradients of two steps, in each of which ``f`` runs twice."""
    found = []
    for _ in range(2):
        x = torch.ones(1, requires_grad=True)
        (f(x) + f(x)).sum().backward()
        found.append(x.grad.item())
    return found
