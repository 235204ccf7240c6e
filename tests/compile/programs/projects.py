"""Training loops and models as projects have them."""

import dataclasses
import functools
import random
import sys
import textwrap
import types

import torch
import torch.nn.functional as F
from torch import nn

import functx

from .collected import Programs, gradients, linear, values

PROGRAMS = Programs()
program, refused, in_eager = PROGRAMS.right, PROGRAMS.refused, PROGRAMS.in_eager


@program
def gan_step(jit):
    g, d = (linear(3, 3), linear(3, 1, start=2))
    og = torch.optim.SGD(g.parameters(), 0.1)
    od = torch.optim.SGD(d.parameters(), 0.1)
    dl = jit(lambda z, x: F.softplus(d(g(z).detach())).mean() + F.softplus(-d(x)).mean())
    gl = jit(lambda z: F.softplus(-d(g(z))).mean())
    r = []
    for i in range(3):
        z, x = (values(4, 3, start=i), values(4, 3, start=i + 9))
        od.zero_grad()
        items = dl(z, x)
        items.backward()
        od.step()
        r.append(items)
        og.zero_grad()
        d.zero_grad()
        items = gl(z)
        items.backward()
        og.step()
        r.append(items)
    return [*r, *g.parameters()]


@program
def gradient_penalty(jit):
    d = nn.Sequential(linear(3, 4), nn.Softplus(), linear(4, 1))

    def gp(x):
        x = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(d(x).sum(), x, create_graph=True)
        return ((g.norm(dim=1) - 1) ** 2).mean()

    f = jit(gp)
    r = []
    for i in range(2):
        d.zero_grad()
        items = f(values(4, 3, start=i))
        items.backward()
        r += [items] + [p.grad for p in d.parameters()]
    return r


@program
def frozen_backbone(jit):
    b, h = (linear(3, 3), linear(3, 2))
    for p in b.parameters():
        p.requires_grad_(False)
    f = jit(lambda x: h(b(x)))
    r = gradients(f(values(2, 3)), h.weight)
    for p in b.parameters():
        p.requires_grad_(True)
    r += gradients(f(values(2, 3)), h.weight, b.weight)
    return r


@program
def target_network(jit):
    q, t = (linear(), linear(start=3))

    @torch.no_grad()
    def target(x):
        return t(x).max(1).values

    f = jit(lambda x, y: ((q(x).max(1).values - target(y)) ** 2).mean())
    r = gradients(f(values(4, 3), values(4, 3, start=1)), q.weight)
    t.load_state_dict(q.state_dict())
    r += gradients(f(values(4, 3), values(4, 3, start=1)), q.weight)
    return r


@program
def replay_sampling(jit):

    class Buf:
        def __init__(self):
            self.data = torch.zeros(8, 3, dtype=torch.float64)
            self.pos = 0

        def add(self, x):
            self.data[self.pos] = x
            self.pos = (self.pos + 1) % 8

    b = Buf()
    f = jit(lambda i: b.data[i].sum(0))
    r = []
    for i in range(3):
        b.add(values(3, start=i))
        r.append(f(torch.tensor([0, 1])))
    return r


@in_eager("runs in eager, because it changes")
def replay_add_jitted(jit):

    class Buf:
        def __init__(self):
            self.data = torch.zeros(8, 3, dtype=torch.float64)
            self.pos = 0

        def add(self, x):
            self.data[self.pos] = x
            self.pos = (self.pos + 1) % 8
            return self.data.sum()

    b = Buf()
    f = jit(b.add)
    return [f(values(3, start=i)) for i in range(4)] + [b.data, b.pos]


@program
def noise_schedule(jit):

    class D:
        def __init__(self):
            self.betas = torch.linspace(0.1, 0.5, 5, dtype=torch.float64)
            self.alphas = (1 - self.betas).cumprod(0)

        def q(self, x, t):
            return (
                x * self.alphas[t].sqrt()[:, None]
                + torch.randn_like(x) * (1 - self.alphas[t]).sqrt()[:, None]
            )

    d = D()
    f = jit(d.q)
    r = [f(values(2, 3), torch.tensor([0, 1]))]
    d.alphas = d.alphas * 0.5
    r.append(f(values(2, 3), torch.tensor([2, 3])))
    return r


@program
def kwargs_only_dict(jit):
    f = jit(lambda **b: b["x"] * b["y"])
    return [
        f(x=values(3), y=values(3, start=1)),
        f(y=values(3, start=1), x=values(3)),
        f(x=values(3), y=2.0),
    ]


