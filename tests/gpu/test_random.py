"""Random numbers and precision of a device: a replay computes as its forward did."""

import pytest
import torch
from cases import identity, judged_by, numbers, seeded, unchanged
from torch import nn
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


def drawn(program, device):
    """A judge: values, gradients and the generator afterwards are those without remat."""

    def seeded(remat):
        torch.manual_seed(3)
        return program(remat), state(device)

    unchanged(seeded, eps=8)


def backward(f, x):
    x = x.clone().requires_grad_()
    out = f(x)
    return out, torch.autograd.grad(out.sum(), x)[0]


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("way", ["backward", "grad", "vmap"])
def test_a_replay_draws_what_its_forward_drew(draw, way, device):
    x = torch.linspace(-1, 1, 64, device=device).view(8, 8)

    def program(remat):
        region = remat(lambda x: x.sin() * draw(x))
        loss = lambda x: (region(x) * draw(x) * region(x.cos())).sum()
        if way == "backward":
            return backward(loss, x)
        gradient = functx.grad(loss)
        return (functx.vmap(gradient, randomness="different") if way == "vmap" else gradient)(x)

    drawn(program, device)


@judged_by(unchanged)
def test_a_generator_may_be_an_argument(remat, device):
    generator = torch.Generator(device).manual_seed(5)
    noisy = lambda x, generator: x.sin() * torch.randn(8, generator=generator, device=device)
    region = remat(noisy)
    x = torch.linspace(0, 1, 8, device=device)
    found = backward(lambda x: region(x, generator) * region(x, generator), x)
    return found, generator.get_state()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [0.0, 0.2])
def test_fused_attention_has_one_mask(dtype, p, device):
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


def net(norm=nn.LayerNorm):
    layers = (nn.Sequential(nn.Linear(32, 32), norm(32), nn.GELU()) for _ in range(3))
    return nn.Sequential(*layers)


def built(device, remat, **options):
    model = seeded(lambda: net(**options)).to(device)
    return functx.apply_remat(model, "*") if remat is functx.remat else model


def dtypes(device):
    return torch.bfloat16 if device == "cpu" else torch.float16, torch.bfloat16


@pytest.mark.parametrize("which", [0, 1], ids=["float16", "bfloat16"])
@pytest.mark.parametrize(("inside", "cache"), [(True, True), (False, False), (False, True)])
@judged_by(unchanged)
def test_gradients_are_those_without_regions(remat, which, inside, cache, device):
    model, dtype = built(device, remat), dtypes(device)[which]
    with torch.autocast(device, dtype, cache_enabled=cache):
        out = model(numbers(16, 32).float().to(device)).float().square().mean()
        if inside:
            out.backward()
    if not inside:
        out.backward()
    return [p.grad for p in model.parameters()]


@judged_by(unchanged)
def test_scaled_gradients_step_alike(remat, device):
    model, x = built(device, remat), numbers(16, 32).float().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**14, growth_interval=2)
    for _ in range(4):
        with torch.autocast(device, dtypes(device)[0]):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [*(p.detach() for p in model.parameters()), torch.tensor(scaler.get_scale())]
