"""``crosscheck`` agrees where it should; bytes kept are equal, exactly, and a moved cut is seen."""

import collections
import functools
import itertools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import functx
from functx import checkpoint_policies as cp
from functx.compat import crosscheck
from functx.compat._crosscheck.derivatives import TRANSFORMS
from functx.compat._crosscheck.precision import difference

from .. import agreement
from ..helpers import BATCH, LAYERS, WIDTH, chain, weights

ALL = tuple(TRANSFORMS)


def test_every_transform_agrees():
    f = lambda p, x: {"y": torch.tanh(x @ p["w"]), "s": (x * p["b"]).sin().sum()}
    p = {"w": torch.randn(3, 2), "b": torch.randn(3)}
    report = crosscheck(f, p, torch.randn(4, 3), in_dims=(None, 0), transforms=ALL, peak=False)
    report.assert_agrees()
    assert tuple(report.differences) == tuple(report.runs) == ALL
    assert "hessian" in report._repr_html_()  # shown in a notebook as it prints
    for d in report.differences.values():
        assert max(d.torch_ulps, d.jax_ulps) < 30


def test_peaks_products_and_replays_are_reported():
    ws, x = weights()
    report = crosscheck(chain(4), ws, x, in_dims=(None, 0))
    report.assert_agrees()
    assert set(report.runs) == {"value", "grad", "vmap(grad)"}
    for run in report.runs.values():
        assert run.torch_peak > 0
        assert run.xla_temp >= 0
    products = report.runs["grad"].products
    assert (products.torch_recomputed, products.jax_recomputed) == (LAYERS, LAYERS)
    assert products.replays == LAYERS // 4
    assert report.runs["value"].products is None


def test_keywords_pytrees_and_static_arguments_agree():
    def f(p, batch, power, *, scale, flip=False):
        x, (y, label) = batch["x"], batch["rest"]
        out = (x @ p) ** power * scale + y
        out = -out if flip else out
        return out[label], None, "text"

    Rest = collections.namedtuple("Rest", "y label")
    batch = {"x": torch.randn(4, 3), "rest": Rest(torch.randn(4, 2), torch.tensor([3, 1]))}
    kwargs = {"scale": torch.tensor(0.5), "flip": True}
    report = crosscheck(f, torch.randn(3, 2), batch, 2, kwargs=kwargs, peak=False)
    report.assert_agrees()
    g = lambda p, b: (b["x"] @ p).sum() + b["shift"]
    batch, dims = {"x": batch["x"], "shift": torch.tensor(1.0)}, {"x": 0, "shift": None}
    crosscheck(g, torch.randn(3, 2), batch, in_dims=(None, dims), peak=False).assert_agrees()


def test_integers_and_masks_are_compared_exactly():
    report = crosscheck(lambda x: (x.argmax(-1), x > 0, x.sum(-1)), torch.randn(4, 5), peak=False)
    report.assert_agrees()
    assert set(report.differences) == {"value", "grad"}
    w = torch.randn(5, dtype=torch.float64)
    picked = crosscheck(lambda w, i: w[i].square().sum(), w, torch.tensor([0, 3]), peak=False)
    assert picked.differences["grad"].relative < 1e-15
    only = crosscheck(lambda i: i * 2 + 1, torch.arange(5), peak=False)
    only.assert_agrees()
    assert set(only.differences) == {"value"}
    assert only.kept_torch is None
    assert only.kept_equal


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_dtype_agrees(dtype):
    f = lambda w, x: torch.tanh(x @ w).sum()
    args = torch.randn(3, 3).to(dtype), torch.randn(5, 3).to(dtype)
    report = crosscheck(f, *args, transforms=("value", "grad", "jvp"), peak=False)
    report.assert_agrees()
    assert all(d.dtype == str(dtype)[6:] for d in report.differences.values())
    assert all(d.torch_ulps < 20 for d in report.differences.values())
    assert jnp.zeros(1, float).dtype != jnp.float64  # x64 is as it was


def test_complex_numbers_nan_and_tangents_of_another_dtype_agree():
    f = lambda z: (z * z).real.sum() + (3 * z).imag.sum()
    crosscheck(f, torch.randn(3, dtype=torch.complex64), peak=False).assert_agrees()
    both = crosscheck(lambda x: (x / 0).log(), torch.tensor([1.0, -1.0, 0.0]), peak=False)
    assert both.differences["value"].agrees
    # Torch's tangent of a float32 scalar times a Python number is float64.
    report = crosscheck(lambda x: x.sum() * 0.7, torch.randn(3), transforms="jvp", peak=False)
    report.assert_agrees()


