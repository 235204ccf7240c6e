"""What the code of users does, of all kinds."""

import argparse
import collections
import contextlib
import copy
import functools
import math
import threading
import types
import warnings as W

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import functx

from .collected import Programs, gradients, linear, values

PROGRAMS = Programs()
program, refused, in_eager = PROGRAMS.right, PROGRAMS.refused, PROGRAMS.in_eager


@program
def ema_foreach(jit):
    a, b = (linear(), linear(start=2))

    @torch.no_grad()
    def step(d):
        torch._foreach_lerp_([*a.parameters()], [*b.parameters()], 1 - d)

    f = jit(step)
    f(0.9)
    f(0.9)
    return [*a.state_dict().values()]


@program
def ema_loop(jit):
    a, b = (linear(), linear(start=2))

    def step():
        with torch.no_grad():
            for p, q in zip(a.parameters(), b.parameters()):
                p.mul_(0.9).add_(q, alpha=0.1)

    f = jit(step)
    f()
    f()
    return [*a.state_dict().values()]


@program
def data_clamp(jit):
    m = nn.Module()
    m.t = nn.Parameter(values(3) * 9)

    def g(x):
        m.t.data.clamp_(-1, 1)
        return x * m.t

    f = jit(g)
    o = f(values(3))
    return [o, m.t, *gradients(f(values(3)), m.t)]


