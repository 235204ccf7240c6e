"""The transforms of `torch.func`, with a reverse mode that frees memory as it goes.

- `reverse_mode`: one level of reverse mode, recorded first and pulled back after it has ended.
- `derivatives`: `grad`, `vjp`, `jvp`, `linearize` and the like.
- `jacobians`: `jacrev`, `jacfwd`, `hessian`.
- `vmap`: torch's ``vmap``, in a form that enclosing regions can record.
- `stateless`: `functional_call`, which leaves a module exactly as it was.
"""

from functx._transforms import derivatives as derivatives
from functx._transforms import reverse_mode as reverse_mode
from functx._transforms.derivatives import grad as grad
from functx._transforms.derivatives import grad_and_value as grad_and_value
from functx._transforms.derivatives import jvp as jvp
from functx._transforms.derivatives import linearize as linearize
from functx._transforms.derivatives import value_and_grad as value_and_grad
from functx._transforms.derivatives import vjp as vjp
from functx._transforms.jacobians import hessian as hessian
from functx._transforms.jacobians import jacfwd as jacfwd
from functx._transforms.jacobians import jacrev as jacrev
from functx._transforms.reverse_mode import Pullback as Pullback
from functx._transforms.reverse_mode import record as record
from functx._transforms.stateless import functional_call as functional_call
from functx._transforms.vmap import vmap as vmap
