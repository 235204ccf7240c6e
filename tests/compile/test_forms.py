"""Each kind of state and effect, wherever a function finds it: in a variable, module, or object.

A kind is an owner, what a function does with it, and what changes between calls. A form is how the
function comes by the owner.
"""

import collections
import functools
import types
import warnings

import pytest
import torch
from torch import nn

import functx
from functx._core import compiler_warnings

from .programs.collected import gradients, linear, values

X = values(3)


def owner(**held):
    return types.SimpleNamespace(**held)


class Slots:
    __slots__ = ("scale", "weight")

    def __init__(self):
        self.scale, self.weight = 2.0, leaf()


def leaf(start=0):
    return values(3, start=start).requires_grad_()


def hooked():
    w = leaf()
    w.register_hook(lambda g: g * 10)
    return w


def put(name, make):
    return lambda o: setattr(o, name, make())


def counts(o, x):
    o.n += 1
    return x * o.n


def in_place(o, x):
    o.buffer.add_(x)
    return o.buffer.sin()


def with_history(o, x):
    o.buffer.copy_(x * o.weight)
    return x.sin()


def keeps(o, x):
    o.last = x.sin()
    return x


def seeds(o, x):
    o.generator.manual_seed(1)
    return x * torch.rand(3, generator=o.generator)


def appends(o, x):
    o.log.append(len(x))
    return x.sin()


# By name: what the owner holds, what a function does with it, what changes, and the outcome.
KINDS = {
    "number": (lambda: owner(k=2.0), lambda o, x: x * o.k, put("k", lambda: 3.0), "right"),
    "flag": (
        lambda: owner(on=True),
        lambda o, x: x.sin() if o.on else x.cos(),
        put("on", lambda: False),
        "right",
    ),
    "tensor": (
        lambda: owner(w=values(3)),
        lambda o, x: x * o.w,
        put("w", lambda: values(3, start=4)),
        "right",
    ),
    "leaf": (
        lambda: owner(weight=leaf()),
        lambda o, x: x * o.weight,
        put("weight", lambda: leaf(4)),
        "right",
    ),
    "leaf with a hook": (
        lambda: owner(weight=hooked()),
        lambda o, x: x * o.weight,
        put("weight", hooked),
        "right",
    ),
    "frozen": (
        lambda: owner(weight=leaf()),
        lambda o, x: x * o.weight if o.weight.requires_grad else x + o.weight,
        lambda o: o.weight.requires_grad_(False),
        "right",
    ),
    "number in a slot": (Slots, lambda o, x: x * o.scale, put("scale", lambda: 3.0), "right"),
    "leaf in a slot": (Slots, lambda o, x: x * o.weight, put("weight", lambda: leaf(4)), "right"),
    "deque": (
        lambda: owner(d=collections.deque([2.0], 2)),
        lambda o, x: x * sum(o.d),
        lambda o: o.d.append(3.0),
        "right",
    ),
    "dict": (
        lambda: owner(d={"a": {"b": 2.0}}),
        lambda o, x: x * o.d["a"]["b"],
        lambda o: o.d["a"].update(b=3.0),
        "right",
    ),
    "conjugated": (
        lambda: owner(w=torch.complex(X, 2 * X).conj()),
        lambda o, x: x * o.w,
        put("w", lambda: torch.complex(2 * X, X)),
        "right",
    ),
    "module": (
        lambda: owner(net=nn.Sequential(linear(), nn.Dropout(0.5))),
        lambda o, x: o.net(x),
        lambda o: o.net.eval(),
        "right",
    ),
    "parameter": (
        lambda: owner(net=linear()),
        lambda o, x: o.net(x),
        lambda o: setattr(o.net, "weight", nn.Parameter(values(2, 3, start=4))),
        "right",
    ),
    "generator": (
        lambda: owner(generator=torch.Generator().manual_seed(0)),
        lambda o, x: x * torch.rand(3, generator=o.generator),
        put("generator", lambda: torch.Generator().manual_seed(5)),
        "right",
    ),
    "buffer": (lambda: owner(buffer=torch.zeros(3).double()), in_place, lambda o: None, "right"),
    "history": (
        lambda: owner(buffer=torch.zeros(3).double(), weight=leaf()),
        with_history,
        put("buffer", lambda: torch.zeros(3).double()),
        "right",
    ),
    "counter": (lambda: owner(n=0), counts, lambda o: None, "in eager"),
    "log": (lambda: owner(log=[]), appends, lambda o: None, "in eager"),
    "tensor that is kept": (owner, keeps, lambda o: None, "is kept"),
    "seed": (
        lambda: owner(generator=torch.Generator()),
        seeds,
        lambda o: None,
        "seeds a generator",
    ),
    "values": (
        lambda: owner(w=values(3)),
        lambda o, x: x * o.w.tolist()[0],
        lambda o: None,
        "reads the value",
    ),
    "data": (
        lambda: owner(w=values(3)),
        lambda o, x: setattr(o.w, "data", x * 2) or x,
        lambda o: None,
        r"sets \.data",
    ),
}
SPACE = {}
exec("def by_global(x):\n    return body(held, x)", SPACE)


class Net(nn.Module):
    def __init__(self, held, body):
        super().__init__()
        self.held, self.body = held, body

    def forward(self, x):
        return self.body(self.held, x)


class Thing:
    def __init__(self, held, body):
        self.held, self.body = held, body

    def method(self, x):
        return self.body(self.held, x)


def function(held, body, jit):
    SPACE.update(held=held, body=body)
    return jit(SPACE["by_global"])


def argument(held, body, jit):
    jitted = jit(lambda o, x: body(o, x))
    return lambda x: jitted(held, x)


def default(held, body, jit):
    return jit(lambda x, held=held: body(held, x))


FORMS = {
    "function": function,
    "module": lambda held, body, jit: jit(Net(held, body)),
    "method": lambda held, body, jit: jit(Thing(held, body).method),
    "argument": argument,
    "captured": lambda held, body, jit: jit(lambda x: body(held, x)),
    "partial": lambda held, body, jit: jit(functools.partial(body, held)),
    "default": default,
}


def told(kind, form, jit):
    """What can be seen of three calls."""
    make, body, change, _ = KINDS[kind]
    held, found = make(), []
    torch.manual_seed(0)
    f = FORMS[form](held, body, jit)
    for i in range(3):
        out = f(values(3, start=i))
        found.append(out.detach().clone())
        weight = getattr(held, "weight", None)
        if weight is not None and out.requires_grad:
            found += gradients(out.sin(), weight)
        if i == 1:
            change(held)
    kept = vars(held) if hasattr(held, "__dict__") else {}
    return found, [v.detach() for v in kept.values() if isinstance(v, torch.Tensor)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_in_each_form_what_it_is_in_eager(kind, form, monkeypatch):
    monkeypatch.setattr(compiler_warnings, "_told", set())  # of other tests
    outcome, graphs = KINDS[kind][-1], []

    def jit(f):
        return functx.jit(f, backend=lambda module, _: graphs.append(module) or module)

    if outcome not in ("right", "in eager"):
        with pytest.raises(functx.TracingError, match=outcome):
            told(kind, form, jit)
        return
    expected = told(kind, form, lambda f: f)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = told(kind, form, jit)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    in_eager = [w for w in caught if "runs in eager" in str(w.message)]
    assert len(in_eager) == (outcome == "in eager")
    assert bool(graphs) == (outcome == "right")
    assert len(graphs) <= 4
