"""Cases of `test_sharded_modules.py`, run on two gloo processes as those of `processes.py` are."""

# ruff: noqa: B023 (each lambda is called before the loop goes on)

import sys

import torch
from processes import (
    WAYS,
    batch,
    criterion,
    full,
    loss,
    main,
    mine,
    net,
    regions,
    same_gradients,
    shard,
    split,
)
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import functx
import functx.compat
from functx import per_sample
from functx._torch import sharding


def mesh():
    return init_device_mesh("cpu", (2,))


def slots(model):
    return [(name, type(p), id(p)) for name, p in model.named_parameters()]


def hooked():
    return torch.nn.modules.module._has_any_global_hook()


def check_alive(model, x=None):
    """The module computes and trains as before."""
    x = mine() if x is None else x
    assert torch.allclose(model(x), net()(x))
    model.zero_grad()
    loss(model, x).backward()
    assert same_gradients(model)
    model.zero_grad()


def said_by(run, kind=RuntimeError):
    """The text of the error that ``run()`` raises, with its notes."""
    try:
        run()
    except kind as error:
        return "\n".join([str(error), *getattr(error, "__notes__", ())])
    raise AssertionError("not refused")


def check_refused(model, run, *words, kind=RuntimeError):
    """``run()`` raises ``kind``, all words are in what it says, and the module is untouched."""
    before = slots(model)
    said = said_by(run, kind)
    assert all(word in said for word in words), said
    assert slots(model) == before
    assert not hooked()


def sharded(ran, **options):
    """An FSDP2 model, before its first forward or after it."""
    model = shard(net(), **options)
    if ran:
        model(mine())
    return model


def detached(model):
    return {name: p.detach() for name, p in model.named_parameters()}


def by_parameters(model, call=torch.func.functional_call):
    x = mine()
    return lambda params: call(model, params, (x,)).square().mean()


ONE = torch.ones((), dtype=torch.float64)
TRANSFORMS = {
    "grad": lambda f, p: functx.grad(f)(p),
    "value_and_grad": lambda f, p: functx.value_and_grad(f)(p),
    "grad_and_value": lambda f, p: functx.grad_and_value(f)(p),
    "vjp": lambda f, p: functx.vjp(f, p)[1](ONE),
    "jacrev": lambda f, p: functx.jacrev(f)(p),
    "linearize": lambda f, p: functx.linearize(f, p),
    "vmap": lambda f, p: functx.vmap(f)({k: full(t).expand(2, *t.shape) for k, t in p.items()}),
    "of an outer level": lambda f, p: functx.grad(lambda p: functx.grad(lambda s: f(p))(ONE))(p),
}


def derivatives_by_parameters_of_fsdp():
    for ran in (False, True):
        model = sharded(ran)
        for transform in TRANSFORMS.values():
            run = lambda: transform(by_parameters(model), detached(model))
            check_refused(model, run, ".backward()", "'0.up.weight'")
        check_alive(model)
    return True


def derivatives_by_some_parameters_of_any_sharding():
    """One parameter in the head; a mesh of two dimensions; a part; a group; replicas; not kept."""
    group = net()
    fully_shard([group[0], group[1]], mesh=mesh())
    two_dimensions = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    part = net()
    fully_shard(part[1], mesh=mesh())
    for model in (
        shard(net(), reshard_after_forward=False),
        fully_shard(net(), mesh=two_dimensions),
        replicate(net(), mesh=mesh()),
        fully_shard(group, mesh=mesh()),
        part,
    ):
        for ran in (False, True):
            if ran:
                model(mine())
            given = {"1.down.bias": detached(model)["1.down.bias"]}
            run = lambda: functx.grad(by_parameters(model))(given)
            check_refused(model, run, ".backward()", "down.bias'")
    # The parameters around the only part that is sharded.
    expected = functx.grad(by_parameters(net()))({"0.up.weight": net()[0].up.weight.detach()})
    ours = functx.grad(by_parameters(part))({"0.up.weight": part[0].up.weight.detach()})
    return torch.allclose(ours["0.up.weight"], expected["0.up.weight"])