@program
def optional_mask(jit):

    def g(x, mask=None):
        return x if mask is None else x.masked_fill(mask, 0)

    f = jit(g)
    return [
        f(values(3)),
        f(values(3), values(3) > 0),
        f(values(3), mask=None),
        f(values(3), mask=values(3) < 0),
    ]


@program
def attention_cache_tuple(jit):

    def g(x, past):
        k = torch.cat([past[0], x]) if past else x
        return ((k * k).sum(0), (k,))

    f = jit(g)
    past = ()
    r = []
    for i in range(3):
        o, past = f(values(1, 3, start=i), past)
        r.append(o)
    return r


@program
def hidden_state_loop(jit):
    c = nn.GRUCell(3, 4).double()
    torch.manual_seed(1)
    with torch.no_grad():
        for p in c.parameters():
            p.copy_(values(*p.shape))
    f = jit(c)
    h = torch.zeros(2, 4, dtype=torch.float64)
    for i in range(3):
        h = f(values(2, 3, start=i), h)
    return [h, *gradients(h, c.weight_hh)]


@program
def truncated_bptt(jit):
    w = values(3, 3).requires_grad_()
    f = jit(lambda x, h: (x + h @ w).tanh())
    h = values(2, 3)
    r = []
    for i in range(4):
        h = f(values(2, 3, start=i), h)
        if i % 2:
            r += gradients(h, w)
            h = h.detach()
    return r


@program
def maml_inner(jit):
    w = values(3).requires_grad_()

    def inner(w, x):
        return (w * x).sin().sum()

    step = jit(lambda w, x: w - 0.1 * torch.autograd.grad(inner(w, x), w, create_graph=True)[0])
    w1 = step(step(w, values(3)), values(3, start=1))
    return [w1, *gradients(w1.sin(), w)]


@program
def lbfgs_closure(jit):
    w = nn.Parameter(values(3))
    f = jit(lambda: (w**2).sum())
    opt = torch.optim.LBFGS([w], max_iter=3)

    def closure():
        opt.zero_grad()
        items = f()
        items.backward()
        return items

    opt.step(closure)
    return [w]


@program
def scaler_like(jit):
    s = torch.tensor(2.0, dtype=torch.float64)
    w = values(3).requires_grad_()
    f = jit(lambda x: (x * w).sum() * s)
    r = gradients(f(values(3)), w)
    s.fill_(4.0)
    r += gradients(f(values(3)), w)
    return r


@program
def label_dict_lookup(jit):
    m = {"cat": 0, "dog": 1}
    f = jit(lambda x, n: x * (m[n] + 1))
    r = [f(values(3), "cat"), f(values(3), "dog")]
    m["cat"] = 7
    r.append(f(values(3), "cat"))
    return r


