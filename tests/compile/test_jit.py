"""`functx.jit` gives eager's numbers, gradients, draws and writes, whatever is inside or around."""

import copy
import itertools
import threading
import weakref

import pytest
import torch
from cases import numbers
from references import assert_same
from torch import nn

import functx
from functx import _torch
from functx._core import compiler_warnings
from functx.compat import random

from .jitted import WEIGHTS, as_traced, backward, norm, writes


def chain(region):
    def f(x):
        for w in WEIGHTS:
            x = region(lambda x, w: torch.tanh(torch.sin(x @ w) + WEIGHTS[0, 0]))(x, w)
        return x.square().sum()

    return f


def two_results(region):
    f = region(lambda x: (torch.sin(x @ WEIGHTS[0]), torch.cos(x)))
    return lambda x: f(x)[0].sum()


def double_backward(f):
    def gradient(x):
        x = x.detach().requires_grad_()
        (first,) = torch.autograd.grad(f(x), x, create_graph=True)
        return torch.autograd.grad(first.sin().sum(), x)[0]

    return gradient


FUNCTIONS = {"chain": chain, "writes": writes, "norm": norm, "two results": two_results}
WAYS = {
    "values": lambda f: f,
    "grad": functx.grad,
    "vmap(grad)": lambda f: functx.vmap(functx.grad(f)),
    "torch's vmap(grad)": lambda f: torch.func.vmap(torch.func.grad(f)),
    "jvp": lambda f: lambda x: functx.jvp(f, (x,), (x.sin(),)),
    "jvp(grad)": lambda f: lambda x: functx.jvp(functx.grad(f), (x,), (x.sin(),))[1],
    "hessian": functx.hessian,
    "grad(grad)": lambda f: functx.grad(lambda x: functx.grad(f)(x).sin().sum()),
    "backward": backward,
    "double backward": double_backward,
}


def grid():
    places = ["around the stack", "inside"]
    regions = {"plain": lambda f: f, "remat": functx.remat}
    for i, (name, way) in enumerate(itertools.product(FUNCTIONS, WAYS)):
        for j, (place, region) in enumerate(itertools.product(places, regions)):
            marks = () if (i + i // len(WAYS) + j) % 5 == 0 else pytest.mark.sweep
            id = f"{name}-{way}-{place}-{region}"
            yield pytest.param(name, way, place, regions[region], marks=marks, id=id)


@pytest.mark.filterwarnings("ignore:functx. a jitted function. it runs in eager")
@pytest.mark.parametrize(("name", "way", "place", "region"), [*grid()])
def test_a_stack_gives_what_it_gives_in_eager(name, way, place, region):
    f, transform = FUNCTIONS[name](region), WAYS[way]
    jit = lambda f: functx.jit(f, backend=as_traced)
    g = transform(jit(f)) if place == "inside" else jit(transform(f))
    shape = (2, 3, 4) if "vmap" in way else (3, 4)
    for start in (0.0, 5.0):  # the second call runs what the first one has traced
        x = numbers(*shape, start=start)
        assert_same(g(x), transform(FUNCTIONS[name](lambda f: f))(x), eps=64)


BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.sweep)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_training_step_advances_state_and_draws_as_in_eager(backend):
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    plain = plain.double()
    ours = copy.deepcopy(plain)
    functx.apply_remat(ours, nn.BatchNorm1d)
    jitted, x = functx.jit(ours, backend=backend), numbers(5, 4)
    for step in range(3):
        found = []
        for net, call in ((plain, plain), (ours, jitted)):
            torch.manual_seed(step)
            loss = call(x).square().sum()
            net.zero_grad()
            loss.backward()
            with torch.no_grad():
                for p in net.parameters():
                    p -= 0.1 * p.grad
            found.append((loss.detach(), dict(net.state_dict()), torch.get_rng_state()))
        assert_same(found[1], found[0], eps=1024)


@pytest.mark.sweep
def test_a_compile_leaves_the_compilers_settings_as_they_were():
    from torch._inductor import config

    before = config.save_config_portable()
    f = functx.grad(chain(functx.remat))
    assert_same(functx.jit(f)(numbers(3, 4)), f(numbers(3, 4)), eps=64)
    assert config.save_config_portable() == before


