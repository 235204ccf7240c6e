"""The recompute engine: ``remat(f)`` is ``f``, recomputed where it is differentiated.

In every stack of transforms, values and derivatives are those of ``f``; only time and memory
differ. As with ``torch.utils.checkpoint`` and ``jax.checkpoint``, the Python code of a region may
run again. Seven rules say all that is promised and asked:

1. Same inputs. A replay finds what the forward found: its arguments; every tensor that it reads, at
   every level; torch's random numbers; autocast, grad mode, default device and dtype, SDPA
   backends, deterministic and matmul-precision flags. Other settings that differ are rule 3.
2. State advances once. Buffers and captured tensors that a region writes in place hold afterwards
   what they hold without remat, bit by bit; so do weights that are written where autograd does not
   record it, under ``no_grad()`` or through ``.data``. The replay starts from a copy of the value
   before the write.
3. Compared. A replay makes the forward's calls: same functions, order, shapes, dtypes, numbers and
   operands. Python's and NumPy's data that becomes a tensor is kept by place. Versions of inputs
   are compared, values are not. A departure raises `ReplayError`.
4. Nothing is lost silently. If a gradient could be lost, an error names the tensor, the line and
   what to do. (In plain autograd a tensor that leaves without being returned is attached.)
5. Everything else is the function's own business, and happens again in a replay: lists, dicts,
   counters, globals, files, prints, NumPy arrays, what hooks keep. The engine finds, copies,
   compares or restores Python objects in four places only: closure cells, numbers given to calls,
   the structure of container arguments, and, where asked, the global generators of Python and
   NumPy. No mechanism may be added to that list.
6. No less memory than it says, no more than it must. A node keeps the inputs that its pullback
   reads, once, and the values that the policy names. Memory is freed by dropping references. The
   pullback recomputes nothing that it does not read.
7. Never silently ``f``. A fallback that saves nothing where something is differentiated warns.

After an exception or an interrupt the state of torch is restored (`guard`).

The idea: a region runs once, in the caller's levels, on leaf stand-ins of its inputs (`forward`). A
function mode (`captures`) sees its calls, and turns foreign tensors into inputs. A dispatch mode
(`ledger`) sees which operation used which memory. The tape of that run is dropped, and the results
get one node for each level (`node`). A node's backward is a region again: it replays the region,
then pulls back (`pullback`).

Implementation details of rule 4. A gradient is lost if a tensor on the region's own tape, which is
dropped, is used outside, or if the region's code uses a tape that functx does not see. Each case is
handled in one place:

- User code still holds a tensor that the region made, or a stand-in, after the region has finished.
  `leaving` makes it a further result in plain autograd, and raises an error otherwise. A replay
  that does not make this tensor raises `departures.not_left`.
- C++ code reads a leaf that no mode sees. `Captures.leaves_unseen` walks the tape of the results
  and makes the leaf an input. It raises an error if the tape leads to any other tensor from
  outside. `replay` raises an error if it then reads another leaf (`departures.other_leaves`).
- A transform of torch.func is given a captured tensor that requires grad. `Captures.meet` raises an
  error.
- The region calls ``backward()``, or differentiates a tensor that was computed outside.
  `Captures.execute` raises an error.
- The region calls a pullback that was made outside. `Captures.leaves_unseen` raises an error if
  something on that tape is differentiated. A replay raises `departures.of_ended_level` if the level
  of the pullback has ended.
- The region changes requires_grad or data of a tensor that it did not make, or registers a hook on
  a captured tensor. `Captures` raises an error. A hook on an argument goes to the caller's tensor
  (`Captures.hang`).
- The region writes in place to a tensor that is differentiated, or writes a value with history into
  a constant. `captures` and `call` turn torch's error into one that names the region, and
  `writes.check_written` finds the second case.
- The region fills a key-value cache, or changes a container argument that it does not return.
  `arguments` raises an error.
- An input requires grad at a level of forward mode, where a region has no node. `region` raises an
  error (`departures.requires_grad_in_forward_mode`).
- Modules that are sharded over processes swap parameters in hooks. `sharding` raises an error.
"""

from functx._remat import control_flow as control_flow
from functx._remat import hooks as hooks
from functx._remat import sharding as sharding
from functx._remat.api import checked_options as checked_options
from functx._remat.api import remat as remat
from functx._remat.arguments import called as called
from functx._remat.call import on_budget as on_budget
from functx._remat.call import run as run
from functx._remat.captures import tape_of as tape_of
from functx._remat.examples import is_batched_form as is_batched_form
from functx._remat.guard import Settings as Settings
from functx._remat.guard import StackGuard as StackGuard
from functx._remat.guard import finish_interrupted as finish_interrupted
from functx._remat.guard import settings_now as settings_now
from functx._remat.inside import made_inside as made_inside
from functx._remat.inside import reported as reported
from functx._remat.inside import taken_in as taken_in
from functx._remat.ledger import read_outside as read_outside
from functx._remat.levels import is_tracked as is_tracked
from functx._remat.listener import listening as listening
from functx._remat.module import RematModule as RematModule
from functx._remat.names import checkpoint_name as checkpoint_name
from functx._remat.node import asking_for as asking_for
from functx._remat.observers import no_regions as no_regions
from functx._remat.observers import on_name as on_name
from functx._remat.observers import on_region as on_region
from functx._remat.observers import on_replay as on_replay
from functx._remat.observers import on_run as on_run
from functx._remat.operators import operator_of as operator_of
from functx._remat.region import Options as Options
from functx._remat.saving import named as named
from functx._remat.sharding import refuse_sharded as refuse_sharded
from functx._remat.traced import batch_being_traced as batch_being_traced
from functx._remat.traced import keep_regions as keep_regions
from functx._remat.traced import unseen as unseen
