"""Where some gradients are asked for, or of one level, what only others read does not run again.

The counts are those of the same program, traced and rid of dead code; and where that is more, as
`jvp` computes values that nobody reads, what it takes without regions is added.
"""

import random

import pytest
import torch
from cases import numbers
from programs import check_program, identity
from references import count, peak
from sweeping import swept_but
from test_second_order import live_nodes
from torch.nn import functional as F

import functx
from functx._remat import _asked

pytestmark = pytest.mark.usefixtures("no_hooks")

X, Y = numbers(3, 6), numbers(3, 6, start=5.0)
W = [numbers(6, 6, start=float(i)) for i in range(3)]


def network(x, *weights):
    for w in weights:
        x = torch.tanh(x @ w)
    return x


BODIES = {
    "network": (network, (X, *W)),
    "two": (lambda x, y: x.sin() * y.exp() + y.tanh(), (X, Y)),
    "apart": (lambda x, y: x.sin().sin() + y.exp().exp(), (X, Y)),
    "products": (lambda x, y, w: (x @ w).sin() * (y @ w).cos(), (X, Y, W[0])),
    "attention": (lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, (X, Y, X + 1)),
    "what is read is computed": (lambda x, y: x * y.exp().sin(), (X, Y)),
    "activations": (lambda x, v, w: F.silu(F.gelu(x @ v) @ w), (X, W[0], W[1])),
}
REGIONS = {
    "one": lambda remat, f: remat(f),
    "a chain": lambda remat, f: (
        lambda *a: remat(lambda x: x.sin().sin())(remat(f)(*map(remat(torch.exp), a)))
    ),
}


def loss(f):
    return lambda *args: f(*args).sum()


def backward(f, i):
    def run(*args):
        args = [t.detach().requires_grad_() for t in args]
        value = f(*args).sum()
        return value, torch.autograd.grad(value, args[i])

    return run


def twice(asks_for_all):
    def stack(f, i):
        def run(*args):
            args = [t.detach().requires_grad_() for t in args]
            value = f(*args).sum()
            (gradient,) = torch.autograd.grad(value, args[i], create_graph=True)
            asked = args if asks_for_all else args[i]
            return (
                value,
                gradient,
                torch.autograd.grad(gradient.sin().sum(), asked, materialize_grads=True),
            )

        return run

    return stack


def of_a_gradient(which):
    def stack(f, i):
        def run(*args):
            value, gradient = functx.value_and_grad(loss(f), argnums=i)(*args)
            return gradient.sin().sum(), (value, gradient)

        return lambda *args: functx.value_and_grad(
            run, argnums=tuple(which(i, len(args))), has_aux=True
        )(*args)

    return stack


def product(f, i):
    def run(*args):
        def gradient(t):
            return functx.value_and_grad(loss(f), argnums=i)(*args[:i], t, *args[i + 1 :])[::-1]

        out, pullback, value = functx.vjp(gradient, args[i], has_aux=True)
        return out, value, pullback(out)

    return run


STACKS = {
    "backward": backward,
    "backward twice": twice(True),
    "backward twice of one": twice(False),
    "grad": lambda f, i: functx.value_and_grad(loss(f), argnums=i),
    "grad of grad": of_a_gradient(lambda i, n: [i]),
    "grad of grad of all": of_a_gradient(lambda i, n: range(n)),
    "hessian-vector product": product,
}
VIEWS = {
    "detach",
    "alias",
    "t",
    "transpose",
    "view",
    "expand",
    "reshape",
    "unsqueeze",
    "_unsafe_view",
}


def counted(f, *args):
    return {k: n for k, n in count(f, *args).items() if k not in VIEWS}


QUICK = ("network", "two", "attention", "what is read is computed")


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("body", swept_but(QUICK, BODIES))
def test_counts(body, region, stack):
    f, args = BODIES[body]
    for i in {0, len(args) - 1}:

        def run(remat, i=i):
            return STACKS[stack](REGIONS[region](remat, f), i)

        ours, plain = (counted(run(remat), *args) for remat in (functx.remat, identity))
        left, left_plain = (live_nodes(run(remat), *args) for remat in (functx.remat, identity))
        for name in COUNTED:
            more = plain.get(name, 0) - left_plain.get(name, 0)
            assert ours.get(name, 0) <= left.get(name, 0) + max(more, 0), (i, name)


