"""What a function does beside its result (J4)."""

import copy
import dataclasses
import random
import types

import torch
import torch.nn.functional as F
from torch import nn

from .collected import Programs, gradients, values

PROGRAMS = Programs()
program, refused, in_eager = PROGRAMS.right, PROGRAMS.refused, PROGRAMS.in_eager


@refused("seeds a generator")
def seed_inside(jit):
    f = jit(lambda x: (torch.manual_seed(3), F.dropout(x))[1])
    return [f(values(9)), f(values(9)), torch.rand(2)]


@refused("seeds a generator")
def fork_rng_inside(jit):

    def g(x):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            return x * torch.rand(9, dtype=torch.float64)

    f = jit(g)
    return [f(values(9)), f(values(9)), torch.rand(2)]


@refused("draws from a torch.Generator")
def generator_inside(jit):

    def g(x):
        gen = torch.Generator().manual_seed(3)
        return x * torch.rand(9, generator=gen, dtype=torch.float64)

    f = jit(g)
    return [f(values(9)), f(values(9))]


@program
def generator_captured(jit):
    gen = torch.Generator().manual_seed(3)
    f = jit(lambda x: x * torch.rand(9, generator=gen, dtype=torch.float64))
    return [f(values(9)), f(values(9)), torch.rand(2, generator=gen)]


@program
def generator_captured_replaced(jit):
    o = types.SimpleNamespace(gen=torch.Generator().manual_seed(3))
    f = jit(lambda x: x * torch.rand(9, generator=o.gen, dtype=torch.float64))
    r = [f(values(9))]
    o.gen = torch.Generator().manual_seed(9)
    r.append(f(values(9)))
    return r


@program
def generator_argument(jit):
    f = jit(lambda x, g: x * torch.rand(9, generator=g, dtype=torch.float64))
    return [f(values(9), torch.Generator().manual_seed(i)) for i in range(3)]


@refused("seeds a generator")
def generator_seeded_inside(jit):
    gen = torch.Generator()
    f = jit(
        lambda x: (gen.manual_seed(3), x * torch.rand(9, generator=gen, dtype=torch.float64))[1]
    )
    return [f(values(9)), f(values(9))]


@refused("draws from Python's or NumPy's random")
def python_random(jit):
    f = jit(lambda x: x * random.random())
    return [f(values(3)), f(values(3)), random.random()]


@program
def unsqueeze_arg(jit):
    f = jit(lambda x: (x.unsqueeze_(0), x * 2)[1])
    x = values(3)
    r = [f(x), x]
    x = values(3, start=1)
    r += [f(x), x]
    return r


@program
def transpose_arg(jit):
    f = jit(lambda x: (x.t_(), x * 2)[1])
    x = values(3, 2)
    return [f(x), x, f(x), x]


@program
def unsqueeze_arg_grad(jit):
    f = jit(lambda x: (x.unsqueeze_(0), x * 2)[1])
    w = values(3).requires_grad_()
    x = w * 2
    o = f(x)
    return [o, x, gradients(o * x, w)]


@refused("unsqueeze_ of a tensor")
def unsqueeze_captured(jit):
    w = values(3)
    f = jit(lambda x: (w.unsqueeze_(0), w * x)[1])
    return [f(values(3)), w]


@program
def history_into_buffer(jit):
    buf = torch.zeros(3, dtype=torch.float64)
    w = values(3).requires_grad_()
    f = jit(lambda x: (buf.copy_(x * w), x.sin())[1])
    f(values(3))
    return [buf, gradients(buf.sin(), w)]


@program
def history_into_buffer_twice(jit):
    m = nn.Module()
    m.register_buffer("h", torch.zeros(3, dtype=torch.float64))
    w = values(3).requires_grad_()

    def g(x):
        m.h.mul_(0.5)
        m.h.add_(x * w)
        return m.h.sum()

    f = jit(g)
    f(values(3))
    o = f(values(3, start=1))
    return [m.h, gradients(o, w)]