@program
def kv_static(jit):

    class C(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("k", torch.zeros(5, 3, dtype=torch.float64))

        def forward(self, x, pos):
            self.k.index_copy_(0, pos, x)
            return (self.k * self.k).sum(0)

    c = C()
    f = jit(c)
    r = [f(values(1, 3, start=i), torch.tensor([i])) for i in range(3)]
    return [*r, c.k]


@program
def rnn_hidden(jit):

    class R(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = linear(3, 3)
            self.register_buffer("h", torch.zeros(3, dtype=torch.float64))

        def forward(self, x):
            h = (self.l(x) + self.h).tanh()
            self.h.copy_(h.detach())
            return h

    m = R()
    f = jit(m)
    return [f(values(3, start=i)) for i in range(3)] + [m.h]


@program
def setitem_buffer(jit):
    b = torch.zeros(4, 3, dtype=torch.float64)

    def g(x, i):
        b[i] = x
        return b.sum(0)

    f = jit(g)
    return [f(values(3, start=i), i) for i in range(3)] + [b]


@program
def out_argument(jit):
    b = torch.zeros(3, dtype=torch.float64)
    f = jit(lambda x: torch.add(x, 1, out=b).sum())
    return [f(values(3)), b, f(values(3, start=1)), b]


@program
def spectral(jit):
    m = nn.utils.parametrizations.spectral_norm(linear())
    torch.manual_seed(1)
    f = jit(m)
    r = [f(values(3)) for _ in range(3)]
    m.eval()
    r.append(f(values(3)))
    return r


@program
def weightnorm(jit):
    m = nn.utils.parametrizations.weight_norm(linear())
    f = jit(m)
    r = [f(values(3))]
    with torch.no_grad():
        m.parametrizations.weight.original0.mul_(2)
    r.append(f(values(3)))
    return r


@program
def parametrize_added(jit):
    m = linear()
    f = jit(m)
    r = [f(values(3))]

    class P(nn.Module):
        def forward(self, w):
            return w * 2

    nn.utils.parametrize.register_parametrization(m, "weight", P())
    r.append(f(values(3)))
    nn.utils.parametrize.remove_parametrizations(m, "weight")
    r.append(f(values(3)))
    return r


@program
def optimizer_lr(jit):
    w = nn.Parameter(values(3))
    opt = torch.optim.SGD([w], lr=0.1)
    f = jit(lambda x: x * opt.param_groups[0]["lr"])
    r = [f(values(3))]
    opt.param_groups[0]["lr"] = 0.2
    r.append(f(values(3)))
    return r


@program
def namespace_cfg(jit):
    a = argparse.Namespace(k=2.0, mode="a")
    f = jit(lambda x: x * a.k if a.mode == "a" else -x)
    r = [f(values(3))]
    a.k = 3.0
    r.append(f(values(3)))
    a.mode = "b"
    r.append(f(values(3)))
    return r


@program
def registry(jit):
    R = {"sin": torch.sin, "cos": torch.cos}
    n = ["sin"]
    f = jit(lambda x: R[n[0]](x))
    r = [f(values(3))]
    n[0] = "cos"
    r.append(f(values(3)))
    R["cos"] = lambda x: x * 5
    r.append(f(values(3)))
    return r


@program
def act_swap(jit):

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = F.relu

        def forward(self, x):
            return self.act(x)

    m = M()
    f = jit(m)
    r = [f(values(5))]
    m.act = torch.tanh
    r.append(f(values(5)))
    m.act = functools.partial(F.leaky_relu, negative_slope=0.5)
    r.append(f(values(5)))
    m.act = functools.partial(F.leaky_relu, negative_slope=0.7)
    r.append(f(values(5)))
    return r


@program
def default_tensor(jit):

    def g(x, w=values(3)):
        return x * w

    f = jit(g)
    r = [f(values(3))]
    g.__defaults__[0].mul_(2)
    r.append(f(values(3)))
    r.append(f(values(3), values(3, start=5)))
    return r


@program
def tuple_keyed(jit):
    d = {(0, 1): values(3), (1, 0): 2.0}
    f = jit(lambda x: x * d[0, 1] * d[1, 0])
    r = [f(values(3))]
    d[1, 0] = 3.0
    r.append(f(values(3)))
    d[0, 1] = values(3, start=1)
    r.append(f(values(3)))
    return r


@program
def containers_modules(jit):
    m = nn.Module()
    m.d = nn.ModuleDict({"a": linear()})
    m.p = nn.ParameterList([nn.Parameter(values(2))])
    m.q = nn.ParameterDict({"z": nn.Parameter(values(2, start=1))})
    f = jit(lambda x: m.d["a"](x) * m.p[0] + m.q["z"])
    r = gradients(f(values(3)), m.p[0], m.q["z"])
    m.p[0] = nn.Parameter(values(2, start=4))
    r += gradients(f(values(3)), m.p[0])
    m.d["a"] = nn.Sequential(linear(start=3))
    r.append(f(values(3)))
    return r


@program
def pre_hook(jit):
    m = linear()
    f = jit(m)
    r = [f(values(3))]
    k = [2.0]
    h = m.register_forward_pre_hook(lambda m, a: (a[0] * k[0],))
    r.append(f(values(3)))
    k[0] = 3.0
    r.append(f(values(3)))
    h.remove()
    r.append(f(values(3)))
    return r


@program
def kwargs_hook(jit):

    class M(nn.Module):
        def forward(self, x, k=1.0):
            return x * k

    m = M()
    f = jit(lambda x: m(x, k=2.0))
    r = [f(values(3))]
    h = m.register_forward_pre_hook(lambda m, a, kw: (a, {"k": kw["k"] + 1}), with_kwargs=True)
    r.append(f(values(3)))
    h.remove()
    r.append(f(values(3)))
    return r


@program
def full_backward_hook(jit):
    m = linear()
    net = nn.Sequential(m)
    m.register_full_backward_hook(
        lambda m, gi, go: tuple(g * 2 if g is not None else g for g in gi)
    )
    f = jit(net)
    x = values(3).requires_grad_()
    return gradients(f(x), x) + gradients(f(x), x)


@refused("is kept by")
def full_backward_hook_logs(jit):
    m = linear()
    net = nn.Sequential(m)
    log = []
    m.register_full_backward_hook(lambda m, gi, go: log.append(go[0].sum().detach()))
    f = jit(net)
    x = values(3).requires_grad_()
    gradients(f(x), x)
    gradients(f(x), x)
    return log


@program
def int_bool(jit):
    f = jit(lambda x, k: x * k if k is True else x + k)
    return [f(values(3), 1), f(values(3), True), f(values(3), 1.0), f(values(3), 1)]


@program
def signed_zero(jit):
    f = jit(lambda x, k: x / k)
    return [f(values(3), 0.0), f(values(3), -0.0)]


@program
def nan_arg(jit):
    f = jit(lambda x, k: x * 2 if k != k else x)
    return [f(values(3), math.nan), f(values(3), math.nan), f(values(3), 1.0)]


@program
def str_arg(jit):
    f = jit(lambda x, m: getattr(torch, m)(x))
    return [f(values(3), "sin"), f(values(3), "cos"), f(values(3), "sin")]


@program
def numpy_args(jit):
    f = jit(lambda x, a: x * torch.as_tensor(a))
    a = np.ones(3)
    r = [f(values(3), a)]
    a[0] = 4
    r.append(f(values(3), a))
    r.append(f(values(3), np.full(3, 2.0)))
    return r


@program
def numpy_scalar(jit):
    f = jit(lambda x, a: x * float(a))
    return [f(values(3), np.float64(2)), f(values(3), np.float64(3)), f(values(3), np.float32(3))]


@program
def returns_shapes(jit):
    f = jit(lambda x: (x.shape, len(x), x.dtype, x.sum(), "a", None, (1, 2.0)))
    return [str(f(values(3))), str(f(values(4)))]


@program
def raises(jit):

    def g(x):
        if x.shape[0] == 3:
            raise ValueError("three")
        return x

    f = jit(g)
    r = [f(values(4))]
    for _ in range(2):
        try:
            f(values(3))
        except ValueError as e:
            r.append(str(e))
    return r


@program
def raises_after_effect(jit):
    o = types.SimpleNamespace(n=0)

    def g(x):
        o.n += 1
        raise ValueError

    f = jit(g)
    for _ in range(2):
        with contextlib.suppress(ValueError):
            f(values(3))
    return [o.n]


@program
def flag_restored(jit):
    o = types.SimpleNamespace(fast=False)

    def inner(x):
        return x * 2 if o.fast else x * 3

    def g(x):
        o.fast = True
        try:
            return inner(x)
        finally:
            o.fast = False

    f = jit(g)
    return [f(values(3)), inner(values(3)), f(values(3)), o.fast]


@program
def context_flag(jit):

    class Ctx:
        on = False

        def __enter__(self):
            Ctx.on = True

        def __exit__(self, *a):
            Ctx.on = False

    def g(x):
        with Ctx():
            return x * 2 if Ctx.on else x

    f = jit(g)
    return [f(values(3)), Ctx.on, f(values(3))]


@program
def generator_fn(jit):
    ks = [1.0, 2.0]

    def gen(x):
        for k in ks:
            yield (x * k)

    f = jit(lambda x: sum(gen(x)))
    r = [f(values(3))]
    ks.append(5.0)
    r.append(f(values(3)))
    return r


@program
def recursion(jit):
    o = types.SimpleNamespace(n=3)

    def g(x, n):
        return x if n == 0 else g(x.sin() * o.n, n - 1)

    f = jit(lambda x: g(x, o.n))
    r = [f(values(3))]
    o.n = 2
    r.append(f(values(3)))
    return r


@program
def default_cache(jit):

    def g(x, cache={}):
        if "k" not in cache:
            cache["k"] = 2.0
        return x * cache["k"]

    f = jit(lambda x: g(x))
    return [f(values(3)), f(values(3)), f(values(3))]


@program
def warn_inside(jit):

    def g(x):
        W.warn("hey")
        return x.sin()

    return [jit(g)(values(3))]


@program
def list_arg_inplace(jit):
    f = jit(lambda items: (items[0].add_(1), items[1].mul_(2), items[0] + items[1])[2])
    a, b = (values(3), values(3, start=1))
    return [f([a, b]), a, b, f([a, b]), a]


@refused("changes an argument")
def dict_arg_mutated(jit):

    def g(d):
        d["y"] = d["x"] * 2
        return d["y"]

    d = {"x": values(3)}
    f = jit(g)
    return [f(d), sorted(d)]


@program
def dict_arg_returned(jit):

    def g(d):
        d["y"] = d["x"] * 2
        return d

    d = {"x": values(3)}
    o = jit(g)(d)
    return [o]


@program
def zero_size(jit):
    f = jit(lambda x: (x.sum(), x * 2))
    return [
        f(values(3)),
        f(torch.zeros(0, dtype=torch.float64)),
        f(torch.zeros(0, 3, dtype=torch.float64)),
    ]


@program
def zero_dim(jit):
    f = jit(lambda x, k: x * k)
    return [
        f(values(3), torch.tensor(2.0)),
        f(values(3), 2.0),
        f(values(3), torch.tensor(2.0, dtype=torch.float64)),
    ]


@program
def int_tensor(jit):
    f = jit(lambda x: x + 1)
    return [f(torch.arange(3)), f(torch.arange(3.0)), f(torch.tensor([True, False]))]


@program
def sparse_arg(jit):
    f = jit(lambda s, x: torch.sparse.mm(s, x))
    s = torch.eye(3).to_sparse()
    return [f(s, torch.ones(3, 2)), f(s, torch.ones(3, 2))]


@program
def expanded_arg(jit):
    f = jit(lambda x: x.sum(0))
    return [f(values(1, 3).expand(4, 3)), f(values(4, 3))]


@program
def two_views_read(jit):
    f = jit(lambda a, b: a * b)
    x = values(6)
    return [f(x[:3], x[3:]), f(x[:3], x[1:4]), f(x[3:], x[:3])]


@refused("writes to a tensor that it is given")
def two_views_write(jit):
    f = jit(lambda a, b: (a.add_(1), b.sum())[1])
    x = values(6)
    return [f(x[:3], x[3:]), x, f(x[:3], x[1:4]), x]


@program
def dtype_change(jit):
    m = linear()
    f = jit(m)
    r = [f(values(3))]
    m.float()
    r.append(f(values(3).float()))
    m.double()
    r.append(f(values(3)))
    return [t.double().float() for t in r]


@program
def load_state(jit):
    m = linear()
    f = jit(m)
    r = [f(values(3))]
    m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()})
    r.append(f(values(3)))
    m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}, assign=True)
    r.append(f(values(3)))
    r += gradients(f(values(3)), m.weight)
    return r


