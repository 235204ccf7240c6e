"""Parts of models and of training, as papers have them."""

import dataclasses
import functools
import types
import weakref

import torch
import torch.nn.functional as F
from torch import nn

import functx

from .collected import Programs, gradients, linear, values

PROGRAMS = Programs()
program, refused, in_eager = PROGRAMS.right, PROGRAMS.refused, PROGRAMS.in_eager


@program
def moe_routing(jit):
    ex = nn.ModuleList([linear(3, 3, start=i) for i in range(2)])
    r_ = linear(3, 2, start=5)

    def g(x):
        p = r_(x).softmax(-1)
        w, i = p.topk(1)
        y = torch.stack([e(x) for e in ex], 1)
        return (y.gather(1, i[..., None].expand(-1, -1, 3)) * w[..., None]).squeeze(1)

    f = jit(g)
    return gradients(f(values(4, 3)), ex[0].weight, r_.weight) + gradients(
        f(values(4, 3, start=4)), ex[1].weight
    )


@program
def vq_ema(jit):
    cb = values(4, 3)
    n = torch.ones(4, dtype=torch.float64)

    def g(x):
        d = torch.cdist(x, cb)
        i = d.argmin(1)
        q = cb[i]
        with torch.no_grad():
            oh = F.one_hot(i, 4).double()
            n.mul_(0.9).add_(oh.sum(0), alpha=0.1)
            cb.lerp_(oh.T @ x / n[:, None], 0.1)
        return (x + (q - x).detach(), i)

    f = jit(g)
    r = [f(values(5, 3, start=i)) for i in range(3)]
    return [*r, cb, n]


@program
def ema_teacher_student(jit):
    s, t = (linear(), linear(start=2))

    def g(x):
        with torch.no_grad():
            for a, b in zip(t.parameters(), s.parameters()):
                a.mul_(0.9).add_(b, alpha=0.1)
            y = t(x)
        return F.mse_loss(s(x), y)

    f = jit(g)
    r = []
    for i in range(3):
        s.zero_grad()
        items = f(values(4, 3, start=i))
        items.backward()
        r += [items, s.weight.grad.clone()]
        with torch.no_grad():
            s.weight.sub_(s.weight.grad)
    return [*r, *t.parameters()]


@program
def lora(jit):

    class L(nn.Module):
        def __init__(self, b):
            super().__init__()
            self.b = b
            self.a = nn.Parameter(values(1, 3))
            self.c = nn.Parameter(values(2, 1))
            self.scale = 0.5
            self.merged = False

        def forward(self, x):
            return self.b(x) if self.merged else self.b(x) + x @ self.a.T @ self.c.T * self.scale

    b = linear()
    for p in b.parameters():
        p.requires_grad_(False)
    m = L(b)
    f = jit(m)
    r = gradients(f(values(3)), m.a, m.c)
    m.scale = 1.0
    r += gradients(f(values(3)), m.a)
    m.merged = True
    r.append(f(values(3)))
    return r


@program
def sam_two_step(jit):
    m = linear()
    f = jit(lambda x: m(x).square().sum())
    m.zero_grad()
    f(values(4, 3)).backward()
    with torch.no_grad():
        e = [p.grad * 0.1 for p in m.parameters()]
        for p, d in zip(m.parameters(), e):
            p.add_(d)
    m.zero_grad()
    f(values(4, 3)).backward()
    with torch.no_grad():
        for p, d in zip(m.parameters(), e):
            p.sub_(d)
    return [p.grad for p in m.parameters()] + [*m.parameters()]


@program
def grad_accum_no_sync(jit):
    m = linear()
    f = jit(lambda x: m(x).square().mean())
    for i in range(3):
        (f(values(2, 3, start=i)) / 3).backward()
    nn.utils.clip_grad_norm_(m.parameters(), 0.5)
    return [p.grad for p in m.parameters()]


@program
def hvp_functx(jit):
    m = linear(3, 1)
    f = jit(
        lambda w, v: functx.jvp(functx.grad(lambda w: (w @ m.weight[0]).sin().sum()), (w,), (v,))[1]
    )
    r = [f(values(2, 3), values(2, 3, start=1))]
    with torch.no_grad():
        m.weight.mul_(2)
    r.append(f(values(2, 3), values(2, 3, start=1)))
    return [t.detach() for t in r]


@program
def ntk(jit):
    m = linear(3, 1)
    P = {k: v.detach() for k, v in m.named_parameters()}
    f = jit(
        lambda p, x: functx.vmap(
            functx.jacrev(lambda p, x: torch.func.functional_call(m, p, (x[None],))[0]), (None, 0)
        )(p, x)
    )
    return [f(P, values(2, 3)), f({k: v * 2 for k, v in P.items()}, values(2, 3))]


@program
def deq_fixed_point(jit):
    w = (values(3, 3) / 4).requires_grad_()

    def g(x):
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(5):
                z = torch.tanh(z @ w + x)
        return torch.tanh(z @ w + x)

    f = jit(g)
    return gradients(f(values(2, 3)), w) + gradients(f(values(2, 3, start=1)), w)


