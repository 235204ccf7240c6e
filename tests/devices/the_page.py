"""Run by torchrun: the torch code of docs/distributed.md, then what the page says is refused.

``python -m torch.distributed.run ... the_page.py CODE``, where CODE is a file with the blocks of
the page as one program. The first process prints, as JSON, what each refusal said on each process,
in the order of the page's table, and how many collectives ran with each policy.
"""

import json
import runpy
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from processes import Log
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor.debug import CommDebugMode

import functx
from functx.compat import to_jax


def refusals(page, ddp, sharded, spread, regions):
    """Functions that the page says are refused: a list for each row of its table, but for JAX's."""
    detached = lambda model: {name: p.detach() for name, p in model.named_parameters()}
    by = lambda model: lambda p: torch.func.functional_call(model, p, (page.mine,)).sum()
    norms = lambda model: page.per_sample.norms((model, page.criterion))(page.mine)
    by_inputs = lambda model: lambda x: page.loss(model, x)

    def called_twice():
        squared = lambda x: functx.grad(by_inputs(sharded))(x).square().sum()
        functx.grad(squared)(page.mine)

    def second():
        x = page.x.clone().requires_grad_()
        (g,) = torch.autograd.grad(page.loss(regions, x), x, create_graph=True)
        g.square().sum().backward()

    def counted():
        with CommDebugMode():
            page.loss(functx.apply_remat(page.net(), "*"), page.x).backward()

    def fsdp1():
        model = FullyShardedDataParallel(page.net(), device_id=torch.device("cpu"))
        functx.grad(by_inputs(model))(page.mine)

    return [
        [lambda: functx.remat(ddp)(page.mine), lambda: functx.remat(sharded)(page.mine)],
        [
            lambda: functx.grad(by(sharded))(detached(sharded)),
            lambda: functx.functional_call(sharded, detached(sharded), (page.mine,)),
        ],
        [called_twice],
        [
            lambda: functx.jit(sharded, backend="aot_eager")(page.mine),
            lambda: functx.plan(sharded, page.mine, budget=0.5),
            lambda: functx.remat(by_inputs(sharded), budget=0.5)(page.mine),
        ],
        [lambda: to_jax(page.shard(page.net()))],
        [lambda: norms(sharded)],
        [lambda: norms(spread)],
        [fsdp1],
        [lambda: functx.grad(by_inputs(spread))(page.x)],
        [second],
        [
            lambda: functx.jvp(by(sharded), (detached(sharded),), (detached(sharded),)),
            lambda: functx.jacfwd(by(sharded))(detached(sharded)),
            lambda: functx.hessian(by(sharded))(detached(sharded)),
        ],
        [counted],
    ]


def said(run):
    try:
        run()
    except Exception as error:
        return "\n".join([str(error), *getattr(error, "__notes__", ())])
    return "nothing"


def collectives(page, **regions):
    model = page.split(functx.apply_remat(page.net(), "*", **regions), page.tensor_parallel)
    with Log() as log:
        page.loss(model, page.x).backward()
    return len(log.names)


def main(code):
    page = SimpleNamespace(**runpy.run_path(code))
    models = [
        page.DistributedDataParallel(page.net()),
        page.shard(page.net()),
        page.split(page.net(), page.tensor_parallel),
        page.split(functx.apply_remat(page.net(), "*"), page.tensor_parallel),
    ]
    found = {
        "refused": [[said(run) for run in row] for row in refusals(page, *models)],
        "collectives": [collectives(page), collectives(page, policy=page.keep)],
    }
    for model, x in zip(models, (page.mine, page.mine, page.x, page.x), strict=True):
        model.zero_grad()
        page.loss(model, x).backward()
        page.check(model)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        print("FOUND " + json.dumps(everyone), flush=True)
    dist.barrier()  # a process that leaves early makes gloo abort the others
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