@program
def data_outside(jit):
    w = values(3).requires_grad_()
    f = jit(lambda x: x * w)
    r = [f(values(3))]
    w.data = values(3, start=7)
    r.append(f(values(3)))
    r += gradients(f(values(3)), w)
    w.data = values(1)
    r.append(f(values(3)))
    return r


@program
def decorated_nograd(jit):
    w = values(3).requires_grad_()

    @torch.no_grad()
    def g(x):
        return x * w

    f = jit(g)
    o = f(values(3))
    return [o, o.requires_grad]


@program
def jit_in_jit(jit):
    o = types.SimpleNamespace(k=2.0)
    inner = jit(lambda x: x * o.k)
    f = jit(lambda x: inner(x) + 1)
    r = [f(values(3))]
    o.k = 3.0
    r.append(f(values(3)))
    return r


@program
def jit_method_decorator(jit):

    class A:
        def __init__(self, k):
            self.k = k

        @jit
        def go(self, x):
            return x * self.k

    a, b = (A(2.0), A(3.0))
    r = [a.go(values(3)), b.go(values(3))]
    a.k = 5.0
    r.append(a.go(values(3)))
    return r


@program
def jit_classmethod(jit):

    class A:
        k = 2.0

        @classmethod
        def go(cls, x):
            return x * cls.k

    f = jit(A.go)
    r = [f(values(3))]
    A.k = 3.0
    r.append(f(values(3)))
    return r