@program
def ode_rk4(jit):
    w = (values(3, 3) / 4).requires_grad_()
    o = types.SimpleNamespace(h=0.1, n=3)

    def step(y):
        k1 = (y @ w).tanh()
        k2 = ((y + o.h * k1 / 2) @ w).tanh()
        return y + o.h * k2

    def g(y):
        for _ in range(o.n):
            y = step(y)
        return y

    f = jit(g)
    r = gradients(f(values(2, 3)), w)
    o.h = 0.2
    r += gradients(f(values(2, 3)), w)
    o.n = 2
    r += gradients(f(values(2, 3)), w)
    return r


@program
def beam_state(jit):

    @dataclasses.dataclass
    class S:
        h: torch.Tensor
        n: int

    from torch.utils._pytree import register_dataclass

    register_dataclass(S)
    f = jit(lambda s, x: S(s.h * x, s.n + 1))
    s = S(values(3), 0)
    for i in range(3):
        s = f(s, values(3, start=i))
    return [s.h, s.n]


@program
def curriculum_epoch(jit):
    tr = types.SimpleNamespace(epoch=0, model=linear())
    f = jit(lambda x: tr.model(x) * (1 if tr.epoch < 2 else 2))
    r = []
    for e in range(4):
        tr.epoch = e
        r.append(f(values(3)))
    return r


@program
def early_exit_layers(jit):
    ms = [linear(3, 3, start=i) for i in range(3)]
    cfg = {"depth": 3}

    def g(x):
        for i, m in enumerate(ms):
            if i == cfg["depth"]:
                break
            x = m(x).tanh()
        return x

    f = jit(g)
    r = [f(values(3))]
    cfg["depth"] = 1
    r.append(f(values(3)))
    cfg["depth"] = 3
    r.append(f(values(3)))
    return r


@program
def mask_cache_by_size(jit):
    cache = {}

    def mask(n):
        if n not in cache:
            cache[n] = torch.ones(n, n, dtype=torch.float64).tril()
        return cache[n]

    mask(3)
    f = jit(lambda x: mask(x.shape[0]) @ x)
    return [f(values(3, 2)), f(values(3, 2, start=1)), cache[3]]


@program
def rope_cache_attr(jit):

    class R(nn.Module):
        def __init__(self):
            super().__init__()
            self.cos = None
            self.n = 0

        def forward(self, x):
            if self.cos is None or len(x) > self.n:
                self.n = len(x)
                self.cos = torch.arange(float(self.n), dtype=torch.float64).cos()
            return x * self.cos[: len(x)]

    r = R()
    r(values(5))
    f = jit(r)
    return [f(values(5)), f(values(3)), r.n]


@program
def loss_dict_logging(jit):
    m = linear()

    def g(x):
        a = m(x).square().mean()
        b = m(x).abs().mean()
        return {"loss": a + b, "a": a.detach(), "b": b.detach()}

    f = jit(g)
    r = []
    for i in range(2):
        o = f(values(2, 3, start=i))
        r += [o, *gradients(o["loss"], m.weight)]
    return r


@program
def tuple_state_rnn(jit):
    c = nn.LSTMCell(3, 4).double()
    with torch.no_grad():
        for p in c.parameters():
            p.copy_(values(*p.shape))
    f = jit(lambda x, hc: c(x, hc))
    hc = (torch.zeros(2, 4, dtype=torch.float64),) * 2
    for i in range(3):
        hc = f(values(2, 3, start=i), hc)
    return list(hc) + gradients(hc[0], c.weight_ih)


@program
def sharded_list_args(jit):
    f = jit(lambda xs: [x * i for i, x in enumerate(xs)])
    return [f([values(2), values(3)]), f([values(2)]), f([values(2), values(3), values(1)])]


@program
def int_indexing_state(jit):
    o = types.SimpleNamespace(i=0, t=values(4, 3))
    f = jit(lambda x: x * o.t[o.i])
    r = []
    for i in (0, 2, 1, 2):
        o.i = i
        r.append(f(values(3)))
    return r


@program
def conv_bn_fuse(jit):
    c, b = (nn.Conv1d(2, 2, 1).double(), nn.BatchNorm1d(2).double())
    m = nn.Sequential(c, b).eval()
    with torch.no_grad():
        for p in m.parameters():
            p.copy_(values(*p.shape))
    f = jit(m)
    r = [f(values(1, 2, 3))]
    b.running_mean.add_(1)
    r.append(f(values(1, 2, 3)))
    m[1] = nn.Identity()
    r.append(f(values(1, 2, 3)))
    m.train()
    r.append(f(values(1, 2, 3)))
    return r


@program
def embedding_tied(jit):
    e = nn.Embedding(4, 3).double()
    h = nn.Linear(3, 4, bias=False).double()
    with torch.no_grad():
        e.weight.copy_(values(4, 3))
    h.weight = e.weight
    f = jit(lambda i: h(e(i)))
    return gradients(f(torch.tensor([0, 2])), e.weight) + gradients(
        f(torch.tensor([1, 1, 3])), e.weight
    )


