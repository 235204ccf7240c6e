"""What a function reads from objects, and what changes there between calls (J2, J3)."""

import collections
import contextvars
import dataclasses
import enum
import functools
import threading
import types
import weakref

import numpy as np
import torch
from torch import nn

import functx

from .collected import Programs, gradients, values

PROGRAMS = Programs()
program, refused, in_eager = PROGRAMS.right, PROGRAMS.refused, PROGRAMS.in_eager


@program
def slots_tensor(jit):

    class S:
        __slots__ = ("k", "w")

    s = S()
    s.w = values(3).requires_grad_()
    s.k = 2.0
    f = jit(lambda x: (s.w * x * s.k).sum())
    r = []
    for i in range(3):
        r += gradients(f(values(3)), s.w)
        s.w = values(3, start=i).requires_grad_()
        s.k = 3.0 + i
        r.append(f(values(3)))
    return r


@program
def slots_grad(jit):

    class S:
        __slots__ = ("w",)

    s = S()
    f = jit(lambda x: (s.w * x).sum())

    def loss(w):
        s.w = w
        return f(values(3))

    return [functx.grad(loss)(values(3, start=i)) for i in range(3)]


@program
def deque_state(jit):
    d = collections.deque([values(3), values(3, start=1)], maxlen=2)
    f = jit(lambda x: x * d[0] + d[1])
    r = [f(values(3))]
    d.append(values(3, start=5))
    r.append(f(values(3)))
    d[0] = values(3, start=9)
    r.append(f(values(3)))
    return r


helper = types.ModuleType("helper")


exec(
    "import torch\nW=torch.ones(3,dtype=torch.float64)\nK=2.\ndef scale(x): return x*W*K\n",
    helper.__dict__,
)


@program
def helper_module(jit):
    helper.K = 2.0
    helper.W = torch.ones(3, dtype=torch.float64)
    f = jit(lambda x: helper.scale(x))
    r = [f(values(3))]
    helper.K = 3.0
    r.append(f(values(3)))
    helper.W = values(3)
    r.append(f(values(3)))
    return r


@program
def function_attr(jit):

    def g(x):
        return x * g.scale

    g.scale = 2.0
    f = jit(g)
    r = [f(values(3))]
    g.scale = 3.0
    r.append(f(values(3)))
    g.scale = values(3)
    r.append(f(values(3)))
    return r


class Base:
    scale = 2.0
    table = None


class Derived(Base):
    def go(self, x):
        return x * self.scale


@program
def inherited_class_attr(jit):
    Base.scale = 2.0
    if "scale" in vars(Derived):
        del Derived.scale
    o = Derived()
    f = jit(o.go)
    r = [f(values(3))]
    Base.scale = 3.0
    r.append(f(values(3)))
    Derived.scale = 4.0
    r.append(f(values(3)))
    o.scale = 5.0
    r.append(f(values(3)))
    del Derived.scale
    return r


@program
def class_level_param(jit):

    class M(nn.Module):
        w = nn.Parameter(values(3))

        def forward(self, x):
            return x * M.w

    m = M()
    f = jit(m)
    r = gradients(f(values(3)), M.w)
    M.w = nn.Parameter(values(3, start=2))
    r += gradients(f(values(3)), M.w)
    r.append(f(values(3)))
    return r


G = 2.0


@program
def global_in_forward(jit):
    global G
    G = 2.0

    class M(nn.Module):
        def forward(self, x):
            return x * G

    f = jit(M())
    r = [f(values(3))]
    G = 3.0
    r.append(f(values(3)))
    G = values(3)
    r.append(f(values(3)))
    G = 2.0
    return r


@program
def vars_mutation(jit):
    o = types.SimpleNamespace(k=2.0)
    f = jit(lambda x: x * o.k)
    r = [f(values(3))]
    vars(o)["k"] = 3.0
    r.append(f(values(3)))
    return r


