"""What a backward pass comes by where only some of a region's results are pulled back."""

from typing import ClassVar

import pytest
import torch
from cases import numbers
from programs import identity
from references import assert_same
from torch import nn
from torch.utils.checkpoint import checkpoint

import functx
from functx._remat import _come_by

pytestmark = pytest.mark.usefixtures("no_hooks")

EVERYTHING = functx.checkpoint_policies.everything_saveable


def nested(body):
    return functx.remat(lambda *args: functx.remat(body)(*args))


REGIONS = {
    "region": functx.remat,
    "nested": nested,
    "policy": functx.remat(policy=EVERYTHING),
}


class Noted(torch.autograd.Function):
    """The identity, which notes what its backward is given."""

    given: ClassVar[list[torch.Tensor]] = []

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        Noted.given.append(g.clone())
        return g


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.a, self.b = (nn.Linear(3, 3).double() for _ in range(3))
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(numbers(*p.shape, start=0.1 * i))

    def forward(self, x):
        h = self.trunk(x).tanh()
        return self.a(h), self.b(h)


@pytest.mark.parametrize("region", REGIONS)
def test_an_optimizer_in_the_backward_steps_what_has_a_gradient(region):
    """Torch's engine calls the hook of a leaf that it comes by with nothing, too."""

    def run(remat):
        model, steps = TwoHeads(), []
        optimizers = {p: torch.optim.AdamW([p], lr=0.1) for p in model.parameters()}
        names = {p: name for name, p in model.named_parameters()}

        def step(p):
            steps.append(names[p])
            optimizers[p].step()
            optimizers[p].zero_grad(set_to_none=False)

        for p in optimizers:
            p.register_post_accumulate_grad_hook(step)
        body = remat(model)
        for i in range(8):  # which makes its runs known
            body(numbers(2, 3))[i % 2].square().sum().backward()
        return [p.detach() for p in optimizers], sorted(steps)

    (want, steps), (got, stepped) = run(identity), run(REGIONS[region])
    assert len(steps) == 32
    assert stepped == steps
    assert_same(got, want)


def through_a_function(x):
    return Noted.apply(x)


def through_a_module_with_hooks(x):
    module = nn.Identity()
    module.register_full_backward_hook(lambda module, given, of: Noted.given.append(of[0]))
    return module(x)


def through_a_region(x):
    return functx.remat(lambda x: x.sin())(Noted.apply(x))


def through_a_checkpoint(x):
    return checkpoint(torch.sin, x, use_reentrant=True)


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize(
    "before",
    [through_a_function, through_a_module_with_hooks, through_a_region, through_a_checkpoint],
)
def test_what_no_gradient_comes_to_is_not_given_zeros(before, region):
    def run(remat):
        x, v = numbers(3).requires_grad_(), numbers(3, start=1.0).requires_grad_()
        Noted.given.clear()
        body = remat(lambda x, u: (x.exp() * x, u * 2))
        for _ in range(6):
            body(x, before(v))[0].sum().backward()
        return x.grad, v.grad, len(Noted.given)

    want, none, calls = run(identity)
    got, also_none, called = run(REGIONS[region])
    assert none is None
    assert also_none is None
    assert called == calls == 0
    assert_same(got, want)


@pytest.mark.parametrize("region", REGIONS)
def test_what_is_not_used_is_told(region):
    x, v = numbers(3).requires_grad_(), numbers(3, start=1.0).requires_grad_()
    y, z = REGIONS[region](lambda x, u: (x.exp(), u * 2))(x, Noted.apply(v))
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(y.sum(), [x, v], retain_graph=True)
    assert_same(torch.autograd.grad(z.sum(), [v])[0], torch.full_like(v, 2))


def test_an_optimizer_in_the_backward_of_two_results():
    """Of which one depends on some weights only, as the loss of a router does: one replay."""

    def run(remat):
        model, runs = TwoHeads(), []
        optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

        def step(p):
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in optimizers:
            p.register_post_accumulate_grad_hook(step)

        def body(x, u):
            runs.append(1)
            h = model.trunk(x).tanh()
            return model.a(h) + u, h.square().mean()

        region = remat(body)
        for _ in range(4):
            a, b = region(numbers(2, 3), Noted.apply(numbers(2, 3, start=1.0).requires_grad_()))
            (a.sin().sum() + b).backward()
        return [p.detach() for p in optimizers], len(runs)

    (want, once), (got, runs) = run(identity), run(functx.remat)
    assert_same(got, want, eps=64)
    assert (once, runs) == (4, 8)


def test_many_results_share_a_node_where_custom_functions_made_the_inputs():
    runs = []

    def body(*inputs):
        runs.append(1)
        h, states = torch.zeros(3, dtype=torch.float64), []
        for x in inputs:
            h = torch.tanh(h + x)
            states.append(h)
        return states

    inputs = [Noted.apply(numbers(3, start=float(i)).requires_grad_()) for i in range(6)]
    sum(h.sum() for h in functx.remat(body)(*inputs)).backward()
    assert len(runs) == 2


