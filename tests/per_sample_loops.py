"""Per-example gradients one after the other, in plain autograd: the slow reference."""

import torch


def slow(loss, params, *batch):
    """One gradient after the other, in plain autograd: a list of flat lists of tensors."""
    found = []
    for one in zip(*batch):
        leaves, spec = torch.utils._pytree.tree_flatten(params)
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        value = loss(torch.utils._pytree.tree_unflatten(leaves, spec), *one)
        found.append(torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True))
    return found


def slow_norms(gradients):
    return torch.stack([torch.cat([g.flatten() for g in one]).norm() for one in gradients])


def slow_sum(gradients, factors):
    return [sum(f * g for f, g in zip(factors, leaf)) for leaf in zip(*gradients)]
