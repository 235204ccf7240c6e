"""State that lies in unusual places, or that comes later than the first call."""

import collections
import functools
import inspect
import threading
import time
import types
import weakref

import numpy as np
import torch

from .collected import Programs, gradients, values

PROGRAMS = Programs()
program, refused, in_eager = PROGRAMS.right, PROGRAMS.refused, PROGRAMS.in_eager
X = values(3)


# -- what is absent in the first call


@program
def attribute_of_function_set_later(jit):
    def act(x):
        return x * getattr(act, "k", 1.0)

    f, out = jit(act), []
    for k in (None, 3.0, 4.0):
        if k:
            act.k = k
        out.append(f(X))
    return out


@program
def attribute_of_function_asked_for_by_an_error(jit):
    def helper():
        pass

    def g(x):
        try:
            return x * helper.k
        except AttributeError:
            return x

    f = jit(g)
    first = f(X)
    helper.k = 3.0
    return [first, f(X)]


@program
def attribute_of_partial_set_later(jit):
    part = functools.partial(torch.mul, other=2.0)
    f = jit(lambda x: part(x) * getattr(part, "k", 1.0))
    first = f(X)
    part.k = 3.0
    second = f(X)
    part.k = 4.0
    return [first, second, f(X)]


@program
def attribute_of_module_set_later(jit):
    settings = types.ModuleType("settings")
    f = jit(lambda x: x * getattr(settings, "k", 1.0))
    first = f(X)
    settings.k = 3.0
    return [first, f(X)]


@program
def global_that_shadows_a_builtin(jit):
    space = {}
    exec("def g(x):\n    return x * len([1, 2])", space)
    f = jit(space["g"])
    first = f(X)
    space["len"] = lambda items: 10
    second = f(X)
    del space["len"]
    return [first, second, f(X)]


@program
def builtin_that_is_added(jit):
    import builtins

    space = {}
    body = "def g(x):\n    try:\n        return x * ADDED\n    except NameError:\n        return x"
    exec(body, space)
    f = jit(space["g"])
    first = f(X)
    builtins.ADDED = 7.0
    try:
        return [first, f(X)]
    finally:
        del builtins.ADDED


@program
def special_methods_added_to_a_class(jit):
    class C:
        pass

    class L(list):
        pass

    c, items = C(), L([2.0])
    f = jit(lambda x: (x * 2 if c else x) * (3 if items else 1))
    first = f(X)
    C.__bool__ = lambda self: False
    second = f(X)
    L.__len__ = lambda self: 0
    return [first, second, f(X)]


@program
def getattr_added_to_a_class(jit):
    class C:
        pass

    c = C()
    f = jit(lambda x: x * getattr(c, "k", 1.0))
    first = f(X)
    C.__getattr__ = lambda self, name: 5.0
    return [first, f(X)]


# -- classes


@program
def other_bases(jit):
    class A:
        k = 1.0

    class B:
        k = 2.0

    class C(A):
        pass

    c = C()
    f = jit(lambda x: x * c.k)
    first = f(X)
    C.__bases__ = (B,)
    return [first, f(X)]


@program
def subclasses(jit):
    class Op:
        pass

    class A(Op):
        k = 2.0

    def g(x):
        for op in Op.__subclasses__():
            x = x * op.k
        return x

    f = jit(g)
    first = f(X)
    A.k = 3.0
    second = f(X)
    B = type("B", (Op,), {"k": 5.0})
    return [first, second, f(X), B.k]


@program
def partialmethod(jit):
    class P:
        def act(self, x, k):
            return x * k

        double = functools.partialmethod(act, k=2.0)

    p = P()
    f = jit(lambda x: p.double(x))
    first = f(X)
    P.double = functools.partialmethod(P.act, k=4.0)
    second = f(X)
    vars(P)["double"].keywords["k"] = 5.0
    return [first, second, f(X)]


@program
def names_listed_by_dir(jit):
    class C:
        loss_a = 2.0

    c = C()
    c.loss_b = 3.0

    def g(x):
        for name in dir(c):
            if name.startswith("loss_"):
                x = x * getattr(c, name)
        return x

    f = jit(g)
    first = f(X)
    c.loss_b = 4.0
    second = f(X)
    c.loss_c = 5.0
    third = f(X)
    C.loss_a = 1.5
    fourth = f(X)
    C.loss_d = 1.25
    return [first, second, third, fourth, f(X)]


@program
def names_listed_by_inspect(jit):
    o = types.SimpleNamespace(reg_a=2.0)

    def g(x):
        return x * sum(v for n, v in inspect.getmembers(o) if n.startswith("reg_"))

    f = jit(g)
    first = f(X)
    o.reg_a = 3.0
    return [first, f(X)]


@program
def property_of_a_metaclass(jit):
    class Meta(type):
        k = property(lambda cls: 2.0)

    class C(metaclass=Meta):
        pass

    f = jit(lambda x: x * C.k)
    first = f(X)
    Meta.k = property(lambda cls: 7.0)
    return [first, f(X)]


@program
def methods_of_containers(jit):
    d, items = {"k": 2.0, "w": values(3).requires_grad_()}, [1.0]
    get, item = d.get, items.__getitem__
    f = jit(lambda x: x * get("k") * item(0) + get("w"))
    out = [f(X), *gradients(f(X), d["w"])]
    d["k"] = 3.0
    out.append(f(X))
    items[0] = 4.0
    out.append(f(X))
    d["w"] = values(3, start=5.0)
    return [*out, f(X)]


