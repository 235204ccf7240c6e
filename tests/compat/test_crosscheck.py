"""``crosscheck`` agrees where it should, and sees it when the frameworks differ."""

import json

import jax.numpy as jnp
import pytest
import torch

import functx
from functx.compat import crosscheck
from functx.compat._kept import Kept, kept_by_jax, kept_by_torch
from functx.compat._report import _plain
from functx.compat._to_jax import to_jax

from .networks import NETWORKS, arrays, params_of

WIDTH, BATCH, LAYERS = 8, 4, 16
ACTIVATION = WIDTH * BATCH * 4


def chain(cuts):
    """An MLP with a region between consecutive cuts."""

    def run(x, *ws):
        for w in ws:
            x = torch.tanh(x @ w)
        return x

    def net(ws, x):
        for a, b in zip(cuts, [*cuts[1:], LAYERS]):
            x = functx.remat(run)(x, *ws[a:b])
        return (x * x).sum()

    return net


def weights():
    torch.manual_seed(0)
    return [torch.randn(WIDTH, WIDTH) / 3 for _ in range(LAYERS)], torch.randn(BATCH, WIDTH)


@pytest.mark.parametrize("segment", [1, 2, 4, 8, 16])
def test_kept_bytes_are_equal_and_as_expected(segment):
    """Each region keeps its input; that of the first is an argument."""
    report = crosscheck(chain(range(0, LAYERS, segment)), *weights(), peak=False)
    report.assert_agrees()
    assert report.kept_torch == report.kept_jax
    assert report.kept_torch.regions == LAYERS // segment
    assert report.kept_torch.activations == (LAYERS // segment - 1) * ACTIVATION
    assert report.kept_torch.arguments == ACTIVATION + LAYERS * WIDTH * WIDTH * 4


def test_a_moved_cut_is_seen():
    ws, x = weights()
    torch_side = kept_by_torch(chain([0, 4, 8, 12]), (ws, x))
    jax_args = arrays((ws, x))
    same = kept_by_jax(to_jax(chain([0, 4, 8, 12])), jax_args, lambda f: f)
    fewer = kept_by_jax(to_jax(chain([0, 8, 12])), jax_args, lambda f: f)
    assert torch_side == same
    assert fewer.activations == torch_side.activations - ACTIVATION


def test_a_moved_cut_fails_the_assertion():
    report = crosscheck(chain([0, 8]), *weights(), peak=False)
    report.assert_agrees()
    moved = Kept(report.kept_jax.activations + ACTIVATION, report.kept_jax.arguments, 3)
    object.__setattr__(report, "kept_jax", moved)
    with pytest.raises(AssertionError, match="the cuts are not at the same places"):
        report.assert_agrees()


def test_per_example_gradients_and_recompute():
    ws, x = weights()
    report = crosscheck(chain(range(0, LAYERS, 4)), ws, x, in_dims=(None, 0))
    report.assert_agrees()
    assert set(report.runs) == {"value", "gradient", "per-example gradient"}
    assert report.runs["gradient"].dots == report.merged_dots + LAYERS
    for run in report.runs.values():
        assert run.torch_peak > 0
        assert run.xla_temp >= 0
    assert report.differences["gradient"].torch_error < 1e-5
    assert report.differences["gradient"].jax_error < 1e-5


def test_remat_lowers_both_peaks():
    torch.manual_seed(0)
    args = [torch.randn(64, 64) / 8 for _ in range(LAYERS)], torch.randn(256, 64)
    plain, cut = (crosscheck(chain(c), *args) for c in ([0], [0, 4, 8, 12]))
    assert cut.runs["gradient"].xla_temp < plain.runs["gradient"].xla_temp
    assert cut.runs["gradient"].torch_peak < plain.runs["gradient"].torch_peak


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_with_regions(name):
    torch.manual_seed(0)
    net, x = NETWORKS[name]()
    params = params_of(net)

    def loss(params, x):
        call = functx.remat(lambda p, x: torch.func.functional_call(net, p, (x,)))
        return call(params, x[None]).square().mean()

    report = crosscheck(loss, params, x, in_dims=(None, 0), peak=False)
    report.assert_agrees(rtol=1e-5)
    assert report.kept_torch.regions == 1


def test_a_wrong_gradient_is_seen():
    def f(w, x):
        return torch.tanh(x @ w).sum()

    report = crosscheck(f, torch.randn(3, 3), torch.randn(2, 3), peak=False)
    report.assert_agrees()
    with pytest.raises(AssertionError, match="the gradient differs by"):
        report.assert_agrees(rtol=-1.0)


def test_json_and_tables(tmp_path):
    def tanh_loss(w, x):
        return torch.tanh(x @ w).sum()

    report = crosscheck(tanh_loss, torch.randn(3, 3), torch.randn(2, 3), repeats=1)
    path = tmp_path / "report.json"
    report.to_json(path)
    read = json.loads(path.read_text())
    assert read["kept_equal"] is True
    assert read["differences"]["value"]["absolute"] == report.differences["value"].absolute
    for text in (str(report), _plain("title", [("", "torch", "JAX", ""), *report.rows()])):
        assert "gradient" in text
        assert "equal" in text
    assert "tanh_loss" in str(report)


def test_float64_and_integers_pass_unchanged():
    def f(w, index):
        return w[index].square().sum()

    w = torch.randn(5, dtype=torch.float64)
    report = crosscheck(f, w, torch.tensor([0, 3, 3]), peak=False)
    assert report.differences["gradient"].relative < 1e-15


def test_closed_over_float32_has_no_float64_reference():
    v = torch.randn(3)
    report = crosscheck(lambda w: (w @ v).sin(), torch.randn(3), peak=False)
    report.assert_agrees()
    assert report.differences["value"].torch_error is None
    assert "no reference" in str(report)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((3, torch.ones(2)), "takes a torch function"),
        ((torch.sum,), "needs the arguments"),
        ((torch.sum, jnp.ones(2)), "pass torch tensors"),
        ((torch.sin, torch.ones(2)), "function to a scalar tensor"),
    ],
)
def test_bad_input(args, message):
    with pytest.raises(TypeError, match=message):
        crosscheck(*args)
