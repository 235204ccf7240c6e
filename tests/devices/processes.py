"""Run by torchrun on several gloo processes: cases compare with what one process computes.

``python -m torch.distributed.run ... processes.py CASE...``. The first process prints one line of
JSON: what each case found on each process, True where all is right.
"""

import json
import sys
import traceback
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.nn.functional import all_gather
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import functx
from functx import per_sample

LAYERS, WIDTH, BATCH = 3, 8, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(torch.sin(self.up(x))))


def net():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(LAYERS))).double()


def batch():
    g = torch.Generator().manual_seed(1)
    return torch.randn(BATCH * dist.get_world_size(), WIDTH, generator=g, dtype=torch.float64)


mine = lambda: batch().chunk(dist.get_world_size())[dist.get_rank()]
loss = lambda model, x: model(x).square().mean()
full = lambda t: t.full_tensor() if isinstance(t, DTensor) else t


def same_gradients(model, steps=1):
    """Whether the gradients of a model are those of one process on the whole batch."""
    expected = net()
    loss(expected, batch()).backward()
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return all(torch.allclose(full(p.grad), steps * e.grad, rtol=1e-9) for p, e in pairs)


def shard(model, **options):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def split(model, mesh=None):
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


class Log(TorchDispatchMode):
    """Collectives, in order, and what they are given here."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        communicates = func.namespace in ("c10d", "_c10d_functional")
        if communicates and not func.__name__.startswith(("wait", "_wrap")):
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def collectives(model, x):
    """How often each runs in a step."""
    with Log() as log:
        loss(model, x).backward()
    return Counter(name.rpartition(".")[0] for name in log.names)


def trained(model, x):
    """Whether gradients are right, also where nobody counts; and how often collectives ran."""
    counts = collectives(model, x)
    right = same_gradients(model)
    model.zero_grad()
    for _ in range(2):
        loss(model, x).backward()
    return right and same_gradients(model, steps=2), counts


def regions(model):
    return functx.apply_remat(model, "*")


def ddp_applied_after():
    model = net()
    wrapped = DistributedDataParallel(model)
    functx.apply_remat(wrapped, "module.*")
    for _ in range(2):
        loss(wrapped, mine()).backward()
    return same_gradients(model, steps=2)


def fsdp_per_example():
    model, expected = shard(regions(net())), net()
    ours = functx.vmap(functx.grad(lambda x: model(x).sum()))(mine())
    return torch.allclose(ours, functx.vmap(functx.grad(lambda x: expected(x).sum()))(mine()))


def criterion(out):
    return out.square().sum()


def clipped(model, x, **options):
    return per_sample.clipped_sum((model, criterion), max_norm=0.5, **options)(x)


def clipped_sum_of_split_layers():
    ours = clipped(split(regions(net())), batch(), chunk_size=1)
    expected = clipped(net(), batch())
    return all(torch.allclose(ours[k], expected[k]) for k in expected)


def clipped_sum_over_ranks():
    """By one all-reduce, also of parameters of two dtypes; and every rank has the same bits."""

    def example(params, x):
        return torch.tanh(torch.tanh(x @ params["w"]) @ params["v"].to(x)).sum() * 3

    g = torch.Generator().manual_seed(0)
    x = torch.randn(7, 6, generator=g, dtype=torch.float64)
    params = {
        "w": torch.randn(6, 5, generator=g, dtype=torch.float64),
        "v": torch.randn(5, 4, generator=g),
        "unused": torch.ones(3, dtype=torch.float64),
    }
    expected, extras = per_sample.clipped_sum(example, max_norm=0.5, return_norms=True)(params, x)
    # Parts of different sizes, the last one empty where there are four.
    bounds = {2: [0, 5, 7], 4: [0, 1, 4, 7, 7]}[dist.get_world_size()]
    part = slice(*bounds[dist.get_rank() : dist.get_rank() + 2])
    f = per_sample.clipped_sum(
        example, max_norm=0.5, chunk_size=2, return_norms=True, process_group=True
    )
    with Log() as log:
        total, own = f(params, x[part])
    everyone = [torch.empty_like(total["w"]) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, total["w"])
    return (
        all(torch.allclose(total[k], expected[k], rtol=1e-6) for k in expected)
        and all(torch.equal(t, total["w"]) for t in everyone)
        and torch.allclose(own.norms, extras.norms[part])
        and bool((extras.norms > 0.5).any())
        and sum("reduce" in name for name in log.names) == 1
    )


def clipped_sum_needs_whole_parameters():
    wrapped = FullyShardedDataParallel(net(), device_id=torch.device("cpu"))
    spread = split(net())

    def of_function():
        loss = lambda params, x: functx.functional_call(spread, params, (x,)).sum()
        per_sample.norms(loss)(dict(spread.named_parameters()), mine())

    for run, words in (
        (lambda: clipped(shard(net()), mine(), chunk_size=1), "sharded by FSDP"),
        (lambda: clipped(wrapped, mine(), chunk_size=1), "sharded by FSDP"),
        (lambda: clipped(spread, mine()), "chunk_size=1"),
        (of_function, r"a pair (module, criterion) and chunk_size=1"),
    ):
        try:
            run()
            return False
        except ValueError as error:
            if words not in str(error):
                raise
    return True


def program(x, w):
    """Collectives in a region, one of which no gradient needs."""
    everywhere = torch.stack(all_gather(torch.tanh(x * w))).mean(0)
    statistics = all_reduce(x.detach().mean(), "sum", dist.group.WORLD)
    total = torch.zeros(())
    dist.all_reduce(total)
    return torch.sin(everywhere) * w, statistics


def collectives_inside():
    """In a region they run as without, in the same order everywhere."""

    def run(f):
        w = torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64, requires_grad=True)
        with Log() as forward:
            out, _ = f(mine(), w)
        with Log() as backward:
            out.sum().backward()
        return w.grad, forward.names, backward.names

    expected, forward, backward = run(program)
    gradient, ours_forward, ours_backward = run(functx.remat(program))
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (ours_forward, ours_backward))
    return (
        torch.allclose(gradient, expected)
        and ours_forward == forward
        and ours_backward[len(ours_backward) - len(backward) :] == backward
        and all(names == everyone[0] for names in everyone)
        and sum("reduce" in n or "gather" in n for n in forward) == 3
    )


WAYS = {
    "fsdp_apply_before": lambda: trained(shard(regions(net())), mine()),
    "fsdp_apply_after": lambda: trained(regions(shard(net())), mine()),
    "fsdp_remat_modules": lambda: trained(shard(nn.Sequential(*map(functx.remat, net()))), mine()),
    "tensor_parallel_apply": lambda: trained(regions(split(net())), batch()),
    "tensor_parallel_as_it_is": lambda: collectives(split(net()), batch()),
}


def main():
    dist.init_process_group("gloo")
    found = {}
    for name in sys.argv[1:]:
        try:
            found[name] = (globals() | WAYS)[name]()
        except Exception:
            found[name] = traceback.format_exc(limit=-4)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        print("FOUND " + json.dumps(everyone), flush=True)
    dist.barrier()  # a process that leaves early makes gloo abort the others
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
