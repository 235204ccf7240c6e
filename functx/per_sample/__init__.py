"""Per-example gradients, their norms, clipped sums and inner products, in little memory.

``torch.func.vmap(torch.func.grad(loss))`` holds the gradients of all examples at once, each as
large as the model. Norms, a clipped sum (differential privacy) or inner products (influence
functions, neural tangent kernels) need less memory: here examples run in chunks, and each chunk is
reduced before the next one runs.

- `grads`: the gradient of each example
- `norms`: the norm of the gradient of each example
- `clipped_sum`: the sum of clipped gradients
- `jacobian`: the Jacobian of each example
- `gram`: inner products of the gradients of all pairs of examples
- `map_reduce`: any function of each example, reduced chunk by chunk
- `functional`: a module and a criterion as a loss of one example
- `clip`, `automatic`, `normalize`: how `clipped_sum` computes a factor from a norm
- `Extras`: losses, norms and auxiliary outputs, in addition to a result

All but the last three lines are transforms, like :func:`functx.grad`: they take the loss of *one*
example (or a pair of module and criterion) and return a function of a batch.
"""

from functx.per_sample._clipping import automatic, clip, normalize
from functx.per_sample._gradient_reductions import Extras
from functx.per_sample._gradients import clipped_sum, grads, norms
from functx.per_sample._gram import gram
from functx.per_sample._map_reduce import jacobian, map_reduce
from functx.per_sample._module_loss import functional

__all__ = [
    "Extras",
    "automatic",
    "clip",
    "clipped_sum",
    "functional",
    "grads",
    "gram",
    "jacobian",
    "map_reduce",
    "normalize",
    "norms",
]
