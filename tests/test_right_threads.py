"""Threads and tasks: a pullback anywhere, several regions at once."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import DTYPE, numbers
from nets import seeded
from programs import identity
from references import assert_same
from right import X, settings
from torch import nn
from torch.nn.functional import dropout

import functx

pytestmark = pytest.mark.usefixtures("no_hooks")


def elsewhere(f):
    """``f()`` in a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(f).result()


def noisy(x):
    return dropout(x.sin(), 0.5).exp()


class TestPulledBackElsewhere:
    @pytest.mark.parametrize("f", [noisy, lambda x: x.sin().exp()])
    def test_backward(self, f):
        def program(remat):
            torch.manual_seed(4)
            w, x = numbers(4, start=1.0).requires_grad_(), X.clone().requires_grad_()
            value = remat(lambda x: f(x) * w)(x).sum()
            state = torch.get_rng_state()
            gradients = elsewhere(lambda: torch.autograd.grad(value, (w, x)))
            return gradients, state, torch.get_rng_state()

        assert_same(program(functx.remat), program(identity))

    def test_vjp(self):
        def program(remat):
            torch.manual_seed(4)
            w = numbers(4, start=1.0).requires_grad_()
            _out, pullback = functx.vjp(remat(lambda x: noisy(x) * w), X)
            gradients = [pullback(X), elsewhere(lambda: pullback(X)), pullback(X)]
            return gradients, elsewhere(lambda: torch.autograd.grad(gradients[1][0].sum(), w))

        assert_same(program(functx.remat), program(identity))

    def test_in_another_grad_mode_and_autocast(self):
        """Grad mode and autocast belong to a thread: a new one has none of the forward's."""

        def program(remat):
            x = numbers(4, 4).float().requires_grad_()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                value = remat(lambda x: torch.tanh(x @ x) @ x)(x).float().sum()
            return elsewhere(lambda: torch.autograd.grad(value, x))

        assert_same(program(functx.remat), program(identity))

    def test_the_thread_is_left_as_it_was(self):
        x = X.clone().requires_grad_()
        value = functx.remat(noisy)(x).sum()

        def pull():
            before = settings()
            value.backward()
            return before, settings()

        before, after = elsewhere(pull)
        assert before == after


class TestAtOnce:
    THREADS, STEPS = 4, 15

    def together(self, work):
        """``work(i)`` in several threads that start each step together."""
        barrier = threading.Barrier(self.THREADS)
        with ThreadPoolExecutor(self.THREADS) as pool:
            return list(pool.map(lambda i: work(i, barrier.wait), range(self.THREADS)))

    def test_one_module_given_different_parameters(self):
        """Swapped attributes of a shared module would be wrong here."""
        net = functx.remat(
            seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))).double()
        )

        def work(i, wait):
            x, found = numbers(3, 4, start=float(i)).requires_grad_(), []
            for _ in range(self.STEPS):
                wait()
                found.append(torch.autograd.grad(net(x).square().sum(), x))
            return found

        for i, found in enumerate(self.together(work)):
            x = numbers(3, 4, start=float(i)).requires_grad_()
            expected = torch.autograd.grad(net(x).square().sum(), x)
            for gradient in found:
                assert_same(gradient, expected)

    @pytest.mark.parametrize("transform", ["grad", "vmap(grad)", "nested"])
    def test_transforms(self, transform):
        w = numbers(4, start=1.0)

        def once(i, remat):
            f = remat(lambda x: (x * w).sin().exp())
            x = numbers(4, start=float(i))
            if transform == "nested":
                f = remat(lambda x, f=f: f(f(x)))
            gradient = functx.grad(lambda x: f(x).sum())
            if transform == "vmap(grad)":
                return functx.vmap(gradient)(torch.stack([x, -x]))
            return gradient(x)

        def work(i, wait):
            wait()
            return [once(i, functx.remat) for _ in range(self.STEPS)]

        for i, found in enumerate(self.together(work)):
            for result in found:
                assert_same(result, once(i, identity))

    def test_a_generator_for_each(self):
        def once(i, remat):
            generator = torch.Generator().manual_seed(i)

            def f(x):
                return x.sin() * torch.randn(4, generator=generator, dtype=DTYPE)

            x = X.clone().requires_grad_()
            return torch.autograd.grad((remat(f)(x) * remat(f)(x)).sum(), x)

        def work(i, wait):
            wait()
            return [once(i, functx.remat) for _ in range(self.STEPS)]

        for i, found in enumerate(self.together(work)):
            for result in found:
                assert_same(result, once(i, identity), eps=8)

    def test_replays_with_dropout_do_not_mix(self):
        """Forwards one after another, then all pullbacks at once, from the default generator."""
        regions, expected = [], []
        for remat, made in ((functx.remat, regions), (identity, expected)):
            torch.manual_seed(4)
            for i in range(self.THREADS):
                x = numbers(64, start=float(i)).requires_grad_()
                made.append((x, remat(noisy)(x).sum()))
        before = torch.get_rng_state()

        def work(i, wait):
            x, value = regions[i]
            found = []
            for _ in range(self.STEPS):
                wait()
                found.append(torch.autograd.grad(value, x, retain_graph=True))
            return found

        for (x, value), found in zip(expected, self.together(work)):
            plain = torch.autograd.grad(value, x)
            for gradient in found:
                assert_same(gradient, plain)
        assert_same(torch.get_rng_state(), before)