@program
def callable_object(jit):

    class A:
        def __init__(self):
            self.k = 2.0
            self.w = values(3).requires_grad_()

        def __call__(self, x):
            return x * self.k * self.w

    a = A()
    f = jit(a)
    r = gradients(f(values(3)), a.w)
    a.k = 3.0
    r += gradients(f(values(3)), a.w)
    return r


@program
def threads(jit):
    w = values(3).requires_grad_()
    f = jit(lambda x, k: x * w * k)
    out = {}

    def work(i):
        out[i] = gradients(f(values(3), float(i % 2)), w)

    ts = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    [t.start() for t in ts]
    [t.join() for t in ts]
    return [out[i] for i in range(6)]


@program
def deepcopy_jitted(jit):
    m = linear()
    f = jit(m)
    r = [f(values(3))]
    g = copy.deepcopy(f)
    with torch.no_grad():
        m.weight.mul_(2)
    r += [f(values(3)), g(values(3))]
    return r


@program
def return_param(jit):
    m = linear()
    f = jit(lambda x: (m.weight, m(x)))
    a, b = f(values(3))
    return [a is m.weight, gradients(a.sum() + b.sum(), m.weight)]


@program
def optimizer_outside(jit):
    m = linear()
    opt = torch.optim.Adam(m.parameters(), lr=0.1)
    f = jit(lambda x: m(x).square().sum())
    r = []
    for i in range(4):
        opt.zero_grad()
        items = f(values(3, start=i))
        items.backward()
        opt.step()
        r.append(items)
    return [*r, *m.state_dict().values()]


