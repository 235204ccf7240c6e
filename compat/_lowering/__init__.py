"""ATen to ``jax.numpy``: trace a torch function, check the graph, interpret it in JAX."""
