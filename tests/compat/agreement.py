"""Agreement of five kinds of networks, plain and cut into regions: writes ``docs/agreement.md``.

    python -m tests.compat.agreement

``make sweep`` runs the same comparisons as a test; each network is a list of steps on a tuple of
tensors, so that a cut can be put between any two.
"""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import functx
from functx.compat import crosscheck

PAGE = Path(__file__).parents[2] / "docs" / "agreement.md"
CUTS = {"none": 0, "every step": 1, "every 2 steps": 2, "one region": 100}
TRANSFORMS = ("value", "grad", "vmap(grad)")
RTOL = 1e-4


class Steps(nn.Module):
    """Modules on a tuple of tensors, ``every`` so many of them a remat region."""

    def __init__(self, steps):
        super().__init__()
        self.steps = nn.ModuleList(steps)
        self.every = 0

    def forward(self, x):
        # One example: the layers want a batch.
        state = (x[None],)
        for start in range(0, len(self.steps), self.every or len(self.steps)):
            part = self.steps[start : start + (self.every or len(self.steps))]

            def segment(*state, part=part):
                for step in part:
                    state = step(*state)
                    state = state if isinstance(state, tuple) else (state,)
                return state

            state = (functx.remat(segment) if self.every else segment)(*state)
        return state[0][0]


class Residual(nn.Module):
    """Two convolutions with batch normalisation, around a shortcut."""

    def __init__(self, channels, out, stride):
        super().__init__()
        self.first = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(out), nn.BatchNorm2d(out)])
        self.shortcut = nn.Conv2d(channels, out, 1, stride)
        for norm in self.norms:
            norm.running_mean.normal_(std=0.1)
            norm.running_var.uniform_(0.5, 1.5)

    def forward(self, x):
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(y)) + self.shortcut(x))


class Down(nn.Module):
    """A convolution, whose result is kept for the way up, and a coarser grid."""

    def __init__(self, channels, out):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, out, 3, padding=1), nn.GroupNorm(2, out)

    def forward(self, x, *skips):
        y = F.silu(self.norm(self.conv(x)))
        return F.max_pool2d(y, 2), *skips, y


class Up(nn.Module):
    """A finer grid, beside what was kept on the way down."""

    def __init__(self, channels, skip, out):
        super().__init__()
        self.up = nn.ConvTranspose2d(channels, channels, 2, 2)
        self.conv = nn.Conv2d(channels + skip, out, 3, padding=1)

    def forward(self, x, *skips):
        y = torch.cat([self.up(x), skips[-1]], 1)
        return F.silu(self.conv(y)), *skips[:-1]


class Embed(nn.Module):
    """Tokens and positions."""

    def __init__(self, tokens, width, length):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(tokens, width), nn.Embedding(length, width)

    def forward(self, x):
        return self.tokens(x) + self.positions(torch.arange(x.shape[-1]))


def feed_forward(width):
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class Attention(nn.Module):
    """A pre-norm transformer block with a causal mask."""

    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = feed_forward(width)
        self.heads = heads

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        split = [t.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for t in (q, k, v)]
        a = nn.functional.scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.out(a.transpose(-2, -3).flatten(-2))
        return x + self.mlp(self.norm2(x))


class Bidirectional(nn.Module):
    """A post-norm transformer block without a mask."""

    def __init__(self, width, heads):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mlp = feed_forward(width)

    def forward(self, x):
        x = self.norms[0](x + self.attention(x, x, x, need_weights=False)[0])
        return self.norms[1](x + self.mlp(x))


def mlp():
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(5)]
    return Steps([*layers, nn.Linear(16, 4)]), torch.randn(3, 16)


def resnet():
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    steps = [Residual(3, 4, 1), Residual(4, 4, 1), Residual(4, 8, 2), head]
    return Steps(steps).eval(), torch.randn(3, 3, 8, 8)


def unet():
    steps = [Down(2, 4), Down(4, 6), Up(6, 6, 4), Up(4, 4, 4), nn.Conv2d(4, 1, 1)]
    return Steps(steps), torch.randn(3, 2, 8, 8)


def gpt():
    blocks = [Attention(16, 2) for _ in range(3)]
    head = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 11))
    return Steps([Embed(11, 16, 6), *blocks, head]), torch.randint(11, (3, 6))


def bert():
    blocks = [Bidirectional(16, 2) for _ in range(3)]
    return Steps([Embed(11, 16, 6), *blocks, nn.Linear(16, 5)]).train(), torch.randint(11, (3, 6))


NETWORKS = {"MLP": mlp, "ResNet": resnet, "U-Net": unet, "GPT": gpt, "BERT": bert}


def checked(network, cuts):
    """The comparison of a network, cut so; per example."""
    torch.manual_seed(0)
    net, x = NETWORKS[network]()
    net.every = CUTS[cuts]
    name = f"{network}, {cuts}"
    return crosscheck(net, x, in_dims=(0,), transforms=TRANSFORMS, rtol=RTOL, peak=False, name=name)


HEAD = (
    "network",
    "regions",
    *(f"{what}: torch, JAX, apart (ulp)" for what in TRANSFORMS),
    "bytes kept, torch",
    "bytes kept, JAX",
)


def row(report):
    differences = [report.differences[what] for what in TRANSFORMS]
    return (
        report.name,
        str(report.kept_torch.regions),
        *(f"{d.torch_ulps:.2g}, {d.jax_ulps:.2g}, {d.ulps:.2g}" for d in differences),
        f"{report.kept_torch.activations:,}",
        f"{report.kept_jax.activations:,}",
    )


def page(reports):
    lines = [
        "# Networks in torch and in JAX",
        "",
        "Written by `python -m tests.compat.agreement`; `make sweep` makes the same comparisons.",
        "Each network is cut into `functx.remat` regions, run in torch, lowered with `to_jax` and",
        "run in JAX under `jax.checkpoint` at the same cuts. Errors are in ulps of the largest",
        "entry of a tensor, from torch in float64, and between the two; float32, 3 examples.",
        "Bytes kept are the activations at region boundaries.",
        "",
        "| " + " | ".join(HEAD) + " |",
        "|---|" + "---:|" * (len(HEAD) - 1),
        *("| " + " | ".join(row(report)) + " |" for report in reports),
        "",
        ", ".join(f"{name} {version}" for name, version in reports[0].environment.items()),
    ]
    return "\n".join(lines) + "\n"


def main():
    reports = [checked(network, cuts) for network in NETWORKS for cuts in CUTS]
    for report in reports:
        report.assert_agrees()
    PAGE.write_text(page(reports))


if __name__ == "__main__":
    main()