@program
def positional_table_grow(jit):

    class P(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("t", torch.arange(3.0, dtype=torch.float64), persistent=False)

        def forward(self, x):
            if len(x) > len(self.t):
                self.t = torch.arange(float(len(x)), dtype=torch.float64)
            return x + self.t[: len(x)]

    p = P()
    f = jit(p)
    r = [f(values(3)), f(values(2))]
    p(values(5))
    r.append(f(values(5)))
    return r


@program
def grad_hook_clip(jit):
    m = linear()
    for p in m.parameters():
        p.register_hook(lambda g: g.clamp(-0.1, 0.1))
    f = jit(lambda x: m(x).square().sum())
    r = []
    for i in range(2):
        m.zero_grad()
        f(values(4, 3, start=i)).backward()
        r += [p.grad.clone() for p in m.parameters()]
    return r


@program
def gradient_reversal(jit):

    class R(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, items):
            ctx.l = items
            return x.view_as(x)

        @staticmethod
        def backward(ctx, g):
            return (-ctx.l * g, None)

    m = linear()
    o = types.SimpleNamespace(l=0.5)
    f = jit(lambda x: R.apply(m(x), o.l))
    r = gradients(f(values(3)), m.weight)
    o.l = 2.0
    r += gradients(f(values(3)), m.weight)
    return r


@program
def straight_through(jit):
    f = jit(lambda x: x + (x.round() - x).detach())
    x = values(3).requires_grad_()
    return [f(x), *gradients(f(x) * values(3), x)]


@program
def gumbel(jit):
    f = jit(lambda x: F.gumbel_softmax(x, hard=True))
    x = values(2, 3).requires_grad_()
    o = f(x)
    return [o, *gradients(o * values(2, 3), x), f(x)]


@program
def reparam_sample(jit):
    mu, ls = (linear(), linear(start=2))
    f = jit(lambda x: mu(x) + ls(x).exp() * torch.randn(2, dtype=torch.float64))
    return gradients(f(values(3)), mu.weight, ls.weight) + gradients(f(values(3)), ls.weight)


@refused("is kept by")
def module_hook_features(jit):
    m = nn.Sequential(linear(3, 3), nn.Tanh())
    feats = {}
    m[0].register_forward_hook(lambda m, a, o: feats.__setitem__("f", o))
    f = jit(m)
    f(values(3))
    return [feats["f"]]


@refused("draws from Python's or NumPy's random")
def layerdrop(jit):
    ms = nn.ModuleList([linear(3, 3, start=i) for i in range(3)])

    def g(x):
        for m in ms:
            if ms.training and random.random() < 0.5:
                continue
            x = m(x)
        return x

    ms.train()
    f = jit(g)
    return [f(values(3)), f(values(3))]


@program
def stochastic_depth_torch(jit):

    def g(x):
        return x * (torch.rand(()) < 0.5)

    f = jit(g)
    return [f(values(3)) for _ in range(4)]


@program
def config_nested(jit):

    @dataclasses.dataclass
    class A:
        drop: float = 0.5
        names: list = dataclasses.field(default_factory=lambda: ["a"])

    @dataclasses.dataclass
    class B:
        a: A = dataclasses.field(default_factory=A)
        scale: float = 2.0

    class M(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.c = c

        def forward(self, x):
            return x * self.c.scale * len(self.c.a.names) + self.c.a.drop

    c = B()
    f = jit(M(c))
    r = [f(values(3))]
    c.a.drop = 0.1
    r.append(f(values(3)))
    c.a.names.append("b")
    r.append(f(values(3)))
    c.a = A(drop=0.9)
    r.append(f(values(3)))
    return r


@program
def strategy_pattern(jit):

    class S:
        def run(self, x):
            raise NotImplementedError

    class Sin(S):
        def run(self, x):
            return x.sin()

    class Scale(S):
        def __init__(self, k):
            self.k = k

        def run(self, x):
            return x * self.k

    class Ctx:
        def __init__(self, st):
            self.st = st

        def go(self, x):
            return self.st.run(x)

    c = Ctx(Sin())
    f = jit(c.go)
    r = [f(values(3))]
    c.st = Scale(2.0)
    r.append(f(values(3)))
    c.st.k = 3.0
    r.append(f(values(3)))
    c.st = Scale(3.0)
    r.append(f(values(3)))
    return r


@program
def mixin_class_flag(jit):

    class Mix:
        debug = False

    class M(Mix, nn.Module):
        def forward(self, x):
            return x * 2 if self.debug else x

    m = M()
    f = jit(m)
    r = [f(values(3))]
    Mix.debug = True
    r.append(f(values(3)))
    m.debug = False
    r.append(f(values(3)))
    return r


@program
def global_flags_module(jit):
    m = types.ModuleType("flags_xyz")
    m.FAST = False
    sys.modules["flags_xyz"] = m
    ns = {}
    source = """
        import flags_xyz
        from flags_xyz import FAST
        def f(x):
          return x*2 if flags_xyz.FAST else x*3
    """
    exec(textwrap.dedent(source), ns)
    f = jit(ns["f"])
    r = [f(values(3))]
    m.FAST = True
    r.append(f(values(3)))
    return r


@program
def import_inside(jit):
    m = types.ModuleType("lib_xyz")
    m.k = 2.0
    sys.modules["lib_xyz"] = m

    def g(x):
        import lib_xyz

        return x * lib_xyz.k

    f = jit(g)
    r = [f(values(3))]
    m.k = 3.0
    r.append(f(values(3)))
    return r


@program
def from_import_inside(jit):
    m = types.ModuleType("lib_xyw")
    m.k = 2.0
    sys.modules["lib_xyw"] = m

    def g(x):
        from lib_xyw import k

        return x * k

    f = jit(g)
    r = [f(values(3))]
    m.k = 3.0
    r.append(f(values(3)))
    return r


@program
def globals_call(jit):
    globals()["ZZ"] = 2.0
    f = jit(lambda x: x * globals()["ZZ"])
    r = [f(values(3))]
    globals()["ZZ"] = 3.0
    r.append(f(values(3)))
    return r


@program
def decorator_closure(jit):

    def scaled(k):

        def deco(fn):

            @functools.wraps(fn)
            def w(x):
                return fn(x) * w.k

            w.k = k
            return w

        return deco

    @scaled(2.0)
    def base(x):
        return x.sin()

    f = jit(base)
    r = [f(values(3))]
    base.k = 3.0
    r.append(f(values(3)))
    return r


@in_eager("runs in eager, because it changes")
def singledispatch_fn(jit):

    @functools.singledispatch
    def h(o, x):
        return x

    @h.register
    def _(o: int, x):
        return x * 2

    f = jit(lambda x: h(1, x))
    r = [f(values(3))]
    h.register(int, lambda o, x: x * 5)
    r.append(f(values(3)))
    return r


@program
def tensor_list_swap(jit):
    items = [values(3), values(3, start=5)]
    f = jit(lambda x: x * items[0] - items[1])
    r = [f(values(3))]
    items[0], items[1] = (items[1], items[0])
    r.append(f(values(3)))
    items.reverse()
    r.append(f(values(3)))
    return r


@program
def same_tensor_two_places(jit):
    o = types.SimpleNamespace(a=values(3).requires_grad_())
    o.b = o.a
    f = jit(lambda x: x * o.a + o.b.sin())
    r = gradients(f(values(3)), o.a)
    o.b = values(3, start=1).requires_grad_()
    r += gradients(f(values(3)), o.a, o.b)
    o.a = o.b
    r += gradients(f(values(3)), o.a)
    return r


@program
def buffer_alias_views(jit):
    b = torch.zeros(4, dtype=torch.float64)
    lo, hi = (b[:2], b[2:])
    f = jit(lambda x: (lo.add_(x), hi.mul_(0).add_(1), lo.sum() + hi.sum())[2])
    return [f(values(2)), f(values(2)), b]


@refused("writes to a tensor that it is given")
def read_base_write_view(jit):
    b = torch.zeros(4, dtype=torch.float64)
    lo = b[:2]
    f = jit(lambda x: (lo.add_(x), b.sum())[1])
    return [f(values(2)), b]


@program
def return_none_and_effect(jit):
    b = torch.zeros(3, dtype=torch.float64)
    f = jit(lambda x: b.copy_(x) and None if False else (b.copy_(x), None)[1])
    return [f(values(3)), b]


@program
def no_args(jit):
    w = values(3).requires_grad_()
    f = jit(lambda: w.sin())
    r = gradients(f(), w)
    with torch.no_grad():
        w.add_(1)
    return r + gradients(f(), w)


@program
def device_branch(jit):
    f = jit(lambda x: x * 2 if x.device.type == "cpu" else x)
    return [f(values(3))]


@program
def dtype_promote(jit):
    o = types.SimpleNamespace(k=2)
    f = jit(lambda x: x * o.k)
    r = [f(torch.arange(3))]
    o.k = 2.0
    r.append(f(torch.arange(3)))
    o.k = True
    r.append(f(torch.arange(3)))
    return r


@program
def multi_backward_accumulate(jit):
    m = linear()
    f = jit(lambda x: m(x).sum())
    a = f(values(3))
    b = f(values(3, start=1))
    (a + b).backward()
    c = f(values(3, start=2))
    c.backward()
    return [m.weight.grad]


@program
def grad_of_grad_module(jit):
    m = nn.Sequential(linear(3, 3), nn.Tanh(), linear(3, 1))
    f = jit(m)
    x = values(2, 3).requires_grad_()
    (g,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
    return gradients(g.square(), m[0].weight)


@program
def functx_grad_module_outer(jit):
    m = linear()
    f = jit(lambda x: m(x).square().sum())
    return [functx.grad(f)(values(3)), functx.grad(f)(values(3, start=1))]


@program
def value_and_grad_weights(jit):
    f = jit(functx.value_and_grad(lambda w, x: (w * x).sin().sum()))
    return [f(values(3), values(3, start=1)), f(values(3, start=2), values(3, start=1))]


@program
def per_sample(jit):
    w = values(3)
    f = jit(functx.vmap(functx.grad(lambda w, x: (w * x).sin().sum()), (None, 0)))
    return [f(w, values(4, 3)), f(w, values(2, 3))]


@program
def jit_of_remat_module(jit):
    m = functx.remat(linear())
    f = jit(m)
    r = gradients(f(values(3)), m.weight)
    with torch.no_grad():
        m.weight.mul_(2)
    return r + gradients(f(values(3)), m.weight)


@program
def apply_remat_after(jit):
    m = nn.Sequential(linear(3, 3), nn.Tanh())
    f = jit(m)
    r = gradients(f(values(3)), m[0].weight)
    functx.apply_remat(m, nn.Tanh)
    r += gradients(f(values(3)), m[0].weight)
    return r


@program
def checkpoint_name_policy(jit):
    w = values(3).requires_grad_()
    reg = functx.remat(
        lambda x: functx.checkpoint_name((x * w).sin(), "a").cos(),
        policy=functx.checkpoint_policies.save_only_these_names("a"),
    )
    f = jit(lambda x: reg(x))
    return gradients(f(values(3)), w) + gradients(f(values(3)), w)
