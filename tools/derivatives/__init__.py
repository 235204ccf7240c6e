"""Derivatives to the second and third order at special points: in JAX, and in torch itself."""
