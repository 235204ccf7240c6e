"""Training loops of ordinary programs: every bit of what is trained is as without remat."""

import copy
import io
import pickle

import pytest
import torch
from programs import identity
from references import assert_same
from torch import nn
from torch.nn.functional import cross_entropy, gelu, pad
from torch.optim import swa_utils
from torch.utils.data import DataLoader, Dataset

import functx


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(8), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.dropout(self.down(gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, remat):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([remat(Block()) for _ in range(2)])
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batches(n=4):
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(6, 8, generator=g), torch.arange(6) % 4) for _ in range(n)]


def scaled(remat):
    net = Net(remat)
    optimizer, scaler = torch.optim.SGD(net.parameters(), 0.1), torch.amp.GradScaler("cpu")
    for x, y in batches():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return net.state_dict(), scaler.get_scale()


def accumulated(remat):
    net = Net(remat)
    optimizer = torch.optim.AdamW(net.parameters(), 0.1, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2)
    for i, (x, y) in enumerate(batches()):
        (cross_entropy(net(x), y) / 2).backward()
        if i % 2:
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return net.state_dict()


def with_a_closure(remat):
    net, (x, y) = Net(remat).eval(), batches()[0]
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=4, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = cross_entropy(net(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    return net.state_dict()


def averaged(remat):
    net = Net(remat)
    average = swa_utils.AveragedModel(net, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for x, y in batches():
        cross_entropy(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(net)
    swa_utils.update_bn([x for x, _ in batches()], average)
    return average.state_dict(), average.eval()(batches()[0][0])


def steps_in_hooks(remat):
    net = Net(remat)
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in net.parameters()}

    def step(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(step)
    for x, y in batches():
        cross_entropy(net(x), y).backward()
    return net.state_dict()


def sharpness_aware(remat):
    net = Net(remat)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for x, y in batches():
        cross_entropy(net(x), y).backward()
        ascents = [p.grad * 0.05 for p in net.parameters()]
        torch._foreach_add_([p.data for p in net.parameters()], ascents)
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        torch._foreach_sub_([p.data for p in net.parameters()], ascents)
        optimizer.step()
        optimizer.zero_grad()
    return net.state_dict()


def two_networks(remat):
    """Each step differentiates one through the other, which is frozen meanwhile."""
    made, judge = Net(remat), Net(remat)
    of_made, of_judge = (torch.optim.Adam(n.parameters(), 0.01) for n in (made, judge))
    for x, _ in batches():
        fake = pad(made(x), (0, 4))
        of_judge.zero_grad()
        (judge(x).mean() - judge(fake.detach()).mean()).backward()
        of_judge.step()
        judge.requires_grad_(False)
        of_made.zero_grad()
        judge(fake).mean().backward()
        of_made.step()
        judge.requires_grad_(True)
    return made.state_dict(), judge.state_dict()


def copied_and_saved(remat):
    net, (x, y) = copy.deepcopy(Net(remat)), batches()[0]
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    net = pickle.loads(pickle.dumps(torch.load(file, weights_only=False)))
    torch.manual_seed(3)
    cross_entropy(net(x), y).backward()
    return net.state_dict(), [p.grad for p in net.parameters()]


def ensemble(remat):
    nets, (x, y) = [Net(remat).eval() for _ in range(3)], batches()[0]
    params, buffers = torch.func.stack_module_state(nets)
    base = copy.deepcopy(nets[0]).to("meta")

    def loss(params, buffers):
        return cross_entropy(torch.func.functional_call(base, (params, buffers), (x,)), y)

    functx.vmap(loss)(params, buffers).sum().backward()
    gradients = functx.vmap(functx.grad(loss))(params, buffers)
    return gradients, {name: p.grad for name, p in params.items()}


def generates(remat):
    torch.manual_seed(0)
    project = nn.Linear(8, 24)

    def attend(x, cache):
        q, k, v = project(x).chunk(3, -1)
        if cache:
            k, v = torch.cat([cache["k"], k], 1), torch.cat([cache["v"], v], 1)
        cache["k"], cache["v"] = k, v
        return nn.functional.scaled_dot_product_attention(q, k, v)

    region, found = remat(attend), []
    for mode in (torch.no_grad, torch.inference_mode):
        x, cache = torch.ones(2, 1, 8), {}
        with mode():
            for _ in range(4):
                x = region(x, cache).sin()
        found += [x.clone(), cache["k"].clone()]
    region(torch.ones(2, 3, 8), {}).sum().backward()
    return found, [p.grad for p in project.parameters()]


class Gradients(Dataset):
    """Differentiates a region in the process that loads an example."""

    def __init__(self, remat):
        self.w = torch.ones(8, requires_grad=True)
        self.f = remat(lambda x: (x.sin() * self.w).cos())

    def __len__(self):
        return 12

    def __getitem__(self, i):
        x = torch.full((8,), float(i), requires_grad=True)
        self.f(x).sum().backward()
        return x.grad.detach().clone(), i % 4


def loaded_by_workers(remat):
    net, (x, y) = Net(remat), batches()[0]
    waiting = cross_entropy(net(x), y)  # a region is alive when they are forked
    loader = DataLoader(Gradients(remat), 6, num_workers=1, multiprocessing_context="fork")
    loaded = [*loader]
    for x, y in loaded:
        cross_entropy(net(x), y).backward()
    waiting.backward()
    return loaded, [p.grad for p in net.parameters()]


@pytest.mark.parametrize(
    "program",
    [
        scaled,
        accumulated,
        with_a_closure,
        averaged,
        steps_in_hooks,
        sharpness_aware,
        two_networks,
        copied_and_saved,
        ensemble,
        generates,
        loaded_by_workers,
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_training(program):
    expected, before = program(identity), torch.get_rng_state()
    assert_same(program(functx.remat), expected)
    assert torch.equal(torch.get_rng_state(), before)