@program
def list_mutation(jit):
    items = [1.0, 2.0]
    f = jit(lambda x: x * sum(items))
    r = [f(values(3))]
    items.append(3.0)
    r.append(f(values(3)))
    items[0] = 9.0
    r.append(f(values(3)))
    items.pop()
    r.append(f(values(3)))
    return r


@program
def nested_dict(jit):
    d = {"a": {"b": [1.0, {"c": 2.0}]}}
    f = jit(lambda x: x * d["a"]["b"][1]["c"])
    r = [f(values(3))]
    d["a"]["b"][1]["c"] = 5.0
    r.append(f(values(3)))
    return r


@program
def dict_order(jit):
    d = {"a": 2.0, "b": 3.0}

    def g(x):
        for v in d.values():
            x = (x * v).sin()
        return x

    f = jit(g)
    r = [f(values(3))]
    d["a"] = d.pop("a")
    r.append(f(values(3)))
    return r


@program
def defaults_changed(jit):

    def g(x, k=2.0):
        return x * k

    f = jit(lambda x: g(x))
    r = [f(values(3))]
    g.__defaults__ = (3.0,)
    r.append(f(values(3)))
    return r


@program
def kwdefaults_changed(jit):

    def g(x, *, k=2.0):
        return x * k

    f = jit(lambda x: g(x))
    r = [f(values(3))]
    g.__kwdefaults__["k"] = 3.0
    r.append(f(values(3)))
    return r


@program
def partial_state(jit):
    d = {"k": 2.0}
    f = jit(functools.partial(lambda x, d: x * d["k"], d=d))
    r = [f(values(3))]
    d["k"] = 3.0
    r.append(f(values(3)))
    return r


@program
def dataclass_state(jit):

    @dataclasses.dataclass
    class C:
        k: float
        w: object

    c = C(2.0, values(3))
    f = jit(lambda x: x * c.k * c.w)
    r = [f(values(3))]
    c.k = 3.0
    r.append(f(values(3)))
    c.w = values(3, start=1)
    r.append(f(values(3)))
    return r


@program
def dataclass_arg(jit):

    @dataclasses.dataclass
    class C:
        k: float
        w: object

    f = jit(lambda x, c: x * c.k * c.w)
    r = []
    for i in range(3):
        w = values(3, start=i).requires_grad_()
        r += gradients(f(values(3), C(2.0 + i, w)), w)
    return r


@program
def enum_state(jit):

    class Mode(enum.Enum):
        A = 1
        B = 2

    o = types.SimpleNamespace(mode=Mode.A)
    f = jit(lambda x: x.sin() if o.mode is Mode.A else x.cos())
    r = [f(values(3))]
    o.mode = Mode.B
    r.append(f(values(3)))
    return r


@program
def enum_value(jit):

    class Mode(enum.Enum):
        A = 1.0
        B = 2.0

    o = types.SimpleNamespace(mode=Mode.A)
    f = jit(lambda x: x * o.mode.value)
    r = [f(values(3))]
    o.mode = Mode.B
    r.append(f(values(3)))
    return r


@program
def sentinel_identity(jit):
    a, b = (object(), object())
    o = types.SimpleNamespace(s=a)
    f = jit(lambda x: x.sin() if o.s is a else x.cos())
    r = [f(values(3))]
    o.s = b
    r.append(f(values(3)))
    return r


@program
def method_replaced(jit):

    class A:
        def act(self, x):
            return x.sin()

        def go(self, x):
            return self.act(x)

    a = A()
    f = jit(a.go)
    r = [f(values(3))]
    A.act = lambda s, x: x.cos()
    r.append(f(values(3)))
    a.act = lambda x: x * 7
    r.append(f(values(3)))
    return r


@program
def forward_replaced(jit):
    m = nn.Linear(3, 3).double()
    with torch.no_grad():
        for p in m.parameters():
            p.copy_(values(*p.shape))
    net = nn.Sequential(m)
    f = jit(net)
    r = [f(values(3))]
    m.forward = lambda x: x * 2
    r.append(f(values(3)))
    return r


