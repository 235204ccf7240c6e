"""Rule 2: what a region writes in place holds what it holds without remat, bit by bit."""

import pytest
import torch
from cases import judged_by
from references import Operations
from torch import nn

import functx

from .programs import STACKS, X, Y, check, numbers

WITH_STATE = [s for s in STACKS if s not in ("vjp", "jvp(grad)")]


class Norm(nn.Sequential):
    def __init__(self, **options):
        torch.manual_seed(0)
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4, **options), nn.Tanh())


BATCH = numbers(6, 3).float()


def state_of(module):
    return {name: t.clone() for name, t in module.state_dict().items()}


class TestBatchNorm:
    @pytest.mark.parametrize(("pullbacks", "options"), [(0, {}), (1, {"momentum": None}), (2, {})])
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

    @pytest.mark.parametrize("stack", ["grad(grad)", "double backward"])
    @judged_by(check, nonzero=False)
    def test_under_transforms(self, remat, stack):
        """torch wants what is written there to be an argument."""

        net = Norm().double()

        def loss(x, state):
            f = remat(lambda x: functx.functional_call(net, state, (x,)))
            return f(x).square().sum()

        state = {name: t.clone() for name, t in net.named_buffers()}
        return STACKS[stack](loss, BATCH.double(), dict(state)), state

    @pytest.mark.parametrize("stack", ["vmap", "vmap(grad)", "grad(vmap)"])
    def test_of_an_ensemble_under_vmap(self, stack):
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
                f = functx.grad(lambda *args: functx.vmap(loss)(*args).sum())
            else:
                f = functx.vmap(functx.grad(loss) if "grad" in stack else loss)
            found = f(parameters, buffers)
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
    @pytest.mark.parametrize(
        ("stack", "reads"), [(stack, READS[i % 3]) for i, stack in enumerate(WITH_STATE)]
    )
    @judged_by(check, nonzero=False)
    def test_of_regions_that_share_them(self, remat, stack, reads):
        counter = Counter(reads)

        def loss(x, state):
            region = remat(lambda x: functx.functional_call(counter, state, (x,)))
            for _ in range(3):
                x = region(x)
            return x.sum()

        state = state_of(counter)
        return STACKS[stack](loss, X, dict(state)), state

    @pytest.mark.parametrize("reads", READS)
    @judged_by(check, nonzero=False)
    def test_in_regions_in_regions_and_set_back_before_the_backward(self, remat, reads):
        counter, x = Counter(reads), X.clone().requires_grad_()
        inner = remat(counter)
        y = remat(lambda x: inner(inner(x).sin()))(x)
        between = state_of(counter)
        counter.steps.zero_()
        gradient = torch.autograd.grad(y.sum(), x)
        return gradient, between, state_of(counter)


BUFFER_WRITES = {
    "add_": lambda t, x: t.add_(x),
    "a method that copies": lambda t, x: t.lerp_(x.sin(), 0.1),
    "an index": lambda t, x: t.__setitem__(slice(1, 3), x[:2]),
    "a view": lambda t, x: t.view(1, 3).t()[1].mul_(x[:1]),
    "augmented": lambda t, x: t.__iadd__(x),
    "zero_": lambda t, x: t[:2].zero_(),
    "masked_fill_": lambda t, x: t.masked_fill_(t > 0, 2.0),
    "out=": lambda t, x: torch.exp(x, out=t),
}


class TestBuffers:
    @pytest.mark.parametrize(
        ("write", "held"),
        [
            (w, h)
            for i, w in enumerate(BUFFER_WRITES)
            for j, h in enumerate(["argument", "captured", "by a view made before"])
            if (i + j) % 3
        ],
    )
    @judged_by(check, nonzero=False, exact=True)
    def test_any_write_of_detached_values(self, remat, write, held):
        buffer, x = Y.clone(), X.clone().requires_grad_()
        view = buffer[:]

        def body(x, t):
            t = {"captured": buffer, "by a view made before": view}.get(held, t)
            y = (x * t.clone()).sin()
            BUFFER_WRITES[write](t, x.detach())
            return y + x.sin() * t.clone()

        region = remat(body)
        argument = buffer if held == "argument" else 0
        out = region(region(x, argument), argument)
        kept = buffer.clone()
        return out, kept, torch.autograd.grad(out.sum(), x), buffer

    def test_readers_and_the_writer_share_a_copy(self):
        """One more region that reads costs no bytes when the next one writes."""

        def gained(readers):
            buffer = torch.zeros(1000, dtype=X.dtype)
            y = numbers(1000).requires_grad_()
            read = functx.remat(lambda y: y * buffer.sum())
            for _ in range(readers):
                y = read(y)
            with Operations() as operations:
                out = functx.remat(lambda y: (buffer.add_(1), y * buffer.sum())[1])(y)
                return operations.live - out.nbytes

        assert gained(3) == gained(1) == gained(0)