@program
def generator_default(jit):

    def g(x, gen=torch.Generator().manual_seed(5)):
        return x * torch.rand(3, generator=gen, dtype=torch.float64)

    f = jit(lambda x: g(x))
    return [f(values(3)), f(values(3))]


@program
def hook_added_later(jit):
    w = values(3).requires_grad_()
    f = jit(lambda x: (x * w).sum())
    r = gradients(f(values(3)), w)
    h = w.register_hook(lambda g: g * 5)
    r += gradients(f(values(3)), w)
    h.remove()
    r += gradients(f(values(3)), w)
    return r


@program
def custom_fn_class_state(jit):

    class D(torch.autograd.Function):
        k = 2.0

        @staticmethod
        def forward(ctx, a):
            return a * D.k

        @staticmethod
        def backward(ctx, g):
            return g * D.k

    f = jit(lambda x: D.apply(x))
    x = values(3).requires_grad_()
    r = [f(x), *gradients(f(x), x)]
    D.k = 3.0
    r += [f(x), *gradients(f(x), x)]
    return r


@program
def custom_fn_ctx_python(jit):

    class D(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, k):
            ctx.k = k
            ctx.save_for_backward(a)
            return a * k

        @staticmethod
        def backward(ctx, g):
            return (g * ctx.k * ctx.saved_tensors[0], None)

    f = jit(lambda x, k: D.apply(x, k))
    x = values(3).requires_grad_()
    return gradients(f(x, 2.0), x) + gradients(f(x, 3.0), x)


@program
def inner_grad_captured(jit):
    w = values(3).requires_grad_()

    def g(x):
        items = (x * w).sin().sum()
        return torch.autograd.grad(items, w)[0]

    f = jit(g)
    return [f(values(3)), f(values(3, start=1))]


@program
def inner_grad_captured_create(jit):
    w = values(3).requires_grad_()

    def g(x):
        items = (x * w).sin().sum()
        return torch.autograd.grad(items, w, create_graph=True)[0]

    f = jit(g)
    return gradients(f(values(3)).sin(), w) + gradients(f(values(3)).sin(), w)