COUNTED = ("sin", "cos", "exp", "tanh", "mm", "_softmax", "gelu", "silu")


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("body", BODIES)
def test_values(body, stack):
    """What was written nowhere is shown, in tests; the sixth run is a known one."""
    f, args = BODIES[body]

    def program(remat):
        runs = [STACKS[stack](remat(f), i) for i in range(len(args))]
        first = [run(*args) for run in runs]
        for _ in range(5):
            found = [run(*args) for run in runs]
        return first, found

    check_program(program, eps=32, nonzero=False)


def test_a_region_inside_reads_what_it_is_given():
    """Though what it computes from that alone leads to nothing that is asked for."""

    def body(x, y):
        return functx.remat(lambda h: h.sin() * x)(y.exp())

    check_program(lambda remat: [backward(remat(body), i)(X, Y) for i in (0, 1)])


def test_what_vmap_copies():
    """A node above it has saved the original."""

    def body(x, w):
        return F.conv1d(x.sin()[None], w.exp(), padding=1).tanh()

    args = numbers(3, 2, 5), numbers(2, 2, 3, 3)

    def program(remat):
        stack = of_a_gradient(lambda i, n: range(n))
        return [functx.vmap(stack(remat(body), i), (0, 2))(*args) for i in (0, 1)]

    check_program(program, eps=64)


@pytest.mark.parametrize("policy", ["everything", "some"])
def test_what_is_kept_has_its_history(policy):
    def body(t):
        return torch.sigmoid(torch.tanh(torch.outer(t, t).diagonal().cos() * 1.4)) * t.sin()

    def program(remat):
        def f(x):
            region = remat(body, policy=POLICIES[policy])
            gradient = functx.grad(lambda t: region(t * 2).sum())
            return gradient(x).sin().sum(), functx.grad(lambda x: gradient(x).sin().sum())(x)

        x = numbers(3).requires_grad_()
        return f(x), torch.autograd.grad(f(x)[0], x), functx.grad(lambda x: f(x)[0])(x.detach())

    check_program(program, eps=64)


@pytest.mark.parametrize("stack", STACKS)
def test_what_is_kept_is_differentiated(stack):
    """What it was computed from is read for that, though nothing has to compute it."""

    def body(x, y):
        return x * (y * y).exp().sin()

    def program(remat):
        region = remat(body, policy=functx.checkpoint_policies.everything_saveable)
        return [STACKS[stack](region, i)(X, Y) for i in (0, 1)]

    check_program(program, eps=32, nonzero=False)


def test_counts_of_known_runs():
    """These have the ledger of a run before them."""
    f, args = BODIES["two"]
    for i, tanh, exp in ((0, 1, 2), (1, 2, 2)):
        run = backward(functx.remat(f), i)
        for _ in range(6):
            found = count(run, *args)
            assert (found["tanh"], found["exp"]) == (tanh, exp)


def test_bytes():
    """A tower that is not asked for is not there again."""

    def body(x, y):
        for _ in range(8):
            y = y.sin()
        return x.sin() + y

    x, y = (numbers(64, 64, start=s).requires_grad_() for s in (0.0, 1.0))
    for asked, most in ((x, 4), (y, 10)):
        value = functx.remat(body)(x, y)
        cotangent = torch.ones_like(value)
        assert peak(lambda v=value, a=asked, c=cotangent: torch.autograd.grad(v, a, c)) <= (
            most * x.nbytes
        )


def random_body(choose, n):
    """Steps on some values, some of them in place, or of several operations."""
    steps = []
    for _ in range(choose.randint(3, 9)):
        kind = choose.choice(KINDS)
        steps.append((kind, choose.random(), choose.random()))

    def f(*args):
        values = [*args]
        for kind, a, b in steps:
            x, y = values[int(a * len(values))], values[int(b * len(values))]
            values.append(KINDS_OF[kind](x, y))
        made = sum(v * (1 + i) for i, v in enumerate(values[n:])) / len(steps)
        return made + sum(t.square().sin() for t in args)

    return f


def in_place(x, y):
    z = x.sin()
    z.mul_(y)
    return z.exp_() / 8


def copied(x, y):
    z = x.sin()
    z[0] = y[1]
    return z.tanh()


