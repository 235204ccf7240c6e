"""Policies: they decide what a region saves in addition to its inputs.

The public names are in `functx.checkpoint_policies`.

- `policy`: the policies, and the `Value` that they decide about.
- `aten_ops`: which ATen operations are matrix products, and how many FLOPs an operation takes.
- `offload`: moves saved tensors to host memory and back.
"""

from functx._policies import offload as offload
from functx._policies import policy as policy
from functx._policies.aten_ops import flops_of as flops_of
from functx._policies.aten_ops import is_dot as is_dot
from functx._policies.policy import Combined as Combined
from functx._policies.policy import Decision as Decision
from functx._policies.policy import Everything as Everything
from functx._policies.policy import Names as Names
from functx._policies.policy import Policy as Policy
from functx._policies.policy import Value as Value
from functx._policies.policy import save_these_operators as save_these_operators
from functx._policies.policy import warn_of_unlisted_names as warn_of_unlisted_names
