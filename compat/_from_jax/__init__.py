"""``from_jax``: convert a JAX function to a torch function, by an operator of torch."""

from functx.compat._from_jax.jax_module import module_from_jax as module_from_jax
from functx.compat._from_jax.torch_function import from_jax as from_jax