def parameters_that_fsdp_ignores():
    """FSDP's hooks leave them alone, so everything is as without FSDP."""
    model, expected = net(), net()
    name = "1.down.weight"
    ignored = model[1].down.weight
    fully_shard(model, mesh=mesh(), ignored_params={ignored})
    for _ in range(2):
        given = {name: 2 * ignored.detach()}
        ours = functx.grad(by_parameters(model, functx.functional_call))(given)
        theirs = functx.grad(by_parameters(expected))(given)
        assert torch.allclose(ours[name], theirs[name])
    return True


def private_names_of_torch():
    """Those of `functx._torch.sharding` mean what they are used for (see test_canary.py)."""
    model = net()
    model[2].down = model[0].down
    fully_shard(model[1], mesh=mesh(), ignored_params={model[1].up.bias})
    fully_shard(model, mesh=mesh(), ignored_params={model[2].up.weight, model[1].up.bias})
    found = {(id(owner), name) for owner, name in sharding.managed_parameters(model)}
    ignored = {(id(model[2].up), "weight"), (id(model[1].up), "bias")}
    layers = [layer for block in model for layer in (block.up, block.down)]
    assert found == {(id(la), name) for la in layers for name in ("weight", "bias")} - ignored
    local = torch.ones(2, requires_grad=True)
    node = DTensor.from_local(local, mesh(), [Replicate()]).grad_fn
    return node.name() == sharding.FROM_LOCAL


def forward_mode_by_parameters():
    model = sharded(True)
    f, p = by_parameters(model), detached(model)
    for run in (
        lambda: functx.jvp(f, (p,), (p,)),
        lambda: functx.jacfwd(f)(p),
        lambda: functx.hessian(f)(p),
    ):
        check_refused(model, run, "DTensor", "reverse mode", kind=NotImplementedError)
    check_alive(model)
    return True


def functional_call():
    for ran in (False, True):
        model = sharded(ran)
        around = nn.Sequential(model, nn.Identity())
        given = {name: 2 * p for name, p in detached(model).items()}
        inner = {f"0.{name}": p for name, p in given.items()}
        for module, params in ((model, given), (model, ({}, given)), (around, inner)):
            run = lambda: functx.functional_call(module, params, (mine(),))
            check_refused(model, run, "functx.functional_call", ".backward()")
        assert torch.allclose(functx.functional_call(model, {}, (mine(),)), net()(mine()))
        check_alive(model)
    whole = split(net())
    out = functx.functional_call(whole, dict(whole.named_parameters()), (batch(),))
    return torch.allclose(out, net()(batch()))


def by_inputs():
    """What is right through FSDP2, and stays so, with regions in it and without."""
    x = mine()
    one = lambda m: lambda x: m(x).square().mean()
    force = lambda m: lambda x: (one(m)(x), functx.grad(one(m))(x))
    ways = {
        "grad": lambda m: functx.grad(one(m))(x),
        "value_and_grad": lambda m: functx.value_and_grad(one(m))(x)[1],
        "twice": lambda m: functx.vjp(m, x)[1](x.expand(len(x), -1))[0],
        "vmap": lambda m: functx.vmap(lambda x: m(x[None]))(x),
        "per example": lambda m: functx.vmap(functx.grad(lambda x: one(m)(x[None])))(x),
        "jvp": lambda m: functx.jvp(one(m), (x,), (x,))[1],
        "jvp of grad": lambda m: functx.jvp(functx.grad(one(m)), (x,), (x,))[1],
        "grad of jvp": lambda m: functx.grad(lambda x: functx.jvp(one(m), (x,), (x,))[1])(x),
        "jacrev": lambda m: functx.jacrev(m)(x),
        "jacrev in chunks": lambda m: functx.jacrev(m, chunk_size=9)(x),
        "jacfwd": lambda m: functx.jacfwd(m)(x),
        "hessian": lambda m: functx.hessian(one(m))(x),
        "auxiliary forces": lambda m: functx.grad(force(m), has_aux=True)(x)[1],
        "a constant gradient": lambda m: functx.grad(lambda s: (s * functx.grad(one(m))(x)).sum())(
            ONE
        ),
    }
    expected = net()
    for model in (sharded(True), shard(regions(net()))):
        model(x)
        for name, way in ways.items():
            assert torch.allclose(way(model), way(expected)), name
        assert not hooked()
        check_alive(model)
    return True