def test_errors_are_measured_from_float64_where_the_function_runs_in_it():
    v, net = torch.randn(3), torch.nn.Linear(3, 1)
    report = crosscheck(net, torch.randn(5, 3), peak=False)
    report.assert_agrees()
    assert report.name == "Linear"
    assert report.differences["grad"].where.startswith("[0]['")
    assert report.differences["grad"].torch_ulps is not None
    report = crosscheck(lambda w: (w @ v).sin() + net(w).sum(), torch.randn(3), peak=False)
    report.assert_agrees()
    assert report.differences["value"].torch_ulps < 10
    assert report.differences["grad"].jax_ulps < 10

    only_float32 = lambda w: w.sum() if w.dtype == torch.float32 else w.no_such_attribute
    report = crosscheck(only_float32, torch.randn(3), peak=False)
    assert report.differences["value"].torch_ulps is None
    assert "no reference" in str(report)


@pytest.mark.parametrize(
    ("error", "allowed"),
    [
        (2**-11, 2**-10),  # four times torch's own, of the largest, 2
        (2**-20, 2e-5),  # the usual
        (1.0, 0.1),  # not a digit is right
        (float("nan"), 2e-5),
        (None, 2e-5),
    ],
)
def test_what_torch_rounds_away_is_allowed(error, allowed):
    reference = None if error is None else [torch.tensor([2.0, 1 + error], dtype=torch.float64)]
    for rtol, expected in ((None, allowed), (1e-6, 1e-6)):
        ours, theirs = [torch.tensor([2.0, 1.0])], [jnp.array([2.0, 1.0])]
        found = difference(ours, theirs, reference, [], rtol, 0.0)
        assert found.allowed == pytest.approx(expected)


def test_a_gradient_that_is_zero_but_for_rounding_agrees():
    """The bias of the keys: softmax takes it out again.  Relative to itself it is never alike."""

    def attention(weights, x):
        query, key, bias = weights
        return torch.softmax(x @ query @ (x @ key + bias).mT + (x @ bias)[..., None], -1) @ x

    weights = [torch.randn(shape) / 3 for shape in ((8, 8), (8, 8), (8,))]
    report = crosscheck(attention, weights, torch.randn(2, 5, 8), peak=False)
    report.assert_agrees()
    assert report.differences["grad"].ulps < 1e4
    # Not where one is not zero, or there is nothing it is small against, or no float64 to tell.
    large, zero = np.ones(3), np.full(3, 1e-17)
    wide = [torch.tensor(large), torch.tensor(zero)]

    def agrees(theirs, dtype=torch.float64, reference=None):
        ours = [torch.tensor(x, dtype=dtype) for x in (large, zero)]
        return difference(ours, [large, theirs], reference, [], None, 0.0, dtypes=False).agrees

    assert agrees(3 * zero)
    assert agrees(3 * zero, torch.float32, wide)
    assert not agrees(zero + 1e-12)
    assert not agrees(zero + 1e-6, torch.float32, wide)
    assert not agrees(3 * zero, torch.float32)
    assert not difference(wide[1:], [3 * zero], None, [], None, 0.0).agrees


@pytest.mark.parametrize(
    ("args", "options", "error", "message"),
    [
        ((3, torch.ones(2)), {}, TypeError, "takes a torch function"),
        ((jax.jit(jnp.sin), torch.ones(2)), {}, TypeError, "not a JAX function"),
        ((torch.nn.Linear, torch.ones(2)), {}, TypeError, "not the class Linear"),
        ((torch.sum,), {}, TypeError, "needs at least one positional argument"),
        ((torch.sum, jnp.ones(2)), {}, TypeError, r"pass torch tensors.* at \[0\]"),
        ((torch.sum, torch.ones(2)), {"transforms": "sum"}, ValueError, "unknown transform 'sum'"),
        ((torch.sum, torch.ones(2)), {"transforms": "vmap(grad)"}, ValueError, "needs in_dims"),
        ((torch.sum, torch.arange(2)), {"transforms": "grad"}, TypeError, "real or complex tensor"),
        ((torch.argmax, torch.ones(2)), {"transforms": "grad"}, TypeError, "one in the result"),
        ((torch.sum, torch.ones(2)), {"argnums": 1}, ValueError, "argnums=1 is out of range"),
        ((torch.sum, torch.ones(2)), {"in_dims": (0, 0)}, ValueError, "2 entries for 1 arg"),
        ((torch.sum, torch.ones(2)), {"in_dims": ({"a": 0},)}, ValueError, "another structure"),
        ((lambda x: None, torch.ones(2)), {}, TypeError, "NoneType without tensors"),
    ],
)
def test_wrong_use_says_what_to_do(args, options, error, message):
    with pytest.raises(error, match=message):
        crosscheck(*args, **options)


