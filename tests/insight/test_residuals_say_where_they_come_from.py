"""What `saved_residuals` says of each value: its name, line, module and cost; and its tables."""

import pytest
import torch
from layered import WEIGHTS, X
from torch import nn

import functx
from functx import checkpoint_policies as cp

pytestmark = pytest.mark.usefixtures("no_hooks")


def sources(residuals):
    return [r.source for r in residuals]


HERE = __file__.rpartition("/")[2]
NAMED_A = cp.save_only_these_names("a")


# As in `layered`, but with lines of this file.
def layers(weights, x):
    for w in weights:
        x = torch.sin(x @ w)
    return x


def named(x):
    inner = functx.checkpoint_name(torch.sin(x), "a")
    return functx.checkpoint_name(torch.sin(inner), "b")


class TestSources:
    def test_arguments_by_their_names(self):
        def f(params, *rest, scale, **more):
            return params["w"] * rest[1][0] * scale * more["more"]

        x = [torch.ones(2) * i for i in range(1, 5)]
        residuals = functx.saved_residuals(f, {"w": x[0]}, 3, (x[1],), scale=x[2], more=x[3])
        assert sources(r for r in residuals if not r.made) == [
            "argument params['w']",
            "argument rest[1][0]",
            "argument scale",
            "argument more",
        ]
        assert all(r.kind == "argument" for r in residuals if not r.made)

    def test_operations_by_their_lines(self):
        line = layers.__code__.co_firstlineno + 2
        made = [r for r in functx.saved_residuals(layers, WEIGHTS, X) if r.made]
        assert sources(made)[:2] == [
            f"output of aten.mm at {HERE}:{line} in layers",
            f"output of aten.sin at {HERE}:{line} in layers",
        ]
        assert {(r.file, r.line, r.function) for r in made} == {(__file__, line, "layers")}
        assert [r.operation for r in made] == ["aten.mm", "aten.sin"] * 2 + ["aten.mm"]

    @pytest.mark.parametrize("remat", [False, True])
    def test_names_come_first(self, remat):
        policy = cp.save_only_these_names("a", "b")
        f = functx.remat(named, policy=policy) if remat else named
        line = named.__code__.co_firstlineno + 1
        kept = [r for r in functx.saved_residuals(lambda x: torch.exp(f(x)), X) if r.names]
        first = kept[0]
        assert first.source == f"named 'a' at {HERE}:{line} in named"
        assert (first.kind, first.names) == ("named", ("a",))
        assert [r.names for r in kept] == [("a",)]

    def test_parameters_and_buffers_by_their_paths(self):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
                self.register_buffer("scale", torch.full((5,), 2.0))

            def forward(self, x):
                for layer in self.body:
                    x = torch.sin(layer(x)) * self.scale
                return x

        net = Net()
        residuals = functx.saved_residuals(net, X.float())
        assert {r.source: r.kind for r in residuals if not r.made} == {
            "argument x": "argument",
            "parameter body.1.weight": "parameter",
            "buffer scale": "buffer",
        }
        first = next(r for r in residuals if r.made)
        assert first.module == "body.0"
        assert first.source.endswith("Net.forward (body.0)")
        closure = functx.saved_residuals(lambda x: net(x), X.float())
        assert "parameter net.body.1.weight" in sources(closure)
        given = functx.saved_residuals(lambda net, x: net(x), net, X.float())
        assert "parameter net.body.1.weight" in sources(given)

    def test_what_a_function_closes_over_by_its_name(self):
        own = torch.ones(5, dtype=torch.float64)

        def f(x):
            return (torch.sin(x) * own) @ WEIGHTS[1]

        assert sources(functx.saved_residuals(f, X)) == [
            "argument x",
            "constant own",
            "constant WEIGHTS[1]",
        ]

    def test_offloaded_values_are_on_the_host(self):
        region = functx.remat(named, policy=cp.offload(cp.save_only_these_names("a")))
        x, a = functx.saved_residuals(region, X)
        assert (x.source, x.on_host) == ("argument x", False)
        assert a.source.startswith("named 'a' at")
        assert a.source.endswith(", in host memory")
        assert a.on_host

    def test_a_view_of_a_larger_tensor_counts_what_it_shows(self):
        big = torch.ones(1000)
        (x,) = functx.saved_residuals(torch.sin, big[:10])
        assert x.nbytes == 40
        (x,) = functx.saved_residuals(torch.sin, torch.ones(1).expand(50))
        assert x.nbytes == 4


class TestTables:
    def test_a_table_of_one(self, capsys):
        functx.print_saved_residuals(functx.remat(named, policy=cp.offload(NAMED_A)), X)
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split() == ["value", "bytes", "from"]
        assert lines[1].split() == ["float64[4,5]", "160", "argument", "x"]
        assert "named 'a'" in lines[2]
        assert "in host memory" in lines[2]
        assert lines[3].split()[:3] == ["320", "total,", "160"]

    def test_a_table_of_two(self, capsys):
        both = {"plain": layers, "dots": functx.remat(layers, policy=cp.dots_saveable)}
        functx.print_saved_residuals(both, WEIGHTS, X)
        rows = [" ".join(row.split()) for row in capsys.readouterr().out.splitlines()]
        line = f"at {HERE}:{layers.__code__.co_firstlineno + 2} in layers"
        assert rows[0] == "value plain dots from"
        assert f"float64[4,5] 3 x 160 3 x 160 output of aten.mm {line}" in rows
        assert f"float64[4,5] 2 x 160 - output of aten.sin {line}" in rows
        assert "1,560 1,240 total" in rows
