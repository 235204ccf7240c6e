"""Gradients of each example: kept, normed, clipped and summed, in little memory.

``torch.func.vmap(torch.func.grad(loss))`` has the gradients of all examples at once, each as large
as the model. Most who want them want less: norms, a clipped sum (differential privacy), inner
products (influence functions, neural tangent kernels). Here examples run in chunks, and each chunk
is reduced as it goes.

All are transforms, as :func:`functx.grad` is: they take the loss of *one* example (or a pair of
module and criterion) and return a function of a batch.
"""

from functx.per_sample._extras import Extras as Extras
from functx.per_sample._gradients import clipped_sum as clipped_sum
from functx.per_sample._gradients import grads as grads
from functx.per_sample._gradients import norms as norms
from functx.per_sample._gram import gram as gram
from functx.per_sample._groups import automatic as automatic
from functx.per_sample._groups import clip as clip
from functx.per_sample._groups import normalize as normalize
from functx.per_sample._model import functional as functional
from functx.per_sample._reduce import jacobian as jacobian
from functx.per_sample._reduce import map_reduce as map_reduce
