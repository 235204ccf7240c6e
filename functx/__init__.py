"""functx: PyTorch transforms that compose the way JAX's do.

A superset of :mod:`torch.func`, with the same names, signatures and results. All transforms,
including `remat`, can be nested in any order and to any depth.

Transforms:
    vmap: map a function over a dimension of its arguments.
    grad, value_and_grad, grad_and_value: the gradient of a scalar function, and its value.
    vjp, jvp, linearize: pullback, pushforward, and the derivative at a point as a function.
    jacrev, jacfwd, hessian: Jacobians by reverse and by forward mode; second derivatives.
    functional_call, stack_module_state, functionalize, rearrange, debug_unwrap,
    replace_all_batch_norm_modules_: as in torch.func.

Recompute:
    remat: recompute a function's intermediates in the backward, instead of saving them.
    checkpoint, checkpoint_sequential: drop-in replacements for torch.utils.checkpoint.
    apply_remat, remove_remat, remat_regions: make submodules of a model regions.
    patch_checkpoint: let existing calls of torch.utils.checkpoint use functx.
    remat_scan, remat_loop, remat_sequential: loops and chains that save a few states.
    checkpoint_policies, checkpoint_name: what a region saves, by operator, size or name.
    plan, Plan: choose what to recompute within a budget of bytes.
    RematError, ReplayError: errors of regions that can't be recomputed, or whose replay differs.

Insight:
    saved_residuals, print_saved_residuals, Residual, Residuals: what a pullback saves.
    memory: peaks, timelines and operation counts of a call.

Compiled:
    jit: compile a stack of transforms and regions as one graph.
    graph: recompute in a joint forward and backward graph.
    TracingError: the error for functions that can't be traced.

Workloads and other frameworks:
    per_sample: per-example gradients, norms and clipped sums, in little memory.
    compat: run the same function in JAX. It is imported, together with JAX, at its first use.
"""

import importlib as _importlib
import typing as _typing

from torch.func import debug_unwrap as debug_unwrap
from torch.func import functionalize as functionalize
from torch.func import replace_all_batch_norm_modules_ as replace_all_batch_norm_modules_
from torch.func import stack_module_state as stack_module_state

from functx import checkpoint_policies as checkpoint_policies
from functx import graph as graph
from functx import memory as memory
from functx import per_sample as per_sample
from functx._budget import Plan as Plan
from functx._budget import plan as plan
from functx._compile import jit as jit
from functx._core import RematError as RematError
from functx._core import ReplayError as ReplayError
from functx._core import TracingError as TracingError
from functx._insight import Residual as Residual
from functx._insight import Residuals as Residuals
from functx._insight import print_saved_residuals as print_saved_residuals
from functx._insight import saved_residuals as saved_residuals
from functx._loops import remat_loop as remat_loop
from functx._loops import remat_scan as remat_scan
from functx._loops import remat_sequential as remat_sequential
from functx._models import apply_remat as apply_remat
from functx._models import checkpoint as checkpoint
from functx._models import checkpoint_sequential as checkpoint_sequential
from functx._models import patch_checkpoint as patch_checkpoint
from functx._models import remat_regions as remat_regions
from functx._models import remove_remat as remove_remat
from functx._remat import checkpoint_name as checkpoint_name
from functx._remat import remat as remat
from functx._transforms import functional_call as functional_call
from functx._transforms import grad as grad
from functx._transforms import grad_and_value as grad_and_value
from functx._transforms import hessian as hessian
from functx._transforms import jacfwd as jacfwd
from functx._transforms import jacrev as jacrev
from functx._transforms import jvp as jvp
from functx._transforms import linearize as linearize
from functx._transforms import value_and_grad as value_and_grad
from functx._transforms import vjp as vjp
from functx._transforms import vmap as vmap

try:
    from torch.func import rearrange as rearrange
except ImportError:  # before torch 2.13 only functorch exports it
    from functorch.einops import rearrange as rearrange  # type: ignore[import-untyped,no-redef]

if _typing.TYPE_CHECKING:
    from functx import compat as compat


def __getattr__(name: str) -> _typing.Any:
    """Import ``functx.compat`` at its first use."""
    if name == "compat":
        return _importlib.import_module("functx.compat")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "compat"})


__all__ = sorted(name for name in globals() if not name.startswith("_"))
__version__ = "0.1.0"
