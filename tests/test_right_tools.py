"""Gradient tools on top of regions, and programs whose backward changes from step to step."""

import warnings

import pytest
import torch
from cases import DTYPE, numbers
from nets import seeded
from programs import identity
from references import Operations, assert_same, no_garbage_collection
from right import X
from torch import nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import functx

W = numbers(4, 4, start=1.0)


def body(x):
    return torch.tanh(x.unsqueeze(-1) * W).sum(0).exp() * x


def chained(remat):
    f = remat(body)
    return lambda x: remat(lambda x: f(f(x)) * W[0])(x)


def both(program, eps=8.0):
    assert_same(program(functx.remat), program(identity), eps)


class TestChecks:
    def test_gradcheck(self):
        x = X.clone().requires_grad_()
        f = functx.remat(lambda x: torch.tanh(x @ W).exp() * x)
        assert gradcheck(f, x, check_forward_ad=True, check_batched_grad=True)
        assert gradcheck(f, x, fast_mode=True)

    def test_gradgradcheck(self):
        x = X.clone().requires_grad_()
        f = functx.remat(lambda x: torch.tanh(x @ W).exp() * x)
        assert gradgradcheck(f, x)
        assert gradgradcheck(f, x, check_fwd_over_rev=True, check_rev_over_rev=True)

    def test_complex(self):
        x = torch.complex(X, X.cos()).requires_grad_()
        assert gradcheck(functx.remat(lambda x: (x * x.exp()).abs()), x)

    def test_gradcheck_of_captures(self):
        w = W.clone().requires_grad_()

        def f(x, w):
            return functx.remat(lambda x: torch.tanh(x @ w))(x)

        assert gradcheck(f, (X.clone().requires_grad_(), w))


class TestAutogradFunctional:
    @pytest.mark.parametrize("vectorize", [True, False])
    @pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
    def test_jacobian(self, vectorize, strategy):
        if strategy == "forward-mode" and not vectorize:
            return

        def program(remat):
            return torch.autograd.functional.jacobian(
                chained(remat), X, vectorize=vectorize, strategy=strategy
            )

        both(program, eps=32)

    @pytest.mark.parametrize("outer", ["reverse-mode", "forward-mode"])
    def test_hessian(self, outer):
        def program(remat):
            f = chained(remat)
            return torch.autograd.functional.hessian(
                lambda x: f(x).sum(),
                X,
                vectorize=outer == "forward-mode",
                outer_jacobian_strategy=outer,
            )

        both(program, eps=64)

    @pytest.mark.parametrize("name", ["vjp", "jvp", "hvp", "vhp"])
    @pytest.mark.parametrize("create_graph", [True, False])
    def test_products(self, name, create_graph):
        def program(remat):
            f = chained(remat)
            x = X.clone().requires_grad_()
            g = (lambda x: f(x).sum()) if name in ("hvp", "vhp") else f
            out = getattr(torch.autograd.functional, name)(g, x, X.cos(), create_graph=create_graph)
            if create_graph:
                return out, torch.autograd.grad(out[1].sum(), x)
            return out

        both(program, eps=128)


