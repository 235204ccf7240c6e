"""Three models of transformers trained in torch and in JAX, from the same weights on the same data.

``python -m tools.models.training --out docs/pictures/models_in_jax.png``: ten steps of Adam by
``torch.optim`` and by ``optax``, in float64 and eval mode, and both losses in one picture.
"""

import argparse
from pathlib import Path

import torch

import functx
from functx.compat import to_jax
from functx.compat.testing import small_models

TYPES = ("llama", "t5", "vit")
STEPS, RATE = 10, 1e-3


def losses(name):
    """The losses of a model type in torch, and in JAX."""
    import jax
    import jax.numpy as jnp
    import optax

    jax.config.update("jax_enable_x64", True)
    cls, config, inputs = small_models.find(name)
    model = functx.apply_remat(small_models.make(cls, config).eval(), "gradient_checkpointing")

    def loss(params, inputs):
        out = functx.functional_call(model, params, (), inputs)
        return sum(t.square().mean() for t in small_models.outputs(out)[:1])

    params = {n: p.detach().clone() for n, p in model.named_parameters()}
    state = jax.tree.map(lambda t: jnp.asarray(t.numpy()), params)
    optimizer, ours = torch.optim.Adam(params.values(), lr=RATE), []
    for _ in range(STEPS):
        gradients, value = functx.grad_and_value(loss)(params, inputs)
        for n, p in params.items():
            p.grad = gradients[n]
        optimizer.step()
        ours.append(value.item())

    update, arrays = optax.adam(RATE), {n: jnp.asarray(t.numpy()) for n, t in inputs.items()}
    moments, theirs = update.init(state), []

    @jax.jit
    def step(state, moments):
        value, gradients = jax.value_and_grad(to_jax(loss))(state, arrays)
        changes, moments = update.update(gradients, moments)
        return optax.apply_updates(state, changes), moments, value

    for _ in range(STEPS):
        state, moments, value = step(state, moments)
        theirs.append(float(value))
    return ours, theirs


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("models_in_jax.png"), help="the picture")
    options = parser.parse_args()
    import matplotlib.pyplot as plt

    torch.set_default_dtype(torch.float64)
    figure, axes = plt.subplots(1, len(TYPES), figsize=(11, 3.2), layout="constrained")
    for axis, name in zip(axes, TYPES):
        ours, theirs = losses(name)
        apart = max(abs(a - b) / abs(a) for a, b in zip(ours, theirs))
        print(f"{name}: {ours[0]:.6f} to {ours[-1]:.6f}, at most {apart:.0e} apart", flush=True)
        axis.plot(range(STEPS), ours, label="torch, torch.optim.Adam")
        axis.plot(range(STEPS), theirs, "o", mfc="none", label="JAX, optax.adam")
        axis.set(title=f"{name}: at most {apart:.0e} apart", xlabel="step")
    axes[0].set_ylabel("loss")
    axes[0].legend()
    figure.savefig(options.out, dpi=110)


if __name__ == "__main__":
    main()
