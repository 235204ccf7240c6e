"""Rules: the implementation of each ATen operation in JAX, with one file per family."""
