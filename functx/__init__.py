"""functx: PyTorch transforms that compose the way JAX's do.

A superset of :mod:`torch.func`: the same names, signatures and results, and `remat`, activation
checkpointing that composes with all of them.
"""

from functx import checkpoint_policies as checkpoint_policies
from functx import graph as graph
from functx import memory as memory
from functx import per_sample as per_sample
from functx._apply import apply_remat as apply_remat
from functx._apply import remove_remat as remove_remat
from functx._checkpoint import checkpoint as checkpoint
from functx._checkpoint import checkpoint_sequential as checkpoint_sequential
from functx._checkpoint import remat_sequential as remat_sequential
from functx._errors import RematError as RematError
from functx._errors import ReplayError as ReplayError
from functx._errors import TracingError as TracingError
from functx._jit import jit as jit
from functx._linearize import linearize as linearize
from functx._loops import remat_loop as remat_loop
from functx._loops import remat_scan as remat_scan
from functx._names import checkpoint_name as checkpoint_name
from functx._patch import patch_checkpoint as patch_checkpoint
from functx._plan import Plan as Plan
from functx._plan import plan as plan
from functx._remat import remat as remat
from functx._residuals import Residual as Residual
from functx._residuals import Residuals as Residuals
from functx._saved import print_saved_residuals as print_saved_residuals
from functx._saved import saved_residuals as saved_residuals
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