@program
def inner_grad_region(jit):
    w = values(3).requires_grad_()
    reg = functx.remat(lambda x: (x * w).sin())

    def g(x):
        items = reg(x).sum()
        return torch.autograd.grad(items, w)[0]

    f = jit(g)
    return [f(values(3)), f(values(3, start=1))]


@refused("takes a gradient with respect to a captured tensor that has hooks")
def inner_grad_hooked(jit):
    w = values(3).requires_grad_()
    w.register_hook(lambda g: g * 10)

    def g(x):
        items = (x * w).sin().sum()
        return torch.autograd.grad(items, w)[0]

    f = jit(g)
    return [f(values(3)), f(values(3, start=1))]


@program
def inner_grad_unused(jit):
    w = values(3).requires_grad_()
    v = values(3).requires_grad_()

    def g(x):
        items = (x * w).sin().sum()
        return torch.autograd.grad(items, [w, v], allow_unused=True)[0]

    f = jit(g)
    return [f(values(3))]


@program
def inner_grad_unused_error(jit):
    w = values(3).requires_grad_()
    v = values(3).requires_grad_()

    def g(x):
        items = (x * w).sin().sum()
        return torch.autograd.grad(items, [w, v])[0]

    return [jit(g)(values(3))]


@program
def inner_functx_grad_captured(jit):
    w = values(3).requires_grad_()
    f = jit(lambda x: functx.grad(lambda v: (v * x).sin().sum())(w))
    return [f(values(3)), f(values(3, start=1)), *gradients(f(values(3)).sin(), w)]


@program
def inner_torch_func(jit):
    m = linear()
    f = jit(
        lambda x: torch.func.grad(lambda p: torch.func.functional_call(m, p, (x,)).sin().sum())(
            dict(m.named_parameters())
        )
    )
    r = [f(values(3))]
    with torch.no_grad():
        m.weight.mul_(2)
    r.append(f(values(3)))
    return [{k: v.detach() for k, v in d.items()} for d in r]


@program
def inner_vmap_captured(jit):
    w = values(3).requires_grad_()
    f = jit(lambda x: functx.vmap(lambda r: (r * w).sin().sum())(x))
    return gradients(f(values(4, 3)), w) + gradients(f(values(4, 3, start=2)), w)


@program
def backward_twice(jit):
    w = values(3).requires_grad_()
    f = jit(lambda x: (x * w).sin().sum())
    o = f(values(3))
    o.backward(retain_graph=True)
    o.backward()
    return [w.grad]


@program
def backward_twice_error(jit):
    w = values(3).requires_grad_()
    f = jit(lambda x: (x * w).sin().sum())
    o = f(values(3))
    o.backward()
    o.backward()
    return [w.grad]


@program
def two_jitted(jit):
    w = values(3).requires_grad_()
    f, g = (jit(lambda x: (x * w).sin()), jit(lambda x: (x + w).cos()))
    g(f(values(3))).sum().backward()
    return [w.grad]


@program
def inference_params(jit):
    with torch.inference_mode():
        w = values(3) * 1
    f = jit(lambda x: x * w)
    r = [f(values(3))]
    with torch.inference_mode():
        r.append(f(values(3)))
    with torch.no_grad():
        r.append(f(values(3)))
    return [t.clone() for t in r]


@program
def mask_setitem(jit):
    f = jit(lambda x: (x.masked_fill_(x > 0, 0.0), x.sum())[1])
    x = values(5)
    return [f(x), x]


@refused("reads the value of a tensor")
def nonzero(jit):
    return [jit(lambda x: x[x > 0].sum())(values(5))]


@program
def complex_grad(jit):
    w = torch.complex(values(3), values(3, start=1)).requires_grad_()
    f = jit(lambda x: (x * w).abs().sum())
    return gradients(f(values(3)), w)


