"""Habits of Python and of torch: containers, results, writes, errors."""

import abc
import collections
import functools
import types

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from .collected import Programs, gradients, linear, values

PROGRAMS = Programs()
program, refused, in_eager = PROGRAMS.right, PROGRAMS.refused, PROGRAMS.in_eager


@program
def numpy_large_mutated(jit):
    a = np.ones((100,))
    f = jit(lambda x: x * float(a.sum()))
    r = [f(values(3))]
    a[50] = 9
    r.append(f(values(3)))
    return r


@program
def kwonly_tensor_default(jit):
    w = values(3).requires_grad_()

    def g(x, *, s=w):
        return x * s

    f = jit(g)
    return gradients(f(values(3)), w) + gradients(f(values(3)), w)


@program
def abstract_property_override(jit):

    class A(abc.ABC):
        @property
        @abc.abstractmethod
        def k(self): ...

        def go(self, x):
            return x * self.k

    class B(A):
        def __init__(self):
            self._k = 2.0

        @property
        def k(self):
            return self._k

    b = B()
    f = jit(b.go)
    r = [f(values(3))]
    b._k = 4.0
    r.append(f(values(3)))
    return r


@program
def class_getitem_registry(jit):

    class R:
        reg = {}

        def __class_getitem__(self, n):
            return self.reg[n]

    R.reg["a"] = 2.0
    f = jit(lambda x: x * R["a"])
    r = [f(values(3))]
    R.reg["a"] = 3.0
    r.append(f(values(3)))
    return r


@program
def init_subclass_list(jit):

    class P:
        subs = []

        def __init_subclass__(self):
            P.subs.append(self)

    class A(P):
        k = 2.0

    f = jit(lambda x: x * sum(c.k for c in P.subs))
    r = [f(values(3))]
    A.k = 5.0
    r.append(f(values(3)))

    class B(P):
        k = 1.0

    r.append(f(values(3)))
    return r


@program
def module_getattr(jit):
    m = types.ModuleType("lazy_mod")
    exec("_d={'k':2.}\ndef __getattr__(n):\n  return _d[n]\n", m.__dict__)
    f = jit(lambda x: x * m.k)
    r = [f(values(3))]
    m._d["k"] = 3.0
    r.append(f(values(3)))
    return r


@program
def nested_partial(jit):
    c = {"k": 2.0}
    g = functools.partial(functools.partial(lambda a, b, x: x * a * b["k"], 3.0), c)
    f = jit(g)
    r = [f(values(3))]
    c["k"] = 4.0
    r.append(f(values(3)))
    return r


@program
def partialmethod(jit):

    class A:
        k = 2.0

        def s(self, m, x):
            return x * m * self.k

        d = functools.partialmethod(s, 10.0)

    a = A()
    f = jit(lambda x: a.d(x))
    r = [f(values(3))]
    a.k = 3.0
    r.append(f(values(3)))
    return r


@program
def reduce_map_filter(jit):
    ks = [1.0, 2.0, 3.0]
    f = jit(
        lambda x: (
            functools.reduce(lambda a, k: a * k, filter(lambda k: k > 1, ks), x)
            + sum(k * x for k in ks)
        )
    )
    r = [f(values(3))]
    ks[0] = 5.0
    r.append(f(values(3)))
    return r


@program
def comprehension_zip(jit):
    a = [1.0, 2.0]
    b = {"p": 3.0, "q": 4.0}
    f = jit(lambda x: sum((i * v * x for i, (k, v) in zip(a, sorted(b.items())))))
    r = [f(values(3))]
    b["p"] = 9.0
    r.append(f(values(3)))
    return r


@program
def walrus_star(jit):
    p = (2.0, 3.0)
    o = types.SimpleNamespace(args=[1.0, 2.0])

    def h(x, *a, **k):
        return x * sum(a) + k.get("z", 0)

    f = jit(lambda x: h(x, *o.args, **{"z": p[0]}))
    r = [f(values(3))]
    o.args.append(5.0)
    r.append(f(values(3)))
    return r


@program
def try_except_state(jit):
    d = {}

    def g(x):
        try:
            return x * d["k"]
        except KeyError:
            return x.sin()

    f = jit(g)
    r = [f(values(3))]
    d["k"] = 3.0
    r.append(f(values(3)))
    return r


@program
def isinstance_state(jit):
    o = types.SimpleNamespace(v=2.0)
    f = jit(lambda x: x * o.v if isinstance(o.v, float) else o.v(x))
    r = [f(values(3))]
    o.v = torch.sin
    r.append(f(values(3)))
    o.v = nn.Tanh()
    r.append(f(values(3)))
    return r