class TestOtherWays:
    def test_is_grads_batched(self):
        def program(remat):
            x = X.clone().requires_grad_()
            out = chained(remat)(x)
            rows = torch.autograd.grad(
                out, x, torch.eye(4, dtype=DTYPE), is_grads_batched=True, create_graph=True
            )[0]
            return rows, torch.autograd.grad(rows.square().sum(), x)

        both(program, eps=64)

    def test_dual_level(self):
        def program(remat):
            w = W[0].clone().requires_grad_()
            f = remat(lambda x: (body(x) * w).sin())
            with forward_ad.dual_level():
                out = forward_ad.unpack_dual(f(forward_ad.make_dual(X, X.cos())))
                return out.primal, out.tangent, torch.autograd.grad(out.tangent.sum(), w)

        both(program, eps=32)

    def test_dual_level_over_a_backward(self):
        def program(remat):
            f = chained(remat)
            with forward_ad.dual_level():
                x = forward_ad.make_dual(X.clone().requires_grad_(), X.cos())
                (gradient,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
                return forward_ad.unpack_dual(gradient)

        both(lambda remat: tuple(program(remat)), eps=64)

    def test_a_captured_dual(self):
        def program(remat):
            with forward_ad.dual_level():
                w = forward_ad.make_dual(W[0], W[1])
                out = remat(lambda x: (x * w).sin())(X)
                return tuple(forward_ad.unpack_dual(out))

        both(program)

    def test_anomaly_mode(self):
        def program(remat):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with torch.autograd.detect_anomaly():
                    x = X.clone().requires_grad_()
                    return torch.autograd.grad(chained(remat)(x).sum(), x)

        both(program)

    @pytest.mark.parametrize("remat", [functx.remat, identity])
    def test_anomaly_mode_finds_what_it_finds_without_remat(self, remat):
        x = torch.zeros(2, dtype=DTYPE, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="nan"):
                remat(lambda x: (x * 0).sqrt() * 0)(x).sum().backward()

    @pytest.mark.parametrize("kind", ["own", "on cpu"])
    @pytest.mark.parametrize("create_graph", [True, False])
    def test_outer_saved_tensors_hooks(self, kind, create_graph):
        def program(remat):
            x = X.clone().requires_grad_()
            w = W.clone().requires_grad_()
            if kind == "own":
                hooks = torch.autograd.graph.saved_tensors_hooks(
                    lambda t: t.numpy(force=True).copy(), torch.from_numpy
                )
                if create_graph:
                    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: [t], lambda p: p[0])
            else:
                hooks = torch.autograd.graph.save_on_cpu()
            with hooks:
                out = remat(lambda x: torch.tanh(x @ w).exp() * x)(x)
            (first,) = torch.autograd.grad(out.sum(), x, create_graph=create_graph)
            if create_graph:
                return out, first, torch.autograd.grad(first.sum(), (x, w))
            return out, first

        both(program, eps=64)

    @pytest.mark.parametrize("kind", ["own", "on cpu", "checkpoint"])
    def test_saved_tensors_hooks_inside(self, kind):
        """Hooks in the body: of the user's own, what the tape holds can't be told."""

        def program(remat):
            x = X.clone().requires_grad_()
            w = W.clone().requires_grad_()

            def f(x):
                if kind == "checkpoint":
                    return checkpoint(lambda x: torch.tanh(x @ w), x.sin(), use_reentrant=False) * 2
                hooks = torch.autograd.graph.save_on_cpu()
                if kind == "own":
                    hooks = torch.autograd.graph.saved_tensors_hooks(
                        lambda t: t.numpy(force=True).copy(), torch.from_numpy
                    )
                with hooks:
                    h = torch.tanh(x.sin() @ w)
                return h * 2

            out = remat(f)(x)
            return out, torch.autograd.grad(out.sum(), (x, w))

        both(program)

    @pytest.mark.parametrize("body", [torch.sin, torch.exp, lambda x: x.sin().exp()])
    @pytest.mark.parametrize("known", [False, True])
    def test_hooks_inside_that_keep_inputs_and_results(self, body, known):
        """``save_on_cpu`` keeps the very objects that are on the CPU: none is counted as held."""

        def program(remat):
            def f(x):
                with torch.autograd.graph.save_on_cpu():
                    return body(x)

            region = remat(f)
            for _ in range(6 if known else 1):
                x = X.clone().requires_grad_()
                out = region(x)
                (gradient,) = torch.autograd.grad(out.sum(), x)
            return out, gradient

        both(program)

    @pytest.mark.parametrize("nested", [True, False])
    def test_floating_point_operations_are_counted(self, nested):
        """Its hooks on what modules are given are those of a replay, too."""
        block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(X)

        def program(remat):
            f = remat(block)
            f = remat(lambda x, inner=f: inner(x).sin()) if nested else f
            for _ in range(6):
                x = X.clone().requires_grad_()
                block.zero_grad()
                with FlopCounterMode(display=False) as counter:
                    f(x).sum().backward()
            assert counter.get_total_flops() > 0
            return x.grad, [p.grad for p in block.parameters()]

        both(program, eps=8)

    def test_graph_surgery(self):
        """``multi_grad_hook``, ``prehook`` of the node, and gradients of an edge."""

        def program(remat):
            seen = []
            x = X.clone().requires_grad_()
            out = remat(body)(x)
            out.register_hook(lambda g: seen.append(g.clone()))
            x.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
            edge = torch.autograd.graph.get_gradient_edge(out)
            torch.autograd.backward(edge, X)
            return x.grad, seen

        both(program)


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
class TestLinearize:
    def test_value(self):
        def program(remat):
            out, linear = functx.linearize(chained(remat), X)
            return out, linear(X.cos()), linear(X.exp())

        both(program, eps=64)

    def test_keeps_boundaries_only(self):
        """A linear function kept for later holds the inputs of regions, not what is inside."""
        layers, x = 8, numbers(64, 64)
        w = numbers(64, 64, start=1.0) / 8

        def kept(remat):
            def region(x):
                for _ in range(layers):
                    x = torch.tanh(x @ w)
                return x

            f = remat(region)
            with no_garbage_collection(), Operations() as operations:
                linear = functx.linearize(lambda x: f(f(x)), x)[1]
                linear(x)  # torch computes what a linear function keeps when it is called first
                return operations.live / (x.numel() * 8), linear

        plain, _ = kept(identity)
        ours, linear = kept(functx.remat)
        assert plain > layers
        assert ours <= 5
        assert linear(x).shape == x.shape