@pytest.mark.parametrize("what", ["a backend", "a function"])
def test_a_failed_compile_leaves_torch_as_it_was(what):
    def broken(*_):
        raise ZeroDivisionError(what)

    f, calls = chain(functx.remat), itertools.count(1)  # which no failed trace puts back
    failing = functx.jit(
        functx.grad(lambda x: f(x) if next(calls) and what == "a backend" else broken()),
        backend=broken if what == "a backend" else as_traced,
    )

    def state():
        modes = _torch.function_depth(), _torch.dispatch_depth(), _torch.functorch_depth()
        return (*modes, torch.is_grad_enabled(), torch.compiler.is_compiling())

    before = state()
    for n in (1, 2):  # and nothing is kept of it
        with pytest.raises(ZeroDivisionError, match=what):
            failing(numbers(3, 4))
        runs = 2 if what == "a function" else 1  # it runs in eager once more
        assert (state(), repr(calls)) == (before, f"count({n * runs + 1})")


def test_what_it_reads_is_read_at_each_call():
    net, w, k = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).double(), numbers(4), 2.0
    activation = torch.sin
    jitted = functx.jit(f := lambda x: activation(net(w * x)) * k, backend=as_traced)

    def check():
        torch.manual_seed(0)
        ours = jitted(numbers(4))
        torch.manual_seed(0)
        assert_same(ours.detach(), f(numbers(4)).detach(), eps=8)

    check()
    w = numbers(4, start=3.0)
    check()
    k = 3.0
    check()
    activation = torch.tanh
    check()
    net[0].weight = nn.Parameter(numbers(4, 4))
    check()
    net[1].p = 0.1
    check()
    net.eval()
    check()


def test_an_attribute_that_is_new_or_emptied_is_seen():
    class Settings:
        scales = {"one": 3.0}  # noqa: RUF012

    settings = Settings()
    f = lambda x: x * (2 if settings.scales else 3) * (5 if hasattr(settings, "more") else 7)
    jitted, x = functx.jit(f, backend=as_traced), numbers(3)
    assert_same(jitted(x), f(x))
    settings.more = {}
    assert_same(jitted(x), f(x))
    settings.scales = {}
    assert_same(jitted(x), f(x))


def test_a_signature_is_traced_once():
    traced = []

    def backend(module, _):
        traced.append(module)
        return module

    jitted = functx.jit(lambda x, *, n: {"a": x["x"] * n, "n": [n, None]}, backend=backend)
    for n, shape in ((1, 3), (1, 3), (2, 3), (2, 4), (1, 3)):
        x = numbers(shape)
        out = jitted({"x": x}, n=n)
        assert_same(out["a"], x * n)
        assert out["n"] == [n, None]
    assert len(traced) == 3


def test_what_functx_knows_of_a_function_is_no_signature():
    """A jitted function inside, and a region with plans, learn at each call."""
    traced = []
    inner = functx.jit(torch.sin, backend=as_traced)
    region = functx.remat(lambda x: x.sin().exp().tanh().sum(), budget=1.0)
    jitted = functx.jit(
        lambda x: inner(x) + functx.grad(region)(x), backend=lambda m, _: traced.append(m) or m
    )
    for n in (3, 3, 4, 3):
        x = numbers(n)
        inner(x), region(x.clone().requires_grad_()).backward()
        assert_same(jitted(x), x.sin() + functx.grad(region)(x), eps=8)
    assert len(traced) == 2


def test_a_trace_is_a_compile_to_the_function_and_takes_elements_by_numbers():
    def f(x, at):
        if not torch.compiler.is_compiling() and (at >= 0).all():
            return torch.sin(x)[at]
        return torch.sin(x[at])

    at = torch.tensor([2, 0])
    assert_same(functx.jit(functx.grad(lambda x: f(x, at).sum()), backend=as_traced)(numbers(3)),
                functx.grad(lambda x: f(x, at).sum())(numbers(3)), eps=4)  # fmt: skip
    assert not torch.compiler.is_compiling()
    with pytest.raises(functx.TracingError, match="reads the value"):
        functx.jit(lambda x: x[x > 0], backend=as_traced)(numbers(3))


