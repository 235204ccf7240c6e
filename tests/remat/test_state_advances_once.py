"""Rule 2: what a region writes in place holds what it holds without remat, bit by bit."""

import pytest
import torch
from torch import nn

import functx

from .programs import STACKS, X, Y, check, identity, numbers

with_state = pytest.mark.parametrize("stack", [s for s in STACKS if s not in ("vjp", "jvp(grad)")])


class Norm(nn.Sequential):
    def __init__(self, **options):
        torch.manual_seed(0)
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4, **options), nn.Tanh())


BATCH = numbers(6, 3).float()


def state_of(module):
    return {name: t.clone() for name, t in module.state_dict().items()}


class TestBatchNorm:
    @pytest.mark.parametrize("options", [{}, {"momentum": None}], ids=["momentum", "average"])
    @pytest.mark.parametrize("pullbacks", [0, 1, 2])
    def test_in_plain_autograd(self, pullbacks, options):
        def program(remat):
            net = Norm(**options)
            region, found = remat(net), []
            for step in range(3):
                x = (BATCH + step).requires_grad_()
                y = region(x)
                found.append(state_of(net))
                for i in range(pullbacks):
                    y.square().sum().backward(retain_graph=i + 1 < pullbacks)
                    found.append((x.grad, [p.grad.clone() for p in net.parameters()]))
            found.append(state_of(net))
            assert net[1].num_batches_tracked == 3
            return found

        check(program, nonzero=False, exact=True, replays=pullbacks > 0)

    def test_two_forwards_before_their_backward(self):
        """Two views of a batch, or gradients of two batches that are added up."""

        def program(remat):
            net = Norm()
            region = remat(net)
            value = region(BATCH).sum() + 2 * region(BATCH + 1).square().sum()
            value.backward()
            return state_of(net), [p.grad for p in net.parameters()]

        check(program, nonzero=False, exact=True)

    @pytest.mark.parametrize("stack", ["grad", "grad(grad)", "double backward"])
    def test_under_transforms(self, stack):
        """torch wants what is written there to be an argument."""

        def program(remat):
            net = Norm().double()

            def loss(x, state):
                f = remat(lambda x: functx.functional_call(net, state, (x,)))
                return f(x).square().sum()

            state = {name: t.clone() for name, t in net.named_buffers()}
            return STACKS[stack](loss, BATCH.double(), dict(state)), state

        check(program, nonzero=False)

    @pytest.mark.parametrize("stack", ["vmap", "vmap(grad)", "grad(vmap)"])
    def test_of_an_ensemble_under_vmap(self, stack):
        """The statistics are batched."""

        def program(remat):
            nets = [Norm().double() for _ in range(3)]
            for net, start in zip(nets, range(3)):
                net[1].running_mean += start
            parameters, buffers = functx.stack_module_state(nets)
            x = BATCH.double()

            def loss(p, b):
                region = remat(lambda x: functx.functional_call(nets[0], (p, b), (x,)))
                return region(x).square().sum()

            if stack == "grad(vmap)":
                found = functx.grad(lambda *args: functx.vmap(loss)(*args).sum())(
                    parameters, buffers
                )
            else:
                found = functx.vmap(functx.grad(loss) if "grad" in stack else loss)(
                    parameters, buffers
                )
            return found, {name: b.clone() for name, b in buffers.items()}

        check(program, nonzero=False, replays=stack != "vmap")


class Counter(nn.Module):
    """Reads its state before or after it advances, or both."""

    def __init__(self, reads):
        super().__init__()
        self.reads = reads
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.ones((), dtype=torch.float64))

    def forward(self, x):
        before = self.mean * (self.steps + 1)
        if "before" in self.reads:
            x = (x * before).sin()
        self.steps.add_(1)
        self.mean.mul_(0.9).add_(0.3)
        if "after" in self.reads:
            x = (x * (self.mean * self.steps)).sin()
        return x * x


READS = ["before", "after", "before and after"]