@program
def view_as_real_result(jit):
    f = jit(lambda x: torch.view_as_real(x))
    x = torch.complex(values(3), values(3, start=1))
    o = f(x)
    o.mul_(2)
    return [o, x]


@program
def detach_result_shares(jit):
    f = jit(lambda x: x.detach())
    x = values(3).requires_grad_()
    o = f(x)
    return [o.requires_grad, o.data_ptr() == x.data_ptr()]


@program
def view_result_grad(jit):
    f = jit(lambda x: x.view(-1)[1:])
    w = values(2, 3).requires_grad_()
    o = f(w * 1)
    return [*gradients(o.sin(), w), o]


@program
def expand_result(jit):
    f = jit(lambda x: x.expand(4, 3))
    w = values(3).requires_grad_()
    o = f(w)
    return [*gradients(o * values(4, 3), w), o.stride()]


@program
def unbind_result(jit):
    f = jit(lambda x: (x * 2).unbind())
    w = values(2, 3).requires_grad_()
    a, b = f(w)
    return gradients(a * b, w)


@program
def result_and_captured_view(jit):
    w = values(2, 3).requires_grad_()
    f = jit(lambda x: (w[0], x * w[1]))
    a, b = f(values(3))
    return gradients(a * b, w)


@program
def written_captured_returned(jit):
    b = torch.zeros(3, dtype=torch.float64)
    f = jit(lambda x: b.add_(x))
    o = f(values(3))
    return [o is b, b, f(values(3)), b]


@program
def version_after(jit):
    b = torch.zeros(3, dtype=torch.float64)
    w = values(3).requires_grad_()
    f = jit(lambda x: (b.add_(x), x * 2)[1])
    y = w * b
    f(values(3))
    return gradients(y, w)


@program
def arg_saved_then_written_by_jit(jit):
    f = jit(lambda x: x.mul_(2).sum())
    w = values(3).requires_grad_()
    t = values(3)
    y = w * t
    f(t)
    return gradients(y, w)


@refused("reads the value of a tensor")
def batchnorm_momentum_none(jit):
    m = nn.BatchNorm1d(3, momentum=None).double()
    f = jit(m)
    return [f(values(5, 3, start=i)) for i in range(3)] + [m.running_mean]


@program
def dropout_p_changed(jit):
    m = nn.Dropout(0.3)
    f = jit(m)
    r = [f(values(9))]
    m.p = 0.9
    r.append(f(values(9)))
    return r


@program
def mha_eval(jit):
    torch.manual_seed(0)
    m = nn.MultiheadAttention(4, 2, batch_first=True).double()
    f = jit(lambda x: m(x, x, x)[0])
    r = [f(values(2, 3, 4))]
    m.eval()
    r.append(f(values(2, 3, 4)))
    with torch.no_grad():
        r.append(f(values(2, 3, 4)))
    return [t.detach() for t in r]


@program
def lstm_module(jit):
    torch.manual_seed(0)
    m = nn.LSTM(3, 4).double()
    f = jit(lambda x: m(x)[0])
    r = [f(values(2, 1, 3))]
    with torch.no_grad():
        m.weight_ih_l0.mul_(2)
    r.append(f(values(2, 1, 3)))
    r += gradients(f(values(2, 1, 3)), m.weight_ih_l0)
    return r


@program
def embedding_maxnorm(jit):
    torch.manual_seed(0)
    m = nn.Embedding(5, 3, max_norm=0.5).double()
    f = jit(m)
    r = [f(torch.tensor([1, 2]))]
    return [*r, m.weight]


@program
def distributions_captured(jit):
    d = torch.distributions.Categorical(probs=torch.tensor([0.2, 0.8]))
    f = jit(lambda x: x * d.log_prob(torch.tensor(1)) + d.entropy())
    return [f(values(3)), f(values(3)), d.log_prob(torch.tensor(0))]


