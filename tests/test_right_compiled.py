"""Compiled functions, and operators that run functions, inside of a region."""

import pytest
import torch
from nets import seeded
from references import assert_same
from right import X, check
from torch import nn

import functx


class TestCompiled:
    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_a_region_of_a_compiled_block(self, backend):
        torch._dynamo.reset()

        def build(remat):
            net = seeded(
                lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
            ).double()
            compiled = torch.compile(net, backend=backend)
            region = remat(compiled)
            return (lambda x: region(region(x[None]))), list(net.parameters())

        check(build, ways=["backward"], eps=32)

    def test_the_engine_is_not_compiled(self):
        graphs = []

        def backend(graph, inputs):
            graphs.append(graph.code)
            return graph.forward

        torch._dynamo.reset()
        block = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double(), backend=backend)
        functx.remat(block)(X[None]).sum().backward()
        assert not [code for code in graphs if "linear" not in code]

    @pytest.mark.parametrize("fullgraph", [False, True])
    def test_what_a_region_runs_in_eager_is_compiled_elsewhere(self, fullgraph):
        graphs = []

        def backend(graph, inputs):
            graphs.append(graph.code)
            return graph.forward

        torch._dynamo.reset()
        block = torch.compile(torch.sin, backend=backend, fullgraph=fullgraph)
        x = X.clone().requires_grad_()
        functx.remat(lambda x: block(x).exp())(x).sum().backward()
        assert_same(x.grad, X.sin().exp() * X.cos())
        functx.grad(lambda x: functx.remat(lambda x: block(x).exp())(x).sum())(X)
        with pytest.raises(ZeroDivisionError):
            functx.remat(lambda x: block(x) / (1 // 0))(x)
        assert not graphs
        block(X)
        assert len(graphs) == 1


class TestOperatorsThatRunFunctions:
    @pytest.mark.filterwarnings("ignore")
    def test_scan(self):
        """Nothing is known of what it reads, so nothing is left out of its replay."""
        from torch._higher_order_ops.scan import scan

        k = X.clone().requires_grad_()

        def body(x):
            carry, states = scan(lambda c, x: ((c * x).sin(), c + x), k.sum(), (x * k).sin())
            return (carry * nn.functional.dropout(states, 0.5)).exp() * k

        def build(remat):
            region = remat(body)
            return (lambda x: region(region(x * 1))), [k]

        check(build, ways=["backward"], eps=32)

    @pytest.mark.filterwarnings("ignore")
    def test_cond_says_what_to_do_instead(self):
        def body(x):
            return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

        with pytest.raises(functx.RematError, match="an if of Python"):
            functx.remat(body)(X.clone().requires_grad_())
