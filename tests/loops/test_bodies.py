"""A loop is the plain loop, whatever its body, under every transform; scans, chains, refusals."""

import itertools

import pytest
import torch
from cases import DTYPE, apply, numbers
from references import assert_same, count, total
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import functx
from functx._loops import binomial

from . import plain

pytestmark = pytest.mark.usefixtures("no_hooks")
ROUNDINGS = 64.0


def gradients(y, *leaves):
    return y, torch.autograd.grad(total(y), leaves)


def of_a_module_with_other_parameters(loop):
    """The backward runs when the module has its own again."""

    class Looped(nn.Module):
        def __init__(self):
            super().__init__()
            self.step = nn.Sequential(nn.Linear(3, 3, dtype=DTYPE), nn.Tanh())

        def forward(self, x):
            return loop(self.step, x, 9)

    torch.manual_seed(0)
    module, x = Looped(), numbers(4, 3).requires_grad_()
    other = {k: (v * 0.5 + 0.1).detach().requires_grad_() for k, v in module.named_parameters()}
    y = functx.functional_call(module, other, (x,))
    return gradients(y, x, *other.values()), gradients(module(x), x, *module.parameters())


def that_draws(loop):
    torch.manual_seed(3)
    own = torch.Generator().manual_seed(4)

    def body(x):
        x = F.dropout(torch.sin(x), 0.3) + torch.rand(3, generator=own, dtype=DTYPE)
        return x * torch.empty_like(x).normal_(generator=own)

    x = numbers(3).requires_grad_()
    return *gradients(loop(body, x, 13), x), torch.rand(1), own.get_state()


def with_loops_and_regions_inside(loop):
    outer = lambda x: loop(lambda x: loop(torch.sin, x * 1.1, 4), x, 3)
    x = numbers(3).requires_grad_()
    y = (outer if loop is plain.of_steps else functx.remat(outer))(x)
    return y, torch.autograd.grad(y.sum(), x, create_graph=True)


def that_passes_an_input_through(loop):
    x, w = numbers(3).requires_grad_(), numbers(3, start=1.0).requires_grad_()
    y, v = loop(lambda s: (torch.sin(s[0] * s[1]), s[1]), (x, w), 7)
    return gradients((y, v * v), x, w)