@program
def forward_hook_added(jit):
    m = nn.Identity()
    net = nn.Sequential(m)
    f = jit(net)
    r = [f(values(3))]
    h = m.register_forward_hook(lambda m, a, o: o * 2)
    r.append(f(values(3)))
    h.remove()
    r.append(f(values(3)))
    return r


@program
def module_list_changed(jit):
    m = nn.ModuleList([nn.Identity()])

    def g(x):
        for k in m:
            x = k(x) + 1
        return x

    f = jit(g)
    r = [f(values(3))]
    m.append(nn.Tanh())
    r.append(f(values(3)))
    m[0] = nn.Sigmoid()
    r.append(f(values(3)))
    return r


@program
def train_eval(jit):
    m = nn.Sequential(nn.Dropout(0.5), nn.Tanh())
    f = jit(m)
    r = [f(values(9))]
    m.eval()
    r.append(f(values(9)))
    m.train()
    r.append(f(values(9)))
    return r


@program
def param_replaced(jit):
    m = nn.Linear(3, 2, bias=False).double()
    m.weight = nn.Parameter(values(2, 3))
    f = jit(m)
    r = [f(values(3))]
    m.weight = nn.Parameter(values(2, 3, start=4))
    r.append(f(values(3)))
    r += gradients(f(values(3)), m.weight)
    return r


@program
def bias_removed(jit):
    m = nn.Linear(3, 2).double()
    m.weight = nn.Parameter(values(2, 3))
    m.bias = nn.Parameter(values(2))
    f = jit(m)
    r = [f(values(3))]
    m.bias = None
    r.append(f(values(3)))
    return r


@program
def frozen_param(jit):
    m = nn.Linear(3, 2, bias=False).double()
    m.weight = nn.Parameter(values(2, 3))
    f = jit(m)
    r = [f(values(3))]
    m.weight.requires_grad_(False)
    r.append(f(values(3)))
    m.weight.requires_grad_()
    r.append(f(values(3)))
    return r


@program
def tied_weights(jit):
    a = nn.Linear(3, 3, bias=False).double()
    b = nn.Linear(3, 3, bias=False).double()
    a.weight = nn.Parameter(values(3, 3))
    b.weight = a.weight
    net = nn.Sequential(a, b)
    f = jit(net)
    r = gradients(f(values(3)), a.weight)
    b.weight = nn.Parameter(values(3, 3, start=2))
    r += gradients(f(values(3)), a.weight, b.weight)
    return r


@program
def weakref_state(jit):

    class P:
        k = 2.0

    p = P()
    ref = weakref.ref(p)
    f = jit(lambda x: x * ref().k)
    r = [f(values(3))]
    p.k = 3.0
    r.append(f(values(3)))
    return r


@program
def closure_cell_rebinding(jit):
    k = 2.0
    w = values(3)

    def inner(x):
        return x * k * w

    f = jit(lambda x: inner(x))
    r = [f(values(3))]
    k = 3.0
    r.append(f(values(3)))
    w = values(3, start=3)
    r.append(f(values(3)))
    return r


@program
def getattr_computed(jit):
    o = types.SimpleNamespace()
    o.k0 = 2.0
    o.k1 = 3.0
    f = jit(lambda x: x * getattr(o, "k" + str(0)) * getattr(o, f"k{1}"))
    r = [f(values(3))]
    o.k1 = 5.0
    r.append(f(values(3)))
    return r


@program
def attrdict(jit):

    class Config(dict):
        __getattr__ = dict.__getitem__

    c = Config(k=2.0)
    f = jit(lambda x: x * c.k)
    r = [f(values(3))]
    c["k"] = 3.0
    r.append(f(values(3)))
    return r