class TestTasks:
    def test_tasks_that_take_turns(self):
        async def once(i, remat):
            x = numbers(4, start=float(i)).requires_grad_()
            scale = numbers(4, start=1.0 + i).requires_grad_()
            y = remat(lambda x: (x * scale).sin().exp())(x)
            await asyncio.sleep(0)
            y = remat(lambda y: (y * scale).cos())(y)
            await asyncio.sleep(0)
            gradients = torch.autograd.grad(y.sum(), (x, scale), create_graph=True)
            await asyncio.sleep(0)
            return gradients, torch.autograd.grad(gradients[0].sum(), x)

        async def all_of(remat):
            return await asyncio.gather(*(once(i, remat) for i in range(4)))

        assert_same(asyncio.run(all_of(functx.remat)), asyncio.run(all_of(identity)), eps=16)

    def test_a_region_that_starts_a_loop(self):
        async def double(x):
            await asyncio.sleep(0)
            return x.sin() * 2

        def program(remat):
            x = X.clone().requires_grad_()
            out = remat(lambda x: asyncio.run(double(x)).exp())(x)
            return out, torch.autograd.grad(out.sum(), x)

        assert_same(program(functx.remat), program(identity))

    def test_a_region_that_starts_a_thread(self):
        """Torch operations of another thread are not shown to the region: right, or raises."""

        def program(remat):
            w = numbers(4, start=1.0).requires_grad_()
            out = remat(lambda x: elsewhere(lambda: (x * w).sin()).exp())(X)
            return out, torch.autograd.grad(out.sum(), w)

        try:
            ours = program(functx.remat)
        except functx.RematError:
            return
        assert_same(ours, program(identity))


# What a thread computes, of what another one computes.
OF_A_THREAD = {
    "all": lambda run, x, w: run(lambda: (x * w).tanh().sin()) * 2,
    "the result": lambda run, x, w: run(lambda: (x * w).tanh().sin()),
    "of an intermediate": lambda run, x, w: (lambda h: run(h.sin) * 2)((x * w).tanh()),
    "with an intermediate": lambda run, x, w: (lambda h: run(h.sin) * h)((x * w).tanh()),
    "detached": lambda run, x, w: (lambda h: run(lambda: h.detach().sin()) * h)((x * w).tanh()),
    "twice": lambda run, x, w: (lambda h: run((run(h.sin) * h).exp))((x * w).tanh()),
}


class TestAThreadInside:
    """Torch operations of another thread are not shown to a region, and nodes have its numbers."""

    @pytest.mark.parametrize("nodes", [0, 2000])
    @pytest.mark.parametrize("closure", [False, True])
    @pytest.mark.parametrize("body", OF_A_THREAD)
    def test_gradients(self, body, closure, nodes):
        with ThreadPoolExecutor(1) as pool:

            def run(f):
                return pool.submit(f).result()

            def count():
                t = numbers(1).requires_grad_()
                for _ in range(nodes):
                    t * 2

            run(count)
            f = OF_A_THREAD[body]

            def program(remat):
                w, x = numbers(4, start=1.0).requires_grad_(), numbers(4).requires_grad_()
                g = (lambda x: f(run, x, w)) if closure else (lambda x, w: f(run, x, w))
                out = remat(g)(x, *(() if closure else (w,)))
                return out.detach(), torch.autograd.grad(out.sum(), (x, w))

            expected = program(identity)
            if closure and body in ("all", "the result"):  # which reads `w` nowhere else
                with pytest.raises(functx.RematError, match=r"in another thread.* as an argument"):
                    program(functx.remat)
                return
            for _ in range(8):
                assert_same(program(functx.remat), expected)

    def test_what_was_there_before_is_no_result_of_the_body(self):
        """Whichever thread made it: the tape of a capture does not end in what stands for it."""
        x = numbers(4).requires_grad_()
        h = elsewhere(lambda: x.sin().exp())
        for _ in range(8):
            y = functx.remat(lambda x: x.cos() * h)(x)
            (found,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
            assert_same(found, torch.autograd.grad((x.cos() * h).sum(), x, retain_graph=True)[0])
