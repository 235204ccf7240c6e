"""Corners of Python and of torch, of all kinds."""

import array
import collections
import dataclasses
import functools
import itertools
import operator
import random
import textwrap
import threading
import time
import types

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import functx

from .collected import Programs, gradients, linear, values

PROGRAMS = Programs()
program, refused, in_eager = PROGRAMS.right, PROGRAMS.refused, PROGRAMS.in_eager


@refused("seeds a generator")
def rng_state_restored(jit):

    def g(x):
        s = torch.get_rng_state()
        a = torch.rand(3)
        torch.set_rng_state(s)
        b = torch.rand(3)
        return x + a - b

    return [jit(g)(values(3))]


@refused("seeds a generator")
def torch_checkpoint_inside_dropout(jit):

    def g(x):
        return checkpoint(lambda x: F.dropout(x.sin(), 0.5), x, use_reentrant=False)

    f = jit(g)
    x = values(50).requires_grad_()
    o = f(x)
    (gr,) = gradients(o, x)
    return [((o == 0) == (gr == 0)).all()]


@program
def torch_checkpoint_inside(jit):
    w = values(3).requires_grad_()

    def g(x):
        return checkpoint(lambda x: (x * w).sin(), x, use_reentrant=False)

    f = jit(g)
    x = values(3).requires_grad_()
    return gradients(f(x), x, w) + gradients(f(x), x, w)


@refused("draws from Python's or NumPy's random")
def np_rng(jit):
    r = np.random.default_rng(0)
    f = jit(lambda x: x * float(r.random()))
    return [f(values(3)), f(values(3))]


@refused("draws from Python's or NumPy's random")
def random_instance(jit):
    r = random.Random(0)
    f = jit(lambda x: x * r.random())
    return [f(values(3)), f(values(3))]


@program
def is_parameter(jit):
    f = jit(lambda x: x * 2 if isinstance(x, nn.Parameter) else x * 3)
    return [f(values(3)), f(nn.Parameter(values(3)))]


