"""What a replay leaves out is never missed: silently wrong gradients if it is."""

import pytest
import torch
from cases import identity, numbers
from references import assert_same

import functx

pytestmark = pytest.mark.usefixtures("no_hooks")


def eager(f, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(f(x), x)[0]


WAYS = {
    "eager": eager,
    "grad": lambda f, x: functx.grad(f)(x),
    "vmap(grad)": lambda f, x: functx.vmap(functx.grad(f))(torch.stack([x, x * 0.5])),
    "grad(grad)": lambda f, x: functx.grad(lambda x: functx.grad(f)(x).sin().sum())(x),
}


def agrees(region, x, way, pick=0):
    def loss(region):
        return lambda x: region(x)[pick].sin().sum()

    expected = WAYS[way](loss(region), x)
    nested = functx.remat(lambda x: functx.remat(region)(x))
    for ours in (functx.remat(region), nested):
        torch.testing.assert_close(WAYS[way](loss(ours), x), expected, rtol=1e-14, atol=1e-14)


def hook_reads_a_sibling_of_the_result(x):
    mask = (x * 3).sin()
    y = x.cos()
    if y.requires_grad:
        y.register_hook(lambda g: g * mask)
    return y, mask.sum()


def hook_reads_an_input(x):
    y = x * 2
    if y.requires_grad:
        y.register_hook(lambda g: g * x)
    return y, x.sum()


def hook_of_a_node(x):
    mask = (x * 3).sin()
    y = x * 2
    if y.grad_fn is not None:
        y.grad_fn.register_hook(lambda gi, go: tuple(g if g is None else g * mask for g in gi))
    return y, mask.sum()


class Keeps(torch.autograd.Function):
    """Saves what is no ancestor of its result."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, mask):
        return x * 2, mask.sum()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, first, second):
        return first * ctx.saved_tensors[0], None


class Hides(Keeps):
    """Holds a tensor where only Python sees it."""

    generate_vmap_rule = False

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mask = inputs[1]

    @staticmethod
    def backward(ctx, first, second):
        return first * ctx.mask, None


def function_saves_a_sibling(x):
    return Keeps.apply(x, (x * 3).sin().detach())


def function_hides_a_sibling(x):
    return Hides.apply(x, (x * 3).sin().detach())


def function_hides_a_result(x):
    mask = (x * 3).sin().detach()
    return Hides.apply(x, mask)[0], mask


REGIONS = [
    function_hides_a_result,
    hook_reads_a_sibling_of_the_result,
    hook_reads_an_input,
    hook_of_a_node,
    function_saves_a_sibling,
    function_hides_a_sibling,
]


@pytest.mark.parametrize(
    ("region", "way"),
    # Torch can't batch a Function without a rule for it.
    [
        (r, w)
        for i, r in enumerate(REGIONS)
        for j, w in enumerate(WAYS)
        if (i + j) % 2 and (w != "vmap(grad)" or "hides" not in r.__name__)
    ],
)
def test_python_on_the_tape_finds_what_it_reads(region, way):
    agrees(region, numbers(4), way)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(("way", "pick"), [("eager", 1), ("vmap(grad)", 2), ("grad(grad)", 1)])
def test_results_of_an_operator_read_each_other(way, pick):
    """Without a batching rule, each result of a factorization is stacked by itself."""
    agrees(lambda x: torch.linalg.lu(x @ x.mT + torch.eye(3)), numbers(3, 3), way, pick)


def draws_with_computed_probability(x):
    draw = torch.bernoulli(x.sigmoid().detach())
    return x.sin(), draw


def draws_with_computed_spread(x):
    return (x * torch.normal(x, x.exp()).detach()).sin(), torch.rand_like(x)


def pools_at_random(x):
    image = x.outer(x)[None, None].expand(1, 1, 4, 4)
    return torch.nn.functional.fractional_max_pool2d(image, 2, output_size=2, return_indices=True)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(
    ("region", "way", "pick"),
    [
        (f, way, (i + j) % 2)
        for i, f in enumerate(
            [draws_with_computed_probability, draws_with_computed_spread, pools_at_random]
        )
        for j, way in enumerate(WAYS)
        if (i + j) % 3
    ],
)
def test_what_draws_has_its_inputs(region, way, pick):
    """A replay must draw, to leave the generator where it was, and reads to do so."""

    def seeded(region):
        def loss(x):
            return region(x)[pick].double().sin().sum() + x.sum()

        torch.manual_seed(3)
        if way == "vmap(grad)":
            xs = torch.stack([numbers(4), numbers(4, start=2.0)])
            return functx.vmap(functx.grad(loss), randomness="different")(xs)
        return WAYS[way](loss, numbers(4))

    actual, expected = seeded(functx.remat(region)), seeded(region)
    torch.testing.assert_close(actual, expected, rtol=1e-14, atol=1e-14)


def test_running_statistics_are_read_though_the_normalized_are_not():
    """The kernel writes them without saying so in its schema."""

    def loss(wrap):
        norm = torch.nn.BatchNorm1d(3, dtype=torch.float64)

        def region(x):
            norm(x.sin())
            return x.cos() * norm.running_mean.clone()

        return lambda x: wrap(region)(x).sin().sum()

    x = numbers(4, 3)
    assert torch.equal(eager(loss(functx.remat), x), eager(loss(lambda f: f), x))


def test_forward_modes_zeros_stay_what_they_are():
    """In place of one, memory nobody wrote to has other operations run."""
    b = numbers(3).requires_grad_()

    def f(wrap):
        def g(x):
            v = x.sin()
            return wrap(lambda: v * b)().sigmoid()

        return lambda x: functx.grad(lambda x: functx.jacfwd(g)(x).sum())(x)

    x = numbers(3, start=1.0)
    assert torch.equal(f(functx.remat)(x), f(lambda f: f)(x))


def test_an_inner_replay_may_leave_out_other_things_than_before():
    """How much an inner region left out is not part of what the outer one does."""

    def f(wrap):
        def g(x):
            v3 = x.sin()

            @wrap
            def region2():
                v4 = wrap(lambda: (x * 0.7).mul_(x) + v3.sin().sin())
                v8 = functx.grad(wrap(lambda t: (v4() * t.sin()).sum()))(x)
                return v8.sigmoid()

            return region2()

        return functx.jacfwd(lambda x: functx.grad(lambda x: g(x).sum())(x))

    x = numbers(3)
    torch.testing.assert_close(f(functx.remat)(x), f(lambda f: f)(x), rtol=1e-14, atol=1e-14)


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
def test_what_an_inner_policy_may_keep_is_written_to(write, used):
    """Whether or not the inner region keeps it in the end, the outer replay goes the same way."""

    def inner(x):
        h = x @ numbers(4, 4)
        kept = h.exp() if used else x.sin()
        h.squeeze_(0) if write == "squeeze_" else h.mul_(2)
        return kept

    def program(remat):
        policy = {} if remat is identity else {"policy": functx.checkpoint_policies.dots_saveable}

        def outer(x):
            return remat(inner, **policy)(x.tanh()).exp() + unread

        x, unread = numbers(3, 4).requires_grad_(), numbers(4).requires_grad_()
        plain = torch.autograd.grad(remat(outer)(x).sum(), x)
        return plain, functx.jacrev(functx.grad(lambda x: remat(outer)(x).sum()))(x.detach())

    assert_same(program(functx.remat), program(identity), eps=8)


@pytest.mark.parametrize(
    ("reduce", "out"),
    [(torch.sum, "jacfwd"), (torch.mean, "vmap(jvp)"), (lambda t: t.sum(0).sum(0), "jvp")],
)
def test_copies_that_forward_mode_makes_are_read_from_what_they_copy(reduce, out):
    """A gradient that is expanded has no memory of its own; neither has its tangent."""

    def program(remat):
        def f(x):
            return remat(lambda p: reduce(remat(torch.square)(torch.outer(p, p))).sin())(x.cos())

        def pushed(x):
            if out == "vmap(jvp)":
                basis = torch.eye(3, dtype=x.dtype)
                return functx.vmap(lambda t: functx.jvp(gradient, (x,), (t,))[1])(basis)
            return (
                functx.jacfwd(gradient)(x)
                if out == "jacfwd"
                else functx.jvp(gradient, (x,), (x,))[1]
            )

        gradient = remat(functx.grad(f))
        x = numbers(3).requires_grad_()
        value = pushed(x)
        return value.detach(), torch.autograd.grad(value.sum(), x)

    assert_same(program(functx.remat), program(identity), eps=64)


def test_forward_modes_zeros_meet_an_operator_of_a_number():
    """Called from a dispatch mode, that ends the process."""

    def f(x, t):
        return (x - t).pow(2).sum()

    def g(t):
        zeros = torch.zeros_like(t)
        return functx.hessian(f)(zeros, t).sum(0) * functx.grad(f)(zeros, t)

    t = numbers(3)
    torch.testing.assert_close(functx.jacrev(functx.remat(g))(t), functx.jacrev(g)(t))