@program
def string_format_state(jit):
    o = types.SimpleNamespace(name="a")
    t = {"a_w": 2.0, "b_w": 3.0}
    f = jit(lambda x: x * t[f"{o.name}_w"])
    r = [f(values(3))]
    o.name = "b"
    r.append(f(values(3)))
    return r


@program
def tensor_scalar_state(jit):
    o = types.SimpleNamespace(t=torch.tensor(2.0, dtype=torch.float64))
    f = jit(lambda x: x**o.t)
    x = values(3).abs()
    r = [f(x)]
    o.t = torch.tensor(3.0, dtype=torch.float64)
    r.append(f(x))
    o.t = 3
    r.append(f(x))
    return r


@program
def tensor_vs_float_state(jit):
    o = types.SimpleNamespace(t=2.0)
    f = jit(lambda x: x * o.t)
    r = [f(torch.ones(2, dtype=torch.float16))]
    o.t = torch.tensor(2.0, dtype=torch.float64)
    r.append(f(torch.ones(2, dtype=torch.float16)))
    o.t = torch.ones(2, dtype=torch.float64)
    r.append(f(torch.ones(2, dtype=torch.float16)))
    return r


@program
def none_to_tensor(jit):
    o = types.SimpleNamespace(m=None)
    f = jit(lambda x: x if o.m is None else x * o.m)
    r = [f(values(3))]
    o.m = values(3).requires_grad_()
    r += gradients(f(values(3)), o.m)
    o.m = None
    r.append(f(values(3)))
    return r


@program
def requires_grad_arg_toggle(jit):
    f = jit(lambda x: x.sin())
    x = values(3)
    r = [f(x).requires_grad]
    x.requires_grad_()
    r.append(f(x).requires_grad)
    x.requires_grad_(False)
    r.append(f(x).requires_grad)
    return r


@program
def input_view_of_param(jit):
    p = nn.Parameter(values(4, 3))
    f = jit(lambda r: r.sin().sum())
    return gradients(f(p[1]), p) + gradients(f(p[2]), p)


@program
def inplace_view_input_param(jit):
    p = values(4, 3).requires_grad_()
    q = p * 1
    f = jit(lambda r: r.mul_(2).sum())
    f(q[1])
    return [q, *gradients(q.sin(), p)]


@program
def output_inplace_then_backward(jit):
    f = jit(lambda x: x.exp())
    x = values(3).requires_grad_()
    y = f(x)
    y.add_(1)
    return gradients(y, x)


@program
def output_inplace_then_backward2(jit):
    f = jit(lambda x: x * 2)
    x = values(3).requires_grad_()
    y = f(x)
    y.add_(1)
    return [y, *gradients(y.sin(), x)]


@program
def input_inplace_after(jit):
    f = jit(lambda x, w: (x * w).sum())
    w = values(3).requires_grad_()
    x = values(3)
    y = f(x, w)
    x.add_(1)
    return gradients(y, w)


@program
def input_inplace_after_unread(jit):
    f = jit(lambda x, w: (x + w).sum())
    w = values(3).requires_grad_()
    x = values(3)
    y = f(x, w)
    x.add_(1)
    return gradients(y, w)


@program
def detach_output(jit):
    f = jit(lambda x: x.sin())
    x = values(3).requires_grad_()
    y = f(x).detach()
    y.mul_(2)
    return [y, y.requires_grad]


@program
def nested_outputs(jit):
    P = collections.namedtuple("P", "a b")
    f = jit(lambda x: {"p": P(x.sin(), [x.cos(), (x,)]), "n": None, "s": "t"})
    o = f(values(3))
    return [type(o["p"]).__name__, o["p"].a, o["p"].b, o["n"], o["s"]]


@program
def ordereddict_output(jit):
    f = jit(lambda x: collections.OrderedDict(b=x, a=x * 2))
    o = f(values(3))
    return [type(o).__name__, list(o.items())]


@program
def deque_output(jit):
    f = jit(lambda x: collections.deque([x, x * 2], maxlen=2))
    o = f(values(3))
    return [type(o).__name__, list(o), o.maxlen]


@program
def defaultdict_output(jit):
    f = jit(lambda x: collections.defaultdict(list, a=[x]))
    o = f(values(3))
    return [type(o).__name__, dict(o)]


@program
def dict_key_order(jit):
    f = jit(lambda d: list(d))
    return [f({"b": values(1), "a": values(1)}), f({"a": values(1), "b": values(1)})]


@program
def dict_iter_order_args(jit):

    def g(d):
        y = 0
        for v in d.values():
            y = (y + v).sin()
        return y

    f = jit(g)
    return [
        f({"b": values(1), "a": values(1, start=3)}),
        f({"a": values(1, start=3), "b": values(1)}),
    ]


