"""functx: PyTorch transforms that compose the way JAX's do.

A superset of :mod:`torch.func`: the same names, signatures and results, and `remat`, activation
checkpointing that composes with all of them.
"""

from functx import checkpoint_policies as checkpoint_policies
from functx._errors import RematError as RematError
from functx._errors import ReplayError as ReplayError
from functx._linearize import linearize as linearize
from functx._remat import checkpoint_name as checkpoint_name
from functx._remat import remat as remat
from functx._transforms import debug_unwrap as debug_unwrap
from functx._transforms import functional_call as functional_call
from functx._transforms import functionalize as functionalize
from functx._transforms import grad as grad
from functx._transforms import grad_and_value as grad_and_value
from functx._transforms import hessian as hessian
from functx._transforms import jacfwd as jacfwd
from functx._transforms import jacrev as jacrev
from functx._transforms import jvp as jvp
from functx._transforms import rearrange as rearrange
from functx._transforms import replace_all_batch_norm_modules_ as replace_all_batch_norm_modules_
from functx._transforms import stack_module_state as stack_module_state
from functx._transforms import value_and_grad as value_and_grad
from functx._transforms import vjp as vjp
from functx._transforms import vmap as vmap

__version__ = "0.1.0"
