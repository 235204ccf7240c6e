"""A tensor that leaves a region otherwise than by return: with its gradient, or an error."""

import re

import pytest
import torch
from cases import DTYPE, numbers
from nets import seeded
from programs import identity
from references import assert_same
from right import X, right_or_raises
from torch import nn
from torch.autograd import forward_ad

import functx

pytestmark = pytest.mark.usefixtures("no_hooks")

HERE = re.compile(r"test_right_escapes\.py\D{1,12}\d+")


def program_of(way, build):
    """A program from ``build(remat) -> (f, leaves)``, in one way to differentiate."""

    def program(remat):
        f, leaves = build(remat)
        x = X.clone()
        if way == "backward":
            x.requires_grad_()
            gradients = torch.autograd.grad(f(x), [x, *leaves], allow_unused=True)
        elif way == "grad":
            gradients = [functx.grad(f)(x)]
        elif way == "hessian":
            gradients = [functx.jacrev(functx.grad(f))(x)]
        elif way == "jvp":
            gradients = list(functx.jvp(f, (x,), (x.cos(),)))
        elif way == "jacfwd":
            gradients = [functx.jacfwd(functx.vmap(f))(numbers(3, 4))]
        elif way == "dual level":
            with forward_ad.dual_level():
                gradients = list(forward_ad.unpack_dual(f(forward_ad.make_dual(x, x.cos()))))
        else:
            gradients = [functx.vmap(functx.grad(f))(numbers(3, 4))]
        return [g for g in gradients if g is not None]

    return program


def check(way, build):
    error = right_or_raises(program_of(way, build), eps=16)
    if error is not None:
        assert HERE.search(str(error)), f"no file and line: {error}"


def appended(remat):
    """``aux.append(h)``."""
    w = numbers(4, start=1.0).requires_grad_()
    region_w = w

    def f(x):
        aux = []

        def block(x):
            h = (x * region_w).sin()
            aux.append(h)
            return h.exp()

        out = remat(block)(x)
        return out.sum() + (aux[0] * X).sum()

    return f, [w]


def appended_detached(remat):
    """Off all tapes; its tangent stays."""

    def f(x):
        aux = []

        def block(x):
            h = x.sin()
            aux.append(h.detach())
            return h.exp()

        return remat(block)(x).sum() + (aux[0] * X).sum()

    return f, []


def appended_twice(remat):
    """Two regions append, and a third reads."""

    def f(x):
        aux = []

        def block(x):
            aux.append(x.sin())
            return x.exp()

        x = remat(block)(remat(block)(x))
        return x.sum() + remat(lambda x: (aux[0] * aux[1] * x).sum())(x)

    return f, []


def stored_in_a_dict(remat):
    def f(x):
        state = {}

        def block(x):
            state["h"] = {"deep": [x.sin()]}
            return state["h"]["deep"][0].exp()

        out = remat(block)(x)
        return out.sum() * state["h"]["deep"][0].sum()

    return f, []


def by_nonlocal(remat):
    def f(x):
        kept = None

        def block(x):
            nonlocal kept
            kept = x.sin()
            return kept.exp()

        out = remat(block)(x)
        return out.sum() * kept.sum()

    return f, []


