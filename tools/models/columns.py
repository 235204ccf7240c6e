"""More of a model type in JAX: layers as regions, training mode, gradients of each example.

Each function takes a type's name and gives a record: an outcome, a detail, and its own figures.
"""

from collections import Counter
from types import SimpleNamespace

import jax
import numpy as np
import torch
from jax.ad_checkpoint import checkpoint_name
from torch.utils._python_dispatch import TorchDispatchMode

from functx.compat import random, to_jax
from functx.compat._crosscheck.kept_bytes import kept_by_torch
from functx.compat._crosscheck.precision import Widened
from functx.compat._crosscheck.products import count
from functx.compat._to_jax.nodes import draws
from functx.compat.testing import small_models
from tools.models import apart, diffusion

EXACT = 1e-9  # of the largest number of all gradients
SEED = 7
# What JAX names the parts of a gradient after, the first that is found.
PARTS = {"rematted": "recomputed", "transpose": "backward", "": "forward"}
PRODUCTS = ("dot_general", "conv_general_dilated")
aten = torch.ops.aten


class NoCase(Exception):
    """A type has nothing that could be compared."""


def arrays(tree):
    return jax.tree.map(lambda t: jax.numpy.asarray(t.numpy()), tree)


def gradients_of(loss, params, *rest, watched=lambda run: run()):
    """The value, and gradients by name; ``watched`` runs the forward, then the backward."""
    leaves, value, found = {n: p.clone().requires_grad_() for n, p in params.items()}, [], []
    watched(lambda: value.append(loss(leaves, *rest)))
    wanted = [*leaves.values()]
    watched(lambda: found.extend(torch.autograd.grad(value[0], wanted, materialize_grads=True)))
    return value[0].detach(), dict(zip(params, found))


def compared(expected, gradients, value=None, value_in_jax=0.0):
    """An outcome, and how far gradients are apart, relative to the largest number of all."""
    if not all(g.isfinite().all() for g in expected.values()):
        return {"outcome": "not judged", "detail": "torch's gradients are not finite"}
    largest = max((g.abs().max().item() for g in expected.values() if g.numel()), default=1.0)
    largest = max(largest, 1e-6)  # what is smaller in all is the rounding of a loss of about 1
    off = max(
        (g - torch.tensor(np.asarray(gradients[n]))).abs().max().item() / largest
        for n, g in expected.items()
        if g.numel()
    )
    if value is not None:
        off = max(off, abs(value.item() - float(value_in_jax)) / max(1.0, abs(value.item())))
    return {"outcome": "same" if off <= EXACT else "differs", "detail": f"{off:.1e}"}


def equations(jaxpr, names, around=""):
    """How many equations of these names a program and its inner programs have, by their parts.

    Of a gradient, these are the forward, what is computed again for the backward, and that.
    """
    found = Counter()
    for e in jaxpr.eqns:
        scopes = f"{around}/{e.source_info.name_stack}/{e.primitive.name}"
        if e.primitive.name in names:
            found[next(part for scope, part in PARTS.items() if scope in scopes)] += 1
        inner = [getattr(v, "jaxpr", v) for v in jax.tree.leaves([*e.params.values()])]
        for j in inner:
            found += equations(j, names, scopes) if hasattr(j, "eqns") else Counter()
    return found


def remat(name):
    """Layers as regions: equations of ``jax.checkpoint``, bytes kept at regions, products."""
    # A replay has no mode around it that would widen what a model casts to float32.
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    calls, hooks = [], []

    def prepare(model):
        for part in apart.with_regions(model):
            hooks.append(part.register_forward_pre_hook(lambda *_: calls.append(None)))

    try:
        loss, (params, inputs) = small_models.loss_of(diffusion.find(name), prepare=prepare)
    except apart.NoLayers as error:
        raise NoCase(str(error)) from None
    with torch.no_grad():
        loss(params, inputs)
    for hook in hooks:
        hook.remove()
    if not calls:
        raise NoCase("no layer is called as a module")
    found = {"regions": len(calls)}
    runs = []

    def watched(run):
        runs.append(count(run, SimpleNamespace(as_text=str)))  # (there is no program)

    _, expected = gradients_of(loss, params, inputs, watched=watched)
    forward, backward = runs
    again = backward.torch_recomputed
    in_torch = {"recomputed": again, "backward": backward.torch - again, "forward": forward.torch}
    lowered, args = to_jax(loss), arrays((params, inputs))
    gradient = jax.jit(jax.grad(lowered))
    found["equations"] = equations(jax.make_jaxpr(lowered)(*args).jaxpr, ["remat2"]).total()
    in_jax = equations(jax.make_jaxpr(gradient)(*args).jaxpr, PRODUCTS)
    found["products"] = [sum(in_torch.values()), in_jax.total()]
    found["parts"] = {part: [n, in_jax[part]] for part, n in in_torch.items()}
    values = [*params.values()], [*inputs.values()]

    def flat(p, i):
        return loss(dict(zip(params, p)), dict(zip(inputs, i)))

    try:
        kept = kept_by_torch(flat, values, lowered.program(*args).captures).activations
    except RuntimeError:  # torch's transforms refuse an autograd.Function without setup_context
        kept = None
    kept_by_jax, found["entered"] = kept_in_jax(lowered, args)
    found["kept"] = [kept, kept_by_jax]
    return found | compared(expected, gradient(*args))


