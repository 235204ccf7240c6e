"""Rules: what each ATen operation is in JAX, a file a family."""