@program
def distribution_inside(jit):
    f = jit(lambda mu: torch.distributions.Normal(mu, 1.0).rsample())
    return [f(values(3)), f(values(3)), torch.rand(1)]


@program
def deque_window(jit):
    d = collections.deque(maxlen=3)

    def g(x):
        return x * sum(d) if d else x

    f = jit(g)
    r = [f(values(3))]
    for i in range(4):
        d.append(float(i))
        r.append(f(values(3)))
    return r


@program
def class_swapped(jit):

    class A:
        def go(self, x):
            return x.sin()

    class B:
        def go(self, x):
            return x.cos()

    a = A()
    f = jit(lambda x: a.go(x))
    r = [f(values(3))]
    a.__class__ = B
    r.append(f(values(3)))
    return r


@program
def code_swapped(jit):

    def g(x):
        return x.sin()

    def h(x):
        return x.cos()

    f = jit(lambda x: g(x))
    r = [f(values(3))]
    g.__code__ = h.__code__
    r.append(f(values(3)))
    return r


@program
def mode_context_arg(jit):
    f = jit(lambda x, train: F.dropout(x, 0.5, train))
    return [f(values(9), False), f(values(9), True), f(values(9), False)]


@program
def unhashable_arg(jit):
    f = jit(lambda x, d: x * d["k"])
    return [f(values(3), {"k": 2.0}), f(values(3), {"k": 3.0})]


@program
def set_arg(jit):
    f = jit(lambda x, s: x * len(s) if "a" in s else x)
    return [f(values(3), {"a"}), f(values(3), {"b"}), f(values(3), {"a", "b"})]


@program
def slice_arg(jit):
    f = jit(lambda x, s: x[s])
    return [f(values(5), slice(0, 2)), f(values(5), slice(1, 4)), f(values(5), slice(0, 2))]


@program
def range_arg(jit):
    f = jit(lambda x, r: sum(x * i for i in r))
    return [f(values(5), range(3)), f(values(5), range(4))]


@program
def callable_arg(jit):
    f = jit(lambda x, g: g(x))
    return [
        f(values(5), torch.sin),
        f(values(5), torch.cos),
        f(values(5), lambda x: x * 2),
        f(values(5), lambda x: x * 3),
    ]


@program
def lambda_arg_closure(jit):
    f = jit(lambda x, g: g(x))
    r = []
    for k in (2.0, 3.0):
        r.append(f(values(5), lambda x, k=k: x * k))
    for k in (2.0, 3.0):

        def h(x):
            return x * k

        r.append(f(values(5), h))
    return r


@program
def device_dtype_arg(jit):
    f = jit(lambda x, d: x.to(d))
    return [f(values(3), torch.float32), f(values(3), torch.float64), f(values(3), torch.int64)]


@program
def none_module(jit):

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = None

        def forward(self, x):
            return x if self.norm is None else self.norm(x)

    m = M()
    f = jit(m)
    r = [f(values(3))]
    m.norm = nn.Tanh()
    r.append(f(values(3)))
    m.norm = None
    r.append(f(values(3)))
    return r


@program
def parameters_iter(jit):
    m = linear()
    f = jit(lambda x: x * sum(p.square().sum() for p in m.parameters()))
    r = [f(values(3))]
    m.register_parameter("extra", nn.Parameter(values(2)))
    r.append(f(values(3)))
    r += gradients(f(values(3)), m.extra)
    return r


@program
def named_modules_iter(jit):
    m = nn.Sequential(nn.Tanh())
    f = jit(lambda x: x * len([*m.modules()]))
    r = [f(values(3))]
    m.add_module("z", nn.Tanh())
    r.append(f(values(3)))
    return r


@program
def state_dict_inside(jit):
    m = linear()
    f = jit(lambda x: x * m.state_dict()["bias"].sum())
    r = [f(values(3))]
    with torch.no_grad():
        m.bias.mul_(2)
    r.append(f(values(3)))
    return r