def test_random_numbers_may_come_from_keys():
    def loss(w, key):
        return (random.dropout(key, torch.tanh(w @ w), 0.5) * random.normal(key, (4,))).sum()

    gradients = functx.vmap(functx.grad(functx.remat(loss)), (None, 0))
    traced = []
    jitted = functx.jit(gradients, backend=lambda m, _: traced.append(m) or m)
    for seed in range(2):
        keys = random.split(random.key(seed), 3)
        assert_same(jitted(WEIGHTS[0], keys), gradients(WEIGHTS[0], keys), eps=16)
    assert len(traced) == 1


def test_none_in_place_of_a_tensor_is_another_signature():
    jitted = functx.jit(lambda x, y: x if y is None else -y, backend=as_traced)
    assert_same(jitted(numbers(3), None), numbers(3))
    assert_same(jitted(None, numbers(3)), -numbers(3))


def test_a_jitted_module_has_its_parameters():
    net = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).double()
    jitted = functx.jit(net, backend=as_traced)
    jitted.eval()
    assert_same(jitted(numbers(2, 4)), net[0](numbers(2, 4)), eps=8)
    assert [*jitted.parameters()] == [*net.parameters()]
    assert not hasattr(functx.jit(torch.sin), "parameters")
    assert_same(copy.deepcopy(jitted)(numbers(2, 4)), net(numbers(2, 4)), eps=8)


def test_a_method_reads_its_own_object():
    class Scale:
        def __init__(self, w):
            self.w = w

        @functx.jit(backend=as_traced)
        def apply(self, x):
            return self.w * x

    one, other = Scale(numbers(3)), Scale(numbers(3, start=4.0))
    for scale in (one, other, one):
        assert_same(scale.apply(numbers(3)), scale.w * numbers(3))


def test_a_jitted_function_works_inside_of_a_region():
    jitted = functx.jit(lambda x: torch.sin(x @ WEIGHTS[0]), backend=as_traced)
    f = lambda x: jitted(torch.cos(x)).exp().sum()
    assert_same(functx.grad(functx.remat(f))(numbers(3, 4)), functx.grad(f)(numbers(3, 4)), eps=8)


def test_threads_that_call_it_for_the_first_time_share_one_graph():
    again, found, threads, x = threading.Event(), [], [], numbers(3)

    def backend(module, examples):
        if threads:
            again.set()
        else:
            threads.append(threading.Thread(target=lambda: found.append(jitted(2 * x))))
            threads[0].start()
            again.wait(0.2)
        return module

    jitted = functx.jit(torch.sin, backend=backend)
    assert_same(jitted(x), x.sin(), eps=4)
    threads[0].join()
    assert_same(found[0], (2 * x).sin(), eps=4)
    assert not again.is_set()


def test_torch_compile_around_it_leaves_it_as_it_is():
    torch._dynamo.reset()
    jitted, x = functx.jit(functx.grad(chain(functx.remat)), backend=as_traced), numbers(3, 4)
    f = torch.compile(lambda x: jitted(2 * x) + 1, backend="eager")
    assert_same(f(x), jitted(2 * x) + 1)


def test_an_argument_that_is_written_or_returned_is_the_callers():
    x = torch.ones(3)
    assert functx.jit(lambda x: x.mul_(2).sum(), backend=as_traced)(x) == 6
    assert x.tolist() == [2, 2, 2]
    leaf = numbers(2, 3).requires_grad_()
    same, view = functx.jit(lambda x: (x, x.t()), backend=as_traced)(leaf)
    (same.sum() + view.sum()).backward()
    assert_same(leaf.grad, torch.full_like(leaf, 2))


