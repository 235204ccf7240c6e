"""Every operator of torch's own database: behind remat, and in JAX."""