@program
def cross_entropy_weights(jit):
    o = types.SimpleNamespace(w=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), ls=0.0)
    f = jit(lambda x, y: F.cross_entropy(x, y, weight=o.w, label_smoothing=o.ls))
    y = torch.tensor([0, 2])
    r = [f(values(2, 3), y)]
    o.w = o.w * 2 + 1
    r.append(f(values(2, 3), y))
    o.ls = 0.1
    r.append(f(values(2, 3), y))
    return r


@program
def set_grad_enabled_flag(jit):
    w = values(3).requires_grad_()
    o = types.SimpleNamespace(train=True)

    def g(x):
        with torch.set_grad_enabled(o.train):
            return x * w

    f = jit(g)
    r = [f(values(3)).requires_grad]
    o.train = False
    r.append(f(values(3)).requires_grad)
    return r


@program
def multi_device_context(jit):
    f = jit(lambda x: x + torch.ones(3))
    r = [f(torch.ones(3))]
    with torch.device("cpu"):
        r.append(f(torch.ones(3)))
    return r


@program
def callbacks_list(jit):
    cbs = []
    f = jit(lambda x: functools.reduce(lambda y, c: c(y), cbs, x))
    r = [f(values(3))]
    cbs.append(torch.sin)
    r.append(f(values(3)))
    cbs.append(lambda y: y * 2)
    r.append(f(values(3)))
    cbs.pop(0)
    r.append(f(values(3)))
    return r


@program
def weak_model_registry(jit):
    reg = weakref.WeakValueDictionary()
    m = linear()
    reg["m"] = m
    f = jit(lambda x: reg["m"](x))
    r = [f(values(3))]
    m2 = linear(start=4)
    reg["m"] = m2
    r.append(f(values(3)))
    return r


@in_eager("runs in eager, because it changes")
def property_setter_effect(jit):

    class A:
        def __init__(self):
            self._k = 1.0
            self.log = []

        @property
        def k(self):
            self.log.append(1)
            return self._k

    a = A()
    f = jit(lambda x: x * a.k)
    return [f(values(3)), f(values(3)), len(a.log)]


@program
def slice_assign_range(jit):
    b = torch.zeros(6, dtype=torch.float64)
    o = types.SimpleNamespace(p=0)

    def g(x):
        b[o.p : o.p + 2] = x
        return b.sum()

    f = jit(g)
    r = []
    for i in range(3):
        r.append(f(values(2, start=i)))
        o.p += 2
    return [*r, b]


@program
def detach_clone_snapshot(jit):
    m = linear()
    f = jit(lambda: {k: v.detach().clone() for k, v in m.named_parameters()})
    a = f()
    with torch.no_grad():
        m.weight.add_(1)
    b = f()
    return [a, b]


@program
def params_as_list_arg(jit):
    m = linear()
    f = jit(lambda ps, x: F.linear(x, *ps).sum())
    ps = [*m.parameters()]
    return gradients(f(ps, values(3)), *ps) + gradients(f([p * 2 for p in ps], values(3)), *ps)


@program
def foreach_ops(jit):
    ps = [values(3).requires_grad_(), values(2).requires_grad_()]
    f = jit(lambda: sum(t.sum() for t in torch._foreach_mul(ps, 2.0)))
    return gradients(f(), *ps)


@program
def einsum_captured(jit):
    w = values(3, 2).requires_grad_()
    f = jit(lambda x: torch.einsum("bi,ij->bj", x, w))
    return gradients(f(values(4, 3)), w) + gradients(f(values(2, 3)), w)


@program
def checkpoint_sequential_functx(jit):
    m = nn.Sequential(linear(3, 3), nn.Tanh(), linear(3, 3, start=2), nn.Tanh())
    f = jit(lambda x: functx.checkpoint_sequential(m, 2, x))
    return gradients(f(values(2, 3)), m[0].weight) + gradients(f(values(2, 3)), m[2].weight)


@program
def remat_scan(jit):
    w = values(3, 3).requires_grad_()
    reg = functx.remat(lambda x: (x @ w).tanh())

    def g(x):
        for _ in range(3):
            x = reg(x)
        return x

    f = jit(g)
    return gradients(f(values(2, 3)), w) + gradients(f(values(2, 3, start=1)), w)


@program
def replaced_before_second_derivative(jit):
    o = types.SimpleNamespace(w=values(3))
    f = jit(lambda x: (x * o.w).sin().sum())
    x = values(3).requires_grad_()
    (g,) = torch.autograd.grad(f(x), x, create_graph=True)
    o.w = values(3, start=5)
    return gradients(g.sin(), x)


@program
def untouched_before_second_derivative(jit):
    o = types.SimpleNamespace(w=values(3), k=1.0, n=0)
    f = jit(lambda x: (x * o.w * o.k).sin().sum())
    x = values(3).requires_grad_()
    (g,) = torch.autograd.grad(f(x), x, create_graph=True)
    o.n = 5
    o.k = float("1")
    return gradients(g.sin(), x)
