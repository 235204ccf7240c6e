"""`remat`."""

from __future__ import annotations

import functools
from typing import Any

import torch

from functx import _policies
from functx._remat.call import call
from functx._remat.region import Options


def remat(f: Any = None, *, policy: Any = None, preserve_rng_state: Any = True, determinism_check: str = "default", debug: bool = False, static_argnums: Any = (), static_argnames: Any = (), budget: Any = None, prevent_cse: bool = True) -> Any:
    if f is None:
        return functools.partial(remat, policy=policy, preserve_rng_state=preserve_rng_state, determinism_check=determinism_check, debug=debug)
    p = None if policy is None else _policies.as_policy(policy)
    if p == _policies.Everything(False):
        p = None
    options = Options(policy=p, preserve_rng_state=preserve_rng_state, determinism_check=determinism_check, debug=debug, name=getattr(f, "__qualname__", type(f).__name__))

    def rematted(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return f(*args, **kwargs)
        return call(f, args, kwargs, options)

    return rematted
