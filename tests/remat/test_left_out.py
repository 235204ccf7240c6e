"""What a replay leaves out is never missed: silently wrong gradients if it is."""

import pytest
import torch
from cases import custom_function, identity, judged_by, numbers, unchanged
from references import assert_same

import functx

from .programs import STACKS, by_backward

pytestmark = pytest.mark.usefixtures("no_hooks")
WAYS = {name: STACKS[name] for name in ("backward", "grad", "vmap(grad)", "grad(grad)")}


def agrees(region, x, way, pick=0):
    def loss(region):
        return lambda x: region(x)[pick].sin().sum()

    expected = WAYS[way](loss(region), x)
    nested = functx.remat(lambda x: functx.remat(region)(x))
    for ours in (functx.remat(region), nested):
        torch.testing.assert_close(WAYS[way](loss(ours), x), expected, rtol=1e-14, atol=1e-14)


def with_mask(keep, read):
    """A Function that keeps what is no ancestor of its result."""
    return custom_function(
        lambda x, mask: (x * 2, mask.sum()),
        lambda ctx, first, second: (first * read(ctx), None),
        lambda ctx, inputs, output: keep(ctx, inputs[1]),
    )


saves = with_mask(lambda ctx, mask: ctx.save_for_backward(mask), lambda ctx: ctx.saved_tensors[0])
# Where only Python sees it.
hides = with_mask(lambda ctx, mask: setattr(ctx, "mask", mask), lambda ctx: ctx.mask)


def hooked(register, y, then):
    """``y`` with a hook, where it is differentiated, and another result."""
    if y.requires_grad:
        register(y)
    return y, then.sum()


def reads_a_sibling(x):
    mask = (x * 3).sin()
    return hooked(lambda y: y.register_hook(lambda g: g * mask), x.cos(), mask)


def of_a_node(x):
    mask = (x * 3).sin()
    hook = lambda gradients, _: tuple(g if g is None else g * mask for g in gradients)
    return hooked(lambda y: y.grad_fn.register_hook(hook), x * 2, mask)


def mask_of(x):
    return (x * 3).sin().detach()


REGIONS = {
    "a Function hides a result": lambda x: (lambda m: (hides(x, m)[0], m))(mask_of(x)),
    "a hook reads a sibling": reads_a_sibling,
    "a hook reads an input": lambda x: hooked(lambda y: y.register_hook(lambda g: g * x), x * 2, x),
    "a hook of a node": of_a_node,
    "a Function saves a sibling": lambda x: saves(x, mask_of(x)),
    "a Function hides a sibling": lambda x: hides(x, mask_of(x)),
}


@pytest.mark.parametrize(
    ("region", "way"),
    # Torch can't batch a Function without a rule for it.
    [
        (r, w)
        for i, r in enumerate(REGIONS)
        for j, w in enumerate(WAYS)
        if (i + j) % 2 and (w != "vmap(grad)" or "hides" not in r)
    ],
)
def test_python_on_the_tape_finds_what_it_reads(region, way):
    agrees(REGIONS[region], numbers(4), way)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(("way", "pick"), [("backward", 1), ("vmap(grad)", 2), ("grad(grad)", 1)])
def test_results_of_an_operator_read_each_other(way, pick):
    """Without a batching rule, each result of a factorization is stacked by itself."""
    agrees(lambda x: torch.linalg.lu(x @ x.mT + torch.eye(3)), numbers(3, 3), way, pick)


def pools_at_random(x):
    image = x.outer(x)[None, None].expand(1, 1, 4, 4)
    return torch.nn.functional.fractional_max_pool2d(image, 2, output_size=2, return_indices=True)


DRAWS = [
    lambda x: (x.sin(), torch.bernoulli(x.sigmoid().detach())),
    lambda x: ((x * torch.normal(x, x.exp()).detach()).sin(), torch.rand_like(x)),
    pools_at_random,
]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(
    ("region", "way", "pick"),
    [
        (f, way, (i + j) % 2)
        for i, f in enumerate(DRAWS)
        for j, way in enumerate(WAYS)
        if (i + j) % 3
    ],
)
def test_what_draws_has_its_inputs(region, way, pick):
    """A replay must draw, to leave the generator where it was, and reads to do so."""

    def seeded(region):
        torch.manual_seed(3)
        return WAYS[way](lambda x: region(x)[pick].double().sin().sum() + x.sum(), numbers(4))

    actual, expected = seeded(functx.remat(region)), seeded(region)
    torch.testing.assert_close(actual, expected, rtol=1e-14, atol=1e-14)