def test_both_results_pulled_back_give_what_one_node_gives():
    def run(remat):
        model = TwoHeads()
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: None)
        a, b = remat(model)(numbers(2, 3))
        (a.sin().sum() + b.square().sum()).backward()
        return [p.grad for p in model.parameters()]

    assert_same(run(functx.remat), run(identity), eps=8)


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("order", [2, 3])
def test_derivatives_of_gradients_do_not_come_by_what_these_do_not_depend_on(region, order):
    """Also where values are kept, of which a replay knows no history."""

    def run(remat):
        calls, x = [], numbers(3).requires_grad_()
        leaf, v = (numbers(3, start=n).requires_grad_() for n in (1.0, 2.0))
        leaf.register_hook(lambda g: calls.append(("leaf", g * 1)))
        leaf.register_post_accumulate_grad_hook(lambda p: calls.append(("after", p.grad * 1)))
        u = v * 2
        u.register_hook(lambda g: calls.append(("computed", g * 1)))
        _, _, y = remat(lambda u, w: (u * x, w * x, (x + x).sin()))(u, leaf)
        loss = y.square().sum()
        for _ in range(order - 1):
            (g,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = g.square().sum()
        loss.backward()
        return x.grad, calls, [leaf.grad, v.grad]

    (want, none, nothing), (got, calls, also) = run(identity), run(REGIONS[region])
    assert calls == none == []
    assert also == nothing == [None, None]
    assert_same(got, want, eps=64)


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("captured", [False, True])
def test_a_result_with_a_node_of_its_own_is_come_by_where_something_below_is_asked_for(
    region, captured
):
    def run(remat):
        calls = []
        a, b = numbers(3).requires_grad_(), numbers(3, start=1.0).requires_grad_()
        a.register_hook(lambda g: g * 2)  # which tells the results apart
        body = remat(lambda b, c: (b * 1.5, a * 1.5) if captured else (b * 1.5, c * 1.5))
        y, z = body(b, b.detach() if captured else a)
        y.register_hook(lambda g: calls.append("y"))
        z.register_hook(lambda g: calls.append("z"))
        loss = (y * y).sum() + (z * z).sum()
        each = [torch.autograd.grad(loss, t, retain_graph=True)[0] for t in (b, a)]
        return each, calls

    (want, calls), (got, called) = run(identity), run(REGIONS[region])
    assert called == calls == ["y", "z"]
    assert_same(got, want)


class GivesNothing(torch.autograd.Function):
    """The first of two tensors, with nothing for the second in the backward."""

    @staticmethod
    def forward(ctx, x, other):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2, None


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("results", ["one", "two", "two in turn"])
@pytest.mark.parametrize("inputs", [False, True])
def test_a_custom_function_that_gives_nothing_for_a_result(region, results, inputs):
    """The engine comes by: a weight that has a gradient from before is stepped."""

    def run(remat):
        steps = []
        x, v, w, unused = (numbers(3, start=float(n)).requires_grad_() for n in range(4))
        for name, p in {"x": x, "v": v, "w": w, "unused": unused}.items():
            p.grad = numbers(3)
            p.register_post_accumulate_grad_hook(lambda p, n=name: steps.append((n, p.grad * 1)))
        if results == "one":
            y, z = v * 1, remat(lambda x: x * w)(x)
        elif results == "two":
            y, z, _ = remat(lambda x: (x * v, x * w, x * unused))(x)
        else:
            a, b, c = remat(lambda x: (x * v, x * w, x * unused))(x)
            y, z, _ = remat(lambda a, b, c: (a * 2, b.sin(), c.exp()))(a, b, c)
        loss = GivesNothing.apply(y, z.sin()).sum()
        loss.backward(inputs=[x, v, w, unused] if inputs else None)
        return sorted(name for name, _ in steps), [p.grad for p in (x, v, w, unused)], steps

    want, got = run(identity), run(REGIONS[region])
    assert "w" in want[0]
    assert "unused" not in want[0]
    assert got[0] == want[0]
    assert_same(got[1], want[1])
    assert_same([g for _, g in sorted(got[2], key=str)], [g for _, g in sorted(want[2], key=str)])


@pytest.mark.parametrize("results", [1, 2])
def test_what_a_region_that_writes_hands_nothing_to_is_not_come_by(results):
    def body(a, b, state):
        y = a * 2 + state.mul_(2)
        return (y, b.cos()) if results == 2 else (y + b.detach(),)

    def run(remat):
        calls, state = [], torch.ones(3, dtype=torch.float64)
        x, w = (numbers(3, start=float(n)).requires_grad_() for n in range(2))
        w.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad))
        a, b = remat(lambda x: (x.sin(), w.exp()))(x)
        remat(body)(a, b, state)[0].sum().backward()
        return calls, x.grad

    (calls, want), (called, got) = run(identity), run(functx.remat)
    assert called == calls == []
    assert_same(got, want)


def test_of_few_passes_it_is_known_what_they_come_by():
    for _ in range(20):
        x, w = (numbers(3, start=float(n)).requires_grad_() for n in range(2))
        w.register_post_accumulate_grad_hook(lambda p: None)
        a, _ = functx.remat(lambda x, w=w: (x.sin(), w.exp()))(x)
        a.sum().backward()
    assert 0 < len(_come_by._passes.latest) <= 8
