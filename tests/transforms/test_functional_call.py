"""`functx.functional_call` leaves a module exactly as it was.

The kind: what is put into a user's module for a call is taken out of it again, object by object.
Compared before and after are the identity and the type of every parameter, buffer and attribute of
every submodule, and the order of the dicts that hold them. Members: one place under several names,
in all shapes in which a module can have that; all ends of a call (a result, an exception, an
interrupt anywhere); places that are neither parameters nor buffers; and every function of
``per_sample``, which calls modules in this way.
"""

import copy
import os
import sys

import pytest
import torch
from cases import DTYPE, numbers
from references import assert_same
from torch import nn
from torch.nn.utils import parametrizations

import functx
from functx._torch import slots


def linear(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(3, 3, dtype=DTYPE)


class Two(nn.Module):
    """One submodule under several names."""

    def __init__(self, *names):
        super().__init__()
        self.a = linear()
        self.blocks = nn.ModuleList([self.a, self.a])
        for name in names:
            self.add_module(name, self.a)

    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return self.a(x)


class Tied(nn.Module):
    """Two places for one parameter, and one module in two places, inside of another one."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleDict({"one": Two()})
        self.head = linear(1)
        self.head.weight = self.inner["one"].a.weight
        self.again = self.inner["one"].blocks

    def forward(self, x):
        return self.head(self.inner["one"](x)) + self.again[0](x)


class Rematted(nn.Module):
    """A module, and a region of it: two objects over the same dicts."""

    def __init__(self):
        super().__init__()
        self.a = linear()
        self.b = functx.remat(self.a)

    def forward(self, x):
        return self.a(x) + self.b(x)


class Noting(nn.Module):
    """All kinds of places for tensors; the call replaces a buffer."""

    scale = torch.ones((), dtype=DTYPE)  # of the class

    def __init__(self):
        super().__init__()
        self.a = linear()
        self.register_parameter("none", None)
        self.register_buffer("steps", torch.zeros((), dtype=DTYPE), persistent=False)
        self.plain = torch.ones(3, dtype=DTYPE)
        self.hidden = torch.ones((), dtype=DTYPE)

    @property
    def gain(self):
        return self.hidden

    @gain.setter
    def gain(self, value):
        self.hidden = value

    def forward(self, x):
        self.steps = self.steps + 1
        return self.a(x) * self.plain * self.scale * self.gain + self.steps


SHARED = {
    "two names": Two,
    "four names": lambda: Two("b", "c"),
    "tied and shared": Tied,
    "a region of it": Rematted,
}
X = numbers(4, 3)


def places(module):
    """What a module holds, and where: the identity and type of each attribute, in order."""
    found = {}
    for name, part in module.named_modules(remove_duplicate=False):
        for store in (part._parameters, part._buffers, part._modules, vars(part)):
            found[name, id(store)] = [(k, id(v), type(v)) for k, v in store.items()]
    return found


def doubled(module, **options):
    return {n: p.detach() * 2 for n, p in module.named_parameters(**options)}


def with_values(module, values):
    """A copy of a module that has these parameters: what a call with them is compared to."""
    module = copy.deepcopy(module)
    with torch.no_grad():
        for name, value in values.items():
            module.get_parameter(name).copy_(value)
    return module


@pytest.mark.parametrize("make", SHARED.values(), ids=SHARED)
def test_a_place_with_several_names_gets_its_own_object_back(make):
    module = make()
    before, values = places(module), doubled(module)
    assert_same(functx.functional_call(module, values, X), with_values(module, values)(X))
    assert places(module) == before
    assert all(isinstance(p, nn.Parameter) for p in module.parameters())


@pytest.mark.parametrize("make", SHARED.values(), ids=SHARED)
def test_gradients_of_a_place_with_several_names_are_those_of_all_its_uses(make):
    module = make()
    before, values = places(module), doubled(module)
    loss = lambda params: functx.functional_call(module, params, X).square().sum()
    found = functx.grad(loss)(values)
    plain = with_values(module, values)
    plain(X).square().sum().backward()
    assert_same(found, {n: p.grad for n, p in plain.named_parameters()}, eps=64)
    assert places(module) == before


def test_all_names_of_a_place_may_be_given():
    module = Two("b")
    before, value = places(module), torch.eye(3, dtype=DTYPE)
    names = [n for n, _ in module.named_parameters(remove_duplicate=False) if "weight" in n]
    same = dict.fromkeys(names, value)
    assert_same(functx.functional_call(module, same, X), with_values(module, same)(X))
    for some in (names[:2], names):  # some of the names, where torch has a KeyError; all of them
        with pytest.raises(ValueError, match=r"multiple values.*Pass one of them"):
            functx.functional_call(module, {n: value.clone() for n in some}, X)
    last = {n: value * i for i, n in enumerate(names)}
    found = functx.functional_call(module, last, X, tie_weights=False)
    assert_same(
        found, torch.func.functional_call(copy.deepcopy(module), last, X, tie_weights=False)
    )
    assert places(module) == before


class Stop(BaseException):
    pass


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, Stop])
@pytest.mark.parametrize("make", SHARED.values(), ids=SHARED)
def test_a_call_that_raises_leaves_nothing_behind(make, error):
    module = make()
    before = places(module)

    def fail(*_):
        raise error

    inner = next(part for part in module.modules() if isinstance(part, nn.Linear))
    hook = inner.register_forward_hook(fail)
    with_hook = places(module)
    with pytest.raises(error):
        functx.functional_call(module, doubled(module), X)
    assert places(module) == with_hook
    hook.remove()
    assert places(module) == before


FILES = {os.path.abspath(slots.__file__), functx.functional_call.__code__.co_filename}


def test_an_interrupt_anywhere_leaves_nothing_behind():
    """At each call of a function of ours, also while things are put back."""
    module, points = Tied(), 0
    before, values = places(module), doubled(module)
    while True:
        left = points

        def interrupt(frame, event, _):
            nonlocal left
            if event == "call" and frame.f_code.co_filename in FILES:
                left -= 1
                if left < 0:
                    sys.setprofile(None)
                    raise KeyboardInterrupt

        sys.setprofile(interrupt)
        try:
            functx.functional_call(module, values, X)
            break
        except KeyboardInterrupt:
            points += 1
        finally:
            sys.setprofile(None)
        assert places(module) == before, points
    assert points > 20


def test_a_call_inside_of_a_call_puts_back_what_it_found():
    """Each puts back what it found: the inner one what the outer one has put there."""

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.two = Two()

        def forward(self, x):
            inner = functx.functional_call(self.two, {"a.bias": x[0]}, x)
            with pytest.raises(ValueError, match="too many"):
                functx.functional_call(Fails(self.two), {"two.a.bias": x[0]}, x)
            return inner + self.two(x)

    class Fails(nn.Module):
        def __init__(self, two):
            super().__init__()
            self.two = two

        def forward(self, x):
            raise ValueError("too many")

    module = Outer()
    before, values = places(module), doubled(module)
    assert_same(functx.functional_call(module, values, X), with_values(module, values)(X))
    assert places(module) == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("plain", numbers(3)),
        ("plain", nn.Parameter(numbers(3))),  # torch registers it, and can't take it back
        ("scale", numbers(1)[0]),  # torch leaves it in the instance
        ("gain", numbers(1)[0]),
        ("none", numbers(3)),
        ("new", numbers(3)),
        ("new", nn.Parameter(numbers(3))),
        ("a.bias", None),
    ],
)
def test_a_place_of_any_kind_gets_its_own_object_back(name, value):
    module = Noting()
    before, of_class = places(module), dict(vars(Noting))
    found = functx.functional_call(module, {name: value, "steps": numbers(1)[0]}, X)
    assert places(module) == before
    assert dict(vars(Noting)) == of_class
    expected = torch.func.functional_call(Noting(), {name: value, "steps": numbers(1)[0]}, X)
    assert_same(found, expected)


def test_a_buffer_that_the_call_replaces_is_in_the_dict_afterwards():
    module = Noting()
    before, given = places(module), {"steps": torch.zeros((), dtype=DTYPE)}
    functx.functional_call(module, given, X)
    assert given["steps"] == 1
    several = {"steps": torch.zeros((), dtype=DTYPE)}, {}
    functx.functional_call(module, several, X)
    assert several[0]["steps"] == 0  # as torch does
    assert places(module) == before


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_layers_hold_their_own_weights_afterwards(kind):
    """They note their weights when they are called, in lists of their own."""
    layer = kind(3, 3, dtype=DTYPE)
    before, flat = places(layer), layer._flat_weights
    loss = lambda params: functx.functional_call(layer, params, X)[0].sum()
    functx.grad(loss)(doubled(layer))
    assert places(layer) == before
    assert layer._flat_weights is flat
    assert all(a is b for a, b in zip(flat, layer.parameters(), strict=True))
    layer.load_state_dict(copy.deepcopy(layer).state_dict())


@pytest.mark.parametrize("apply", [parametrizations.spectral_norm, parametrizations.weight_norm])
def test_what_a_parametrization_is_applied_to_can_be_replaced_and_its_result_can_not(apply):
    """torch would write the result into the parameter, and could not put it back."""
    module = nn.Sequential(apply(linear())).eval()
    before, state = places(module), copy.deepcopy(module.state_dict())
    values = doubled(module)
    assert_same(functx.functional_call(module, values, X), with_values(module, values)(X))
    with pytest.raises(ValueError, match=r"0\.parametrizations\.weight\.original"):
        functx.functional_call(module, {"0.weight": torch.eye(3, dtype=DTYPE)}, X)
    assert places(module) == before
    assert_same(dict(module.state_dict()), dict(state))


def test_names_are_tied_and_checked_as_torch_does():
    module = Tied()
    del module.again, module.inner["one"].blocks[1:]  # torch leaves no fault in it
    module.inner["one"].blocks = nn.ModuleList()
    module.forward = lambda x: module.head(module.inner["one"](x))
    weight, other = "inner.one.a.weight", "head.weight"
    value = torch.eye(3, dtype=DTYPE)
    complete = doubled(module)
    for given in ({weight: value}, {other: value}, {weight: value, other: value * 2}, complete):
        for options in ({}, {"tie_weights": False}, {"strict": True}):
            found = []
            for call in (functx.functional_call, torch.func.functional_call):
                try:
                    found.append(call(module, given, X, **options))
                except (ValueError, RuntimeError) as error:
                    found.append(type(error))
            assert_same(*found)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"b.weight": X}, AttributeError, "Two has no attribute `b`"),
        ({"a.weight.data": X}, TypeError, "not an instance of torch.nn.Module"),
        ({"forward": X}, TypeError, "not an instance of torch.Tensor"),
        ({"a.weight": 3}, TypeError, "not an instance of torch.Tensor"),
        ({"": X}, KeyError, "empty string"),
        ([{"a.weight": X}, {"a.weight": X}], ValueError, "multiple dictionaries"),
        (3, ValueError, "to be a dict"),
        ([3], ValueError, "to be dictionaries"),
    ],
)
def test_wrong_arguments_change_nothing(given, error, words):
    module = Two()
    before = places(module)
    if isinstance(given, dict):
        given = {"a.bias": X[0], **given}
    with pytest.raises(error, match=words):
        functx.functional_call(module, given, X)
    assert places(module) == before


def test_torch_compile_leaves_the_module_as_it_was():
    module = Two()
    before, values = places(module), doubled(module)
    call = lambda params, x: functx.functional_call(module, params, x)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert_same(compiled(values, X), call(values, X), eps=8)
    assert places(module) == before


def mean_square(output):
    return output.square().mean()


PER_SAMPLE = {
    "grads": lambda m, loss: functx.per_sample.grads((m, loss))(X),
    "grads one by one": lambda m, loss: functx.per_sample.grads((m, loss), chunk_size=1)(X),
    "norms": lambda m, loss: functx.per_sample.norms((m, loss))(X),
    "clipped_sum": lambda m, loss: functx.per_sample.clipped_sum((m, loss), max_norm=1.0)(X),
    "gram": lambda m, loss: functx.per_sample.gram((m, loss))(X),
    "jacobian": lambda m, loss: functx.per_sample.jacobian(m)(X),
    "functional": lambda m, loss: functional(m, loss),
}


def functional(module, loss):
    f, params = functx.per_sample.functional(module, loss)
    return functx.vmap(functx.grad(f), (None, 0))(params, X)


@pytest.mark.parametrize("make", SHARED.values(), ids=SHARED)
@pytest.mark.parametrize("run", PER_SAMPLE.values(), ids=PER_SAMPLE)
def test_per_sample_leaves_the_module_as_it_was(run, make):
    module = make()
    before = places(module)
    run(module, mean_square)
    assert places(module) == before
    mean_square(module(X)).backward()
    assert all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("run", PER_SAMPLE.values(), ids=PER_SAMPLE)
def test_per_sample_leaves_the_module_as_it_was_if_it_fails(run, error):
    module = Two()

    def fail(*_):
        raise error

    module.a.register_forward_hook(fail)
    before = places(module)
    with pytest.raises(error):
        run(module, mean_square)
    assert places(module) == before


@pytest.mark.parametrize("make", SHARED.values(), ids=SHARED)
def test_jit_and_plans_leave_the_module_as_it_was(make):
    module = make()
    before, values = places(module), doubled(module)
    loss = lambda params: functx.functional_call(module, params, X).square().sum()
    expected = functx.grad(loss)(values)
    assert_same(functx.jit(functx.grad(loss), backend="eager")(values), expected, eps=64)
    assert_same(functx.grad(functx.remat(loss, budget=1 << 20))(values), expected, eps=64)
    assert places(module) == before