BODIES = [
    of_a_module_with_other_parameters,
    that_draws,
    with_loops_and_regions_inside,
    that_passes_an_input_through,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
@pytest.mark.parametrize("loop", [plain.counted, plain.until], ids=["steps", "condition"])
def test_a_loop_with_this_body_is_the_plain_loop(body, loop):
    assert_same(body(loop), body(plain.of_steps), ROUNDINGS)


def draws_in_the_condition(loop):
    torch.manual_seed(3)
    x = numbers(4).requires_grad_()
    i, y = loop(
        lambda s: (s[0] + 1, F.dropout(s[1].sin(), 0.3)),
        (0, x),
        lambda s: s[0] < 4 or torch.rand(()) < 0.9,
    )
    assert 4 <= i < 100
    return i, gradients(y, x), torch.rand(1)


def reads_what_the_body_does_not(loop):
    w, bound = numbers(3).requires_grad_(), torch.tensor(6.0).requires_grad_()
    y = loop(lambda x: x + w * w, numbers(3), lambda x: x.norm() * bound < 30.0)
    return gradients(y, w)


def ends_early(loop):
    def found(n):
        x = numbers(3).requires_grad_()
        i, y = loop(lambda s: (s[0] + 1, s[1].sin()), (0, x), lambda s: s[0] < n)
        return i, gradients(y, x)

    return [found(n) for n in range(4)]


CONDITIONS = [draws_in_the_condition, reads_what_the_body_does_not, ends_early]


@pytest.mark.parametrize("program", CONDITIONS, ids=lambda p: p.__name__)
def test_a_condition_is_asked_as_in_the_plain_loop(program):
    assert_same(program(functx.remat_loop), program(plain.while_it_holds), 8)


def test_a_bound_ends_a_loop_that_a_condition_would_go_on_with():
    def steps(x, bound):
        body = lambda s: (s[0] + 1, s[1].sin())
        return functx.remat_loop(body, (0, x), bound, cond=lambda s: s[0] < 7)[0]

    for bound, ran in ((5, 5), (0, 0), (50, 7)):
        assert steps(numbers(3), bound) == steps(numbers(3).requires_grad_(), bound) == ran


STATES = numbers(64, 4)


def test_a_scan_of_pytrees():
    def body(carry, x):
        i, (h, frozen) = carry
        h = torch.tanh(h + x["a"] * x["b"].sum())
        return (i + 1, (h, frozen)), {"h": h, "i": i, "none": None, "flag": h.sum() > 0}

    xs = {"a": numbers(6, 3).requires_grad_(), "b": numbers(6, 2), "c": None}
    carry = (0, (numbers(3), torch.arange(3)))
    (i, (h, frozen)), ys = functx.remat_scan(body, carry, xs, slots=2)
    assert (i, ys["i"].tolist(), ys["none"]) == (6, list(range(6)), None)
    assert ys["flag"].dtype == torch.bool
    assert torch.equal(frozen, torch.arange(3))
    assert torch.equal(ys["h"][-1], h)
    (gradient,) = torch.autograd.grad(ys["h"].sum(), xs["a"])
    h, hs = numbers(3), []
    for a, b in zip(xs["a"], xs["b"]):
        h = torch.tanh(h + a * b.sum())
        hs.append(h)
    assert_same(ys["h"], torch.stack(hs))
    assert_same(gradient, torch.autograd.grad(sum(h.sum() for h in hs), xs["a"])[0], 64)


@pytest.mark.parametrize("length", [None, 0])
def test_a_scan_of_no_steps_has_results_of_its_body_s_shapes(length):
    before = torch.get_rng_state()
    xs = None if length == 0 else torch.empty(0, 3)
    carry, ys = functx.remat_scan(
        lambda c, x: (c, (F.dropout(c), None, 1)), torch.ones(2), xs, length
    )
    assert torch.equal(carry, torch.ones(2))
    assert (ys[0].shape, ys[1], ys[2].shape) == ((0, 2), None, (0,))
    assert torch.equal(torch.get_rng_state(), before)
    assert functx.remat_loop(torch.sin, 3, 0) == 3


@pytest.mark.parametrize("segments", [1, 2, 3, 7])
def test_a_chain_runs_all_but_its_last_segment_again(segments):
    layers = [nn.Sequential(nn.Linear(4, 4, dtype=DTYPE), nn.Tanh()) for _ in range(7)]

    def run(f):
        x = STATES.detach().requires_grad_()
        y = f(x)
        return y, torch.autograd.grad(y.sum(), [x, *nn.Sequential(*layers).parameters()])

    for functions in (layers, nn.Sequential(*layers), iter(layers)):
        ours = run(lambda x, functions=functions: functx.remat_sequential(functions, segments, x))
        assert_same(ours, run(nn.Sequential(*layers)))
    start, end = binomial.segments(7, segments)[-1]
    counts = count(run, lambda x: functx.remat_sequential(layers, segments, x))
    assert counts["tanh"] == 7 + 7 - (end - start)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"slots": 0}, ValueError, "slots is 0"),
        ({"slots": 1.5}, TypeError, "slots must be an int"),
        ({"slots": 2, "steps": 497}, ValueError, "need 3 slots or more, got 2"),
        ({"steps": -1}, ValueError, "expected 0 or more"),
        ({"steps": 2.0}, TypeError, "steps must be an int"),
        ({"steps": None}, TypeError, "pass the number of steps, or a condition"),
        ({"steps": None, "cond": True}, TypeError, "expected a callable"),
        ({"steps": None, "cond": bool, "slots": 4}, ValueError, "slots can be used only without"),
        ({"steps": None, "cond": lambda x: x > 0}, ValueError, "must be one boolean"),
    ],
)
def test_a_loop_refuses(kwargs, error, message):
    with pytest.raises(error, match=message):
        functx.remat_loop(torch.sin, STATES, **{"steps": 100, **kwargs})


@pytest.mark.parametrize(
    ("body", "args", "error", "message"),
    [
        (lambda c, x: c, (STATES, STATES), TypeError, "must return a pair"),
        (lambda c, x: (c[:1], x), (STATES, STATES), TypeError, "leaf 0 was a torch.float64 tensor"),
        (lambda c, x: (c.float(), x), (STATES, STATES), TypeError, "torch.float32"),
        (lambda c, x: ((c, c), x), (STATES, STATES), TypeError, "structure"),
        (lambda c, x: (c, x), (STATES, 1.0), TypeError, "xs must be tensors"),
        (lambda c, x: (c, x), (STATES, STATES[0, 0]), ValueError, "leading dimension"),
        (lambda c, x: (c, x), (STATES, STATES, 3), ValueError, "agree on one number"),
        (lambda c, x: (c, x), (STATES, (STATES, STATES[:2])), ValueError, "agree on one number"),
        (lambda c, x: (c, x), (STATES,), ValueError, "pass length, since xs has no"),
        (
            lambda i, x: (i + 1, (x,) if i else x),
            (0, STATES),
            TypeError,
            "of the same structure at every step",
        ),
        (3, (STATES, STATES), TypeError, "expected a callable"),
    ],
)
def test_a_scan_refuses(body, args, error, message):
    with pytest.raises(error, match=message):
        functx.remat_scan(body, *args)