@judged_by(unchanged)
def test_running_statistics_are_read_though_the_normalized_are_not(remat):
    """The kernel writes them without saying so in its schema."""
    norm = torch.nn.BatchNorm1d(3, dtype=torch.float64)

    def region(x):
        norm(x.sin())
        return x.cos() * norm.running_mean.clone()

    return by_backward(lambda x: remat(region)(x).sin().sum(), numbers(4, 3))


@judged_by(unchanged)
def test_forward_modes_zeros_stay_what_they_are(remat):
    """In place of one, memory nobody wrote to has other operations run."""
    b = numbers(3).requires_grad_()

    def g(x):
        v = x.sin()
        return remat(lambda: v * b)().sigmoid()

    return functx.grad(lambda x: functx.jacfwd(g)(x).sum())(numbers(3, start=1.0))


@judged_by(unchanged, eps=8)
def test_an_inner_replay_may_leave_out_other_things_than_before(remat):
    """How much an inner region left out is not part of what the outer one does."""

    def g(x):
        v3 = x.sin()

        @remat
        def region2():
            v4 = remat(lambda: (x * 0.7).mul_(x) + v3.sin().sin())
            v8 = functx.grad(remat(lambda t: (v4() * t.sin()).sum()))(x)
            return v8.sigmoid()

        return region2()

    return functx.jacfwd(lambda x: functx.grad(lambda x: g(x).sum())(x))(numbers(3))


@pytest.mark.parametrize(
    ("library", "outer"), [(functx, "none"), (torch.func, "jvp"), (functx, "vjp")]
)
def test_a_leaf_that_vmap_expands_inside_vjp_was_not_made_there(library, outer):
    """The results of vjp were; what vmap expanded to be one of them, in C++, was not seen."""
    leaf = numbers(3, 3, start=2.0).requires_grad_()
    x = numbers(2, 3).requires_grad_()

    def f(x):
        y, pullback = library.vjp(library.vmap(lambda x: (x.sin(), leaf)), x)
        return y, pullback((y[0].cos(), y[1]))[0]

    def gradients(f):
        if outer == "none":
            out = f(x)
        elif outer == "jvp":
            out = library.jvp(f, (x,), (x,))
        else:
            out, pullback = library.vjp(f, x)
            out = out, pullback(out)[0]
        total = sum(t.sin().sum() for t in torch.utils._pytree.tree_leaves(out))
        return torch.autograd.grad(total, [x, leaf])

    assert_same(gradients(functx.remat(f)), gradients(f), eps=8)


@pytest.mark.parametrize(("write", "used"), [("mul_", False), ("squeeze_", True)])
@judged_by(unchanged, eps=8)
def test_what_an_inner_policy_may_keep_is_written_to(remat, write, used):
    """Whether or not the inner region keeps it in the end, the outer replay goes the same way."""

    def inner(x):
        h = x @ numbers(4, 4)
        kept = h.exp() if used else x.sin()
        h.squeeze_(0) if write == "squeeze_" else h.mul_(2)
        return kept

    policy = {} if remat is identity else {"policy": functx.checkpoint_policies.dots_saveable}
    outer = lambda x: remat(inner, **policy)(x.tanh()).exp() + unread
    x, unread = numbers(3, 4).requires_grad_(), numbers(4).requires_grad_()
    plain = torch.autograd.grad(remat(outer)(x).sum(), x)
    return plain, functx.jacrev(functx.grad(lambda x: remat(outer)(x).sum()))(x.detach())