@program
def empty_containers(jit):
    f = jit(lambda x, items, d: x * (1 + len(items)) + len(d))
    return [
        f(values(3), [], {}),
        f(values(3), [1], {}),
        f(values(3), [], {"a": 1}),
        f(values(3), (), {}),
    ]


@program
def tuple_vs_list(jit):
    f = jit(lambda x, s: x * 2 if isinstance(s, tuple) else x * 3)
    return [f(values(3), (1,)), f(values(3), [1]), f(values(3), (1,))]


@program
def bool_tensor_arg(jit):
    f = jit(lambda x, m: torch.where(m, x, -x))
    return [
        f(values(3), torch.tensor(True)),
        f(values(3), torch.tensor([True, False, True])),
        f(values(3), torch.tensor(False)),
    ]


@program
def scalar_promotions(jit):
    f = jit(lambda x, k: x + k)
    return [
        f(torch.ones(2, dtype=torch.int32), 1),
        f(torch.ones(2, dtype=torch.int32), 1.0),
        f(torch.ones(2, dtype=torch.int32), True),
        f(torch.ones(2), 1j),
    ]


@program
def memory_format(jit):
    f = jit(lambda x: F.conv2d(x, torch.ones(2, 2, 1, 1, dtype=torch.float64)))
    x = values(1, 2, 3, 3)
    a = f(x)
    b = f(x.to(memory_format=torch.channels_last))
    return [a, b]


@program
def is_contiguous_cl(jit):
    f = jit(lambda x: x * 2 if x.is_contiguous(memory_format=torch.channels_last) else x * 3)
    x = values(2, 2, 3, 3)
    return [f(x), f(x.to(memory_format=torch.channels_last))]


@program
def no_grad_param_update(jit):
    m = linear()

    def step(x):
        items = m(x).square().sum()
        gs = torch.autograd.grad(items, [*m.parameters()])
        with torch.no_grad():
            for p, g in zip(m.parameters(), gs):
                p.sub_(g, alpha=0.1)
        return items.detach()

    f = jit(step)
    return [f(values(3)) for _ in range(3)] + [*m.parameters()]


@program
def momentum_buffers(jit):
    m = linear()
    bufs = {n: torch.zeros_like(p) for n, p in m.named_parameters()}

    def step(x):
        items = m(x).square().sum()
        gs = torch.autograd.grad(items, [*m.parameters()])
        with torch.no_grad():
            for (n, p), g in zip(m.named_parameters(), gs):
                bufs[n].mul_(0.9).add_(g)
                p.add_(bufs[n], alpha=-0.1)
        return items.detach()

    f = jit(step)
    return [f(values(3)) for _ in range(3)] + [*bufs.values()]


@refused("is kept by")
def momentum_functional_dict(jit):
    state = {"m": torch.zeros(3, dtype=torch.float64)}

    def step(w, x):
        state["m"] = state["m"] * 0.9 + x
        return w - state["m"]

    f = jit(step)
    return [f(values(3), values(3))]


@program
def swa_average(jit):
    avg = torch.zeros(3, dtype=torch.float64)
    n = torch.zeros((), dtype=torch.int64)

    def up(x):
        avg.add_((x - avg) / (n + 1))
        n.add_(1)
        return avg.clone()

    f = jit(up)
    return [f(values(3, start=i)) for i in range(3)] + [n]


@program
def running_max(jit):
    m = torch.full((3,), -9.0, dtype=torch.float64)
    f = jit(lambda x: torch.maximum(m, x, out=m))
    return [f(values(3)), f(values(3, start=1)), m]


@program
def index_put_accumulate(jit):
    b = torch.zeros(5, dtype=torch.float64)
    f = jit(lambda i, x: b.index_put_((i,), x, accumulate=True).sum())
    return [f(torch.tensor([0, 0, 1]), values(3)), b]


@program
def scatter_history(jit):
    b = torch.zeros(5, dtype=torch.float64)
    w = values(3).requires_grad_()
    f = jit(lambda i: b.scatter_(0, i, w).sum())
    f(torch.tensor([0, 2, 4]))
    return [b, *gradients(b.sin(), w)]


@program
def setitem_history_arg(jit):
    w = values(3).requires_grad_()

    def g(x):
        x[0] = w
        return x.sum()

    f = jit(g)
    x = torch.zeros(2, 3, dtype=torch.float64)
    f(x)
    return [x, x.requires_grad, *gradients(x.sin(), w)]


@program
def list_of_buffers_history(jit):
    bs = [torch.zeros(3, dtype=torch.float64) for _ in range(2)]
    w = values(3).requires_grad_()

    def g(x):
        for i, b in enumerate(bs):
            b.copy_(w * x * (i + 1))
        return x.sum()

    f = jit(g)
    f(values(3))
    return bs + gradients(bs[0] * bs[1], w)


