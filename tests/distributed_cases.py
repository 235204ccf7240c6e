"""Run by torchrun on several gloo processes: each case compares with what one process computes.

Prints one line of JSON from the first process: what each case found.
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

CASES = {}
LAYERS, WIDTH, BATCH = 3, 8, 4


def case(f):
    CASES[f.__name__] = f
    return f


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(torch.sin(self.up(x))))


class Around(nn.Module):
    """Calls its block as a region."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return functx.checkpoint(self.block, x, use_reentrant=False)


def net():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(LAYERS))).double()


def batch():
    g = torch.Generator().manual_seed(1)
    return torch.randn(BATCH * dist.get_world_size(), WIDTH, generator=g, dtype=torch.float64)


def mine():
    return batch().chunk(dist.get_world_size())[dist.get_rank()]


def loss(model, x):
    return model(x).square().mean()


def full(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def same_gradients(model, steps=1):
    """Whether the gradients of a model are those of one process on the whole batch."""
    expected = net()
    loss(expected, batch()).backward()
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return all(torch.allclose(full(p.grad), steps * e.grad, rtol=1e-9) for p, e in pairs)


def shard(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def split(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def communicates(run):
    """How often each collective runs."""
    with Log() as log:
        run()
    return Counter(name.rpartition(".")[0] for name in log.names if "exp" not in name)


class Log(TorchDispatchMode):
    """Collectives, in order, and what they are given here."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        communicates = func.namespace in ("c10d", "_c10d_functional")
        if (communicates and not func.__name__.startswith(("wait", "_wrap"))) or func.__name__ in (
            "exp.default",
            "expm1.default",
        ):
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@case
def ddp():
    model = functx.apply_remat(net(), "*")
    wrapped = DistributedDataParallel(model)
    loss(wrapped, mine()).backward()
    return same_gradients(model)


@case
def ddp_applied_after():
    model = net()
    wrapped = DistributedDataParallel(model)
    functx.apply_remat(wrapped, "module.*")
    for _ in range(2):
        loss(wrapped, mine()).backward()
    return same_gradients(model, steps=2)


@case
def fsdp_as_it_is():
    model = shard(net())
    counts = communicates(lambda: loss(model, mine()).backward())
    return same_gradients(model), counts


def fsdp(build):
    model = build()
    counts = communicates(lambda: loss(model, mine()).backward())
    right = same_gradients(model)
    model.zero_grad()
    for _ in range(2):  # and where nobody counts
        loss(model, mine()).backward()
    return right and same_gradients(model, steps=2), counts


@case
def fsdp_apply_before():
    return fsdp(lambda: shard(functx.apply_remat(net(), "*")))


@case
def fsdp_apply_after():
    return fsdp(lambda: functx.apply_remat(shard(net()), "*"))


@case
def fsdp_remat_modules():
    return fsdp(lambda: shard(nn.Sequential(*(functx.remat(block) for block in net()))))


@case
def fsdp_checkpoint_inside():
    return fsdp(lambda: shard(nn.Sequential(*(Around(block) for block in net()))))


@case
def fsdp_saves_memory():
    def peak(model):
        x = torch.randn(256, WIDTH, dtype=torch.float64)
        return functx.memory.peak(lambda: loss(model, x).backward())

    return peak(shard(functx.apply_remat(net(), "*"))) < 0.75 * peak(shard(net()))


@case
def fsdp_per_example():
    model = shard(functx.apply_remat(net(), "*"))
    ours = functx.vmap(functx.grad(lambda x: model(x).sum()))(mine())
    expected = net()
    return torch.allclose(ours, functx.vmap(functx.grad(lambda x: expected(x).sum()))(mine()))


def criterion(out):
    return out.square().sum()


def clipped(model, x, **options):
    return functx.per_sample.clipped_sum((model, criterion), max_norm=0.5, **options)(x)


@case
def clipped_sum_of_split_layers():
    ours = clipped(split(functx.apply_remat(net(), "*")), batch(), chunk_size=1)
    expected = clipped(net(), batch())
    return all(torch.allclose(ours[k], expected[k]) for k in expected)


@case
def clipped_sum_needs_whole_parameters():
    wrapped = FullyShardedDataParallel(net(), device_id=torch.device("cpu"))
    spread = split(net())

    def of_function():
        def loss(params, x):
            return functx.functional_call(spread, params, (x,)).sum()

        functx.per_sample.norms(loss)(dict(spread.named_parameters()), mine())

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


def refused(run):
    try:
        run()
    except functx.RematError as error:
        return "Swap the order" in str(error)
    return False


@case
def around_fsdp_is_refused():
    model = shard(net())
    region = functx.remat(lambda x: model(x))
    return refused(lambda: loss(region, mine()))


@case
def around_a_part_under_fsdp_is_refused():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Sequential(*net()[:2]), net()[2])
    for part in (model[0][0], model[0], model):
        fully_shard(part, mesh=mesh)
    functx.apply_remat(model, "0")
    return refused(lambda: loss(model, mine()))


@case
def around_ddp_is_refused():
    model = DistributedDataParallel(net())
    return refused(lambda: functx.checkpoint(model, mine()))


@case
def tensor_parallel_as_it_is():
    model = split(net())
    return communicates(lambda: loss(model, batch()).backward())


def tensor_parallel(build):
    model = build()
    counts = communicates(lambda: loss(model, batch()).backward())
    right = same_gradients(model)
    model.zero_grad()
    for _ in range(2):
        loss(model, batch()).backward()
    return right and same_gradients(model, steps=2), counts


@case
def tensor_parallel_apply():
    return tensor_parallel(lambda: functx.apply_remat(split(net()), "*"))


@case
def tensor_parallel_apply_before():
    return tensor_parallel(lambda: split(functx.apply_remat(net(), "*")))


@case
def tensor_parallel_closed_over():
    model = split(net())
    loss(functx.remat(lambda x: model(x)), batch()).backward()
    return same_gradients(model)


@case
def tensor_parallel_trains():
    def train(model):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            loss(model, batch()).backward()
            optimizer.step()
        return [full(p).detach() for p in model.parameters()]

    ours, expected = train(functx.apply_remat(split(net()), "*")), train(net())
    return all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(ours, expected, strict=True))


def program(x, w):
    """Collectives in a region, one of which no gradient needs."""
    everywhere = torch.stack(all_gather(torch.tanh(x * w))).mean(0)
    statistics = all_reduce(x.detach().mean(), "sum", dist.group.WORLD)
    total = torch.zeros(())
    dist.all_reduce(total)
    return torch.sin(everywhere) * w, statistics


def operators(x, w):
    """As they come without the tensors that wait for their values."""
    group = dist.group.WORLD.group_name
    ops = torch.ops._c10d_functional
    statistics = ops.wait_tensor(ops.all_reduce(x.detach().exp(), "sum", group))
    ops.wait_tensor(ops.all_reduce_(x.detach().expm1(), "sum", group))
    return torch.sin(x * w), statistics


@case
def collectives_that_nothing_reads():
    return collectives(operators, 2)


@case
def collectives_inside():
    return collectives(program, 3)


def collectives(program, some):
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
    return {
        "same gradient": torch.allclose(gradient, expected),
        "forward": ours_forward == forward,
        "backward ends as without": ours_backward[len(ours_backward) - len(backward) :] == backward,
        "same on every process": all(names == everyone[0] for names in everyone),
        "as many as there are": sum("reduce" in n or "gather" in n for n in forward) == some,
    }


def main():
    dist.init_process_group("gloo")
    found = {}
    for name, f in CASES.items():
        try:
            found[name] = f()
        except Exception:
            found[name] = traceback.format_exc(limit=-4)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        print("FOUND " + json.dumps(everyone), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
