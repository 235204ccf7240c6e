"""``crosscheck(compiled=...)``: eager, traced, compiled and JAX side by side."""

import json

import pytest
import torch

import functx
from functx.__main__ import main
from functx.compat import crosscheck
from functx.compat.testing import assert_agrees

from ..helpers import LAYERS, chain, weights


def changed(operation, by):
    """A backend that puts another operation in the place of one, and runs the graph."""

    def backend(graph, inputs):
        for node in graph.graph.nodes:
            if node.target is operation:
                node.target = by
        graph.recompile()
        return graph

    return backend


def merging(graph, inputs):
    """A backend that computes once what a recomputation computes again."""
    seen, put = {}, {}
    for node in graph.graph.nodes:
        node.args = torch.fx.map_arg(node.args, lambda n: put.get(n, n))
        same = (node.target, repr(node.args), repr(node.kwargs))
        if node.op == "call_function":
            put[node] = seen.setdefault(same, node)
        if "detach" in str(node.target):
            put[node] = node.args[0]
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


@pytest.mark.parametrize("segment", [0, 4])
def test_four_ways_have_the_same_numbers_products_and_recomputed_ones(segment):
    ws, x = weights()
    transforms = ("value", "grad", "hvp")
    report = crosscheck(chain(segment), ws, x, transforms=transforms, compiled="aot_eager")
    report.assert_agrees()
    assert [*report.ways] == [*transforms]
    for what, ways in report.ways.items():
        assert [*ways] == ["eager", "traced", "functx.jit", "JAX"]
        assert ways["eager"].difference is None
        assert all(way.difference.agrees for way in [*ways.values()][1:])
        assert ways["JAX"].difference is report.differences[what]
        assert all(way.bytes >= 0 for way in ways.values())
        assert ways["eager"].bytes == report.runs[what].torch_peak
    products = {name: (way.products, way.again) for name, way in report.ways["grad"].items()}
    again = LAYERS if segment else 0
    assert products == dict.fromkeys(products, (3 * LAYERS - 1 + again, again))
    assert report.ways["hvp"]["functx.jit"].again == report.ways["hvp"]["traced"].again


def test_a_convolution_and_attention_count_as_in_eager():
    def f(w, x):
        y = torch.nn.functional.conv1d(x, w).sin()
        return torch.nn.functional.scaled_dot_product_attention(y, y, y).sum()

    args = torch.randn(4, 3, 3), torch.randn(2, 3, 6)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        report = crosscheck(f, *args, transforms="grad", compiled="aot_eager", peak=False)
    ways = report.ways["grad"]
    assert ways["eager"].products == ways["traced"].products == ways["functx.jit"].products > 6
    assert [way.bytes for way in ways.values()] == [None] * 4


def test_a_compiler_that_undoes_a_recomputation_is_seen():
    ws, x = weights()
    report = crosscheck(chain(4), ws, x, transforms="grad", compiled=merging)
    report.assert_agrees()
    ways = report.ways["grad"]
    assert (ways["traced"].again, ways["functx.jit"].again) == (LAYERS, 0)


def test_a_compiler_that_is_wrong_is_named(tmp_path):
    aten = torch.ops.aten
    backend = changed(aten.sin.default, aten.cos.default)
    report = crosscheck(lambda x: x.sin().sum(), torch.ones(3), compiled=backend, peak=False)
    assert not report.agrees
    (said, *_) = report.problems()
    assert "the value of torch in eager and as compiled by functx.jit differ at result" in said
    assert report.ways["value"]["traced"].difference.agrees
    read = json.loads(report.to_json(tmp_path / "report.json").read_text())
    assert read["ways"]["value"]["functx.jit"]["difference"]["agrees"] is False
    with pytest.raises(AssertionError, match=r"as compiled by functx\.jit"):
        assert_agrees(lambda x: x.sin().sum(), torch.ones(3), compiled=backend)


def test_what_can_t_be_traced_is_the_error_of_functx_jit():
    scale = torch.tensor(5.0)
    f = lambda x: (x * scale.item()).sum()
    crosscheck(f, torch.ones(3), transforms="value").assert_agrees()
    with pytest.raises(functx.TracingError, match="reads the value of a tensor"):
        crosscheck(f, torch.ones(3), transforms="value", compiled="aot_eager")


def test_the_table_is_printed_and_the_command_has_it(capsys, tmp_path):
    path = tmp_path / "net.py"
    path.write_text("import torch\n\ndef loss(w, x):\n    return torch.tanh(x @ w).sum()\n")
    args = ["--args", "float32[3,3]", "float32[5,3]", "--compiled", "aot_eager"]
    assert main(["crosscheck", f"{path}:loss", *args]) == 0
    said = capsys.readouterr().out
    head = next(line.split() for line in said.splitlines() if "traced" in line)
    assert head == ["eager", "traced", "functx.jit", "JAX"]
    assert "grad: products (run again)" in said