def test_a_chain_refuses():
    layers = [torch.sin] * 3
    for segments in (0, 4, -1):
        with pytest.raises(ValueError, match="3 functions can be cut into 1 to 3 segments"):
            functx.remat_sequential(layers, segments, STATES)
    for segments in (2.0, True, None):
        with pytest.raises(TypeError, match="segments must be an int"):
            functx.remat_sequential(layers, segments, STATES)
    with pytest.raises(TypeError, match="expected a callable"):
        functx.remat_sequential([torch.sin, STATES], 1, STATES)


def test_the_deepest_nest_works_and_one_step_more_is_an_error():
    steps = binomial.reach(1, binomial.DEEPEST)
    loop = lambda x: functx.remat_loop(torch.sin, x, steps, slots=1).sum()
    expected = functx.grad(lambda x: plain.of_steps(torch.sin, x, steps).sum())(STATES[:1])
    assert_same(functx.grad(loop)(STATES[:1]), expected)
    with pytest.raises(ValueError, match="need 2 slots"):
        functx.remat_loop(torch.sin, STATES, steps + 1, slots=1)


@pytest.mark.parametrize(
    ("body", "state", "message"),
    [
        (lambda s: (s[0] + 1, s[1]), lambda x: (0, x), "may change; got 0 and then 1"),
        (
            lambda s: (s[0] * 2, s[0]),
            lambda x: (x,),
            "body must return a state of the same structure",
        ),
    ],
)
def test_states_that_vmap_can_not_mask_are_an_error(body, state, message):
    loop = lambda x: functx.remat_loop(body, state(x), lambda s: s[-1].sum() < 9)[-1]
    with pytest.raises(TypeError, match=message):
        functx.vmap(loop)(numbers(3, start=1.0))


@pytest.mark.parametrize("change", ["another factor", "fewer factors", "a condition that ends"])
def test_a_step_that_changes_before_the_backward_is_an_error(change):
    x, w, v = (numbers(3, start=i).requires_grad_() for i in (0.0, 1.0, 2.0))
    factors, most = [w, v], [5]

    def step(state):
        y = torch.sin(state[1])
        for factor in factors:
            y = y * factor
        return state[0] + 1, y

    _, y = functx.remat_loop(step, (0, x), lambda s: s[0] < most[0])
    if change == "a condition that ends":
        most[0] = 2
    else:
        factors[:] = [w, v, v] if change == "another factor" else [w]
    with pytest.raises(functx.ReplayError, match="rule 3"):
        y.sum().backward()


STACKS = [
    *[(name,) for name in ("grad", "vjp", "jvp", "jacrev", "jacfwd", "hessian", "vmap")],
    *itertools.permutations(("grad", "vmap", "jvp"), 2),
    *[("grad", "grad"), ("jacrev", "jacfwd"), ("vmap", "jacrev"), ("grad", "vmap", "grad")],
    *[("vmap", "grad", "vmap"), ("jvp", "grad", "vmap")],
]
OPTIONS = [{"slots": 3, "reverse": True}, {}, {"slots": 1}]


def found(f, stack, x, library=functx):
    """Values of a stack of transforms around ``f``, and the gradient of their sum."""
    for name in reversed(stack):
        f = apply(library, name, f)
    x = x.clone().requires_grad_()
    out = f(x)
    return out, torch.autograd.grad(total(out), x, allow_unused=True, materialize_grads=True)


def argument(stack):
    return numbers(*(2,) * stack.count("vmap"), 2)


@pytest.mark.parametrize(
    ("stack", "options"),
    [
        pytest.param(s, OPTIONS[i % 3], marks=pytest.mark.sweep if i % 5 in (1, 3) else ())
        for i, s in enumerate(STACKS)
    ],
    ids=str,
)
def test_a_scan_is_the_plain_scan(stack, options):
    def recurrence(scan):
        def f(x):
            weight, xs = x[:, None] * numbers(2, 2), numbers(7, 2) * x

            def body(carry, piece):
                new = torch.tanh(carry @ weight + piece)
                return new, new * piece

            return scan(body, x, xs, **options)

        return found(f, stack, argument(stack))

    assert_same(recurrence(functx.remat_scan), recurrence(plain.scan), eps=ROUNDINGS)