def a_pullback_called_twice():
    model, expected = sharded(True), net()
    pulled = [functx.vjp(m, mine())[1] for m in (model, expected)]
    for cotangent in (mine(), 2 * mine()):
        ours, theirs = (pull(cotangent)[0] for pull in pulled)
        assert torch.allclose(ours, theirs)
    return True


def functions_of_dtensors():
    """Nothing calls the module: what is sharded is right to differentiate."""
    params, whole = detached(sharded(True)), detached(net())
    decay = lambda params: sum(p.pow(3).sum() for p in params.values())
    ours, expected = functx.grad(decay)(params), functx.grad(decay)(whole)
    assert all(torch.equal(full(ours[name]), expected[name]) for name in whole)
    x, spread = batch(), distribute_tensor(batch(), mesh(), [Shard(0)])
    twice = lambda x: functx.grad(lambda x: functx.grad(lambda x: x.sin().sum())(x).cos().sum())(x)
    return torch.allclose(full(twice(spread)), twice(x))


def reverse_over_reverse():
    one = lambda m: lambda x: m(x).square().mean()

    def by_torch(x):
        (g,) = torch.autograd.grad(one(model)(x), x, create_graph=True)
        return g.square().sum()

    def penalty():
        functx.grad(one(model))(mine()).square().sum().backward()

    def penalty_of_jvp():
        functx.jvp(functx.grad(one(model)), (mine(),), (mine(),))[1].sum().backward()

    squared = lambda x: functx.grad(one(model))(x).square().sum()
    by_torch_func = lambda x: torch.func.grad(one(model))(x).square().sum()
    for model in (sharded(True), shard(regions(net())), sharded(True, reshard_after_forward=False)):
        model(mine())
        for run in (
            lambda: functx.grad(squared)(mine()),
            lambda: functx.jacrev(functx.grad(one(model)))(mine()),
            lambda: functx.grad(by_torch)(mine()),
            lambda: functx.grad(by_torch_func)(mine()),
            lambda: torch.func.grad(squared)(mine()),
            lambda: functx.linearize(one(model), mine())[1](mine()),
            penalty,
            penalty_of_jvp,
        ):
            said = said_by(run)
            assert "functx.hessian" in said, said
        check_alive(model)
    return True


def traces_and_plans():
    x = mine()
    for ran in (False, True):
        model = sharded(ran)
        one = lambda x: model(x).square().mean()
        # (After a forward the parameters of the root are whole, plain tensors.)
        for run, kind in (
            (lambda: functx.jit(model, backend="aot_eager")(x), functx.TracingError),
            (lambda: functx.jit(one, backend="aot_eager")(x), functx.TracingError),
            (lambda: functx.jit(functx.grad(one), backend="aot_eager")(x), functx.TracingError),
            (lambda: functx.plan(model, x, budget=0.5), functx.RematError),
            (lambda: functx.plan(one, x, budget=0.5), functx.RematError),
            (lambda: functx.remat(one, budget=0.5)(x), functx.RematError),
            (lambda: functx.compat.crosscheck(one, x), NotImplementedError),
        ):
            check_refused(model, run, "before the module is sharded", kind=kind)
        run = lambda: functx.compat.to_jax(model)
        check_refused(model, run, "DTensor", "full_tensor", kind=NotImplementedError)
        check_alive(model)
    assert functx.memory.peak(model, x) > 0
    assert len(functx.saved_residuals(model, x)) > 0
    check_alive(model)
    return True


def jit_inside_fsdp():
    """A graph of each block has the parameters of this block as inputs, not those of all others."""
    model = net()
    for block in model:
        block.forward = functx.jit(block.forward, backend="aot_eager")
    model = shard(model)
    for _ in range(2):
        check_alive(model)
    return True


def fsdp1():
    for flat in (False, True):
        wrap = lambda: FullyShardedDataParallel(
            net(), device_id=torch.device("cpu"), use_orig_params=not flat
        )
        model = wrap()
        x = mine()
        expected = net()
        loss(expected, batch()).backward()
        for run in (
            lambda: functx.grad(by_parameters(model))(detached(model)),
            lambda: functx.grad(lambda x: model(x).sum())(x),
            lambda: functx.jvp(lambda x: model(x).sum(), (x,), (x,)),
            lambda: functx.vmap(lambda x: model(x[None]))(x),
            lambda: functx.functional_call(model, detached(model), (x,)),
            lambda: functx.plan(lambda x: model(x), x, budget=0.5),
        ):
            check_refused(model, run, "FullyShardedDataParallel")
        # (The parameters may be views of a flat one, which torch refuses as inputs of a graph.)
        check_refused(model, lambda: functx.jit(model, backend="aot_eager")(x))
        loss(model, x).backward()
        with FullyShardedDataParallel.summon_full_params(model, with_grads=not flat):
            assert flat or all(
                torch.allclose(p.grad, e.grad)
                for p, e in zip(model.parameters(), expected.parameters(), strict=True)
            )
    return True