class TestCounters:
    @with_state
    @pytest.mark.parametrize("reads", READS)
    def test_of_regions_that_share_them(self, stack, reads):
        """Each replay finds the state that its forward found."""

        def program(remat):
            counter = Counter(reads)

            def loss(x, state):
                region = remat(lambda x: functx.functional_call(counter, state, (x,)))
                for _ in range(3):
                    x = region(x)
                return x.sum()

            state = state_of(counter)
            return STACKS[stack](loss, X, dict(state)), state

        check(program, nonzero=False)

    @pytest.mark.parametrize("reads", READS)
    def test_in_regions_in_regions(self, reads):
        def program(remat):
            counter, x = Counter(reads), X.clone().requires_grad_()
            inner = remat(counter)
            y = remat(lambda x: inner(inner(x).sin()))(x)
            between = state_of(counter)
            gradient = torch.autograd.grad(y.sum(), x)
            return gradient, between, state_of(counter)

        check(program, nonzero=False)

    @pytest.mark.parametrize("reads", READS)
    def test_that_the_user_sets_back_before_the_backward(self, reads):
        def program(remat):
            counter, x = Counter(reads), X.clone().requires_grad_()
            y = remat(counter)(x)
            counter.steps.zero_()
            gradient = torch.autograd.grad(y.sum(), x)
            return gradient, state_of(counter)

        check(program, nonzero=False)

    def test_where_nothing_is_differentiated(self):
        def program(remat):
            counter = Counter("after")
            return remat(counter)(X), functx.vmap(remat(counter))(numbers(2, 3)), state_of(counter)

        check(program, nonzero=False, replays=False)

    @with_state
    def test_a_tensor_that_a_closure_writes(self, stack):
        def program(remat):
            def loss(x, seen):
                def f(x):
                    y = (x * (1 + seen[0])).sin() * x
                    seen[0] += 1
                    seen[1:].copy_(seen[:1] * 2)
                    return y

                return remat(f)(remat(f)(x)).sum()

            seen = torch.zeros(2, dtype=torch.float64)
            return STACKS[stack](loss, X, seen), seen

        check(program, nonzero=False)

    def test_a_running_statistic_of_what_flows_through(self):
        """Of detached values, so nothing of a gradient is lost."""

        def program(remat):
            mean, x = torch.zeros(3, dtype=torch.float64), X.clone().requires_grad_()

            def f(x):
                with torch.no_grad():
                    mean.lerp_(x.sin(), 0.1)
                return (x - mean).sin() * x

            y = remat(f)(remat(f)(x))
            return torch.autograd.grad(y.sum(), x), mean

        check(program, nonzero=False, exact=True)

    def test_an_argument_without_history(self):
        def program(remat):
            state, x = Y.clone(), X.clone().requires_grad_()

            def f(x, state):
                y = (x * (state * 2)).sin()
                state += 1
                return y * (state * 2)

            region = remat(f)
            y = region(region(x, state), state)
            return torch.autograd.grad(y.sum(), x), state

        check(program, nonzero=False)


class TestPowerIterations:
    @pytest.mark.parametrize("pullbacks", [0, 1, 2])
    def test_spectral_norm(self, pullbacks):
        def program(remat):
            torch.manual_seed(0)
            net = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4))
            region, x = remat(lambda x: torch.tanh(net(x))), BATCH.clone().requires_grad_()
            y = region(x).sum() + 2 * region(x + 1).sum()
            found = [state_of(net)]
            for i in range(pullbacks):
                found.append(
                    torch.autograd.grad(y, [x, *net.parameters()], retain_graph=i + 1 < pullbacks)
                )
            return found, state_of(net)

        check(program, nonzero=False, exact=True, replays=pullbacks > 0)

    @with_state
    def test_by_hand_under_transforms(self, stack):
        def program(remat):
            def loss(x, u):
                def f(x):
                    w = numbers(3, 3)
                    with torch.no_grad():
                        u.copy_(torch.nn.functional.normalize(w.T @ (w @ u), dim=0))
                    return (x * (w @ u).norm()).sin() * x

                return remat(f)(remat(f)(x)).sum()

            u = Y.clone()
            return STACKS[stack](loss, X, u), u

        check(program, nonzero=False)


def test_the_comparison_can_fail():
    """torch's own checkpoint, which advances statistics in the backward again, is seen."""

    def checkpointed(f):
        return lambda *args: torch.utils.checkpoint.checkpoint(f, *args, use_reentrant=False)

    def state(remat):
        net = Norm()
        remat(net)(BATCH).sum().backward()
        return net[1].running_mean

    assert not torch.equal(state(checkpointed), state(identity))
    assert torch.equal(state(functx.remat), state(identity))