@program
def history_into_arg(jit):
    w = values(3).requires_grad_()
    f = jit(lambda x: x.mul_(w))
    x = values(3)
    y = f(x)
    return [x, y is x, gradients(x.sin(), w)]


@program
def inplace_on_tracked_arg(jit):
    f = jit(lambda x: (x.mul_(3), x.sin())[1])
    w = values(3).requires_grad_()
    x = w * 2
    o = f(x)
    return [x, o, gradients(o * x, w)]


@program
def inplace_on_tracked_leaf(jit):
    f = jit(lambda x: (x.mul_(3), x.sin())[1])
    w = values(3).requires_grad_()
    return f(w)


@program
def inplace_on_view_of_arg(jit):
    w = values(3).requires_grad_()
    f = jit(lambda x: (x[0].copy_(w[0]), x.sin())[1])
    x = values(3)
    o = f(x)
    return [x, o, gradients(x * o, w)]


@program
def inplace_arg_view_outside(jit):
    base = values(4, 3)
    f = jit(lambda x: x.add_(1).sum())
    return [f(base[1]), base]


@program
def inplace_arg_view_history(jit):
    base = torch.zeros(4, 3, dtype=torch.float64)
    w = values(3).requires_grad_()
    f = jit(lambda x: x.add_(w).sum())
    f(base[1])
    return [base, gradients(base.sin(), w)]


@refused("reads the value of a tensor")
def captured_tolist(jit):
    w = values(3)
    f = jit(lambda x: x * w.tolist()[0])
    r = [f(values(3))]
    w.add_(1)
    r.append(f(values(3)))
    return r


@refused("reads the value of a tensor")
def captured_item(jit):
    w = values(3)
    f = jit(lambda x: x * w[0].item())
    r = [f(values(3))]
    w.add_(1)
    r.append(f(values(3)))
    return r


@refused("reads the value of a tensor")
def captured_float(jit):
    w = torch.tensor(2.0)
    f = jit(lambda x: x * float(w))
    r = [f(values(3))]
    w.add_(1)
    r.append(f(values(3)))
    return r


@refused("reads the value of a tensor")
def captured_numpy(jit):
    w = values(3)
    f = jit(lambda x: x * torch.from_numpy(w.numpy()))
    r = [f(values(3))]
    w.add_(1)
    r.append(f(values(3)))
    return r


@refused("reads the value of a tensor")
def captured_bool(jit):
    w = torch.tensor(True)
    f = jit(lambda x: x.sin() if w else x.cos())
    r = [f(values(3))]
    w.logical_not_()
    r.append(f(values(3)))
    return r


@program
def captured_deepcopy(jit):
    w = values(3).requires_grad_()
    f = jit(lambda x: x * copy.deepcopy(w))
    r = [f(values(3))]
    with torch.no_grad():
        w.add_(1)
    r.append(f(values(3)))
    return [t.detach() for t in r]


@refused("returns an object that is not a pytree")
def returns_object(jit):

    class O:
        pass

    def g(x):
        o = O()
        o.y = x.sin()
        return o

    f = jit(g)
    return [f(values(3)).y]


@refused("returns an object that is not a pytree")
def returns_dataclass(jit):

    @dataclasses.dataclass
    class O:
        y: object

    f = jit(lambda x: O(x.sin()))
    return [f(values(3)).y, f(values(3, start=1)).y]


@refused("returns an object that is not a pytree")
def returns_closure(jit):
    f = jit(lambda x: lambda: x.sin())
    return [f(values(3))()]


@program
def returns_arg_object(jit):

    class O:
        pass

    f = jit(lambda x, o: (x.sin(), o))
    a, b = (O(), O())
    return [f(values(3), a)[1] is a, f(values(3), b)[1] is b]


@program
def returns_captured_object(jit):

    class O:
        pass

    h = types.SimpleNamespace(o=O())
    f = jit(lambda x: (x.sin(), h.o))
    r = [f(values(3))[1] is h.o]
    h.o = O()
    r.append(f(values(3))[1] is h.o)
    return r


