"""More ways to run a model on several processes, with and without regions; see `distributed_cases`.

Each case says whether the gradients are the same.
"""

import distributed_cases
import torch
import torch.distributed as dist
from distributed_cases import batch, full, loss, mine, net
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import functx

CASES = {}


def case(f):
    CASES[f.__name__] = f
    return f


def backward(model):
    loss(model, mine()).backward()


def regions(remat, model, **options):
    return functx.apply_remat(model, "*", **options) if remat else model


def shard(model, **options):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def same(build, run=backward):
    def gradients(remat):
        torch.manual_seed(0)
        model = build(remat)
        run(model)
        return [p.grad for p in model.parameters()]

    return all(
        a is b or torch.allclose(full(a), full(b), rtol=1e-9, atol=1e-12)
        for a, b in zip(gradients(True), gradients(False), strict=True)
    )


@case
def fsdp_that_keeps_its_parameters():
    return same(lambda remat: shard(regions(remat, net()), reshard_after_forward=False))


@case
def fsdp_in_mixed_precision():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return same(
        lambda remat: shard(regions(remat, net().float()), mp_policy=policy),
        lambda model: loss(model, mine().float()).backward(),
    )


@case
def fsdp_that_accumulates():
    def run(model):
        model.set_requires_gradient_sync(False)
        loss(model, mine()).backward()
        model.set_requires_gradient_sync(True)
        loss(model, 2 * mine()).backward()

    return same(lambda remat: shard(regions(remat, net())), run)


@case
def fsdp_with_a_policy():
    policy = functx.checkpoint_policies.dots_saveable
    return same(lambda remat: shard(regions(remat, net(), policy=policy)))


@case
def fsdp_with_dropout():
    def build(remat):
        layers = (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()) for _ in range(3))
        return shard(regions(remat, nn.Sequential(*layers).double()))

    def run(model):
        torch.manual_seed(7 + dist.get_rank())
        backward(model)

    return same(build, run)


@case
def fsdp_trained_and_clipped():
    def run(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            backward(model)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

    return same(lambda remat: shard(regions(remat, net())), run)


@case
def fsdp_with_torchs_wrapper_under_a_patch():
    def build(remat):
        return shard(nn.Sequential(*map(checkpoint_wrapper, net())) if remat else net())

    with functx.patch_checkpoint():
        return same(build)


@case
def the_older_fsdp():
    device = torch.device("cpu")
    return same(
        lambda remat: FullyShardedDataParallel(
            regions(remat, net()), use_orig_params=True, device_id=device
        )
    )


@case
def sharded_and_split():
    if dist.get_world_size() < 4:
        return True
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    split = {"up": ColwiseParallel(), "down": RowwiseParallel()}

    def build(remat):
        model = net()
        for block in model:
            parallelize_module(block, mesh["tp"], split)
        regions(remat, model)
        for block in model:
            fully_shard(block, mesh=mesh["dp"])
        return fully_shard(model, mesh=mesh["dp"])

    x = batch().chunk(2)[mesh["dp"].get_local_rank()]
    return same(build, lambda model: loss(model, x).backward())


@case
def ddp_that_looks_for_unused_parameters():
    return same(
        lambda remat: DistributedDataParallel(regions(remat, net()), find_unused_parameters=True)
    )


@case
def ddp_of_a_static_graph():
    def run(model):
        for _ in range(3):
            backward(model)

    return same(
        lambda remat: DistributedDataParallel(regions(remat, net()), static_graph=True), run
    )


@case
def ddp_compiled():
    def run(model):
        backward(torch.compile(model, backend="aot_eager"))

    return same(lambda remat: DistributedDataParallel(regions(remat, net())), run)


if __name__ == "__main__":
    distributed_cases.CASES.clear()
    distributed_cases.CASES.update(CASES)
    distributed_cases.main()