@program
def history_accumulates(jit):
    b = torch.zeros(3, dtype=torch.float64)
    w = values(3).requires_grad_()
    f = jit(lambda x: (b.add_(w * x), b.sum())[1])
    f(values(3))
    o = f(values(3, start=1))
    return [o, *gradients(o, w)]


@program
def dropout_inplace(jit):
    f = jit(lambda x: F.dropout(x, 0.5, inplace=True))
    x = values(20)
    y = f(x)
    return [y, x, y is x]


@program
def relu_inplace_module(jit):
    m = nn.Sequential(linear(3, 3), nn.ReLU(inplace=True))
    f = jit(m)
    x = values(3).requires_grad_()
    return gradients(f(x), x)


@program
def relu_inplace_arg(jit):
    m = nn.ReLU(inplace=True)
    f = jit(m)
    x = values(6)
    y = f(x)
    return [x, y, y is x]


@program
def sync_two_modules_share_buffer(jit):
    a, b = (nn.BatchNorm1d(3).double(), nn.BatchNorm1d(3).double())
    b.running_mean = a.running_mean
    f = jit(lambda x: a(x) + b(x * 2))
    f(values(4, 3))
    return [a.running_mean, b.running_var]


@program
def two_functions_share_state(jit):
    b = torch.zeros(3, dtype=torch.float64)
    f = jit(lambda x: b.add_(x).sum())
    g = jit(lambda x: (b * x).sum())
    return [f(values(3)), g(values(3)), f(values(3)), g(values(3))]


@program
def exception_then_ok(jit):
    o = types.SimpleNamespace(bad=True)

    def g(x):
        if o.bad:
            raise RuntimeError("bad")
        return x.sin()

    f = jit(g)
    r = []
    try:
        f(values(3))
    except RuntimeError as e:
        r.append(str(e))
    o.bad = False
    r.append(f(values(3)))
    o.bad = True
    try:
        f(values(3))
    except RuntimeError as e:
        r.append(str(e))
    return r


@program
def assert_in_function(jit):

    def g(x, n):
        assert n > 0, "n"
        return x * n

    f = jit(g)
    r = [f(values(3), 2)]
    try:
        f(values(3), -1)
    except AssertionError as e:
        r.append(str(e))
    return r


@program
def deleted_attribute(jit):
    o = types.SimpleNamespace(k=2.0)
    f = jit(lambda x: x * getattr(o, "k", 7.0))
    r = [f(values(3))]
    del o.k
    r.append(f(values(3)))
    o.k = 3.0
    r.append(f(values(3)))
    return r


@program
def cleared_list(jit):
    items = [1.0, 2.0]
    f = jit(lambda x: x * sum(items))
    r = [f(values(3))]
    items.clear()
    r.append(f(values(3)))
    items.extend([4.0])
    r.append(f(values(3)))
    return r


@program
def dict_popped_and_reset(jit):
    d = {"a": 1.0, "b": 2.0}
    f = jit(lambda x: sum((x * i * v for i, v in enumerate(d.values()))))
    r = [f(values(3))]
    v = d.pop("a")
    d["a"] = v
    r.append(f(values(3)))
    return r


@program
def module_setattr_shadow(jit):

    class M(nn.Module):
        scale = 2.0

        def forward(self, x):
            return x * self.scale

    m = M()
    f = jit(m)
    r = [f(values(3))]
    m.scale = 3.0
    r.append(f(values(3)))
    del m.scale
    r.append(f(values(3)))
    M.scale = 5.0
    r.append(f(values(3)))
    return r


@program
def param_to_buffer(jit):
    m = nn.Module()
    m.w = nn.Parameter(values(3))
    f = jit(lambda x: x * m.w)
    r = [f(values(3)).requires_grad]
    del m.w
    m.register_buffer("w", values(3))
    r.append(f(values(3)).requires_grad)
    del m.w
    m.w = 2.0
    r.append(f(values(3)))
    return r


@program
def sequential_slice(jit):
    s = nn.Sequential(linear(3, 3), nn.Tanh(), linear(3, 3, start=2))
    o = types.SimpleNamespace(n=2)
    f = jit(lambda x: s[: o.n](x))
    r = [f(values(3))]
    o.n = 3
    r.append(f(values(3)))
    return r


@program
def weight_standardize(jit):

    class C(nn.Conv1d):
        def forward(self, x):
            w = self.weight
            w = w - w.mean((1, 2), keepdim=True)
            return F.conv1d(x, w, self.bias)

    c = C(2, 2, 1).double()
    with torch.no_grad():
        for p in c.parameters():
            p.copy_(values(*p.shape))
    f = jit(c)
    return gradients(f(values(1, 2, 3)), c.weight) + gradients(f(values(1, 2, 3)), c.weight)
