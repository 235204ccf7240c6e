"""What each rank of `test_per_sample_parallel` runs: its part of a batch, and the sum of all."""

import sys

import torch
import torch.distributed as dist

from functx import per_sample


def loss(params, x):
    return torch.tanh(torch.tanh(x @ params["w"].to(x)) @ params["v"].to(x)).sum() * 3


def problem():
    generator = torch.Generator().manual_seed(0)
    params = {
        "w": torch.randn(6, 5, generator=generator, dtype=torch.float64),
        "v": torch.randn(5, 4, generator=generator, dtype=torch.float32),
        "unused": torch.ones(3, dtype=torch.float64),
    }
    return params, torch.randn(7, 6, generator=generator, dtype=torch.float64)


def main(path):
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    params, x = problem()
    # Parts of different sizes, the last one empty where there are four.
    bounds = {2: [0, 5, 7], 4: [0, 1, 4, 7, 7]}[size]
    own = x[bounds[rank] : bounds[rank + 1]]
    reduced = []
    all_reduce = dist.all_reduce

    def counted(buffer, *args, **kwargs):
        reduced.append(buffer.numel())
        return all_reduce(buffer, *args, **kwargs)

    dist.all_reduce = counted
    f = per_sample.clipped_sum(
        loss, max_norm=0.5, chunk_size=2, return_norms=True, process_group=True
    )
    total, extras = f(params, own)
    same = {"w": params["w"], "v": params["v"].double()}
    alike, _ = per_sample.clipped_sum(
        loss,
        max_norm=0.5,
        return_norms=True,
        process_group=dist.device_mesh.init_device_mesh("cpu", (size,)),
    )(same, own)
    torch.save(
        {"total": total, "norms": extras.norms, "alike": alike, "reduced": reduced},
        f"{path}/{rank}.pt",
    )
    dist.barrier()  # a rank that leaves early makes gloo abort the others
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
