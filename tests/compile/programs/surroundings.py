"""What is around a call, and what its arguments are (J5)."""

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import functx

from .collected import Programs, gradients, values

PROGRAMS = Programs()
program, refused, in_eager = PROGRAMS.right, PROGRAMS.refused, PROGRAMS.in_eager


@program
def inference_then_nograd(jit):
    f = jit(lambda x: x.sin())
    with torch.inference_mode():
        a = f(values(3))
    with torch.no_grad():
        b = f(values(3))
    return [a.is_inference(), b.is_inference(), f(values(3)).is_inference()]


@program
def inference_asked(jit):
    f = jit(lambda x: x.sin() if torch.is_inference_mode_enabled() else x.cos())
    r = []
    with torch.no_grad():
        r.append(f(values(3)))
    with torch.inference_mode():
        r.append(f(values(3)))
    return [t.clone() for t in r]


@program
def conj_arg(jit):
    f = jit(lambda x: x * 2)
    x = torch.complex(values(3), values(3, start=1))
    return [f(x.conj()), f(x), f(x.conj())]


@program
def conj_captured(jit):
    w = torch.complex(values(3), values(3, start=1)).conj()
    f = jit(lambda x: x * w)
    return [f(values(3)), f(values(3))]


@program
def neg_arg(jit):
    f = jit(lambda x: x * 2)
    x = torch.complex(values(3), values(3, start=1)).conj().imag
    return [f(x), f(values(3))]


@program
def is_conj_asked(jit):
    f = jit(lambda x: x * 2 if x.is_conj() else x * 3)
    x = torch.complex(values(3), values(3, start=1))
    return [f(x.conj()), f(x)]


@program
def same_args(jit):
    f = jit(lambda a, b: a.sin() if a is b else a.cos())
    x, y = (values(3), values(3))
    return [f(x, y), f(x, x), f(x, y)]


@program
def same_as_captured(jit):
    w = values(3)
    f = jit(lambda a: a.sin() if a is w else a.cos())
    return [f(values(3)), f(w), f(values(3))]


@program
def requires_grad_branch(jit):
    f = jit(lambda a: a.sin() if a.requires_grad else a.cos())
    x = values(3)
    y = values(3).requires_grad_()
    r = [f(x), f(y)]
    with torch.no_grad():
        r += [f(x), f(y)]
    return r


@program
def is_leaf_branch(jit):
    f = jit(lambda a: a.sin() if a.is_leaf else a.cos())
    y = values(3).requires_grad_()
    return [f(y), f(y * 1), f(y)]


@program
def grad_fn_branch(jit):
    f = jit(lambda a: a.sin() if a.grad_fn is None else a.cos())
    y = values(3).requires_grad_()
    return [f(y), f(y * 1), f(y)]


@program
def offset_branch(jit):
    f = jit(lambda a: a * (1 + a.storage_offset()))
    y = values(9)
    return [f(y[:3]), f(y[3:6]), f(y[6:])]


@program
def contiguous_branch(jit):
    f = jit(lambda a: a * 2 if a.is_contiguous() else a * 3)
    return [f(values(3, 2)), f(values(2, 3).t())]


@program
def grad_enabled_branch(jit):
    f = jit(lambda a: a * 2 if torch.is_grad_enabled() else a * 3)
    r = [f(values(3))]
    with torch.no_grad():
        r.append(f(values(3)))
    return r


@program
def enable_grad_inside_nograd(jit):
    w = values(3).requires_grad_()

    def g(x):
        with torch.enable_grad():
            return (x * w).sin()

    f = jit(g)
    with torch.no_grad():
        o = f(values(3))
    return [o, gradients(o, w)]


@program
def no_grad_inside(jit):
    w = values(3).requires_grad_()

    def g(x):
        with torch.no_grad():
            y = (x * w).sin()
        return y + w

    f = jit(g)
    o = f(values(3))
    return [o, gradients(o, w)]


@program
def autocast(jit):
    f = jit(lambda a, b: a @ b)
    a = torch.ones(2, 2)
    r = [f(a, a).dtype == torch.float32]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        r.append(f(a, a).dtype == torch.bfloat16)
    return r


@program
def default_dtype(jit):
    f = jit(lambda a: a + torch.ones(3))
    r = [f(torch.ones(3))]
    torch.set_default_dtype(torch.float64)
    try:
        r.append(f(torch.ones(3)))
    finally:
        torch.set_default_dtype(torch.float32)
    return r


