"""What C++ hands over where no mode sees it: known for what the region computed, by any way."""

import pytest
import torch
from cases import numbers
from programs import identity
from references import assert_same

import functx
from functx import checkpoint_policies

pytestmark = pytest.mark.usefixtures("no_hooks")


def unseen(f):
    """``f`` where no function mode sees it, as in an extension."""

    def g(*args):
        with torch._C.DisableTorchFunction():
            return f(*args)

    return g


def insides(vmap):
    """By name, what a region may compute of ``x``, of shape (3, 4), and of nothing else."""
    return {
        "mapped": lambda x: vmap(torch.tanh)(x),
        "mapped, a batch of one": lambda x: vmap(torch.tanh)(x[None])[0],
        "written in place": lambda x: vmap(lambda v: torch.tanh(v).clone().mul_(2))(x),
        "handed back": lambda x: vmap(lambda v: v)(torch.tanh(x)),
        "handed back, turned": lambda x: vmap(lambda v: v, 0, 1)(torch.tanh(x)).mT,
        "nested": lambda x: vmap(lambda row: vmap(torch.tanh)(row) * 2)(x),
        "nested, handed back": lambda x: vmap(vmap(lambda v: v))(torch.tanh(x)),
        "not mapped": lambda x: vmap(lambda v: (v, X.tanh()), 0, (0, None))(x)[1] * x,
        "expanded": lambda x: vmap(lambda v: x.tanh()[0])(x),
        "in chunks": lambda x: vmap(torch.tanh, chunk_size=2)(x),
        "along columns": lambda x: vmap(torch.tanh, 1, 1)(x),
        "of a dict": lambda x: vmap(lambda d: {"a": d["b"].tanh()})({"b": x})["a"],
        "of grad": lambda x: vmap(functx.grad(lambda v: v.tanh().sum()))(x),
        "of torch's grad": lambda x: vmap(torch.func.grad(lambda v: v.tanh().sum()))(x),
        "older": lambda x: torch.autograd.functional.jacobian(torch.tanh, x[0], vectorize=True)[:3],
        "jvp": lambda x: torch.func.jvp(torch.tanh, (x,), (x,))[1],
        "jacrev": lambda x: functx.jacrev(torch.tanh)(x[0])[:3],
        "jacfwd": lambda x: torch.func.jacfwd(torch.tanh)(x[0])[:3],
        "in an extension": unseen(torch.tanh),
    }


def loss(inside, x, w):
    """It depends on what is computed inside, and on ``w``."""
    return (inside(x).cos() * w).sin().sum()


def ways(x, w):
    """Derivatives of ``f(x, w)``, by name."""
    xs, ws = torch.stack([x, x * 2]), torch.stack([w, w * 2])

    def plain(f):
        leaf = w.clone().requires_grad_()
        return torch.autograd.grad(f(x, leaf), leaf)[0]

    def of_vmap(f):
        return functx.grad(lambda w: functx.vmap(f, (0, None))(xs, w).sum())(w)

    return {
        "plain": plain,
        "grad by w": lambda f: functx.grad(f, 1)(x, w),
        "grad by x": lambda f: functx.grad(f, 0)(x, w),
        "hessian": lambda f: functx.hessian(f, 1)(x, w),
        "jvp of grad": lambda f: functx.jvp(functx.grad(f, 1), (x, w), (w, x)),
        "vmap of grad": lambda f: functx.vmap(functx.grad(f, 1), (None, 0))(x, ws),
        "grad of vmap": of_vmap,
        "jacrev": lambda f: functx.jacrev(f, 1)(x, w),
        "jacfwd": lambda f: functx.jacfwd(f, 1)(x, w),
    }


