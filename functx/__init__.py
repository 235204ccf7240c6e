"""functx: PyTorch transforms that compose the way JAX's do.

A superset of :mod:`torch.func`, with the same names, signatures and results. Every transform takes
every other one, `remat` included, in any order and to any depth.

Transforms:
    vmap: map a function over a dimension of its arguments.
    grad, value_and_grad, grad_and_value: the gradient of a scalar function, and its value.
    vjp, jvp, linearize: pullback, pushforward, and the derivative at a point as a function.
    jacrev, jacfwd, hessian: Jacobians by reverse and by forward mode; second derivatives.
    functional_call, stack_module_state, functionalize, rearrange, debug_unwrap,
    replace_all_batch_norm_modules_: as in torch.func.

Recompute:
    remat: compute a function's intermediates again in the backward, instead of keeping them.
    checkpoint, checkpoint_sequential: drop-ins for torch.utils.checkpoint.
    apply_remat, remove_remat: regions of a model's submodules.
    patch_checkpoint: other people's torch.utils.checkpoint calls become functx's.
    remat_scan, remat_loop, remat_sequential: loops and chains that keep a few states.
    checkpoint_policies, checkpoint_name: what a region keeps, by operator, size or name.
    plan, Plan: what to keep within a budget of bytes.
    RematError, ReplayError: a region that would be wrong, or that departed from its forward.

Insight:
    saved_residuals, print_saved_residuals, Residual, Residuals: what a pullback keeps.
    memory: peaks, timelines and counts of a call.

Compiled:
    jit: a stack of transforms and regions as one graph.
    graph: recompute in a joint forward and backward graph.
    TracingError: what a graph can't have.

Workloads and other frameworks:
    per_sample: gradients, norms and clipped sums of each example, in little memory.
    compat: the same function in JAX; import it as functx.compat.
"""

from functx import checkpoint_policies, graph, memory, per_sample
from functx._apply import apply_remat, remove_remat
from functx._checkpoint import checkpoint, checkpoint_sequential
from functx._errors import RematError, ReplayError, TracingError
from functx._jit import jit
from functx._linearize import linearize
from functx._loops import remat_loop, remat_scan, remat_sequential
from functx._names import checkpoint_name
from functx._patch import patch_checkpoint
from functx._plan import Plan, plan
from functx._remat import remat
from functx._residuals import Residual, Residuals, print_saved_residuals, saved_residuals
from functx._transforms import (
    debug_unwrap,
    functional_call,
    functionalize,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    rearrange,
    replace_all_batch_norm_modules_,
    stack_module_state,
    value_and_grad,
    vjp,
    vmap,
)

__all__ = [
    "Plan",
    "RematError",
    "ReplayError",
    "Residual",
    "Residuals",
    "TracingError",
    "apply_remat",
    "checkpoint",
    "checkpoint_name",
    "checkpoint_policies",
    "checkpoint_sequential",
    "debug_unwrap",
    "functional_call",
    "functionalize",
    "grad",
    "grad_and_value",
    "graph",
    "hessian",
    "jacfwd",
    "jacrev",
    "jit",
    "jvp",
    "linearize",
    "memory",
    "patch_checkpoint",
    "per_sample",
    "plan",
    "print_saved_residuals",
    "rearrange",
    "remat",
    "remat_loop",
    "remat_scan",
    "remat_sequential",
    "remove_remat",
    "replace_all_batch_norm_modules_",
    "saved_residuals",
    "stack_module_state",
    "value_and_grad",
    "vjp",
    "vmap",
]

__version__ = "0.1.0"
