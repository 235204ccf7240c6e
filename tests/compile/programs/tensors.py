"""Tensors as objects: hooks, attributes, identity, leaves."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .collected import Programs, gradients, linear, values

PROGRAMS = Programs()
program, refused, in_eager = PROGRAMS.right, PROGRAMS.refused, PROGRAMS.in_eager


@program
def hook_on_module_output_outside(jit):
    m = linear()
    f = jit(m)
    x = values(3).requires_grad_()
    y = f(x)
    y.register_hook(lambda g: g * 3)
    return gradients(y, x)


@program
def weight_shared_across_jits(jit):
    w = nn.Parameter(values(3))
    w.register_hook(lambda g: g + 1)
    f, g = (jit(lambda x: x * w), jit(lambda x: x + w))
    (f(values(3)) + g(values(3))).sum().backward()
    return [w.grad]


@program
def param_hook_on_view(jit):
    w = values(6).requires_grad_()
    v = w.view(2, 3)
    v.register_hook(lambda g: g * 2)
    f = jit(lambda x: x @ v)
    return gradients(f(values(2)), w) + gradients(f(values(2)), w)


@program
def accumulate_grad_hook(jit):
    w = values(3).requires_grad_()
    acc = w.view_as(w).grad_fn.next_functions[0][0]
    n = []
    acc.register_hook(lambda *a: n.append(1))
    f = jit(lambda x: (x * w).sum())
    f(values(3)).backward()
    f(values(3)).backward()
    return [len(n), w.grad]


@program
def multi_grad_hook(jit):
    a, b = (values(3).requires_grad_(), values(3, start=1).requires_grad_())
    seen = []
    torch.autograd.graph.register_multi_grad_hook(
        (a, b), lambda gs: seen.append([g.clone() for g in gs])
    )
    f = jit(lambda x: (x * a * b).sum())
    f(values(3)).backward()
    return seen


@program
def checkpoint_early_stop(jit):
    m = linear(3, 3)
    f = jit(m)
    x = values(2, 3).requires_grad_()
    y = checkpoint(lambda x: f(x).tanh().sin(), x, use_reentrant=False)
    return gradients(y, x, m.weight)


@program
def saved_hooks_offload_second(jit):
    store = []

    def pack(t):
        store.append(t.clone())
        return len(store) - 1

    def unpack(i):
        return store[i]

    f = jit(lambda x: (x.sin() * x).exp())
    x = values(3).requires_grad_()
    r = gradients(f(x), x)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = f(x)
    return r + gradients(y, x)


@program
def graph_retained_then_inplace(jit):
    w = values(3).requires_grad_()
    f = jit(lambda x: (x * w).sum())
    y = f(values(3))
    y.backward(retain_graph=True)
    with torch.no_grad():
        w.mul_(2)
    z = f(values(3))
    z.backward()
    return [w.grad]


@program
def param_step_between_fw_bw_error(jit):
    w = values(3).requires_grad_()
    f = jit(lambda x: (x * w * w).sum())
    y = f(values(3))
    with torch.no_grad():
        w.mul_(2)
    return gradients(y, w)


@program
def param_step_between_fw_bw_ok(jit):
    w = values(3).requires_grad_()
    f = jit(lambda x: (x + w).sum())
    y = f(values(3))
    with torch.no_grad():
        w.mul_(2)
    return gradients(y, w)


@program
def arg_nonleaf_hook(jit):
    w = values(3).requires_grad_()
    h = w * 2
    got = []
    h.register_hook(lambda g: got.append(g))
    f = jit(lambda a: a.sin())
    return gradients(f(h), w) + got


@program
def grad_wrt_intermediate_arg(jit):
    w = values(3).requires_grad_()
    h = w * 2
    f = jit(lambda a: a.sin())
    return gradients(f(h), h)


@program
def is_same_param(jit):
    m = linear()
    f = jit(lambda p: p * 2 if p is m.weight else p * 3)
    return [f(m.weight), f(m.bias)]


@program
def tensor_in_dict_key_lookup(jit):
    a, b = (values(3), values(3, start=1))
    d = {a: 2.0, b: 3.0}
    f = jit(lambda t: t * d[t])
    return [f(a), f(b)]


@program
def in_list_identity(jit):
    a, b = (values(3), values(3, start=1))
    items = [a]
    f = jit(lambda t: t * 2 if any(t is u for u in items) else t * 3)
    return [f(a), f(b), f(values(3))]


@program
def optimizer_state_lookup(jit):
    w = nn.Parameter(values(3))
    opt = torch.optim.Adam([w])
    w.sum().backward()
    opt.step()
    f = jit(lambda x: x * opt.state[w]["exp_avg"])
    r = [f(values(3))]
    w.grad.mul_(3)
    opt.step()
    r.append(f(values(3)))
    return r


@program
def attribute_on_arg_tensor(jit):
    f = jit(lambda x: x * getattr(x, "scale", 1.0))
    x = values(3)
    r = [f(x)]
    y = values(3)
    y.scale = 5.0
    r.append(f(y))
    return r


@program
def attribute_on_arg_tensor_first(jit):
    f = jit(lambda x: x * getattr(x, "scale", 1.0))
    y = values(3)
    y.scale = 5.0
    r = [f(y)]
    r.append(f(values(3)))
    y.scale = 7.0
    r.append(f(y))
    return r


@refused("sets an attribute")
def attribute_set_on_arg(jit):

    def g(x):
        x.tag = "seen"
        return x * 2

    f = jit(g)
    x = values(3)
    f(x)
    return [getattr(x, "tag", None)]


@program
def attribute_set_on_captured(jit):
    w = values(3)

    def g(x):
        w.tag = "seen"
        return x * w

    f = jit(g)
    f(values(3))
    return [getattr(w, "tag", None)]


@refused("sets an attribute")
def attribute_set_on_result(jit):

    def g(x):
        y = x * 2
        y.tag = "seen"
        return y

    f = jit(g)
    return [getattr(f(values(3)), "tag", None), getattr(f(values(3)), "tag", None)]


@program
def param_attr_added_later(jit):
    w = nn.Parameter(values(3))
    f = jit(lambda x: x * w * getattr(w, "mult", 1.0))
    r = [f(values(3))]
    w.mult = 3.0
    r.append(f(values(3)))
    return r


@program
def requires_grad_result_leaf(jit):
    f = jit(lambda x: x.detach().requires_grad_())
    y = f(values(3))
    return [y.requires_grad, y.is_leaf]


@program
def detach_shares_requires(jit):
    f = jit(lambda x: x.detach().requires_grad_())
    x = values(3)
    y = f(x)
    with torch.no_grad():
        y.mul_(2)
    return [x, y.requires_grad]


@program
def result_is_leaf(jit):
    f = jit(lambda x: x * 2)
    x = values(3).requires_grad_()
    return [f(x).is_leaf, f(values(3)).is_leaf]


@program
def result_version(jit):
    f = jit(lambda x: x * 2)
    return [f(values(3))._version]


@program
def result_contiguity(jit):
    f = jit(lambda x: (x.t() * 2, x.expand(2, 2, 3).sum(0).t()))
    return [t.stride() for t in f(values(2, 3))]


@program
def result_dtype_device(jit):
    f = jit(lambda x: (x > 0, x.int(), x.half(), x.sum().to(torch.complex64)))
    return [str(t.dtype) for t in f(values(3))]


@program
def named_output_none_grad(jit):
    f = jit(lambda x, y: (x.sin(), y.detach()))
    x, y = (values(3).requires_grad_(), values(3).requires_grad_())
    a, b = f(x, y)
    return [*gradients(a, x, y), b.requires_grad]