@program
def default_device(jit):
    f = jit(lambda: torch.ones(3))
    r = [str(f().device)]
    with torch.device("meta"):
        r.append(str(f().device))
    return r


@in_eager("runs in eager, inside of")
def function_mode(jit):

    class M(TorchFunctionMode):
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is torch.sin:
                return torch.cos(*args)
            return func(*args, **kwargs or {})

    f = jit(lambda x: torch.sin(x))
    r = []
    with M():
        r.append(f(values(3)))
    r.append(f(values(3)))
    with M():
        r.append(f(values(3)))
    return r


@in_eager("runs in eager, inside of")
def global_module_hook(jit):
    f = jit(nn.Sequential(nn.Identity()))
    r = []
    h = nn.modules.module.register_module_forward_hook(lambda m, a, o: o * 2)
    try:
        r.append(f(values(3)))
    finally:
        h.remove()
    r.append(f(values(3)))
    return r


@in_eager("runs in eager, inside of")
def dispatch_mode(jit):
    n = [0]

    class M(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            n[0] += 1
            return func(*args, **kwargs or {})

    f = jit(lambda x: x.sin().cos())
    r = []
    for _ in range(2):
        with M():
            r.append(f(values(3)))
    r.append(f(values(3)))
    return r + n


@in_eager("runs in eager inside vmap")
def vmap_around(jit):
    f = jit(lambda x: x.sin().sum())
    return [functx.vmap(f)(values(3, 2))]


@program
def grad_around(jit):
    w = values(3).requires_grad_()
    f = jit(lambda x: (x * w).sin().sum())
    return [functx.grad(f)(values(3, start=i)) for i in range(3)]


@program
def functional_call_grad(jit):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 2).double()
            self.call = jit(lambda x: self.inner(x).sin())

        def forward(self, x):
            return self.call(x)

    outer = Outer()
    tensors = {"inner.weight": values(2, 3), "inner.bias": values(2)}

    def loss(tensors, x):
        return functx.functional_call(outer, tensors, (x,)).sum()

    return [functx.grad(loss)(tensors, values(3, start=i)) for i in range(2)]


@program
def functional_call_jitted_inside(jit):
    m = nn.Linear(3, 2).double()
    inner = jit(lambda x: m(x).sin().sum())
    P = {"weight": values(2, 3), "bias": values(2)}

    def loss(p, x):
        old = m.weight
        del m.weight
        m.weight = p["weight"]
        b = m.bias
        del m.bias
        m.bias = p["bias"]
        try:
            return inner(x)
        finally:
            del m.weight, m.bias
            m.weight = old
            m.bias = b

    return [functx.grad(loss)(P, values(3, start=i)) for i in range(2)]


@program
def grad_grad_around(jit):
    w = values(3).requires_grad_()
    f = jit(lambda x: (x * w).sin().sum())
    g = functx.grad(f)
    return [functx.grad(lambda x: g(x).sin().sum())(values(3, start=i)) for i in range(2)]


@in_eager("runs in eager inside vmap")
def hessian_around(jit):
    f = jit(lambda x: x.sin().prod())
    return [functx.hessian(f)(values(3))]


@in_eager("runs in eager inside vmap")
def jacrev_around(jit):
    w = values(3)
    f = jit(lambda x: x.sin() * w)
    return [functx.jacrev(f)(values(3))]


@program
def kwargs_and_defaults(jit):
    f = jit(lambda x, *, k=2.0, flag=False: x * k if flag else x + k)
    return [f(values(3)), f(values(3), k=3.0), f(values(3), flag=True), f(values(3), k=3.0)]


@program
def static_method_class(jit):

    class A:
        k = 2.0

        @classmethod
        def c(cls, x):
            return x * cls.k

        @staticmethod
        def s(x):
            return x * A.k

    f = jit(lambda x: A.c(x) + A.s(x))
    r = [f(values(3))]
    A.k = 3.0
    r.append(f(values(3)))
    return r


@program
def autocast_off_inside(jit):
    w = torch.ones(3, 3, requires_grad=True)

    def f(x):
        with torch.autocast("cpu", enabled=False):
            a = x @ (w / 3)
        return a, x @ w

    jitted, x = jit(f), torch.arange(9.0).reshape(3, 3) / 7
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a, b = jitted(x)
        return [a, b, *gradients(a.sin(), w), *jitted(x)]
