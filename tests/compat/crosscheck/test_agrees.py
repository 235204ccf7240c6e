"""``crosscheck`` agrees where it should, whatever is checked, and takes what users have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import functx
from functx.compat import crosscheck
from functx.compat._derivatives import TRANSFORMS
from functx.compat._precision import difference

WIDTH, BATCH, LAYERS = 8, 4, 8
ALL = tuple(TRANSFORMS)


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


def test_every_transform_agrees():
    def f(p, x):
        return {"y": torch.tanh(x @ p["w"]), "s": (x * p["b"]).sin().sum()}

    p = {"w": torch.randn(3, 2), "b": torch.randn(3)}
    report = crosscheck(f, p, torch.randn(4, 3), in_dims=(None, 0), transforms=ALL, peak=False)
    report.assert_agrees()
    assert tuple(report.differences) == tuple(report.runs) == ALL
    for d in report.differences.values():
        assert d.torch_ulps < 30
        assert d.jax_ulps < 30


def test_peaks_products_and_replays_are_reported():
    ws, x = weights()
    report = crosscheck(chain(range(0, LAYERS, 4)), ws, x, in_dims=(None, 0))
    report.assert_agrees()
    assert set(report.runs) == {"value", "grad", "vmap(grad)"}
    for run in report.runs.values():
        assert run.torch_peak > 0
        assert run.xla_temp >= 0
    products = report.runs["grad"].products
    assert (products.torch_recomputed, products.jax_recomputed) == (LAYERS, LAYERS)
    assert products.replays == LAYERS // 4
    assert report.runs["value"].products is None
    assert report.barriers_kept


def test_a_module_agrees():
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    report = crosscheck(net, torch.randn(5, 3), peak=False)
    report.assert_agrees()
    assert report.name == "Sequential"
    assert report.differences["grad"].where.startswith("[0]['")
    assert report.differences["grad"].torch_ulps is not None
    by_example = crosscheck(net, torch.randn(5, 3), in_dims=(0,), peak=False)
    by_example.assert_agrees()
    assert "vmap(grad)" in by_example.differences


def test_keywords_pytrees_and_static_arguments_agree():
    def f(p, batch, power, *, scale, flip=False):
        x, (y, label) = batch["x"], batch["rest"]
        out = (x @ p) ** power * scale + y
        out = -out if flip else out
        return out[label], None, "text"

    batch = {"x": torch.randn(4, 3), "rest": (torch.randn(4, 2), torch.tensor([3, 1]))}
    kwargs = {"scale": torch.tensor(0.5), "flip": True}
    report = crosscheck(f, torch.randn(3, 2), batch, 2, kwargs=kwargs, peak=False)
    report.assert_agrees()
    batched = crosscheck(
        lambda p, b: (b["x"] @ p).sum() + b["shift"],
        torch.randn(3, 2),
        {"x": torch.randn(4, 3), "shift": torch.tensor(1.0)},
        in_dims=(None, {"x": 0, "shift": None}),
        peak=False,
    )
    batched.assert_agrees()


def test_integers_and_masks_are_compared_exactly():
    def f(x):
        return x.argmax(-1), x > 0, x.sum(-1)

    report = crosscheck(f, torch.randn(4, 5), peak=False)
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
    def f(w, x):
        return torch.tanh(x @ w).sum()

    args = torch.randn(3, 3).to(dtype), torch.randn(5, 3).to(dtype)
    report = crosscheck(f, *args, transforms=("value", "grad", "jvp"), peak=False)
    report.assert_agrees()
    assert all(d.dtype == str(dtype)[6:] for d in report.differences.values())
    assert all(d.torch_ulps < 20 for d in report.differences.values())
    assert jnp.zeros(1, float).dtype != jnp.float64  # x64 is as it was


def test_complex_numbers_nan_and_tangents_of_another_dtype_agree():
    def f(z):
        return (z * z).real.sum() + (3 * z).imag.sum()

    crosscheck(f, torch.randn(3, dtype=torch.complex64), peak=False).assert_agrees()
    both = crosscheck(lambda x: (x / 0).log(), torch.tensor([1.0, -1.0, 0.0]), peak=False)
    assert both.differences["value"].agrees
    # Torch's tangent of a float32 scalar times a Python number is float64.
    report = crosscheck(lambda x: x.sum() * 0.7, torch.randn(3), transforms="jvp", peak=False)
    report.assert_agrees()


def test_errors_are_measured_from_float64_where_the_function_runs_in_it():
    v, net = torch.randn(3), torch.nn.Linear(3, 1)
    report = crosscheck(lambda w: (w @ v).sin() + net(w).sum(), torch.randn(3), peak=False)
    report.assert_agrees()
    assert report.differences["value"].torch_ulps < 10
    assert report.differences["grad"].jax_ulps < 10

    def f(w):
        assert w.dtype == torch.float32
        return w.sum()

    report = crosscheck(f, torch.randn(3), peak=False)
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
        wq, bq, wk, bk = weights
        scores = torch.nn.functional.linear(x, wq, bq) @ torch.nn.functional.linear(x, wk, bk).mT
        return torch.softmax(scores, -1) @ x

    weights = [torch.randn(shape) / 3 for shape in ((8, 8), (8,), (8, 8), (8,))]
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
        ((jax.jit(jnp.sin), torch.ones(2)), {}, TypeError, "not a function of JAX"),
        ((torch.nn.Linear, torch.ones(2)), {}, TypeError, "not the class Linear"),
        ((torch.sum,), {}, TypeError, "needs the arguments"),
        ((torch.sum,), {"kwargs": {"input": torch.ones(2)}}, TypeError, "one by position"),
        ((torch.sum, jnp.ones(2)), {}, TypeError, r"pass torch tensors.* at \[0\]"),
        ((torch.sum, np.ones(2)), {}, TypeError, "pass torch tensors"),
        ((torch.sum, torch.ones(2)), {"transforms": "sum"}, ValueError, "no transform 'sum'"),
        ((torch.sum, torch.ones(2)), {"transforms": ()}, ValueError, "no transform was"),
        ((torch.sum, torch.ones(2)), {"transforms": "vmap(grad)"}, ValueError, "needs in_dims"),
        ((torch.sum, torch.arange(2)), {"transforms": "grad"}, TypeError, "real or complex tensor"),
        ((torch.argmax, torch.ones(2)), {"transforms": "grad"}, TypeError, "one in the result"),
        ((torch.sum, torch.ones(2)), {"argnums": 1}, ValueError, "argnums=1 of 1 arguments"),
        ((torch.sum, torch.ones(2)), {"in_dims": (0, 0)}, ValueError, "2 entries for 1 arg"),
        ((torch.sum, torch.ones(2)), {"in_dims": ({"a": 0},)}, ValueError, "another structure"),
        ((lambda x: None, torch.ones(2)), {}, TypeError, "NoneType without any"),
    ],
)
def test_wrong_use_says_what_to_do(args, options, error, message):
    with pytest.raises(error, match=message):
        crosscheck(*args, **options)