def ddp_by_parameters():
    """Its hooks leave parameters alone: gradients are those of this process."""
    model, expected = DistributedDataParallel(net()), net()
    ours = functx.grad(by_parameters(model, functx.functional_call))(detached(model))
    theirs = functx.grad(by_parameters(expected))(detached(expected))
    assert all(torch.allclose(ours[f"module.{name}"], g) for name, g in theirs.items())
    check_alive(model)
    return True


def sequence_parallel(model):
    for block in model:
        up, down = ColwiseParallel(input_layouts=Shard(0)), RowwiseParallel(output_layouts=Shard(0))
        parallelize_module(block, mesh(), {"up": up, "down": down})
    return model


def replicated(model):
    """Parameters, and inputs that the backward does not redistribute."""
    enter = lambda module, x, m: DTensor.from_local(x[0], m, [Replicate()], run_check=False)
    return distribute_module(model, mesh(), None, enter, lambda module, out, m: out.full_tensor())


def second(model, x):
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
    return torch.autograd.grad(g.square().sum(), [x, *model.parameters()], allow_unused=True)


def second_derivatives_of_split_modules():
    x = batch()
    model = split(regions(net()))
    check_refused(model, lambda: second(model, x), "DTensor.from_local", "silently wrong")
    nested = split(nn.Sequential(*(functx.remat(functx.remat(block)) for block in net())))
    check_refused(nested, lambda: second(nested, x), "DTensor.from_local")
    # First derivatives stay, also where a graph of them is made that nobody differentiates.
    out = loss(model, x)
    given = torch.autograd.grad(out, [*model.parameters()], create_graph=True)
    expected = net()
    whole = torch.autograd.grad(loss(expected, x), [*expected.parameters()])
    assert all(torch.allclose(full(a), b) for a, b in zip(given, whole, strict=True))
    # What torch gets right is right in regions.
    by_torch, ours = second(replicated(net()), x), second(replicated(regions(net())), x)
    in_sequence = [second(sequence_parallel(m), mine()) for m in (net(), regions(net()))]
    assert all(torch.allclose(full(a), full(b)) for a, b in zip(*in_sequence, strict=True))
    return all(
        torch.allclose(full(a), full(b)) and torch.allclose(full(a), c)
        for a, b, c in zip(ours, by_torch, second(net(), x), strict=True)
        if a is not None
    )


def split_modules_under_transforms():
    model, x = split(net()), batch()
    for run in (
        lambda: functx.grad(by_parameters(model))(detached(model)),
        lambda: functx.grad(lambda x: model(x).sum())(x),
        lambda: functx.vjp(lambda x: model(x), x),
        lambda: per_sample.gram((model, criterion), chunk_size=1)(x),
    ):
        check_refused(model, run, "setup_context", "parallelize_module", ".backward()")
    assert "use_reentrant" not in said_by(lambda: functx.grad(lambda x: model(x).sum())(x))
    jitted = lambda: functx.jit(model, backend="aot_eager")(x)
    check_refused(model, jitted, kind=functx.TracingError)
    assert len(functx.saved_residuals(model, x)) > 0
    check_alive(model, x)
    return True


CASES = [
    derivatives_by_parameters_of_fsdp,
    derivatives_by_some_parameters_of_any_sharding,
    parameters_that_fsdp_ignores,
    private_names_of_torch,
    forward_mode_by_parameters,
    functional_call,
    by_inputs,
    a_pullback_called_twice,
    functions_of_dtensors,
    reverse_over_reverse,
    traces_and_plans,
    jit_inside_fsdp,
    fsdp1,
    ddp_by_parameters,
    second_derivatives_of_split_modules,
    split_modules_under_transforms,
]

if __name__ == "__main__":
    WAYS.update((case.__name__, case) for case in CASES)
    sys.exit(main())