@program
def custom_getattr(jit):

    class Config:
        def __init__(self):
            object.__setattr__(self, "_d", {"k": 2.0})

        def __getattr__(self, n):
            return self._d[n]

        def __setattr__(self, n, v):
            self._d[n] = v

    c = Config()
    f = jit(lambda x: x * c.k)
    r = [f(values(3))]
    c.k = 3.0
    r.append(f(values(3)))
    return r


@program
def property_state(jit):

    class A:
        _k = 2.0

        @property
        def k(self):
            return self._k * 2

    a = A()
    f = jit(lambda x: x * a.k)
    r = [f(values(3))]
    a._k = 3.0
    r.append(f(values(3)))
    A._k = 9.0
    del a._k
    r.append(f(values(3)))
    return r


@program
def namedtuple_state(jit):
    P = collections.namedtuple("P", "a w")
    o = types.SimpleNamespace(p=P(2.0, values(3)))
    f = jit(lambda x: x * o.p.a * o.p.w)
    r = [f(values(3))]
    o.p = P(3.0, values(3, start=1))
    r.append(f(values(3)))
    return r


@program
def module_as_argument(jit):
    f = jit(lambda m, x: m(x))
    r = []
    for i in range(3):
        m = nn.Linear(3, 2, bias=False).double()
        m.weight = nn.Parameter(values(2, 3, start=i))
        r += gradients(f(m, values(3)), m.weight)
        r.append(f(m, values(3)))
    return r


@program
def set_state(jit):
    s = {"a"}
    f = jit(lambda x: x.sin() if "b" in s else x.cos())
    r = [f(values(3))]
    s.add("b")
    r.append(f(values(3)))
    return r


@program
def tensor_attribute(jit):
    w = nn.Parameter(values(3))
    w.mult = 2.0
    f = jit(lambda x: x * w * w.mult)
    r = [f(values(3))]
    w.mult = 3.0
    r.append(f(values(3)))
    return r


@program
def global_unbound_later(jit):
    globals().pop("LATER", None)

    def g(x):
        try:
            return x * LATER
        except NameError:
            return x.sin()

    f = jit(g)
    r = [f(values(3))]
    globals()["LATER"] = 3.0
    r.append(f(values(3)))
    globals().pop("LATER")
    return r


@program
def hasattr_state(jit):
    o = types.SimpleNamespace()
    f = jit(lambda x: x * 2 if hasattr(o, "flag") else x * 3)
    r = [f(values(3))]
    o.flag = 1
    r.append(f(values(3)))
    return r


@program
def numpy_state(jit):
    a = np.ones(3)
    f = jit(lambda x: x * torch.from_numpy(a) * float(a[0]))
    r = [f(values(3))]
    a[0] = 5.0
    r.append(f(values(3)))
    return r


@program
def contextvar_state(jit):
    v = contextvars.ContextVar("v", default=2.0)
    f = jit(lambda x: x * v.get())
    r = [f(values(3))]
    v.set(3.0)
    r.append(f(values(3)))
    return r


@program
def threadlocal_state(jit):
    v = threading.local()
    v.k = 2.0
    f = jit(lambda x: x * v.k)
    r = [f(values(3))]
    v.k = 3.0
    r.append(f(values(3)))
    return r


@program
def lru_cache_state(jit):

    @functools.lru_cache
    def table(n):
        return torch.arange(float(n), dtype=torch.float64)

    f = jit(lambda x: x * table(3))
    return [f(values(3)), f(values(3)), table(3), f(values(3))]


@program
def cached_property_state(jit):

    class A:
        def __init__(self):
            self.n = 3

        @functools.cached_property
        def k(self):
            return self.n * 2

    a = A()
    f = jit(lambda x: x * a.k)
    r = [f(values(3)), f(values(3))]
    a.n = 5
    r.append(f(values(3)))
    return r


@refused("is kept by")
def cached_property_tensor(jit):

    class A:
        @functools.cached_property
        def t(self):
            return torch.arange(3.0, dtype=torch.float64)

    a = A()
    f = jit(lambda x: x * a.t)
    return [f(values(3)), f(values(3)), a.t]
