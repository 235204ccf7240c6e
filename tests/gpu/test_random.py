"""Random numbers of a device: each replay draws what its forward drew, and nobody else notices."""

import pytest
import torch
from programs import identity
from references import assert_same
from torch.nn.functional import dropout, scaled_dot_product_attention

import functx

DRAWS = {
    "rand": torch.rand_like,
    "dropout": lambda x: dropout(x, 0.3),
    "bernoulli": lambda x: torch.bernoulli(x.detach().sigmoid()),
    "normal": lambda x: torch.normal(x, 1.0),
    "uniform_": lambda x: torch.empty_like(x).uniform_(1, 2),
}


def state(device):
    return torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()


def same_with_and_without(program, device):
    """Values, gradients and the generator afterwards."""

    def run(remat):
        torch.manual_seed(3)
        return program(remat), state(device)

    assert_same(run(functx.remat), run(identity), eps=8)


def backward(f, x):
    x = x.clone().requires_grad_()
    out = f(x)
    return out, torch.autograd.grad(out.sum(), x)[0]


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("way", ["backward", "grad", "vmap"])
def test_default_generator(draw, way, device):
    x = torch.linspace(-1, 1, 64, device=device).view(8, 8)

    def program(remat):
        region = remat(lambda x: x.sin() * draw(x))

        def loss(x):
            return (region(x) * draw(x) * region(x.cos())).sum()

        if way == "backward":
            return backward(loss, x)
        gradient = functx.grad(loss)
        return (functx.vmap(gradient, randomness="different") if way == "vmap" else gradient)(x)

    same_with_and_without(program, device)


def test_where_no_input_is_on_the_device(device):
    scale = torch.linspace(1, 2, 8, device=device, requires_grad=True)

    def program(remat):
        region = remat(lambda n: (torch.rand(n, device=device) * scale).sin())
        out = region(8)
        torch.rand(3, device=device)
        return out, torch.autograd.grad(out.sum(), scale)

    same_with_and_without(program, device)


def test_a_generator_as_argument(device):
    def run(remat):
        generator = torch.Generator(device).manual_seed(5)

        def noisy(x, generator):
            return x.sin() * torch.randn(8, generator=generator, device=device)

        region = remat(noisy)
        x = torch.linspace(0, 1, 8, device=device)
        found = backward(lambda x: region(x, generator) * region(x, generator), x)
        return found, generator.get_state()

    assert_same(run(functx.remat), run(identity))


def test_a_replay_leaves_the_generator_alone(device):
    x = torch.ones(8, device=device, requires_grad=True)
    out = functx.remat(lambda x: dropout(x.sin(), 0.5))(x)
    before = state(device)
    out.sum().backward()
    assert torch.equal(state(device), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [0.0, 0.2])
def test_fused_attention(dtype, p, device):
    """The same kernel in the replay, with the same mask."""
    if device == "cpu" and dtype == torch.float16:
        dtype = torch.float64
    x = torch.randn(2, 4, 64, 32, device=device, dtype=dtype)

    def program(remat):
        def attend(q):
            return scaled_dot_product_attention(q, q.sin(), q.cos(), dropout_p=p, is_causal=True)

        return backward(remat(attend), x)

    def run(remat):
        torch.manual_seed(3)
        return program(remat), state(device)

    (ours, gradient), ours_state = run(functx.remat)
    (expected, expected_gradient), expected_state = run(identity)
    assert torch.equal(ours, expected)
    assert torch.equal(ours_state, expected_state)
    # Kernels on a device add up in no fixed order.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(gradient, expected_gradient, rtol=32 * eps, atol=32 * eps)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
class TestTwoDevices:
    def test_regions_on_both(self):
        def program(remat):
            region = remat(lambda x: dropout(x.sin(), 0.5))
            found = [
                backward(lambda x: region(x) * region(x), torch.ones(8, device=f"cuda:{n}"))
                for n in range(2)
            ]
            return found, torch.cuda.get_rng_state_all()

        same_with_and_without(program, "cuda")

    def test_a_region_that_spans_them(self):
        """A captured parameter says that the region was on the other device too."""
        scale = torch.ones(8, device="cuda:1", requires_grad=True)

        def program(remat):
            def across(x):
                return dropout(dropout(x.sin(), 0.5).to("cuda:1") * scale, 0.5)

            return backward(remat(across), torch.ones(8, device="cuda:0"))

        same_with_and_without(program, "cuda")

    def test_offloaded_values_come_back_to_their_device(self):
        x = torch.linspace(0, 1, 8, device="cuda:1")
        policy = functx.checkpoint_policies.offload(functx.checkpoint_policies.everything_saveable)
        region = functx.remat(lambda x: x.sin().exp(), policy=policy)
        assert_same(backward(region, x), backward(lambda x: x.sin().exp(), x))
