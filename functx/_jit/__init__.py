"""`functx.jit`: any stack of transforms as one compiled graph, in which regions stay recomputed.

A call is traced once a signature (`jitted`) into a plain graph (`tracing`) and compiled. What it
reads beside its arguments (`state`) is inputs; gradients from outside are jitted too (`rules`).
"""

from functx._jit.backends import noticed as noticed
from functx._jit.intact import refused_by_torch as refused_by_torch
from functx._jit.jitted import is_compiled as is_compiled
from functx._jit.jitted import jit as jit
from functx._jit.state import State as State
from functx._jit.state import kept_by as kept_by
from functx._jit.state import leaving_nothing as leaving_nothing
from functx._jit.state import refuse_second_trace as refuse_second_trace
from functx._jit.state import variables as variables
from functx._jit.tracing import base_of as base_of
from functx._jit.tracing import written_by as written_by
