"""Arrays between torch and JAX on a device: they stay there, both ways, and hold what was meant."""

import pytest
import torch

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

import functx  # noqa: E402
from functx.compat import crosscheck, from_jax, to_jax  # noqa: E402
from functx.compat._bridge import borrow, give  # noqa: E402

PLATFORM = {"cpu": "cpu", "cuda": "gpu"}


@pytest.fixture(autouse=True)
def _has_device(device):
    try:
        here = jax.devices(PLATFORM[device])[0]
    except RuntimeError:
        pytest.skip("JAX has no such device here")
    with jax.default_device(here):
        yield


@pytest.fixture
def highest():
    """No TF32 in JAX: for all threads, since backward passes of a device have one of their own."""
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", "highest")
    yield
    jax.config.update("jax_default_matmul_precision", before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32])
def test_arrays_go_to_jax_and_back(dtype, device):
    x = torch.arange(4096, device=device).to(dtype).view(64, 64)
    array = borrow(x, "a test")
    (place,) = array.devices()
    assert place.platform == PLATFORM[device]
    back = give(jax.jit(lambda a: a + 0)(array), None)
    assert back.device.type == device
    assert torch.equal(back, x)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "offset"])
def test_views_arrive_as_what_they_show(layout, device):
    x = torch.randn(65, 64, device=device)
    view = {"transposed": x.T, "sliced": x[::2], "offset": x.view(-1)[1:]}[layout]
    back = give(jax.jit(lambda a: a * 1)(borrow(view, "a test")), None)
    assert torch.equal(back, view)


@pytest.mark.usefixtures("exact", "highest")
@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("way", ["backward", "grad", "vmap", "remat"])
def test_a_function_of_jax_in_torch(way, own_stream, device):
    """On a stream of its own too: what is queued there comes first."""
    f = from_jax(lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2))

    def run(f):
        w = torch.linspace(-1, 1, 64 * 64, device=device).view(64, 64) / 8
        x = torch.linspace(-1, 1, 16 * 64, device=device).view(16, 64)
        for _ in range(20):
            w = w + torch.tanh(w) / 100  # under way when JAX is asked
        if way == "backward":
            w = w.requires_grad_()
            return torch.autograd.grad(f(w, x), w)[0]
        if way == "vmap":
            return functx.vmap(functx.grad(f), (None, 0))(w, x[:, None])
        return functx.grad(functx.remat(f) if way == "remat" else f)(w, x)

    stream = torch.cuda.Stream() if device == "cuda" and own_stream else None
    with torch.cuda.stream(stream):
        ours, expected = run(f), run(lambda w, x: torch.tanh(x @ w).square().sum())
        assert ours.device.type == device
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("exact")
def test_a_function_of_torch_in_jax(device):
    loss = lambda w, x: functx.remat(lambda w, x: torch.tanh(x @ w))(w, x).square().sum()
    w, x = torch.randn(8, 8) / 3, torch.randn(16, 8)
    expected = functx.grad(loss)(w, x)
    with jax.default_matmul_precision("highest"):
        found = jax.jit(jax.grad(to_jax(loss)))(jnp.asarray(w.numpy()), jnp.asarray(x.numpy()))
    (place,) = found.devices()
    assert place.platform == PLATFORM[device]
    torch.testing.assert_close(torch.tensor(found.tolist()), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("exact")
def test_a_crosscheck_agrees(device):
    loss = lambda w, x: functx.remat(lambda w, x: torch.tanh(x @ w))(w, x).square().sum()
    w, x = torch.randn(8, 8, device=device) / 3, torch.randn(16, 8, device=device)
    with jax.default_matmul_precision("highest"):
        report = crosscheck(loss, w, x, in_dims=(None, 0))
    report.assert_agrees(rtol=1e-4)
    assert report.kept_equal