@pytest.mark.parametrize(
    ("reduce", "out"),
    [(torch.sum, "jacfwd"), (torch.mean, "vmap(jvp)"), (lambda t: t.sum(0).sum(0), "jvp")],
)
@judged_by(unchanged, eps=64)
def test_copies_that_forward_mode_makes_are_read_from_what_they_copy(remat, reduce, out):
    """A gradient that is expanded has no memory of its own; neither has its tangent."""

    f = lambda x: remat(lambda p: reduce(remat(torch.square)(torch.outer(p, p))).sin())(x.cos())
    pushed = lambda t: functx.jvp(gradient, (x,), (t,))[1]
    gradient = remat(functx.grad(f))
    x = numbers(3).requires_grad_()
    if out == "jacfwd":
        value = functx.jacfwd(gradient)(x)
    else:
        value = pushed(x) if out == "jvp" else functx.vmap(pushed)(torch.eye(3, dtype=x.dtype))
    return value.detach(), torch.autograd.grad(value.sum(), x)


@pytest.mark.parametrize("jacobian", [functx.jacrev, functx.jacfwd, torch.func.jacrev])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_forward_modes_zeros_meet_an_operator_of_a_number(jacobian, requires_grad):
    """Called from a dispatch mode, that ends the process."""

    f = lambda x, t: (x - t).pow(2).sum()

    def g(t):
        zeros = torch.zeros_like(t)
        return functx.hessian(f)(zeros, t).sum(0) * functx.grad(f)(zeros, t)

    t = numbers(3).requires_grad_(requires_grad)
    torch.testing.assert_close(jacobian(functx.remat(g))(t), jacobian(g)(t))


def written_at(y, index):
    y = y.clone()
    y[index,] = 0.0
    return y


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch 2.11, although it is told
@pytest.mark.parametrize(
    "use",
    [
        lambda y, i, j: y[(i, j),],
        lambda y, i, j: y[..., [i, j]],
        lambda y, i, j: written_at(y, (i, j)),
        lambda y, i, j: written_at(y, [i > 0, j > 5, i > 0, j > 9]),
        lambda y, i, j: y[:2] * y.new([i, j]),
        lambda y, i, j: (
            y * torch.sparse_coo_tensor([[i, j]], [i, j], (4,), check_invariants=False).to_dense()
        ),
    ],
)
def test_numbers_in_a_sequence_are_read_though_no_mode_sees_it(use):
    rows = torch.tensor([1, 3])
    region = lambda x: (use(x.sin(), *(rows * 1).unbind()),)
    for way in ("backward", "grad"):
        agrees(region, torch.arange(4.0, dtype=torch.float64), way)


def test_where_to_split_is_read_though_no_mode_sees_it():
    agrees(lambda x: x.sin().tensor_split(torch.tensor([1, 3]) * 1), numbers(4), "backward", 1)


def test_python_that_an_inner_replay_runs_reads_what_the_outer_one_computes():
    def f(wrap, x, v):
        def inner(v):
            scaled = (x[0] * v * 2).tolist()
            return v.sum() * len([t for t in scaled if t > 0])

        value, pull = functx.vjp(wrap(inner), v)
        return value * pull(torch.ones_like(value))[0] + pull(value)[0]

    x, v = numbers(3, 3), numbers(3).requires_grad_()
    policy = functx.checkpoint_policies.save_only_these_names("none")
    whole = functx.remat(lambda v: f(functx.remat, x, v), policy=policy)
    (expected,) = torch.autograd.grad(f(identity, x, v).sum(), v)
    for _ in range(2):  # the second time, by a plan
        (found,) = torch.autograd.grad(whole(v).sum(), v)
        assert_same(found, expected)


library = torch.library.Library("functx_left_out", "DEF")
library.define("doubled(Tensor x) -> Tensor")
runs = []
NUMBER = torch.ones((), dtype=torch.float64)


@torch.library.impl(library, "doubled", "CompositeImplicitAutograd")
def doubled(x):
    """In its first run it also doubles a number, whose kernel is that of the result."""
    runs.append("doubled")
    with torch._C.DisableTorchFunction():
        if len(runs) == 1:
            NUMBER.mul(2)
        return x.mul(2)


@pytest.mark.parametrize("way", WAYS)
def test_an_operation_may_be_taken_for_another_of_the_same_operator(way):
    """Memory of that one's shape stands in for its result then, and the replay begins again."""
    loss = lambda double: lambda x: double(x.sin()).sum()
    expected = WAYS[way](loss(lambda x: x * 2), numbers(3))
    runs.clear()
    region = functx.remat(lambda x: torch.ops.functx_left_out.doubled(x))
    assert_same(WAYS[way](loss(region), numbers(3)), expected)
    assert len(runs) > 2