@program
def a_thread_that_changes_itself(jit):
    class Beat(threading.Thread):
        count, scale = 0, 2.0

        def run(self):
            while not self.done.wait(0.001):
                self.count = self.count + 1

    def slow(x):
        time.sleep(0.02)
        return x * beat.scale

    beat = Beat(daemon=True)
    beat.done = threading.Event()
    beat.start()
    f = jit(slow)
    out = [f(X), f(X)]
    beat.scale = 3.0
    out.append(f(X))
    beat.done.set()
    return out


@program
def a_function_of_the_class_of_an_argument(jit):
    o = types.SimpleNamespace(k=2.0)

    @functools.singledispatch
    def scaled(x):
        raise TypeError

    @scaled.register
    def _(x: torch.Tensor):
        return x * o.k

    f = jit(lambda x: scaled(x))
    out = [f(X), f(X)]
    o.k = 3.0
    return [*out, f(X)]


# -- objects


@program
def another_dict_of_an_object(jit):
    class C:
        k = 1.0

    c = C()
    f, out = jit(lambda x: x * c.k), []
    for k in (None, 8.0, 9.0):
        if k:
            c.__dict__ = {"k": k}
        out.append(f(X))
    c.k = 7.0
    return [*out, f(X)]


@program
def another_dict_of_a_module(jit):
    first, second = torch.nn.Linear(3, 1).double(), torch.nn.Linear(3, 1).double()
    f = jit(lambda x: first(x))
    before = f(X) - first(X)
    first.__dict__ = second.__dict__
    return [before, f(X) - second(X)]


@program
def order_of_an_ordered_dict(jit):
    d = collections.OrderedDict(a=1.0, b=2.0)
    by_number = collections.OrderedDict([(1, values(3)), (2, values(3, start=5.0))])

    def g(x):
        for v in (*d.values(), *by_number.values()):
            x = x * v + 1
        return x * next(iter(d.values()))

    f = jit(g)
    out = [f(X)]
    for change in (d, by_number):
        change.move_to_end(next(iter(change)))
        out.append(f(X))
    return out


@program
def views_of_a_dict(jit):
    d = {"a": 1.0, "t": values(3)}
    kept, items = d.values(), d.items()
    f = jit(lambda x: sum(kept, x) * len(items))
    first = f(X)
    d["a"] = 2.0
    second = f(X)
    d["t"] = values(3, start=4.0)
    third = f(X)
    d["u"] = 1.0
    return [first, second, third, f(X)]


@program
def proxy_of_an_object(jit):
    class C:
        def act(self, x):
            return x * self.k + self.w

    c = C()
    c.k, c.w = 1.0, values(3).requires_grad_()
    p = weakref.proxy(c)
    f = jit(lambda x: p.act(x) * p.k)
    out = [f(X), *gradients(f(X), c.w)]
    c.k = 2.0
    out.append(f(X))
    c.w = values(3, start=2.0)
    return [*out, f(X)]


@program
def arrays_of_objects(jit):
    a = np.array([types.SimpleNamespace(w=2.0), 3.0], dtype=object)
    f = jit(lambda x: x * a[0].w * a[1])
    out = [f(X)]
    a[0].w = 3.0
    out.append(f(X))
    a[0] = types.SimpleNamespace(w=7.0)
    out.append(f(X))
    a[1] = 4.0
    return [*out, f(X)]


@program
def arrays_of_derived_classes(jit):
    class Named(np.ndarray):
        scale = 1.0

    records = np.rec.array([(2.0, 3.0)], dtype=[("a", float), ("b", float)])
    named = np.ones(2).view(Named)
    f = jit(lambda x: x * float(records.a[0]) * float(named[0]) * named.scale)
    out = [f(X)]
    records.a[0] = 5.0
    out.append(f(X))
    named[0] = 2.0
    out.append(f(X))
    named.scale = 3.0
    return [*out, f(X)]


# -- caches


def _projection():
    @functools.lru_cache
    def projection(n):
        return torch.randn(n, dtype=torch.float64)

    return projection


@program
def a_cache_keeps_what_the_first_call_draws(jit):
    projection = _projection()
    f = jit(lambda x: x * projection(3))
    out = [f(X), f(X), X * projection(3)]
    projection(3).mul_(2)
    out.append(f(X))
    return [*out, f(X), projection.cache_info().currsize]


@program
def a_cache_keeps_a_plain_value(jit):
    o = types.SimpleNamespace(v=2.0)

    @functools.lru_cache
    def scale(n):
        return n * o.v

    f = jit(lambda x: x * scale(3))
    first = f(X)
    o.v = 3.0
    return [first, f(X), scale.cache_info().currsize]


@refused("Call the function once before, in eager")
def a_cache_that_holds_other_results(jit):
    projection = _projection()
    projection(5)
    return [jit(lambda x: x * projection(3))(X)]


# -- errors of the function


@program
def state_after_an_error_of_the_function(jit):
    o = types.SimpleNamespace(bad=False, calls=0)
    n, out = torch.zeros(3).double(), []

    def g(x):
        n.add_(1)
        torch.rand(2)
        if o.bad:
            o.calls += 1
            raise ValueError("no")
        return x * n

    f = jit(g)
    for bad in (False, True, False):
        o.bad = bad
        try:
            out.append(f(X))
        except ValueError as error:
            out.append(str(error))
        out += [n.clone(), torch.rand(1), o.calls]
    return out


@in_eager("because torch can't trace it: ValueError: Cannot view a tensor")
def a_kernel_of_other_strides_than_its_description(jit):
    norm = torch.nn.BatchNorm1d(3).double()
    f = jit(lambda x: norm(x).view(-1))
    return [f(values(3, 4).t()), f(values(3, 4).t()), norm.running_mean]