class Reversal(torch.autograd.Function):
    """Gradient reversal with a factor that is read in the backward."""

    factor = 1.0

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, cotangent):
        return -Reversal.factor * cotangent


class ReversalOfArgument(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, cotangent):
        return -ctx.factor * cotangent, None


class TestChangingBackward:
    @pytest.mark.parametrize("way", ["backward", "grad", "vmap"])
    def test_gradient_reversal_read_in_the_backward(self, way):
        def program(remat):
            f = remat(lambda x: Reversal.apply(x.sin()).exp().sum())
            results = []
            for step in range(3):
                Reversal.factor = 1.0 + step
                if way == "backward":
                    x = X.clone().requires_grad_()
                    value = f(x)
                    Reversal.factor += 0.5
                    results.append(torch.autograd.grad(value, x))
                elif way == "grad":
                    results.append(functx.grad(f)(X))
                else:
                    results.append(functx.vmap(functx.grad(f))(X[:, None]) if step else X)
            return results

        class Vmappable(Reversal):
            generate_vmap_rule = True

        if way == "vmap":
            original, globals()["Reversal"] = Reversal, Vmappable
            try:
                both(program)
            finally:
                globals()["Reversal"] = original
        else:
            both(program)

    def test_gradient_reversal_with_a_factor_from_a_schedule(self):
        def program(remat):
            schedule = {"factor": 1.0}
            f = remat(lambda x: ReversalOfArgument.apply(x.sin(), schedule["factor"]).exp())
            results = []
            for _ in range(3):
                x = X.clone().requires_grad_()
                results.append(torch.autograd.grad(f(x).sum(), x))
                schedule["factor"] *= 2
            return results

        both(program)

    def test_the_factor_changes_between_forward_and_backward(self):
        def program(remat):
            schedule = {"factor": 1.0}
            x = X.clone().requires_grad_()
            f = remat(lambda x: ReversalOfArgument.apply(x.sin(), schedule["factor"]).exp())
            out = f(x)
            schedule["factor"] = 5.0
            return torch.autograd.grad(out.sum(), x)

        try:
            ours = program(functx.remat)
        except functx.ReplayError:
            return
        assert_same(ours, program(identity))

    def test_training_with_it(self):
        def program(remat):
            net = seeded(
                lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()
            )
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            region = remat(lambda x: net[2](Reversal.apply(net[1](net[0](x)))))
            for step in range(4):
                Reversal.factor = step / 2
                optimizer.zero_grad()
                region(X[None]).sum().backward()
                optimizer.step()
            return list(net.parameters())

        both(program)
