"""functx's transforms of JAX arrays, done by JAX."""