class WithLoss(nn.Module):
    """``self.aux_loss = ...``."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=DTYPE)
        self.aux_loss = 0.0

    def forward(self, x):
        h = torch.tanh(self.linear(x))
        self.aux_loss = h.square().sum()
        return h.exp()


def by_attribute(remat):
    module = remat(seeded(WithLoss))
    return lambda x: module(x).sum() + 3 * module.aux_loss, list(module.parameters())


def by_attribute_of_a_submodule(remat):
    net = seeded(lambda: nn.Sequential(WithLoss(), nn.Tanh(), WithLoss()))
    region = remat(net)

    def f(x):
        return region(x).sum() + net[0].aux_loss * net[2].aux_loss

    return f, list(net.parameters())


def by_forward_hook(remat):
    net = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double())
    kept = []
    net[0].register_forward_hook(lambda module, args, out: kept.append(out))
    region = remat(net)

    def f(x):
        kept.clear()
        return region(x).sum() + kept[0].square().sum()

    return f, list(net.parameters())


class Mixture(nn.Module):
    """A mixture of experts that hands its router logits on by a list."""

    def __init__(self, logits):
        super().__init__()
        self.router = nn.Linear(4, 2, dtype=DTYPE)
        self.experts = nn.ModuleList(nn.Linear(4, 4, dtype=DTYPE) for _ in range(2))
        self.logits = logits

    def forward(self, x):
        logits = self.router(x)
        self.logits.append(logits)
        weights = logits.softmax(-1)
        return sum(weights[..., i, None] * e(x) for i, e in enumerate(self.experts)).tanh()


def router_logits(remat):
    logits = []
    blocks = nn.ModuleList(remat(m) for m in seeded(lambda: [Mixture(logits) for _ in range(2)]))

    def f(x):
        logits.clear()
        x = x[None]
        for block in blocks:
            x = block(x)
        balance = sum(m.softmax(-1).mean(0).square().sum() for m in logits)
        return x.sum() + balance

    return f, list(blocks.parameters())


def from_an_inner_region(remat):
    def f(x):
        aux = []

        def inner(x):
            aux.append(x.sin())
            return x.exp()

        def outer(x):
            y = remat(inner)(x * 2)
            return y * aux[0]

        return remat(outer)(x).sum() + aux[0].sum()

    return f, []


def through_two_regions(remat):
    """Left behind by an inner region, read in the outer one only."""

    def f(x):
        def outer(x):
            aux = []

            def inner(x):
                aux.append(x.sin())
                return x.exp()

            return remat(inner)(x) * aux[0]

        return remat(outer)(x).sum()

    return f, []


ESCAPES = [
    appended,
    appended_twice,
    stored_in_a_dict,
    by_nonlocal,
    by_attribute,
    by_attribute_of_a_submodule,
    by_forward_hook,
    router_logits,
    from_an_inner_region,
    through_two_regions,
]


@pytest.mark.parametrize(
    "way", ["backward", "grad", "vmap", "hessian", "jvp", "jacfwd", "dual level"]
)
@pytest.mark.parametrize("build", ESCAPES, ids=lambda f: f.__name__)
def test_never_a_constant(build, way):
    check(way, build)


@pytest.mark.parametrize("way", ["backward", "grad", "vmap", "jvp", "jacfwd", "dual level"])
def test_what_is_off_all_tapes_has_its_tangent(way):
    check(way, appended_detached)


class TestHarmless:
    """What nobody differentiates may leave: it is right, and no error."""

    def test_detached(self):
        def program(remat):
            log = []

            def block(x):
                h = x.sin()
                log.append(h.detach())
                log.append(h.detach().sum().item())
                return h.exp()

            x = X.clone().requires_grad_()
            out = remat(block)(x)
            assert not log[0].requires_grad
            return torch.autograd.grad(out.sum() * log[0].sum() * log[1], x), log[:2]

        assert_same(program(functx.remat), program(identity), eps=8)

    def test_what_is_gone_when_the_region_ends(self):
        def program(remat):
            scratch = []

            def block(x):
                scratch.append(x.sin())
                return scratch.pop().exp()

            x = X.clone().requires_grad_()
            return torch.autograd.grad(remat(block)(x).sum(), x)

        assert_same(program(functx.remat), program(identity))

    def test_also_returned(self):
        """Two ways out of one tensor: what was left behind is what was returned, or an error."""

        def build(remat):
            def f(x):
                aux = []

                def block(x):
                    h = x.sin()
                    aux.append(h)
                    return h

                return remat(block)(x).sum() + (aux[0] * X).sum()

            return f, []

        for way in ("backward", "grad", "vmap"):
            check(way, build)

    def test_an_argument(self):
        def program(remat):
            aux = []

            def block(x):
                aux.append(x)
                return x.sin()

            x = X.clone().requires_grad_()
            out = remat(block)(x)
            return torch.autograd.grad((out * aux[0]).sum(), x)

        error = right_or_raises(program)
        assert error is None or HERE.search(str(error))

    def test_a_metric_is_logged_once(self):
        log = []

        def block(x):
            h = x.sin()
            log.append(h.detach().sum().item())
            return h.exp()

        x = X.clone().requires_grad_()
        functx.remat(block)(x).sum().backward()
        assert log[0] == X.sin().sum().item()


@pytest.mark.parametrize("make", [lambda x: x.detach().requires_grad_(), lambda x: x * 0 + 1])
def test_a_leaf_of_its_own_is_refused_where_it_is_held(make):
    # Without remat it would get a gradient, on a tape that a region throws away.
    held = []

    def f(x):
        y = make(x.detach()).requires_grad_()
        held.append(y)
        return (y * x).sum()

    with pytest.raises(functx.RematError, match="otherwise than by return"):
        functx.remat(f)(numbers(3).requires_grad_())
    held.clear()


def test_a_parameter_made_inside_gets_its_gradient():
    held = []

    def f(x):
        held.append(torch.nn.Parameter(x.detach().sin()))
        return (held[-1] * x).sum()

    x = numbers(3)
    functx.remat(f)(x.clone().requires_grad_()).backward()
    assert_same(held[0].grad, x)
