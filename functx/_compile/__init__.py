"""`functx.jit`: any stack of transforms as one compiled graph, in which regions stay recomputed.

A call is traced once for each signature (`jit`) into a plain graph (`tracing`) and compiled
(`backends`). Tensors that it reads in addition to its arguments (`state`) are inputs of the graph.
Autograd and the transforms around it see one operation, whose gradients are compiled as well
(`operation`). A trace leaves no tensor without values in a user's module (`intact`).
`joint_graph` puts recompute into graphs that others have traced.
"""

from functx._compile.backends import noticed as noticed
from functx._compile.intact import refused_by_torch as refused_by_torch
from functx._compile.jit import is_compiled as is_compiled
from functx._compile.jit import jit as jit
from functx._compile.joint_graph import remat as remat
from functx._compile.state import State as State
from functx._compile.state import kept_by as kept_by
from functx._compile.state import leaving_nothing as leaving_nothing
from functx._compile.state import refuse_second_trace as refuse_second_trace
from functx._compile.tracing import base_of as base_of
from functx._compile.tracing import written_by as written_by
