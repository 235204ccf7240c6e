"""What the sweep of models in JAX measures and reports, on functions of a few lines."""

from importlib.resources import files

import pytest
import torch

import functx

jax = pytest.importorskip("jax")
pytest.importorskip("transformers")

from functx.compat import to_jax  # noqa: E402

in_jax = pytest.importorskip("tools.models.in_jax")
columns = pytest.importorskip("tools.models.columns")
PARAMS, INPUTS = {"w": torch.randn(4, 4), "v": torch.randn(4, 4)}, {"x": torch.randn(4, 4)}
SIZE = 64  # bytes of each


def measured(loss, arrays):
    return columns.kept_in_jax(to_jax(loss), arrays)


@pytest.fixture
def arrays():
    return columns.arrays((PARAMS, INPUTS))


def test_an_array_that_two_regions_take_and_the_function_reads_counts_once(arrays):
    region = functx.remat(lambda shared, h: torch.sin(shared * h))

    def loss(params, inputs):
        shared = torch.tanh(inputs["x"] @ params["w"])
        h = region(shared, region(shared, shared.exp()))
        return (h * shared.cos()).sum()

    assert measured(loss, arrays) == [3 * SIZE, 3 * SIZE]


def test_what_no_derivative_reads_enters_and_is_not_kept(arrays):
    region = functx.remat(lambda h, positions: torch.sin(h))

    def loss(params, inputs):
        return region(torch.tanh(inputs["x"] @ params["w"]), inputs["x"].exp()).sum()

    assert measured(loss, arrays) == [SIZE, 2 * SIZE]


def test_products_of_a_gradient_are_told_apart_by_its_parts(arrays):
    region = functx.remat(lambda x, w, v: torch.tanh(x @ w) @ v)

    def loss(params, inputs):
        return region(inputs["x"], params["w"], params["v"]).sin().sum()

    program = jax.make_jaxpr(jax.jit(jax.grad(to_jax(loss))))(*arrays).jaxpr
    parts = columns.equations(program, columns.PRODUCTS)
    assert parts == {"forward": 2, "recomputed": 1, "backward": 3}


def test_exponential_numbers_are_those_that_jax_draws():
    draw = lambda x: torch.empty_like(x).exponential_(2.0)
    with columns.Drawn(3):
        expected = draw(INPUTS["x"])
    got = to_jax(draw, rng=True)(jax.random.key(3), columns.arrays(INPUTS["x"]))
    torch.testing.assert_close(torch.tensor(jax.device_get(got)), expected)


def record(name, kept, entered, parts):
    remat = {"regions": 1, "equations": 1, "kept": kept, "outcome": "same", "detail": ""}
    remat |= {"products": [sum(n) for n in zip(*parts.values())], "parts": parts}
    return {"type": name, "outcome": "same", "remat": remat | {"entered": entered}}


def test_the_report_says_why_bytes_and_products_differ():
    alike = {"forward": [4, 4], "recomputed": [4, 4], "backward": [8, 8]}
    report = in_jax.report(
        [
            record("plain", [4096, 4096], 4096, alike),
            record("unread", [4736, 4096], 4736, alike | {"forward": [6, 4]}),
            record("masked", [4096, 5120], 5120, alike | {"recomputed": [5, 4]}),
            record("cloned", [6144, 4096], 4096, alike | {"backward": [8, 9]}),
        ]
    )
    assert "equal in 1 of 4." in report
    assert "positions, say), and `unread` 640.\n" in report
    assert "traced: `masked` 1,024.\n" in report
    assert "(a clone): `cloned` 2,048.\n" in report
    assert "gradient: equal in 1. There" in report
    assert "program has none: `unread` 2.\n" in report
    assert "zeros runs again ([engine](engine.md)): `masked` 1.\n" in report
    assert "derivatives of these: `cloned` 1.\n" in report
    assert "not looked into" not in report


def test_types_that_the_same_line_of_code_stops_are_one_group():
    error = "aten._local_scalar_dense.default needs a number at modeling_{}.py:{} in forward; JAX"
    details = {"other": "another"}
    for name in ("bert", "llama"):
        code = files("transformers") / "models" / name / f"modeling_{name}.py"
        line = code.read_text().splitlines().index("import torch") + 1
        details[name] = error.format(name, line)
    training = {n: {"outcome": "raises", "detail": why} for n, why in details.items()}
    records = [{"type": n, "outcome": "same", "training": c} for n, c in training.items()]
    report, title = in_jax.report(records), "training mode, draws by a key: raises"
    assert f"- `bert`, `llama`, {title}: values decide what runs, `import torch`\n" in report
    assert f"- `other`, {title}: another\n" in report
