"""`functx.jit`: any stack of transforms as one compiled graph, in which regions stay recomputed.

A compiled function that is silently stale is worse than none. So `jit` keeps a contract, which
code, tests, errors and pages cite by number:

- J1. As in eager, or an error. A call computes what eager computes from the same arguments and
  state. Where that is impossible, `TracingError` names the line, the object and what to do, and the
  effects of the trace on the user's objects are undone. The only exception: the constants of J3.
- J2. Inputs. The inputs of a graph are the arguments and every real tensor that the trace meets. A
  tensor in a slot (a cell, a global, an attribute, an item) is read from that slot at each call. A
  tensor that is in no slot is an error if it requires grad or belongs to an enclosing transform;
  otherwise it is a constant.
- J3. Guards. functx searches the objects that the code in the trace names. Plain values that it
  finds are guards: another value means another graph. A call checks a flat list of guards, and
  searches again only if a guarded object has been replaced. Everything that the search does not
  reach is a constant.
- J4. Effects. Writes by operators to arguments and captured tensors happen once per call and carry
  their history. Any other effect is an error, before it happens or undone at the end of the trace.
  If the trace changes a plain value, the function runs in eager from then on, with a warning.
- J5. Surroundings. Grad mode, inference mode, autocast, defaults, flags, requires_grad, conj and
  neg bits, and which arguments are the same tensor belong to the signature. So do leafness and
  storage offset if the function asks for them. Saved-tensor hooks around a call see the tensors
  that the compiled call saves. Under other modes and global module hooks the call runs in eager,
  with a warning.
- J6. Backward. Only what the backward reads is saved and version-checked. Hooks of captured tensors
  run once. Results that share memory share it. Two forwards before one backward work.
- J7. As convenient as torch.compile. A jitted module is a module over the same state (`module`).
  ``mode=`` and ``options=`` go to the compiler, without CUDA graphs. Compiling shows progress.
  A symbolic size that the function puts into a string is guarded. This rule is kept only in part:
  sizes are symbols only with ``dynamic=True``, and floats are never symbols.

The package has four parts:

- *search*: `search` finds the state that the function reads. `running` notes which code runs in the
  trace, so that the search follows only names in that code.
- *guards*: `guards` checks the found state at each call; `surroundings` describes everything else
  that a graph depends on; `entries` has the calls for which there is a graph.
- *tensors in a trace*: `met` replaces captured tensors by stand-ins, and refuses operations that a
  graph can't do.
- *effects*: `effects` notes the objects in reach before a trace, finds changes, and undoes them.
  `results` makes results share memory as in eager. `program` writes history after the call.

`jit` ties these together. `module` makes a jitted module an ``nn.Module``, and `retraces` says why
a function is traced again and again. `tracing` makes a plain graph and `backends` compiles it. A
`program` has the graphs of one signature, and `operation` makes it one operation to autograd and
enclosing transforms. `state` and `intact` keep user modules intact in other traces (`to_jax`,
plans). `joint_graph` puts recompute into graphs that other tools have traced.
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
