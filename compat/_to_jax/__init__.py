"""``to_jax``: trace a torch function, check the graph, and run it on JAX arrays by rules."""

from functx.compat._to_jax.functional_graph import FunctionalGraph as FunctionalGraph
from functx.compat._to_jax.jax_function import Lowered as Lowered
from functx.compat._to_jax.jax_function import to_jax as to_jax
from functx.compat._to_jax.lower.interpreter import Interpreter as Interpreter
from functx.compat._to_jax.lower.interpreter import apply_rule as apply_rule
from functx.compat._to_jax.nodes import body_of as body_of
from functx.compat._to_jax.nodes import custom_function_of as custom_function_of
from functx.compat._to_jax.nodes import is_region as is_region
from functx.compat._to_jax.rules.table import rule as rule
from functx.compat._to_jax.source_lines import Source as Source
from functx.compat._to_jax.source_lines import source_of as source_of
