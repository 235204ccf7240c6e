"""Hooks, saved tensors, results that share memory, derivatives of derivatives (J5, J6)."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import functx

from .collected import Programs, gradients, values

PROGRAMS = Programs()
program, refused, in_eager = PROGRAMS.right, PROGRAMS.refused, PROGRAMS.in_eager


@program
def hook_captured(jit):
    w = values(3).requires_grad_()
    w.register_hook(lambda g: g * 10)
    f = jit(lambda x: (x * w).sum())
    r = []
    for i in range(3):
        f(values(3, start=i)).backward()
        r.append(w.grad.clone())
    return r


@program
def hook_param_module(jit):
    m = nn.Linear(3, 2).double()
    with torch.no_grad():
        for p in m.parameters():
            p.copy_(values(*p.shape))
    m.weight.register_hook(lambda g: g * 10)
    f = jit(m)
    r = []
    for i in range(2):
        f(values(4, 3, start=i)).sum().backward()
        r.append(m.weight.grad.clone())
    return r


@program
def hook_method(jit):

    class A:
        def __init__(self):
            self.w = values(3).requires_grad_()
            self.w.register_hook(lambda g: g * 2)
            self.call = jit(self.go)

        def go(self, x):
            return (self.w * x).sin()

    a = A()
    return [gradients(a.call(values(3)), a.w) for _ in range(2)]


@program
def hook_argument(jit):
    w = values(3).requires_grad_()
    h = w * 2
    h.register_hook(lambda g: g * 3)
    f = jit(lambda a: a.sin().sum())
    return gradients(f(h), w)


@program
def hook_region(jit):
    w = values(3).requires_grad_()
    w.register_hook(lambda g: g * 10)
    reg = functx.remat(lambda x: (x * w).sin())
    f = jit(lambda x: reg(x).sum())
    return [gradients(f(values(3)), w), gradients(f(values(3)), w)]


@program
def hook_custom_function(jit):

    class D(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            ctx.save_for_backward(a)
            return a.sin()

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0].cos()

    w = values(3).requires_grad_()
    w.register_hook(lambda g: g * 10)
    f = jit(lambda x: (x * D.apply(w)).sum())
    return [gradients(f(values(3)), w), gradients(f(values(3)), w)]


@program
def post_acc_hook(jit):
    w = values(3).requires_grad_()
    seen = []
    w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    f = jit(lambda x: (x * w).sum())
    f(values(3)).backward()
    f(values(3)).backward()
    return seen


@refused("registers a hook on")
def hook_inside_on_captured(jit):
    w = values(3).requires_grad_()

    def g(x):
        w.register_hook(lambda g: g * 10)
        return (x * w).sum()

    f = jit(g)
    return [gradients(f(values(3)), w) for _ in range(2)]


@refused("registers a hook on")
def hook_inside_on_arg(jit):

    def g(x):
        x.register_hook(lambda g: g * 10)
        return (x * x).sum()

    f = jit(g)
    x = values(3).requires_grad_()
    return gradients(f(x), x)


@program
def hook_inside_on_inner(jit):

    def g(x):
        y = x * 2
        y.register_hook(lambda g: g * 10)
        return y.sin().sum()

    f = jit(g)
    x = values(3).requires_grad_()
    return [gradients(f(x), x), gradients(f(x), x)]


@program
def hook_result_inside(jit):

    def g(x):
        y = x * 2
        y.register_hook(lambda g: g * 10)
        return y

    f = jit(g)
    x = values(3).requires_grad_()
    return [gradients(f(x), x), gradients(f(x).sin(), x)]


@program
def bn_two_forwards(jit):
    m = nn.BatchNorm1d(3).double()
    f = jit(m)
    a = f(values(5, 3))
    b = f(values(5, 3, start=3))
    (a * values(5, 3) + b).sin().sum().backward()
    return [m.weight.grad, m.running_mean, m.num_batches_tracked]


@program
def return_twice(jit):
    f = jit(lambda x: (lambda y: (y, y))(x.sin()))
    x = values(3).requires_grad_()
    a, b = f(x)
    a.mul_(2)
    return [a, b, a is b, gradients(b.sin(), x)]


@program
def return_view_pair(jit):
    f = jit(lambda x: (lambda y: (y, y.t()))(x.sin()))
    x = values(3, 2).requires_grad_()
    a, b = f(x)
    a.mul_(2)
    return [a, b, gradients(b.sin(), x)]


@program
def return_input_view(jit):
    f = jit(lambda x: x.t())
    x = values(3, 2)
    a = f(x)
    a.mul_(2)
    return [a, x]


@program
def return_input(jit):
    f = jit(lambda x: x)
    x = values(3, 2)
    a = f(x)
    return [a is x]


@program
def return_captured(jit):
    w = values(3)
    f = jit(lambda x: w)
    return [f(values(3)) is w, f(values(3)) is w]


@program
def return_chunks(jit):
    f = jit(lambda x: x.sin().chunk(2))
    x = values(4).requires_grad_()
    a, b = f(x)
    return [a, b, gradients(a * b, x)]


@program
def return_overlapping(jit):
    f = jit(lambda x: (lambda y: (y[:3], y[1:]))(x.sin()))
    x = values(4).requires_grad_()
    a, b = f(x)
    a.mul_(2)
    return [a, b, gradients(b.sin(), x)]


@program
def return_detached_pair(jit):
    f = jit(lambda x: (lambda y: (y.detach(), y))(x.sin()))
    x = values(4).requires_grad_()
    a, b = f(x)
    a.mul_(2)
    return [a, b]


@program
def torch_checkpoint_around(jit):
    w = values(3, 3).requires_grad_()
    f = jit(lambda x: (x @ w).tanh())
    x = values(3, 3).requires_grad_()
    out = checkpoint(f, x, use_reentrant=False)
    return gradients(out.sin(), x, w)


@program
def checkpoint_reentrant(jit):
    w = values(3, 3).requires_grad_()
    f = jit(lambda x: (x @ w).tanh())
    x = values(3, 3).requires_grad_()
    out = checkpoint(f, x, use_reentrant=True)
    out.sin().sum().backward()
    return [x.grad, w.grad]


@program
def save_on_cpu(jit):
    f = jit(lambda x: (x.sin() * x).tanh())
    x = values(3).requires_grad_()
    r = []
    for _ in range(2):
        with torch.autograd.graph.save_on_cpu():
            o = f(x)
        r += gradients(o, x)
    r += gradients(f(x), x)
    return r


@program
def saved_hooks_first_call(jit):
    f = jit(lambda x: x.sin().tanh())
    x = values(3).requires_grad_()
    r = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
        o = f(x)
    r += gradients(o, x)
    r += gradients(f(x), x)
    return r


@program
def saved_hooks_inside(jit):

    def g(x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
            return x.sin()

    f = jit(g)
    x = values(3).requires_grad_()
    return gradients(f(x), x)


@refused("calls retain_grad")
def retain_grad_arg(jit):
    f = jit(lambda x: (x.retain_grad(), x.sin())[1])
    x = values(3).requires_grad_() * 1
    f(x).sum().backward()
    return [x.grad]


@refused("calls retain_grad")
def retain_grad_result(jit):

    def g(x):
        y = x.sin()
        y.retain_grad()
        return y

    f = jit(g)
    x = values(3).requires_grad_()
    y = f(x)
    (y * 2).sum().backward()
    return [y.grad]


@program
def second_derivative(jit):
    w = values(3).requires_grad_()
    f = jit(lambda x: (x * w).sin().sum() * w.sum())
    x = values(3).requires_grad_()
    (g,) = torch.autograd.grad(f(x), x, create_graph=True)
    return gradients(g.sin(), x, w)


@program
def second_derivative_region(jit):
    w = values(3).requires_grad_()
    reg = functx.remat(lambda x: (x * w).sin())
    f = jit(lambda x: reg(x).sum() * w.sum())
    x = values(3).requires_grad_()
    (g,) = torch.autograd.grad(f(x), x, create_graph=True)
    return gradients(g.sin(), x, w)


@program
def second_derivative_custom(jit):

    class D(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            ctx.save_for_backward(a)
            return a.sin()

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0].cos()

    w = values(3).requires_grad_()
    f = jit(lambda x: (x * D.apply(w)).sin().sum())
    x = values(3).requires_grad_()
    (g,) = torch.autograd.grad(f(x), x, create_graph=True)
    return gradients(g.sin(), x, w)


@program
def third_derivative_custom(jit):

    class D(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            ctx.save_for_backward(a)
            return a.sin()

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0].cos()

    w = values(3).requires_grad_()
    f = jit(lambda x: (x * D.apply(w)).sin().sum())
    x = values(3).requires_grad_()
    (g,) = torch.autograd.grad(f(x), x, create_graph=True)
    (h,) = torch.autograd.grad(g.sin().sum(), w, create_graph=True)
    return gradients(h.cos(), x, w)


@program
def double_backward_after_eval(jit):

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(values(3))

        def forward(self, x):
            return (x * self.w).sin() if self.training else (x * self.w).cos()

    m = M()
    f = jit(m)
    x = values(3).requires_grad_()
    (g,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
    m.eval()
    return gradients(g.sin(), x, m.w)


@program
def param_written_between(jit):
    w = values(3).requires_grad_()
    f = jit(lambda x: (x * w).sum())
    x = values(3).requires_grad_()
    o = f(x)
    with torch.no_grad():
        w.add_(1)
    return gradients(o, w)