@pytest.mark.parametrize("stack", STACKS, ids="(".join)
def test_a_loop_until_a_condition_is_the_plain_loop(stack):
    def run(loop):
        def f(x):
            weight = x[:, None] * numbers(2, 2)
            first = (torch.zeros((), dtype=DTYPE), x)
            body = lambda state: (state[0] + 1, torch.tanh(state[1] @ weight + x))
            return loop(body, first, lambda state: state[0] < 6)[1]

        return found(f, stack, argument(stack))

    assert_same(run(functx.remat_loop), run(plain.while_it_holds), eps=ROUNDINGS)


@pytest.mark.parametrize(
    "stack", [("vmap",), ("vmap", "grad"), ("grad", "vmap"), ("vmap", "hessian")], ids="(".join
)
def test_examples_may_end_at_different_steps(stack):
    def masked(body, state, cond):
        for _ in range(12):
            state = torch.where(cond(state), body(state), state)
        return state

    def run(loop):
        f = lambda x: loop(lambda y: y * (1.5 + x * x), x, lambda y: y.abs() < 9)
        return found(f, stack, numbers(5) + 1.3)

    assert_same(run(functx.remat_loop), run(masked), eps=ROUNDINGS)


def finished_at_a_pole(loop, x, c):
    """The step behind the last one takes the square root of a negative number."""
    body = lambda s: (s[0] - 1, torch.sqrt(s[0] - 1) * s[1])
    return loop(body, (x, x * 0 + c), lambda s: s[0] > 1)[1]


def finished_where_a_closure_is_differentiated(loop, x, c):
    def body(s):
        return s[0] - c, torch.log(s[0] / (c * x) * x - 0.9) * s[1] + torch.sqrt(s[0] - c)

    return loop(body, (x, x * 0 + 1.0), lambda s: s[0] > 1.5)[1]


def finished_on_a_norm(loop, x, c):
    """The last state is zero, where a norm has no derivative."""

    def body(s):
        return s[0] - 1, (s[1] * (s[0] - 1)) / torch.linalg.vector_norm(s[1].reshape(1)) * c

    return loop(body, (torch.ceil(x).detach(), x), lambda s: s[0] >= 1)[1]


@pytest.mark.parametrize("order", ["vmap(grad)", "grad(vmap)", "vmap(hessian)", "vmap(jacfwd)"])
@pytest.mark.parametrize(
    "program",
    [finished_at_a_pole, finished_where_a_closure_is_differentiated, finished_on_a_norm],
    ids=lambda p: p.__name__,
)
def test_an_example_that_is_done_changes_no_gradient(program, order):
    """Also one that is done before the first step."""
    xs, c = torch.tensor([2.5, 6.0, 0.5, 1.2], dtype=DTYPE), torch.tensor(1.0, dtype=DTYPE)
    one = lambda x, c: program(plain.while_it_holds, x, c)
    many = lambda x, c: program(functx.remat_loop, x, c)
    if order == "grad(vmap)":
        f = lambda xs, c: functx.vmap(many, (0, None))(xs, c).sum()
        found = functx.grad(f, (0, 1))(xs, c)
        each = [torch.func.grad(one, (0, 1))(x, c) for x in xs]
        expected = torch.stack([dx for dx, _ in each]), sum(dc for _, dc in each)
    else:
        name = order[5:-1]
        found = functx.vmap(getattr(functx, name)(many, (0, 1)), (0, None))(xs, c)
        each = [getattr(torch.func, name)(one, (0, 1))(x, c) for x in xs]
        flat = [torch.stack(leaves) for leaves in zip(*map(tree_leaves, each))]
        found, expected = tree_leaves(found), flat
    assert all(t.isfinite().all() for t in expected)
    assert_same(found, expected, eps=ROUNDINGS)


def test_a_write_in_a_body_that_some_examples_never_run_is_refused_as_in_any_region():
    captured = numbers(3).requires_grad_() * 1.0
    body = lambda s: s - captured.mul_(0.5)
    loop = lambda x: functx.remat_loop(body, x, lambda s: s > 1)
    with pytest.raises(RuntimeError, match=r"in-place|in place"):
        functx.vmap(loop)(torch.tensor([0.5, 2.0, 3.0], dtype=DTYPE))
