"""What a region reaches is what was there when it was called: nested, rebound, in threads."""

import threading

import pytest
import torch
from cases import DTYPE, numbers
from programs import check_program
from references import assert_same
from torch import nn

import functx

pytestmark = pytest.mark.usefixtures("hooks")

X, Y = numbers(3), numbers(3, start=1.0)


class TestNestedRegions:
    def test_captured_by_the_inner_region_only(self):
        def program(remat):
            w = Y.clone().requires_grad_()
            f = remat(lambda x: remat(lambda x: (x * w).sin())(x).exp())
            plain = torch.autograd.grad(f(X).sum(), w)
            second = functx.grad(lambda x: f(x).sum())(X)
            return plain, second, torch.autograd.grad(second.sum(), w)

        check_program(program, eps=8)

    def test_an_intermediate_of_the_outer_region(self):
        def program(remat):
            def outer(x):
                h = x.sin()
                return remat(lambda y: (y * h).exp())(x) * h

            gradient = functx.grad(lambda x: remat(outer)(x).sum())(X)
            x = X.clone().requires_grad_()
            return gradient, torch.autograd.grad(remat(outer)(x).sum(), x)

        check_program(program, eps=4)

    def test_at_every_depth(self):
        def program(remat):
            w = Y.clone().requires_grad_()

            def nest(depth):
                if depth == 0:
                    return lambda x: (x * w).sin()
                inner = nest(depth - 1)
                return remat(lambda x: inner(x * 0.5) * w)

            out = nest(3)(X)
            return out, torch.autograd.grad(out.sum(), w)

        check_program(program, eps=8)


class TestTime:
    """What a region sees is what was there when it was called."""

    def test_late_bound_closures(self):
        def program(remat):
            functions = []
            scales = [Y * (i + 1) for i in range(3)]
            for s in scales:
                functions.append(remat(lambda x: (x * s).sin()))  # noqa: B023 - the point
            x = X.clone().requires_grad_()
            return torch.autograd.grad(sum(f(x) for f in functions).sum(), x)

        check_program(program)

    def test_a_loop_variable_captured_in_the_loop(self):
        def program(remat):
            x = h = X.clone().requires_grad_()
            scales = [(Y * (i + 1)).requires_grad_() for i in range(3)]
            for s in scales:
                h = remat(lambda x: (x * s).sin())(h)  # noqa: B023 - s has moved on at the replay
            return torch.autograd.grad(h.sum(), [x, *scales])

        check_program(program)

    def test_a_number_that_moves_on(self):
        def program(remat):
            h = x = X.clone().requires_grad_()
            for i in range(3):
                h = remat(lambda x: (x * (i + 1)).sin())(h)  # noqa: B023
            return torch.autograd.grad(h.sum(), x)

        check_program(program)

    def test_a_cell_rebound_after_the_forward(self):
        def program(remat):
            w = Y.clone().requires_grad_()
            first = w
            out = remat(lambda x: (x * w).sin())(X)
            w = torch.zeros(3, dtype=DTYPE)
            return torch.autograd.grad(out.sum(), first)

        check_program(program)

    def test_a_second_call_sees_new_values(self):
        def program(remat):
            box = [Y.clone().requires_grad_()]
            region = remat(lambda x: (x * box[0]).sin())
            first, first_w = region(X), box[0]
            box[0] = (2 * Y).requires_grad_()
            second = region(X)
            return torch.autograd.grad((first * second).sum(), (first_w, box[0]))

        check_program(program)

    def test_the_region_is_called_again_inside_another_level(self):
        """A capture of one call does not leak into the next."""
        box = [None]
        region = functx.remat(lambda x: x * box[0])

        def inside(w):
            box[0] = w
            return region(X).sum()

        assert_same(functx.grad(inside)(Y), X)
        assert_same(functx.vmap(inside)(numbers(2, 3)), (numbers(2, 3) * X).sum(1), eps=4)
        box[0] = Y.clone().requires_grad_()
        assert_same(torch.autograd.grad(region(X).sum(), box[0]), (X,))


class TestThreads:
    def test_two_threads_share_a_module(self):
        """Each thread trains its own input through one region; none sees the other's tensors."""
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        region, barrier = functx.remat(net), threading.Barrier(2)
        results, errors = {}, []

        def work(name, start):
            try:
                with torch.autograd.graph.disable_saved_tensors_hooks("functx uses no hooks"):
                    barrier.wait()
                    for _ in range(20):
                        x = numbers(4, 3, start=start).requires_grad_()
                        plain = torch.autograd.grad(region(x).square().sum(), x)
                        per_example = functx.vmap(functx.grad(lambda x: region(x).square().sum()))(
                            x.detach()
                        )
                    results[name] = plain, per_example
            except BaseException as error:  # handed to the main thread
                errors.append(error)

        threads = [threading.Thread(target=work, args=(i, float(i))) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
        for name in range(2):
            x = numbers(4, 3, start=float(name)).requires_grad_()
            expected = torch.autograd.grad(net(x).square().sum(), x)
            assert_same(results[name], (expected, expected[0]), eps=16)

    def test_pulled_back_in_another_thread(self):
        w = Y.clone().requires_grad_()
        _, pullback = functx.vjp(functx.remat(lambda x: (x * w.detach()).sin()), X)
        value = functx.remat(lambda x: (x * w).sin())(X).sum()
        results = []

        def work():
            results.append((pullback(X), torch.autograd.grad(value, w)))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert_same(results[0][0], (X * Y * (X * Y).cos(),), eps=4)
        assert_same(results[0][1], (X * (X * Y).cos(),), eps=4)