def kept_in_jax(lowered, args):
    """Bytes of what entered regions, parameters aside: what a pullback holds of it, and all."""

    def residuals(params, inputs):
        given, named = [], {}

        def observe(operands, name):
            for x in operands:
                new = isinstance(x, jax.core.Tracer) and id(x) not in named
                if new and not any(x is y for y in given):
                    named[id(x)] = x, checkpoint_name(x, "operand")
            return [named.get(id(x), (x, x))[1] for x in operands]

        def loss(params):
            given[:] = jax.tree.leaves((params, inputs))
            return lowered.observed(observe, params, inputs)

        return jax.tree.leaves(jax.vjp(loss, params)[1])

    program = jax.make_jaxpr(residuals)(*args).jaxpr
    held = {id(v) for v in program.outvars}
    arguments, operands = {id(v) for v in program.invars}, []
    for e in program.eqns:
        before, after = e.invars[:1], next(iter(e.outvars), None)
        if e.primitive.name in ("reshape", "squeeze", "broadcast_in_dim"):
            if id(before[0]) in arguments and before[0].aval.size == after.aval.size:
                arguments.add(id(after))  # an argument in another shape
        elif e.primitive.name == "name" and id(before[0]) not in arguments:
            size = after.aval.size * after.aval.dtype.itemsize
            operands.append((size if held & {id(before[0]), id(after)} else 0, size))
    return [sum(sizes) for sizes in zip((0, 0), *operands)]


class Drawn(TorchDispatchMode):
    """Random numbers are drawn from a key, as `to_jax` draws them in JAX."""

    def __init__(self, seed):
        super().__init__()
        self.key, self.number, self.drawn = random.key(seed), 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        drawn = draws(func, args)
        if not drawn or "dot_product" in str(func):  # the latter drops nothing on a CPU
            self.number += drawn
            return func(*args, **(kwargs or {}))
        if func not in DRAWS:
            raise NoCase(f"{func} draws what no key can be compared by")
        key, like = random.fold_in(self.key, self.number), args[0]
        self.number, self.drawn = self.number + 1, self.drawn + 1
        if not isinstance(like, torch.Tensor):
            return DRAWS[func](key, torch.empty(like, dtype=(kwargs or {}).get("dtype")))
        drawn = DRAWS[func](key, like, *args[1:])
        return like.copy_(drawn) if func._schema.is_mutable else drawn


def _uniform(key, x, low=0.0, high=1.0):
    return random.uniform(key, x.shape, x.dtype, low, high)


def _normal(key, x, mean=0.0, std=1.0):
    return mean + std * random.normal(key, x.shape, x.dtype)


def _bernoulli(key, x, p):
    return random.bernoulli(key, p, x.shape).to(x.dtype)


def _exponential(key, x, rate=1.0):
    return -torch.log(_uniform(key, x)) / rate


DRAWS = {
    **dict.fromkeys((aten.bernoulli_.float, aten.bernoulli.p), _bernoulli),
    **dict.fromkeys((aten.uniform_.default, aten.rand.default, aten.rand_like.default), _uniform),
    **dict.fromkeys((aten.normal_.default, aten.randn.default, aten.randn_like.default), _normal),
    aten.exponential_.default: _exponential,
    aten.bernoulli.default: lambda key, p: random.bernoulli(key, p, p.shape).to(p.dtype),
}


def _settled(model):
    """Training mode without what draws from Python's or NumPy's generators, or keeps statistics."""
    apart.settle(model.train())
    for config in [m.config for m in model.modules() if hasattr(m, "config")]:
        config.apply_spec_augment = False  # where it has none, as if it were True


def training(name):
    """Training mode: dropout draws by the same key in both."""
    loss, (params, inputs) = small_models.loss_of(diffusion.find(name), prepare=_settled)

    def widened(params, inputs):
        with Widened():
            return loss(params, inputs)

    with torch.no_grad():
        widened(params, inputs)  # BigBird takes another attention from its first call on
    with Drawn(SEED) as drawn:
        value, expected = gradients_of(widened, params, inputs)
    if not drawn.drawn:
        raise NoCase("it draws nothing")
    gradient = jax.jit(jax.value_and_grad(to_jax(widened, rng=True), 1))
    value_in_jax, gradients = gradient(jax.random.key(SEED), *arrays((params, inputs)))
    found = compared(expected, gradients, value, value_in_jax)
    return found | {"draws": drawn.drawn}


def examples(name):
    """``jax.vmap`` of the gradient over two inputs, and torch's gradients of one after another."""
    loss, (params, inputs) = small_models.loss_of(diffusion.find(name))

    def widened(params, inputs):
        with Widened():
            return loss(params, inputs)

    two = {n: torch.stack([t, t.roll(1, -1)]) for n, t in inputs.items()}
    one = [gradients_of(widened, params, {n: t[i] for n, t in two.items()})[1] for i in range(2)]
    expected = {n: torch.stack([g[n] for g in one]) for n in params}
    gradients = jax.jit(jax.vmap(jax.grad(to_jax(widened)), (None, 0)))
    return compared(expected, gradients(*arrays((params, two))))


def column(name, which):
    """The record of a type in a column; an error is an outcome."""
    jax.config.update("jax_enable_x64", True)
    try:
        return JUDGES[which](name)
    except NoCase as error:
        return {"outcome": "no case", "detail": str(error)}
    except Exception as error:
        return {"outcome": "raises", "detail": apart.line(f"{type(error).__name__}: {error}", 300)}


JUDGES = {"remat": remat, "training": training, "examples": examples}
