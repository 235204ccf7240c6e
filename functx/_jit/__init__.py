"""`functx.jit`: any stack of transforms as one compiled graph, in which regions stay recomputed.

A call is traced once for each signature (`jitted`) into a plain graph (`tracing`), compiled, and
kept. What the function reads otherwise than through its arguments (`state`) becomes inputs of the
graph. Gradients from outside are jitted functions, too (`rules`).
"""

from functx._jit.backends import noticed as noticed
from functx._jit.jitted import is_compiled as is_compiled
from functx._jit.jitted import jit as jit
from functx._jit.state import reached as reached
from functx._jit.state import variables as variables