def test_it_holds_nothing_of_a_call():
    jitted = functx.jit(lambda x: x.sin().sum(), backend=as_traced)
    x = numbers(3).requires_grad_()
    out = jitted(x)
    kept = weakref.ref(x), weakref.ref(out)
    out.backward()
    del x, out
    assert [ref() for ref in kept] == [None, None]


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x * x[0].item(),
        lambda x: x[x > 0].sum(),
        lambda x: x * float(x.numpy()[0]),
        lambda x: functx.grad(lambda x: (x * x.tolist()[0]).sum())(x),
        lambda x: x * len(f"{x[0]:.3f}"),
    ],
)
def test_a_value_that_is_read_is_an_error_with_the_line(f):
    with pytest.raises(functx.TracingError, match=r"test_jit\.py:\d+ the function reads the value"):
        functx.jit(f, backend=as_traced)(numbers(3))


@pytest.mark.parametrize("stack", ["vmap", "jvp", "jacrev"])
def test_within_these_it_runs_in_eager_and_a_warning_says_so(stack, monkeypatch):
    monkeypatch.setattr(compiler_warnings, "_told", set())  # of other tests
    dropped = functx.jit(lambda x: nn.functional.dropout(x.sin(), 0.5), backend=as_traced)
    x = numbers(2, 3)
    stacks = {
        "vmap": lambda: functx.vmap(dropped, randomness="different")(x),
        "jvp": lambda: functx.jvp(dropped, (x,), (x,))[1],
        "jacrev": lambda: functx.jacrev(functx.jit(torch.sin, backend=as_traced))(x[0]),
    }
    with pytest.warns(RuntimeWarning, match="Put functx.jit around the transforms") as seen:
        found = stacks[stack]()
    assert [w.filename for w in seen if w.category is RuntimeWarning] == [__file__]
    if stack == "jacrev":
        assert_same(found, x[0].cos().diag(), eps=4)
    else:
        kept = {"vmap": 2 * x.sin(), "jvp": 2 * x * x.cos()}[stack]
        assert_same(found, torch.where(found == 0, 0, kept), eps=4)


def test_a_backward_inside_is_an_error_and_sets_nothing():
    net = nn.Linear(4, 3).double()
    net.bias.grad = torch.ones(3, dtype=torch.float64)

    def step(x):
        net(x).sum().backward()

    with pytest.raises(functx.TracingError, match=r"sets \.grad of a tensor"):
        functx.jit(step, backend=as_traced)(numbers(2, 4))
    assert net.weight.grad is None
    assert net.bias.grad.tolist() == [1, 1, 1]


def test_a_step_writes_parameters_and_returns_what_has_no_history():
    def step(net, x):
        loss = net(x).square().sum()
        gradients = torch.autograd.grad(loss, [*net.parameters()])
        with torch.no_grad():
            for p, g in zip(net.parameters(), gradients):
                p -= 0.1 * g
        return loss.detach(), loss

    nets = [nn.Linear(4, 3).double()]
    nets.append(copy.deepcopy(nets[0]))
    jitted = functx.jit(lambda x: step(nets[0], x), backend=as_traced)
    for _ in range(2):
        found, expected = jitted(numbers(2, 4)), step(nets[1], numbers(2, 4))
        assert not [t for t in found if t.requires_grad]  # it has been pulled back
        assert_same(found[0], expected[0], eps=16)
        assert_same(*[net.state_dict() for net in nets], eps=16)


def test_a_captured_tensor_of_a_transform_around_is_differentiated():
    traced = []
    backend = lambda module, _: traced.append(module) or module
    x = numbers(2, 3)
    jitted = functx.jit(lambda y: x * y, backend=backend)

    def loss(t):
        nonlocal x
        x = t
        return jitted(t.sin()).sum()

    for start in (0.0, 3.0):
        t = numbers(2, 3, start=start)
        assert_same(functx.grad(loss)(t), t.sin() + t * t.cos(), eps=4)
    assert len(traced) == 2, "a forward and a backward"


def test_an_argument_need_not_have_a_hash():
    class Unhashable:
        __hash__ = None
        scale = 2.0

    jitted, o = functx.jit(lambda x, o: x * o.scale, backend=as_traced), Unhashable()
    assert_same(jitted(numbers(3), o), numbers(3) * 2)
    o.scale = 3.0
    assert_same(jitted(numbers(3), o), numbers(3) * 3)
    with pytest.raises(TypeError, match="expected a callable"):
        functx.jit(3)
