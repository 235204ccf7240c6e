"""``crosscheck``: compare the results and the memory of one function in torch and in JAX."""

from functx.compat._crosscheck.comparison import crosscheck as crosscheck
from functx.compat._crosscheck.report import Crosscheck as Crosscheck
