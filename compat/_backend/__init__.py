"""The transforms of functx for JAX arrays, implemented by JAX."""
