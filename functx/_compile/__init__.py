"""`functx.jit`: any stack of transforms as one compiled graph, in which regions stay recomputed.

A compiled function that is silently stale is worse than none. So `jit` keeps a contract, which
code, tests, errors and pages cite by number:

- J1. As in eager, or an error. A call computes what eager computes from the same arguments and
  state. Where that is impossible, `TracingError` names the line, the object and what to do, and the
  effects of the trace on the user's objects are undone. The only exception: the constants of J3.
- J2. Inputs. The inputs of a graph are the arguments and every real tensor that the trace meets. A
  tensor in a slot (a cell, a global, an attribute, an item) is read from that slot at each call.
  One in no slot that requires grad, or that belongs to a transform around, is an error. Any other
  one is a constant.
- J3. Guards. What the code that ran in the trace names is searched, and plain values found there
  are guards: another value means another graph. A call checks a flat list, and searches again only
  where something guarded has been replaced. What the search does not reach is a constant.
- J4. Effects. Writes by operators to arguments and captured tensors happen once per call and carry
  their history. Any other effect is an error, before it happens or undone at the end of the trace.
  A plain value that the trace changes lets the function run in eager from then on, with a warning.
- J5. Surroundings. Grad mode, inference mode, autocast, defaults, flags, requires_grad, conj and
  neg bits, and which arguments are the same tensor belong to the signature. Leafness and offset do
  if the trace asked. Saved-tensor hooks around see what the compiled call saves. Inside of other
  modes and global module hooks the call runs in eager, with a warning.
- J6. Backward. Only what the backward reads is saved and version-checked. Hooks of captured tensors
  run once. Results that share memory share it. Two forwards before one backward work.
- J7. As convenient as torch.compile. A jitted module is a module over the same state (`module`).
  ``mode=`` and ``options=`` go to the compiler, without CUDA graphs. Compiling shows progress.
  A symbolic size in a text is guarded. Partly kept: sizes are symbols with ``dynamic=True``
  alone, and floats never are.

The wing reads as four things, and what a call needs around them:

- *search*: `search` finds what the function reads, as far as code names that has run (`running`).
- *guards*: `guards` checks that at each call; `surroundings` is what else a graph depends on;
  `entries` are the calls for which there is a graph.
- *what the trace meets*: `met` puts stand-ins in place of captured tensors, and refuses.
- *effects*: `effects` notes what is in reach before a trace, finds what has changed, and undoes it;
  `results` lets results share memory, and `program` writes history after the call.

`jit` ties these together, `module` lets a jitted module be one, and `retraces` says what changes.
`tracing` makes a plain graph, `backends` compiles it, `program` is a
graph of one signature, and `operation` is what autograd and the transforms around see of it.
`state` and `intact` keep the models of users intact in other traces (`to_jax`, plans).
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
