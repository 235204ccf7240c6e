"""Agreement of networks in torch and in JAX, plain and cut into regions: ``docs/agreement.md``."""

from pathlib import Path

import torch
from budget.networks import NETWORKS, Chain
from torch import nn

import functx
from functx.compat import crosscheck

PAGE = Path(__file__).parents[2] / "docs" / "agreement.md"
CUTS = {"none": 0, "every block": 1, "every 2 blocks": 2, "one region": 100}
TRANSFORMS = ("value", "grad", "vmap(grad)")
RTOL = 1e-4


class OfOneExample(Chain):
    """A network of one example, ``every`` so many blocks a region; blocks want a batch."""

    every, in_tuple = 0, False

    def forward(self, x):
        state = (x[None],) if self.in_tuple else x[None]
        for start in range(0, len(self.order), self.every or len(self.order)):

            def segment(state, start=start):
                for block in self.order[start : start + (self.every or len(self.order))]:
                    state = block(state)
                return state

            state = (functx.remat(segment) if self.every else segment)(state)
        return (state[0] if self.in_tuple else state)[0]


def checked(network, cuts):
    """The comparison of a network, cut so; of three examples."""
    torch.manual_seed(0)
    blocks, x = NETWORKS[network]()
    net = OfOneExample(b for b in blocks if isinstance(b, nn.Module)).eval()
    net.every, net.in_tuple = CUTS[cuts], isinstance(x, tuple)
    x, name = (x[0] if net.in_tuple else x)[:3], f"{network}, {cuts}"
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
        "Written by `make sweep`, which compares them. Each network is cut into `functx.remat`",
        "regions, run in torch, lowered with `to_jax` and run in JAX under `jax.checkpoint` at",
        "the same cuts. Errors are in ulps of the largest entry of a tensor, from torch in",
        "float64, and between the two; float32, 3 examples. Bytes kept are the activations at",
        "region boundaries.",
        "",
        "| " + " | ".join(HEAD) + " |",
        "|---|" + "---:|" * (len(HEAD) - 1),
        *("| " + " | ".join(row(report)) + " |" for report in reports),
        "",
        ", ".join(f"{name} {version}" for name, version in reports[0].environment.items()),
    ]
    return "\n".join(lines) + "\n"