@in_eager("runs in eager, because it changes")
def counter_in_forward(jit):

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.n = 0

        def forward(self, x):
            self.n += 1
            return x * self.n

    m = M()
    f = jit(m)
    return [f(values(3)), f(values(3)), f(values(3)), m.n]


@in_eager("runs in eager, because it changes")
def global_counter(jit):
    global COUNT
    COUNT = 0

    def g(x):
        global COUNT
        COUNT += 1
        return x * COUNT

    f = jit(g)
    return [f(values(3)), f(values(3)), COUNT]


@in_eager("runs in eager, because it changes")
def log_list(jit):
    log = []
    f = jit(lambda x: (log.append(len(x)), x.sin())[1])
    f(values(3))
    f(values(3))
    return log


@refused("is kept by")
def log_tensor(jit):
    log = []
    f = jit(lambda x: (log.append(x.sum()), x.sin())[1])
    f(values(3))
    f(values(3))
    return log


@refused("is kept by")
def attr_tensor(jit):
    o = types.SimpleNamespace()

    def g(x):
        o.last = x.sin()
        return o.last * 2

    f = jit(g)
    f(values(3))
    return [o.last]


@in_eager("runs in eager, because it changes")
def swap_attrs(jit):
    o = types.SimpleNamespace(a=values(3), b=values(3, start=3))

    def g(x):
        o.a, o.b = (o.b, o.a)
        return x * o.a

    f = jit(g)
    return [f(values(3)), f(values(3)), f(values(3)), o.a]


@refused("leaves grad mode, a default or a flag")
def grad_mode_left(jit):
    f = jit(lambda x: (torch.set_grad_enabled(False), x.sin())[1])
    x = values(3).requires_grad_()
    try:
        return [f(x), torch.is_grad_enabled()]
    finally:
        torch.set_grad_enabled(True)


@refused("leaves grad mode, a default or a flag")
def default_dtype_left(jit):
    f = jit(lambda x: (torch.set_default_dtype(torch.float64), x.sin())[1])
    try:
        return [f(values(3)), torch.get_default_dtype()]
    finally:
        torch.set_default_dtype(torch.float32)


@refused("sets .data")
def data_assign(jit):
    w = values(3)
    f = jit(lambda x: (setattr(w, "data", w.data * 2), x * w)[1])
    return [f(values(3)), w]


@refused("sets requires_grad")
def requires_grad_inside(jit):

    def g(x):
        x.requires_grad_()
        return torch.autograd.grad(x.sin().sum(), x)[0]

    f = jit(g)
    x = values(3)
    return [f(x), x.requires_grad]


@program
def forces(jit):
    w = values(3).requires_grad_()

    def g(x):
        x = x.detach().requires_grad_()
        e = (x * w).sin().sum()
        (f,) = torch.autograd.grad(e, x, create_graph=True)
        return (e, f)

    f = jit(g)
    e, fo = f(values(3))
    return [e, fo, gradients(fo.sin() + e, w)]


@program
def returns_new_leaf(jit):
    f = jit(lambda x: (x.sin(), torch.zeros(3, requires_grad=True)))
    return list(f(values(3)))


@program
def batchnorm_counts(jit):
    m = nn.BatchNorm1d(3).double()
    f = jit(m)
    [f(values(5, 3, start=i)) for i in range(3)]
    return [m.running_mean, m.running_var, m.num_batches_tracked]


@refused("calls SGD.step")
def optimizer_step(jit):
    w = nn.Parameter(values(3))
    o = torch.optim.SGD([w], 0.1)
    w.grad = torch.ones(3, dtype=torch.float64)
    f = jit(lambda: o.step())
    f()
    return [w]


@program
def unused_dropout(jit):
    f = jit(lambda x: (F.dropout(x), x.sin())[1])
    f(values(3))
    return [torch.rand(2)]


@program
def print_inside(jit):
    f = jit(lambda x: (x.shape, x.sin())[1])
    return [f(values(3))]