REGIONS = {
    "remat": functx.remat,
    "nested": lambda f: functx.remat(functx.remat(f)),
    "kept": lambda f: functx.remat(f, policy=checkpoint_policies.everything_saveable),
    "closed over": lambda f: lambda x, w: functx.remat(lambda w: f(x, w))(w),
    "compared": lambda f: functx.remat(f, determinism_check="values"),
}
X, W = numbers(3, 4), numbers(3, 4, start=1.0)


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("way", ways(X, W))
def test_it_is_computed_again(way, region):
    derivative = ways(X, W)[way]
    for vmap in (functx.vmap, torch.func.vmap):
        for name, inside in insides(vmap).items():
            if name == "in an extension" and region == "closed over" and way == "grad by x":
                continue  # refused, below

            def f(x, w, inside=inside):
                return loss(inside, x, w)

            if name == "older" and way != "plain":
                continue  # torch's older vmap knows few of the transforms
            expected = derivative(f)
            assert_same(derivative(REGIONS[region](f)), expected)


@pytest.mark.parametrize("vmap", [functx.vmap, torch.func.vmap], ids=["functx", "torch"])
@pytest.mark.parametrize("out_dim", [0, 1])
@pytest.mark.parametrize("way", ["plain", "grad by w", "hessian", "grad of vmap"])
def test_what_vmap_hands_back_as_it_is_has_its_gradient(vmap, out_dim, way):
    def loss(remat):
        return lambda x, w: remat(lambda: vmap(lambda v: v, 0, out_dim)(w).sin())().mul(2).sum()

    derivative = ways(X, W)[way]
    assert_same(derivative(loss(functx.remat)), derivative(loss(identity)))


@pytest.mark.parametrize("way", ["grad by x", "hessian", "vmap of grad", "grad of vmap", "jacrev"])
@pytest.mark.parametrize("region", ["remat", "nested", "compared"])
def test_what_an_extension_reads_of_an_outer_level_is_refused(way, region):
    # By what it computes: the tape that this is on is that of the outer level itself.
    x, w = X, W
    ways_by_x = {
        "grad by x": lambda f: functx.grad(f)(x),
        "hessian": lambda f: functx.hessian(f)(x),
        "vmap of grad": lambda f: functx.vmap(functx.grad(f))(torch.stack([x, x])),
        "grad of vmap": lambda f: functx.grad(lambda x: functx.vmap(f)(x).sum())(
            torch.stack([x, x])
        ),
        "jacrev": lambda f: functx.jacrev(f)(x),
    }
    f = REGIONS[region]

    def of(x):
        return f(lambda _, w: loss(unseen(torch.tanh), x, w))(w, w)

    with pytest.raises(functx.RematError, match="where functx can't see it"):
        ways_by_x[way](of)


@pytest.mark.parametrize("make", ["unseen", "parameter"])
@pytest.mark.parametrize("reads", ["on the tape", "before the tape", "off the tape"])
def test_a_leaf_that_the_region_computed_is_kept(make, reads):
    def f(x, w):
        if make == "parameter":
            leaf = torch.nn.Parameter(x.tanh())
        else:
            leaf = unseen(lambda x: x.tanh().requires_grad_())(x)
        if reads == "on the tape":
            return (leaf.cos() * w).sum()
        with torch.set_grad_enabled(reads == "before the tape"):
            read = leaf.exp().sin()
        return (read * w).sum()

    w = W.clone().requires_grad_()
    expected = torch.autograd.grad(f(X, w), w)
    assert_same(torch.autograd.grad(functx.remat(f)(X, w), w), expected)


@pytest.mark.parametrize("gone", ["freed", "collected"])
@pytest.mark.parametrize("way", ["plain", "grad by w", "vmap of grad"])
def test_another_tensor_over_the_memory_of_an_input_goes_meanwhile(gone, way):
    # How many hold the memory is then as before, though the tape has come to hold a view.
    def program():
        held = [X[0]]
        if gone == "collected":
            held[0] = held  # a cycle
            held.append(X[0])

        def f(x, w):
            held.clear()
            return (x.mT @ w).sum()

        return f

    derivative = ways(X, W)[way]
    assert_same(derivative(functx.remat(program())), derivative(program()))


def test_another_tensor_is_given_the_memory_of_an_input_unseen():
    def program(remat):
        held = [X.detach()]

        def f(x, w):
            other = torch.empty_like(x)
            other.data = x
            out = other * w
            held.clear()
            return out

        w = X.cos().requires_grad_()
        return torch.autograd.grad(remat(f)(X, w).sum(), w)

    assert_same(program(functx.remat), program(identity))
