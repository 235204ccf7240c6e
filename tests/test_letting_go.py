"""Memory that goes while a region is pulled back: cotangents, whoever else holds a tensor over it.

Peaks are those of torch's checkpoint, where no cotangent outlives the operation that it is for; and
what hooks are shown of cotangents is what they are shown without remat.
"""

import pytest
import torch
from cases import deep_mlp, numbers
from references import assert_same, peak
from torch.utils.checkpoint import checkpoint

import functx
from functx._remat import _letting_go


def identity(f):
    return f


def checkpointed(f):
    return lambda *args: checkpoint(f, *args, use_reentrant=False)


def block(x, weights):
    for w in weights:
        x = torch.tanh(x @ w)
    return x


def chained(weights, x, region, segment=4):
    for start in range(0, len(weights), segment):
        x = region(block)(x, weights[start : start + segment])
    return x.square().sum()


def autograd(weights, x, region):
    leaves = [w.detach().requires_grad_() for w in weights]
    return torch.autograd.grad(chained(leaves, x, region), leaves)


def transformed(weights, x, region):
    return functx.grad(lambda w: chained(w, x, region))(weights)


# A gradient of a weight weighs a quarter of an activation, one, or four.
@pytest.mark.parametrize("batch", [64, 16, 4])
def test_no_more_than_torchs_checkpoint(batch):
    weights, x, _ = deep_mlp(batch=batch)
    theirs = peak(autograd, weights, x, checkpointed)
    assert peak(autograd, weights, x, functx.remat) <= theirs
    assert peak(transformed, weights, x, functx.remat) <= theirs


def test_small_tensors_are_not_worth_it(monkeypatch):
    """The comparison above can fail: this is the peak where nothing is let go."""
    weights, x, _ = deep_mlp()
    theirs = peak(autograd, weights, x, checkpointed)
    monkeypatch.setattr(_letting_go, "_WORTH", 1 << 20)
    for f in (autograd, transformed):
        assert peak(f, weights, x, functx.remat) == theirs + weights[0].nbytes


def test_per_example_gradients():
    """The last pullback has the gradients of all weights, an operand and a cotangent."""
    weights, x, _ = deep_mlp()
    one = functx.grad(lambda w, x: chained(w, x, functx.remat))
    total = peak(functx.vmap(one, (None, 0)), weights, x[:, None])
    assert total <= 64 * sum(w.nbytes for w in weights) + 1.2 * x.nbytes


W = [numbers(16, 16, start=float(i)) / 2 for i in range(4)]


def hooked(register):
    """The gradient of two regions, with a hook on the first; and what the hook was shown."""

    def run(x, region):
        seen = []
        x = x.detach().requires_grad_()
        hidden = region(block)(x, W[:2])
        register(hidden, seen)
        out = region(block)(hidden, W[2:])
        gradients = torch.autograd.grad((out * hidden).square().sum(), x)
        return gradients, seen

    return run


@pytest.mark.usefixtures("hooks")
class TestWhatHooksSee:
    """All that they are given, and what they keep of it."""

    X = numbers(8, 16)

    @pytest.mark.parametrize(
        "register",
        [
            lambda t, seen: t.register_hook(seen.append),
            lambda t, seen: t.grad_fn.register_prehook(lambda g: seen.append(g[0])),
            lambda t, seen: t.grad_fn.register_hook(lambda _, g: seen.append(g[0])),
        ],
        ids=["tensor", "before", "after"],
    )
    def test_of_a_result(self, register):
        run = hooked(register)
        assert_same(run(self.X, functx.remat), run(self.X, identity))

    def test_a_hook_before_a_node_may_change_its_cotangent(self):
        run = hooked(lambda t, seen: t.grad_fn.register_prehook(lambda g: (2 * g[0],)))
        assert_same(run(self.X, functx.remat), run(self.X, identity))

    def test_inside_a_region(self):
        """The innermost cotangent is the engine's own, and here a hook keeps it."""
        seen = []

        def body(x):
            out = torch.tanh(x @ W[0])
            out.register_hook(seen.append)
            return out

        def run(region):
            seen.clear()
            x = self.X.detach().requires_grad_()
            gradient = torch.autograd.grad(region(body)(x).square().sum(), x)
            return gradient, [*seen]

        assert_same(run(functx.remat), run(identity))

    def test_retained_gradients(self):
        def run(region):
            x = self.X.detach().requires_grad_()
            hidden = region(block)(x, W[:2])
            hidden.retain_grad()
            region(block)(hidden, W[2:]).square().sum().backward()
            return hidden.grad, x.grad

        assert_same(run(functx.remat), run(identity))

    def test_a_cotangent_of_the_callers_stays(self):
        cotangent = numbers(8, 16, start=2.0)
        before = cotangent.clone()
        for _ in range(2):
            x = self.X.detach().requires_grad_()
            torch.autograd.grad(functx.remat(block)(x, W), x, cotangent)
            functx.vjp(lambda x: functx.remat(block)(x, W), self.X)[1](cotangent)
            assert torch.equal(cotangent, before)


def _two(x):
    hidden = torch.sin(x @ W[0])
    return hidden, torch.tanh(hidden @ W[1])


def _nested(x):
    return functx.remat(lambda x: functx.remat(block)(x, W[:2]))(x).sin() + x


def _ending_in_a_region(x):
    return functx.remat(block)(torch.sin(x), W[:2])


PROGRAMS = {
    "one result from another": lambda region, x: sum(t.square().sum() for t in region(_two)(x)),
    "one cotangent for two results": lambda region, x: sum(region(_two)(x)).sum(),
    "results used twice": lambda region, x: (lambda a, b: a * b + b)(*region(_two)(x)).sum(),
    "nested": lambda region, x: region(_nested)(x).square().sum(),
    "ending in a region": lambda region, x: region(_ending_in_a_region)(x).square().sum(),
    "an input handed back": lambda region, x: sum(
        t.square().sum() for t in region(lambda x: (x, x.sin(), x.T))(x)
    ),
    "complex": lambda region, x: (
        torch.view_as_real(region(lambda x: torch.complex(x.sin(), x.cos()))(x)).square().sum()
    ),
}
STACKS = {
    "grad": functx.grad,
    "grad of torch.func": torch.func.grad,
    "autograd": lambda f: lambda x: _autograd(f, x),
    "vmap(grad)": lambda f: lambda x: functx.vmap(functx.grad(f))(torch.stack([x, 2 * x])),
    "grad(vmap)": lambda f: (
        lambda x: functx.grad(lambda x: functx.vmap(f)(torch.stack([x, 2 * x])).sum())(x)
    ),
    "grad(grad)": lambda f: functx.grad(lambda x: functx.grad(f)(x).square().sum()),
    "jacrev": lambda f: functx.jacrev(lambda x: torch.stack([f(x), 2 * f(3 * x)])),
    "jvp(grad)": lambda f: lambda x: functx.jvp(functx.grad(f), (x,), (x.cos(),)),
    "with a base tape": lambda f: (
        lambda x: _autograd(lambda x: functx.grad(lambda y: f(y * x.cos()))(x).square().sum(), x)
    ),
}


def _autograd(f, x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(f(x), x)


@pytest.mark.usefixtures("hooks")
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("stack", STACKS)
def test_values_are_as_they_are(program, stack):
    f, transform = PROGRAMS[program], STACKS[stack]
    ours, plain = (
        transform(lambda x, region=region: f(region, x))(numbers(8, 16))
        for region in (functx.remat, identity)
    )
    assert_same(ours, plain, eps=8)