KINDS_OF = {
    "sin": lambda x, y: x.sin(),
    "tanh": lambda x, y: x.tanh(),
    "gelu": lambda x, y: F.gelu(x),
    "times": lambda x, y: x * y,
    "plus": lambda x, y: x + y,
    "matrices": lambda x, y: x @ y / 4,
    "divided": lambda x, y: x / (2 + y * y),
    "linear": lambda x, y: F.linear(x, y, x[0]) / 4,
    "batched": lambda x, y: torch.einsum("ij,kj->ki", x, y) / 4,
    "softmax": lambda x, y: torch.softmax(x, -1) * y,
    "norm": lambda x, y: F.layer_norm(x, (4,), y[0], x[1]),
    "in place": in_place,
    "copied": copied,
    "region": functx.remat(lambda x, y: x.sin() * y.exp() / 4),
    "cut": lambda x, y: x.detach() * y,
    "mapped": lambda x, y: functx.vmap(lambda a, b: torch.tanh(a) * b)(x, y),
    "gradient": lambda x, y: functx.grad(lambda x: (x.sin() * y).sum())(x),
}
KINDS = sorted(KINDS_OF)


POLICIES = {
    "nothing": functx.checkpoint_policies.nothing_saveable,
    "everything": functx.checkpoint_policies.everything_saveable,
    "some": functx.checkpoint_policies.dots_saveable | [torch.ops.aten.tanh, torch.ops.aten.exp],
}


@pytest.mark.parametrize("seed", range(80))
def test_random_bodies(seed):
    choose = random.Random(seed)
    n = choose.randint(2, 4)
    f, args = random_body(choose, n), [numbers(4, 4, start=float(s)) for s in range(n)]
    i, j = choose.randrange(n), choose.randrange(n)
    stack = choose.choice([*STACKS, "mapped", "of another", "two asked"])

    policy = POLICIES[choose.choice(sorted(POLICIES))] if choose.random() < 0.4 else None

    def program(remat):
        g = remat(f, policy=policy)
        if stack == "mapped":
            return functx.vmap(STACKS["grad of grad of all"](g, i))(
                *(numbers(2, 4, 4, start=float(s)) for s in range(n))
            )
        if stack == "of another":
            return of_a_gradient(lambda i, n: [j])(g, i)(*args)
        if stack == "two asked":
            leaves = [t.clone().requires_grad_() for t in args]
            asked = [leaves[i], leaves[j]]
            return torch.autograd.grad(g(*leaves).sin().sum(), asked, materialize_grads=True)
        return STACKS[stack](g, i)(*args)

    check_program(program, eps=256, nonzero=False)


@pytest.mark.parametrize("operation", sorted(_asked.RESULT_UNREAD, key=str))
def test_what_nodes_read(operation):
    """Of the operations in the tables: who has saved what, and whose gradient reads it."""
    args = arguments(operation)
    tensors = [t for t in args if isinstance(t, torch.Tensor)]
    for leaf in tensors:
        leaf.requires_grad_()
    out = operation(*args)
    saved = [n for n in dir(out.grad_fn) if n.startswith("_saved_")]
    held = {n: getattr(out.grad_fn, n) for n in saved}
    memory = out.untyped_storage()._cdata
    kept = [t for t in held.values() if isinstance(t, torch.Tensor)]
    assert all(t.untyped_storage()._cdata != memory for t in kept)
    if operation in _asked.UNREAD:
        assert not kept
    if operation in _asked.FACTORS:
        for asked in tensors:
            expected = torch.autograd.grad(operation(*args).sum(), asked)
            own = asked.detach().clone()
            result = operation(*args).sum()
            asked.data.fill_(float("nan"))  # past torch
            found = torch.autograd.grad(result, asked)
            asked.data.copy_(own)
            torch.testing.assert_close(found, expected)


def arguments(operation):
    """Something to call it on."""
    name = operation._schema.name.removeprefix("aten::")
    a, b, c = (numbers(4, 4, start=s) for s in (0.0, 1.0, 2.0))
    batches = [numbers(2, 4, 4, start=float(s)) for s in range(3)]
    special = {
        "bmm": batches[:2],
        "baddbmm": batches,
        "mv": (a, b[0]),
        "dot": (a[0].clone(), b[0].clone()),
        "addmm": (a, b, c),
        "convolution": (
            *(numbers(1, 2, 5, 5), numbers(3, 2, 3, 3), numbers(3)),
            *([1, 1], [0, 0], [1, 1], False, [0, 0], 1),
        ),
        "pow": (a, 3),
        "cat": ([a, b],),
        "log": (a.exp(),),
        "_softmax_backward_data": (a, b, -1, a.dtype),
    }
    if name in special:
        return [t.detach().clone() if isinstance(t, torch.Tensor) else t for t in special[name]]
    given = [x for x in operation._schema.arguments if str(x.type) == "Tensor"]
    rest = {"dim": [[0]]} if "dim" in operation._overloadname else {}
    extra = rest.get("dim", [])
    return [*(t.clone() for t in (a, b, c)[: len(given)]), *extra]