class Sub(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        r = super().__torch_function__(func, types, args, kwargs or {})
        return r * 2 if func is torch.sin else r


@refused("is of a subclass")
def subclass_arg(jit):
    f = jit(lambda x: torch.sin(x).as_subclass(torch.Tensor))
    return [f(values(3).as_subclass(Sub)), f(values(3))]


@refused("is of a subclass")
def subclass_captured(jit):
    w = values(3).as_subclass(Sub)
    f = jit(lambda x: (torch.sin(w) * x).as_subclass(torch.Tensor))
    return [f(values(3))]


@program
def scripted(jit):

    @torch.jit.script
    def s(a, b):
        return (a * b).sin()

    w = values(3).requires_grad_()
    f = jit(lambda x: s(x, w))
    return gradients(f(values(3)), w) + gradients(f(values(3, start=1)), w)


@refused("reads the value of a tensor")
def index_by_captured_int(jit):
    i = torch.tensor(1)
    f = jit(lambda x: x[i])
    r = [f(values(3))]
    i.add_(1)
    r.append(f(values(3)))
    return r


@refused("reads the value of a tensor")
def range_captured(jit):
    n = torch.tensor(2)
    f = jit(lambda x: sum(x * i for i in range(n)))
    r = [f(values(3))]
    n.add_(1)
    r.append(f(values(3)))
    return r


@refused("reads the value of a tensor")
def captured_compare(jit):
    w = values(3)
    f = jit(lambda x: x if w.sum() > 0 else -x)
    r = [f(values(3))]
    w.mul_(-1)
    r.append(f(values(3)))
    return r


@program
def captured_shape(jit):
    w = values(3)
    o = types.SimpleNamespace(w=w)
    f = jit(lambda x: x * o.w.shape[0])
    r = [f(values(3))]
    o.w = values(5)
    r.append(f(values(3)))
    return r


@program
def captured_list_stack(jit):
    items = [values(3).requires_grad_(), values(3, start=1).requires_grad_()]
    f = jit(lambda x: torch.stack(items).sum(0) * x)
    r = gradients(f(values(3)), *items)
    items.append(values(3, start=3).requires_grad_())
    r += gradients(f(values(3)), *items)
    return r


@program
def captured_generator_expr(jit):
    items = [values(3).requires_grad_(), values(3, start=1).requires_grad_()]
    f = jit(lambda x: sum(w * x for w in items))
    return gradients(f(values(3)), *items)


@program
def captured_cat_kw(jit):
    w = values(2, 3).requires_grad_()
    f = jit(lambda x: F.linear(input=x, weight=w))
    return gradients(f(values(3)), w)


@program
def tensor_in_set(jit):
    w = values(3).requires_grad_()
    s = {w}
    f = jit(lambda x: sum(t * x for t in s))
    return gradients(f(values(3)), w) + gradients(f(values(3)), w)


@program
def tensor_as_key(jit):
    w = values(3).requires_grad_()
    d = {w: 2.0}
    f = jit(lambda x: w * d[w] * x)
    r = gradients(f(values(3)), w)
    d[w] = 3.0
    r += gradients(f(values(3)), w)
    return r


@program
def tensor_in_partial(jit):
    w = values(3).requires_grad_()
    f = jit(functools.partial(torch.mul, w))
    return gradients(f(values(3)), w) + gradients(f(values(3)), w)


@program
def tensor_in_tuple_in_list(jit):
    w = values(3).requires_grad_()
    items = [(1, (w,))]
    f = jit(lambda x: x * items[0][1][0])
    r = gradients(f(values(3)), w)
    v = values(3, start=1).requires_grad_()
    items[0] = (1, (v,))
    r += gradients(f(values(3)), v)
    return r


@refused("can't find it again")
def tensor_in_iterator(jit):
    w = values(3).requires_grad_()
    it = itertools.cycle([w])
    f = jit(lambda x: x * next(it))
    return gradients(f(values(3)), w)


@program
def tensor_in_thread_local(jit):
    v = threading.local()
    v.w = values(3).requires_grad_()
    f = jit(lambda x: x * v.w)
    r = gradients(f(values(3)), v.w)
    v.w = values(3, start=2).requires_grad_()
    r += gradients(f(values(3)), v.w)
    return r


@program
def global_rebinds_module(jit):
    ns = {}
    source = """
        import torch
        import torch.nn.functional as F
        w=torch.ones(3,dtype=torch.float64)
        def f(x):
          return F.relu(x)*w
    """
    exec(textwrap.dedent(source), ns)
    f = jit(ns["f"])
    r = [f(values(5)[:3] - 0.5)]
    ns["F"] = types.SimpleNamespace(relu=lambda x: x * 2)
    r.append(f(values(5)[:3] - 0.5))
    ns["w"] = values(3)
    r.append(f(values(5)[:3] - 0.5))
    return r


@program
def exec_class(jit):
    ns = {}
    exec(
        "class A:\n  k=2.\n  def go(s,x):\n    return x*s.k\na=A()\ndef f(x):\n  return a.go(x)\n",
        ns,
    )
    f = jit(ns["f"])
    r = [f(values(3))]
    ns["A"].k = 3.0
    r.append(f(values(3)))
    ns["a"].k = 4.0
    r.append(f(values(3)))
    return r


@program
def metaclass(jit):

    class M(type):
        @property
        def k(self):
            return self._k

    class A(metaclass=M):
        _k = 2.0

    f = jit(lambda x: x * A.k)
    r = [f(values(3))]
    A._k = 3.0
    r.append(f(values(3)))
    return r


@program
def super_call(jit):

    class A(nn.Module):
        def forward(self, x):
            return x * self.k

    class B(A):
        def __init__(self):
            super().__init__()
            self.k = 2.0

        def forward(self, x):
            return super().forward(x) + 1

    b = B()
    f = jit(b)
    r = [f(values(3))]
    b.k = 3.0
    r.append(f(values(3)))
    A.forward = lambda s, x: x * 100
    r.append(f(values(3)))
    return r


@program
def descriptor(jit):

    class D:
        def __get__(self, o, c):
            return o._v * 2

        def __set__(self, o, v):
            o._v = v

    class A:
        v = D()

    a = A()
    a.v = 2.0
    f = jit(lambda x: x * a.v)
    r = [f(values(3))]
    a.v = 3.0
    r.append(f(values(3)))
    return r


@program
def slots_inherited(jit):

    class A:
        __slots__ = ("a",)

    class B(A):
        __slots__ = ("__dict__", "b")

    o = B()
    o.a = 2.0
    o.b = 3.0
    o.c = 4.0
    f = jit(lambda x: x * o.a * o.b * o.c)
    r = [f(values(3))]
    o.a = 5.0
    r.append(f(values(3)))
    o.b = 6.0
    r.append(f(values(3)))
    o.c = 7.0
    r.append(f(values(3)))
    return r


@program
def frozen_dataclass_replaced(jit):

    @dataclasses.dataclass(frozen=True)
    class C:
        k: float = 2.0

    o = types.SimpleNamespace(c=C())
    f = jit(lambda x: x * o.c.k)
    r = [f(values(3))]
    o.c = dataclasses.replace(o.c, k=3.0)
    r.append(f(values(3)))
    return r


@program
def dataclass_slots(jit):

    @dataclasses.dataclass(slots=True)
    class C:
        k: float = 2.0
        w: object = None

    c = C(2.0, values(3).requires_grad_())
    f = jit(lambda x: x * c.k * c.w)
    r = gradients(f(values(3)), c.w)
    c.k = 3.0
    r += gradients(f(values(3)), c.w)
    c.w = values(3, start=3).requires_grad_()
    r += gradients(f(values(3)), c.w)
    return r


@program
def operator_attrgetter(jit):
    o = types.SimpleNamespace(a=types.SimpleNamespace(k=2.0))
    g = operator.attrgetter("a.k")
    f = jit(lambda x: x * g(o))
    r = [f(values(3))]
    o.a.k = 3.0
    r.append(f(values(3)))
    return r


@program
def match_statement(jit):
    ns = {}
    source = """
        class P:
          __match_args__=('k',)
          def __init__(s,k): s.k=k
        p=P(2.)
        def f(x):
          match p:
            case P(k): return x*k
    """
    exec(textwrap.dedent(source), ns)
    f = jit(ns["f"])
    r = [f(values(3))]
    ns["p"].k = 3.0
    r.append(f(values(3)))
    return r


@program
def dunder_methods(jit):

    class V:
        def __init__(self, k):
            self.k = k

        def __mul__(self, x):
            return x * self.k

        def __getitem__(self, i):
            return self.k + i

        def __len__(self):
            return int(self.k)

        def __iter__(self):
            return iter([self.k] * 2)

        def __contains__(self, y):
            return y == self.k

        def __bool__(self):
            return self.k > 2

        def __eq__(self, o):
            return self.k == o

        def __call__(self, x):
            return x + self.k

    v = V(2.0)
    f = jit(
        lambda x: (
            (v * x + v[1] + len(v) + sum(v))
            * (2 if 2.0 in v else 3)
            * (5 if v else 7)
            * (11 if v == 2.0 else 13)
            + v(x)
        )
    )
    r = [f(values(3))]
    v.k = 3.0
    r.append(f(values(3)))
    return r


@program
def list_subclass(jit):

    class L(list):
        def total(self):
            return sum(self) * self.scale

    items = L([1.0, 2.0])
    items.scale = 2.0
    f = jit(lambda x: x * items.total())
    r = [f(values(3))]
    items.append(3.0)
    r.append(f(values(3)))
    items.scale = 5.0
    r.append(f(values(3)))
    return r


@program
def defaultdict_state(jit):
    d = collections.defaultdict(lambda: 2.0)
    f = jit(lambda x: x * d["k"])
    r = [f(values(3)), f(values(3))]
    d["k"] = 3.0
    r.append(f(values(3)))
    return [*r, dict(d)]


@in_eager("runs in eager, because it changes")
def counter_class(jit):
    c = collections.Counter()

    def g(x):
        c["calls"] += 1
        return x * 2

    f = jit(g)
    return [f(values(3)), f(values(3)), c["calls"]]


@program
def chainmap(jit):
    a = {"k": 2.0}
    m = collections.ChainMap({}, a)
    f = jit(lambda x: x * m["k"])
    r = [f(values(3))]
    a["k"] = 3.0
    r.append(f(values(3)))
    m["k"] = 4.0
    r.append(f(values(3)))
    return r


@program
def userdict(jit):
    m = collections.UserDict(k=2.0)
    f = jit(lambda x: x * m["k"])
    r = [f(values(3))]
    m["k"] = 3.0
    r.append(f(values(3)))
    return r


@program
def mappingproxy(jit):
    a = {"k": 2.0}
    m = types.MappingProxyType(a)
    f = jit(lambda x: x * m["k"])
    r = [f(values(3))]
    a["k"] = 3.0
    r.append(f(values(3)))
    return r


@program
def array_state(jit):
    a = array.array("d", [2.0])
    f = jit(lambda x: x * a[0])
    r = [f(values(3))]
    a[0] = 3.0
    r.append(f(values(3)))
    return r


@program
def bytearray_state(jit):
    a = bytearray(b"\x02")
    f = jit(lambda x: x * a[0])
    r = [f(values(3))]
    a[0] = 3
    r.append(f(values(3)))
    return r


@program
def cell_in_nested_function(jit):

    def make():
        k = 2.0

        def get():
            return k

        def put(v):
            nonlocal k
            k = v

        return (get, put)

    get, put = make()
    f = jit(lambda x: x * get())
    r = [f(values(3))]
    put(3.0)
    r.append(f(values(3)))
    return r


@in_eager("runs in eager, because it changes")
def nonlocal_counter(jit):
    n = 0

    def g(x):
        nonlocal n
        n += 1
        return x * n

    f = jit(g)
    return [f(values(3)), f(values(3)), n]


@in_eager("runs in eager, because it changes")
def function_attr_counter(jit):

    def g(x):
        g.calls += 1
        return x * g.calls

    g.calls = 0
    f = jit(g)
    return [f(values(3)), f(values(3)), g.calls]


@in_eager("runs in eager, because it changes")
def class_counter(jit):

    class A:
        n = 0

        def go(self, x):
            A.n += 1
            return x * A.n

    f = jit(A().go)
    return [f(values(3)), f(values(3)), A.n]


@in_eager("runs in eager, because it changes")
def slot_counter(jit):

    class A:
        __slots__ = ("n",)

        def go(self, x):
            self.n += 1
            return x * self.n

    a = A()
    a.n = 0
    f = jit(a.go)
    return [f(values(3)), f(values(3)), a.n]


@in_eager("runs in eager, because it changes")
def warmup_schedule(jit):

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.step = 0
            self.w = nn.Parameter(values(3))

        def forward(self, x):
            if self.training:
                self.step += 1
            return x * self.w * min(1.0, self.step / 3)

    m = M()
    f = jit(m)
    r = [f(values(3)) for _ in range(3)]
    m.eval()
    r += [f(values(3)), f(values(3))]
    return [*r, m.step]


@program
def first_call_flag(jit):

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.ready = False
            self.register_buffer("m", torch.zeros(3, dtype=torch.float64))

        def forward(self, x):
            if not self.ready:
                self.m.copy_(x)
                self.ready = True
            return x - self.m

    m = M()
    f = jit(m)
    return [f(values(3)), f(values(3, start=1)), f(values(3, start=2)), m.m, m.ready]


@refused("reads the value of a tensor")
def actnorm_init_tensor(jit):

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("init", torch.tensor(False))
            self.b = nn.Parameter(torch.zeros(3, dtype=torch.float64))

        def forward(self, x):
            if not self.init:
                with torch.no_grad():
                    self.b.copy_(x.mean(0))
                    self.init.fill_(True)
            return x - self.b

    m = M()
    f = jit(m)
    return [f(values(4, 3)), f(values(4, 3, start=1))]


@program
def memo_dict_plain(jit):
    memo = {}

    def scale(n):
        if n not in memo:
            memo[n] = n**0.5
        return memo[n]

    f = jit(lambda x: x * scale(x.shape[0]))
    return [f(values(3)), f(values(3)), f(values(4)), f(values(4)), sorted(memo)]


@refused("seeds a generator")
def lazily_built_module(jit):

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = None

        def forward(self, x):
            if self.l is None:
                torch.manual_seed(0)
                self.l = linear(x.shape[-1], 2)
            return self.l(x)

    m = M()
    return [jit(m)(values(3))]


@program
def attribute_rebound_same(jit):
    o = types.SimpleNamespace(k=2.0)

    def g(x):
        o.k = float("2")
        return x * o.k

    f = jit(g)
    return [f(values(3)), f(values(3))]


@program
def lists_built_inside(jit):

    def g(x):
        items = []
        for i in range(3):
            items.append(x * i)
        d = {}
        d["a"] = items
        return torch.stack(d["a"])

    return [jit(g)(values(3))]


@program
def objects_built_inside(jit):

    class P:
        def __init__(self, x):
            self.x = x
            self.n = 0

        def add(self, y):
            self.n += 1
            self.x = self.x + y
            return self

    f = jit(lambda x: P(x).add(x).add(2.0).x)
    return [f(values(3)), f(values(3))]


@program
def module_built_inside(jit):
    w = values(2, 3).requires_grad_()

    def g(x):
        m = nn.Linear(3, 2, bias=False, dtype=torch.float64, device="meta")
        return torch.func.functional_call(m, {"weight": w}, (x,))

    return gradients(jit(g)(values(3)), w)


@program
def param_created_inside(jit):
    f = jit(
        lambda x: (lambda p: torch.autograd.grad((x * p).sin().sum(), p)[0])(
            nn.Parameter(torch.ones(3, dtype=torch.float64))
        )
    )
    return [f(values(3)), f(values(3))]


@program
def result_requires_grad_flags(jit):
    w = values(3).requires_grad_()
    f = jit(lambda x: (x * w, (x * w).detach(), x * 2, x > 0, w))
    return [t.requires_grad for t in f(values(3))]


@program
def integer_results(jit):
    w = values(3).requires_grad_()
    f = jit(lambda x: ((x * w).argmax(), (x * w).max(0).indices, (x * w).sum()))
    return list(f(values(3))) + gradients(f(values(3))[2], w)


@program
def zero_grad_paths(jit):
    w = values(3).requires_grad_()
    v = values(3).requires_grad_()
    f = jit(lambda x, flag: x * w if flag else x * v)
    return gradients(f(values(3), True), w, v) + gradients(f(values(3), False), w, v)


@program
def unused_param_grad_none(jit):
    a, b = (linear(), linear(start=1))
    f = jit(lambda x: a(x))
    f(values(3)).sum().backward()
    return [b.weight.grad is None, a.weight.grad]


@program
def detach_captured(jit):
    w = values(3).requires_grad_()
    f = jit(lambda x: x * w.detach() + w)
    return gradients(f(values(3)), w)


@program
def requires_grad_captured_branch(jit):
    w = values(3).requires_grad_()
    f = jit(lambda x: x * w if w.requires_grad else x + w)
    r = [f(values(3))]
    w.requires_grad_(False)
    r.append(f(values(3)))
    return r


@program
def captured_is_leaf(jit):
    o = types.SimpleNamespace(w=values(3).requires_grad_())
    f = jit(lambda x: x * 2 if o.w.is_leaf else x * 3)
    r = [f(values(3))]
    o.w = o.w * 1
    r.append(f(values(3)))
    return r


@refused("reads .grad")
def captured_grad_none(jit):
    w = values(3).requires_grad_()
    f = jit(lambda x: x * w if w.grad is None else x + w)
    r = [f(values(3))]
    w.grad = values(3)
    r.append(f(values(3)))
    return r


@refused("reads .grad")
def zero_grad_inside(jit):
    w = values(3).requires_grad_()

    def g(x):
        if w.grad is not None:
            w.grad.zero_()
        return x * w

    f = jit(g)
    r = [f(values(3))]
    w.grad = values(3)
    r.append(f(values(3)))
    return [*r, w.grad]


@program
def nonleaf_captured(jit):
    v = values(3).requires_grad_()
    w = v * 2
    f = jit(lambda x: x * w + v)
    return gradients(f(values(3)), v)


@program
def nonleaf_captured_inplace(jit):
    v = values(3).requires_grad_()
    w = v * 2
    f = jit(lambda x: (w.mul_(x), w.sin())[1])
    o = f(values(3))
    return [*gradients(o + w, v), w]


@program
def nonleaf_captured_hooked(jit):
    v = values(3).requires_grad_()
    w = v * 2
    w.register_hook(lambda g: g * 5)
    f = jit(lambda x: x * w)
    return gradients(f(values(3)), v)


@program
def arg_is_captured_param(jit):
    m = linear()
    f = jit(lambda w, x: (w * 2).sum() + m(x).sum())
    return gradients(f(m.weight, values(3)), m.weight) + gradients(
        f(values(2, 3), values(3)), m.weight
    )


@program
def arg_twice_grad(jit):
    f = jit(lambda a, b: (a * b.sin()).sum())
    w = values(3).requires_grad_()
    v = values(3, start=1).requires_grad_()
    return gradients(f(w, w), w) + gradients(f(w, v), w, v)


@program
def arg_twice_second(jit):
    f = jit(lambda a, b: (a * b.sin()).sum() if a is b else (a + b).prod())
    w = values(3).requires_grad_()
    (g,) = torch.autograd.grad(f(w, w), w, create_graph=True)
    return gradients(g.sin(), w)


@program
def second_after_inplace(jit):
    f = jit(lambda x: (x * x * x).sum())
    w = values(3).requires_grad_()
    t = w * 1
    o = f(t)
    (g,) = torch.autograd.grad(o, t, create_graph=True)
    return gradients(g, w)


@program
def module_dict_arg(jit):
    f = jit(lambda ms, x: sum(m(x) for m in ms.values()))
    a, b = (linear(), linear(start=1))
    r = gradients(f({"a": a, "b": b}, values(3)), a.weight)
    r += gradients(f({"a": b, "b": b}, values(3)), b.weight)
    return r


@in_eager("runs in eager, because it changes")
def object_arg_mutated_plain(jit):

    class S:
        pass

    def g(x, s):
        s.n = s.n + 1
        return x * s.n

    f = jit(g)
    s = S()
    s.n = 0
    return [f(values(3), s), f(values(3), s), s.n]


@refused("is kept by")
def object_arg_mutated_tensor(jit):

    class S:
        pass

    def g(x, s):
        s.y = x * 2
        return x

    f = jit(g)
    s = S()
    f(values(3), s)
    return [s.y]


@refused("takes items of an iterator")
def iterator_arg(jit):
    f = jit(lambda x, it: x * next(it))
    it = iter([1.0, 2.0])
    return [f(values(3), it), f(values(3), it)]


@program
def time_now(jit):
    f = jit(lambda x: x * 0 + (time.time() > 0))
    return [f(values(3))]


@program
def autocast_inside(jit):
    w = torch.ones(3, 3, requires_grad=True)

    def g(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (x @ w).float()

    f = jit(g)
    return gradients(f(torch.ones(3, 3)), w) + gradients(f(torch.ones(3, 3)), w)


@program
def anomaly_mode(jit):
    f = jit(lambda x: x.sin())
    x = values(3).requires_grad_()
    with torch.autograd.detect_anomaly(check_nan=False):
        r = gradients(f(x), x)
    return r + gradients(f(x), x)


@program
def profiler_around(jit):
    f = jit(lambda x: x.sin())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        r = [f(values(3))]
    return [*r, f(values(3))]


@program
def functional_jvp_inside(jit):
    w = values(3).requires_grad_()
    f = jit(lambda x: functx.jvp(lambda y: (y * w).sin(), (x,), (x,))[1])
    return gradients(f(values(3)), w)


@program
def vmap_random_inside(jit):
    f = jit(lambda x: functx.vmap(lambda r: F.dropout(r, 0.5), randomness="different")(x))
    return [f(values(4, 9)), torch.rand(1)]


@program
def many_graphs(jit):
    o = types.SimpleNamespace(k=0)
    f = jit(lambda x: x + o.k)
    r = []
    for i in range(6):
        o.k = i
        r.append(f(values(3)))
    for i in range(6):
        o.k = i
        r.append(f(values(3)))
    return r