def check_network(report):
    report.assert_agrees()
    network, cuts = report.name.split(", ")
    blocks = [b for b in agreement.NETWORKS[network]()[0] if isinstance(b, torch.nn.Module)]
    every = agreement.CUTS[cuts]
    assert report.kept_torch.regions == (-(-len(blocks) // every) if every else 0)
    for d in report.differences.values():
        assert max(d.torch_ulps, d.jax_ulps) < 200


@pytest.mark.parametrize("cuts", ["every 2 blocks", "one region"])
def test_a_network_agrees(cuts):
    report = agreement.checked("mlp", cuts)
    check_network(report)
    assert report.kept_torch.activations > 0 or cuts == "one region"
    assert report.runs["grad"].products.torch_recomputed > 0


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_all_networks_agree_however_they_are_cut():
    every = itertools.product(agreement.NETWORKS, agreement.CUTS)
    reports = list(itertools.starmap(agreement.checked, every))
    for report in reports:
        check_network(report)
    agreement.PAGE.write_text(agreement.page(reports))


def test_the_page_has_all_networks_and_cuts():
    rows = [line for line in agreement.PAGE.read_text().splitlines() if line.startswith("| ")][1:]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in rows]
    names = itertools.product(agreement.NETWORKS, agreement.CUTS)
    assert [name for name, *_ in cells] == [*map(", ".join, names)]
    for _, *_, kept_torch, kept_jax in cells:
        assert kept_torch == kept_jax


ACTIVATION = WIDTH * BATCH * 4


@pytest.mark.parametrize("segment", [1, 4, 8])
def test_kept_bytes_are_equal_and_as_expected(segment):
    """Each region keeps its input; that of the first is an argument."""
    report = crosscheck(chain(segment), *weights(), transforms="grad", peak=False)
    report.assert_agrees()
    assert report.kept_torch == report.kept_jax
    assert report.kept_torch.regions == LAYERS // segment
    assert report.kept_torch.activations == (LAYERS // segment - 1) * ACTIVATION
    assert report.kept_torch.arguments == ACTIVATION + LAYERS * WIDTH * WIDTH * 4
    activations = [r.activations for r in report.kept_torch.by_region]
    assert activations == [0] + [ACTIVATION] * (LAYERS // segment - 1)
    assert {r.name for r in report.kept_jax.by_region} == {"chain.<locals>.run"}


def test_a_moved_cut_fails_the_assertion_and_names_the_region():
    # Layers of different widths, so that where a cut is shows in bytes.
    ws = [torch.randn(n, n + 1) for n in range(2, 6)]

    def cut(*places):
        run = lambda x, *ws: functools.reduce(lambda x, w: torch.tanh(x @ w), ws, x)

        def f(ws, x):
            for a, b in itertools.pairwise([0, *places, len(ws)]):
                x = functx.remat(run)(x, *ws[a:b])
            return x.sum()

        return crosscheck(f, ws, torch.randn(7, 2), transforms="grad", peak=False)

    report = cut(1, 3)
    report.assert_agrees()
    moved = cut(2, 3).kept_jax
    assert moved.activations != report.kept_jax.activations
    object.__setattr__(report, "kept_jax", moved)
    assert not report.kept_equal
    message = r"first at region 2, \S*: 84 and 112\); the boundaries are not at the same places"
    with pytest.raises(AssertionError, match=message):
        report.assert_agrees()
    assert "DIFFERENT" in str(report)


def test_integers_that_no_derivative_reads_may_be_kept_by_torch_alone():
    def f(read):
        def region(w, x, at):
            return torch.tanh(x @ w)[at] if read else torch.tanh(x @ w)

        return lambda w, x: functx.remat(region)(w, x.sin(), torch.arange(len(x)).flip(0)).sum()

    args = torch.randn(4, 4), torch.randn(3, 4)
    report = crosscheck(f(False), *args, peak=False)
    report.assert_agrees()
    assert (report.kept_torch.activations, report.kept_jax.activations) == (72, 48)
    assert report.kept_torch.by_region[0].integers == report.kept_torch.integers == 24
    assert re.search(r"activations +72 +48 +24 not read\n", str(report))
    read = crosscheck(f(True), *args, peak=False)
    read.assert_agrees()
    assert read.kept_torch == read.kept_jax

    # What JAX alone keeps differs, and so does what is no integer, also where the sums are equal.
    ours, theirs = report.kept_torch, report.kept_jax
    no_integers = replace(ours, integers=0)
    for a, b in ((theirs, ours), (no_integers, theirs), (ours, no_integers)):
        object.__setattr__(report, "kept_torch", a)
        object.__setattr__(report, "kept_jax", b)
        with pytest.raises(AssertionError, match="the boundaries are not at the same places"):
            report.assert_agrees()


def test_what_a_region_closes_over_is_kept_by_neither():
    w = torch.randn(5, 5)
    net = torch.nn.BatchNorm1d(5).eval()
    report = crosscheck(functx.remat(lambda x: net(torch.tanh(x @ w))), torch.randn(3, 5))
    report.assert_agrees()
    assert report.kept_jax.activations == 0


def test_what_several_regions_take_counts_for_the_first():
    def f(x):
        y = x.exp()
        first, second = functx.remat(torch.sin), functx.remat(torch.cos)
        return first(y).sum() + second(y).sum()

    report = crosscheck(f, torch.randn(5), peak=False)
    assert [r.activations for r in report.kept_torch.by_region] == [20, 0]
    assert report.kept_torch.by_region == report.kept_jax.by_region

    def hands_on(x):
        skip, x = functx.remat(lambda skip, x: (skip, x.cos()))(x.exp(), x.sin())
        return functx.remat(lambda skip, x: (skip * x).sum())(skip, x)

    report = crosscheck(hands_on, torch.randn(5), peak=False)
    report.assert_agrees()
    assert report.kept_torch.activations == report.kept_jax.activations == 60


@pytest.mark.parametrize(
    "how", [{"transforms": "grad"}, {"transforms": "vmap(grad)", "in_dims": (None, 0)}]
)
def test_kept_bytes_agree_for_nested_regions_of_other_operations(how):
    def inner(x, w):
        y = torch.nn.functional.layer_norm(x * w.sum(), x.shape[-1:])
        return torch.cat([y, x @ w], -1)[..., 1 : 1 + x.shape[-1]]

    def outer(x, v, w):
        y = functx.remat(inner)(torch.nn.functional.gelu(x + v[0]), v)
        return (y @ w).softmax(-1) * x.sin()

    def f(ws, x):
        x = functx.remat(inner)(x @ ws[0], ws[0])  # every region is differentiated
        return functx.remat(outer)(torch.tanh(x @ ws[1]), *ws[1:]).sin().sum()

    ws = [torch.randn(4, 4, dtype=torch.float64) / 2 for _ in range(3)]
    report = crosscheck(f, ws, torch.randn(3, 4, dtype=torch.float64), peak=False, **how)
    report.assert_agrees(rtol=1e-4)
    assert report.kept_equal
    assert report.kept_torch.regions == 2


@pytest.mark.parametrize(
    ("policy", "in_dims"), [(None, (None, 0)), (cp.dots_saveable, None)], ids=repr
)
def test_a_derivative_inside_the_function_keeps_the_same(policy, in_dims):
    """Its pullbacks are regions too; levels that ended inside the function keep nothing."""

    def gradient(ws, x):
        def loss(x):
            for w in ws:
                x = functx.remat(lambda x, w: torch.tanh(x @ w), policy=policy)(x, w)
            return (x * x).sum()

        return functx.grad(loss)(x)

    ws = [torch.randn(4, 4) / 2 for _ in range(3)]
    options = {"in_dims": in_dims, "transforms": ["grad"], "peak": False}
    report = crosscheck(gradient, ws, torch.randn(5, 4), **options)
    report.assert_agrees()
    assert report.kept_torch.regions == 6
    assert report.kept_torch.activations > 0


PARTS = {
    "slices of one": (lambda f, x: sum(f(one).sum() for one in x), [(48, 0)] * 5),
    "a slice": (lambda f, x: f(x[1:]).sum(), [(192, 0)]),
    "the same, reshaped": (lambda f, x: f(x.reshape(-1)).sum(), [(0, 240)]),
    "transposed": (lambda f, x: f(x).sum() + f(x.mT).sum(), [(0, 240), (240, 0)]),
    "expanded": (lambda f, x: f(x[:1].expand(5, 3, 4)).sum(), [(240, 0)]),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_an_argument_is_an_activation(part):
    """In JAX it is an array of its own; in torch it takes no memory, which `storages` tells."""
    f, expected = PARTS[part]
    report = crosscheck(lambda x: f(functx.remat(torch.sin), x), torch.randn(5, 3, 4), peak=False)
    report.assert_agrees()
    assert [(r.activations, r.arguments) for r in report.kept_torch.by_region] == expected
    assert report.kept_torch.storages == 0


def test_numbers_below_all_normal_ones_are_compared():
    for dtype in (torch.float32, torch.float64):
        least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        ours = [torch.tensor([least], dtype=dtype)]
        assert difference(ours, [np.asarray(ours[0])], ours, [""], None, 0.0).agrees


def test_a_model_with_dropout_names_its_eval_mode_which_works():
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.5), torch.nn.Tanh())
    attention = torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
    for model, x in ((net, torch.randn(2, 4)), (attention, torch.randn(1, 3, 4))):
        with pytest.raises(NotImplementedError) as caught:
            crosscheck(model, x, peak=False)
        assert "model.eval()" in caught.value.__notes__[-1]
        crosscheck(model.eval(), x, peak=False, transforms=["value"]).assert_agrees()
