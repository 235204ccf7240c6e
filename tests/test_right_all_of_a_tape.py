"""``.backward()`` comes by all of a tape: by what leads to no input of a region, too."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.function import once_differentiable

import functx

X = torch.tensor([0.5, 1.0], dtype=torch.float64)
REGIONS = [
    pytest.param(functx.remat, id="a region"),
    pytest.param(lambda f: functx.remat(functx.remat(f)), id="a region in a region"),
    pytest.param(lambda f: functx.remat(lambda *a: f(*a) * 1.0), id="a part of a region"),
]


class OnceSin(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return ctx.saved_tensors[0].cos() * g


class OnceSinOfTheOldStyle(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return ctx.saved_tensors[0].cos() * g


def gradient(f, x, g):
    (found,) = torch.autograd.grad(f(x), x, g, create_graph=True)
    return found.sum()


BODIES = [
    pytest.param(lambda x: OnceSin.apply(x).sum(), id="alone"),
    pytest.param(lambda x: (OnceSin.apply(x) + x**3).sum(), id="beside others"),
    pytest.param(lambda x: OnceSinOfTheOldStyle.apply(x * x).sum(), id="old style"),
]


class TestOnceDifferentiable:
    @pytest.mark.parametrize("region", REGIONS)
    @pytest.mark.parametrize("body", BODIES)
    def test_a_second_backward_raises_as_without_remat(self, body, region):
        for _ in range(8):
            g = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
            for f in (body, region(body)):
                x = X.clone().requires_grad_()
                with pytest.raises(RuntimeError, match="marked with @once_differentiable"):
                    gradient(f, x, g).backward()

    @pytest.mark.parametrize("region", REGIONS)
    @pytest.mark.parametrize("body", BODIES)
    def test_where_gradients_are_asked_for_torch_does_not_come_by(self, body, region):
        found = []
        for f in (body, region(body)):
            x = X.clone().requires_grad_()
            g = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
            found.append(torch.autograd.grad(gradient(f, x, g), [x, g], allow_unused=True))
        for a, b in zip(*found, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)

    def test_a_gradient_penalty(self):
        w = torch.ones(2, dtype=torch.float64, requires_grad=True)

        @functx.remat
        def critic(x):
            return (OnceSin.apply(x * w).square() + x**2).sum()

        x = X.clone().requires_grad_()
        (g,) = torch.autograd.grad(critic(x), x, create_graph=True)
        with pytest.raises(RuntimeError, match="marked with @once_differentiable"):
            g.square().sum().backward()


class TestLeavesOfTheBody:
    @staticmethod
    def told(log, name):
        return lambda g: log.append((name, g.tolist()))

    def body(self, log):
        told = self.told

        class Doubled(torch.autograd.Function):
            @staticmethod
            def forward(a):
                return a * 2

            @staticmethod
            def setup_context(ctx, inputs, output):
                pass

            @staticmethod
            def backward(ctx, g):
                log.append(("Function", g.tolist()))
                return g * 2

        def f(x):
            tap = torch.full((2,), 3.0, dtype=torch.float64, requires_grad=True)
            tap.register_hook(told(log, "leaf"))
            h = Doubled.apply(tap)
            h.register_hook(told(log, "between"))
            return x.sin() * h

        return f

    def runs(self, region, requires_grad=True, **kwargs):
        log = []
        f = region(self.body(log))
        found = []
        for _ in range(8):
            x = X.clone().requires_grad_(requires_grad)
            y = f(x)
            found.append(y.detach())
            y.sum().backward(**kwargs)
            if requires_grad:
                found.append(x.grad)
        return log, found

    @pytest.mark.parametrize("requires_grad", [True, False])
    @pytest.mark.parametrize("region", REGIONS)
    def test_hooks_and_functions_are_called(self, region, requires_grad):
        expected = self.runs(lambda f: f, requires_grad)
        log, found = self.runs(region, requires_grad)
        assert len(log) == 24
        assert log == expected[0]
        assert all(map(torch.equal, found, expected[1]))

    def test_each_time_that_a_kept_graph_is_pulled_back(self):
        logs = []
        for region in (lambda f: f, functx.remat):
            logs.append(log := [])
            x = X.clone().requires_grad_()
            y = region(self.body(log))(x).sum()
            y.backward(retain_graph=True)
            y.backward()
            assert torch.equal(x.grad, 2 * X.cos() * 6)
        assert len(logs[0]) == 6
        assert logs[0] == logs[1]

    @pytest.mark.parametrize("way", ["grad", "backward(inputs=)", "functx.grad"])
    def test_not_where_gradients_are_asked_for(self, way):
        logs = []
        for region in (lambda f: f, functx.remat):
            logs.append(log := [])
            f = region(self.body(log))
            x = X.clone().requires_grad_()
            if way == "grad":
                torch.autograd.grad(f(x).sum(), x)
            elif way == "backward(inputs=)":
                f(x).sum().backward(inputs=[x])
            else:
                functx.grad(lambda x, f=f: f(x).sum())(X)
        assert logs == [[], []]

    def test_only_of_results_that_are_pulled_back(self):
        logs = []
        for region in (lambda f: f, functx.remat):
            logs.append(log := [])
            inner = self.body(log)
            x = X.clone().requires_grad_()
            a, b = region(lambda x, inner=inner: (inner(x), x.cos()))(x)
            b.sum().backward(retain_graph=True)
            assert not log
            a.sum().backward()
        assert len(logs[0]) == 3
        assert logs[0] == logs[1]

    def test_second_derivatives(self):
        logs, found = [], []
        for region in (lambda f: f, functx.remat):
            logs.append(log := [])
            x = X.clone().requires_grad_()
            (g,) = torch.autograd.grad(region(self.body(log))(x).sum(), x, create_graph=True)
            g.square().sum().backward()
            found.append(x.grad)
        assert len(logs[0]) == 3
        assert logs[0] == logs[1]
        assert torch.equal(*found)
