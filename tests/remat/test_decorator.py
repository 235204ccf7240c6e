"""`remat` as it is called: bare, with options, on methods and partials, with static arguments."""

import functools
import inspect
import pickle
import warnings

import pytest
import torch
from cases import numbers
from references import assert_same, count
from torch import nn

import functx

X = numbers(4)


def body(x, scale=1.0, *, shift=0.0):
    """What a region does."""
    return torch.sin(x) * torch.exp(x) * scale + shift


rematted = functx.remat(body)


@functx.remat
def decorated(x, scale=1.0, *, shift=0.0):
    """What a region does."""
    return body(x, scale, shift=shift)


@functx.remat(policy=None, determinism_check="none")
def decorated_with_options(x, scale=1.0, *, shift=0.0):
    """What a region does."""
    return body(x, scale, shift=shift)


class Layers:
    """A class with regions for methods."""

    def __init__(self):
        self.factor = 3.0

    @functx.remat
    def method(self, x):
        return body(x, self.factor)

    @functx.remat(preserve_rng_state=False)
    def with_options(self, x):
        return body(x, self.factor)

    @functx.remat
    @staticmethod
    def static(x):
        return body(x, 3.0)

    @functx.remat
    @classmethod
    def of_the_class(cls, x):
        assert cls is Layers
        return body(x, 3.0)

    def plain(self, x):
        return body(x, self.factor)

    def __call__(self, x):
        return body(x, self.factor)


layers = Layers()
FORMS = {
    "bare": (decorated, body),
    "with options": (decorated_with_options, body),
    "called": (rematted, body),
    "a method": (layers.method, layers.plain),
    "a method with options": (layers.with_options, layers.plain),
    "a static method": (layers.static, layers.plain),
    "a class method": (Layers.of_the_class, layers.plain),
    "a bound method": (functx.remat(layers.plain), layers.plain),
    "a callable object": (functx.remat(layers), layers.plain),
    "a partial": (functx.remat(functools.partial(body, scale=3.0)), layers.plain),
    "a lambda": (functx.remat(lambda x: body(x, 3.0)), layers.plain),
    "of torch": (functx.remat(torch.sin), torch.sin),
    "a method of a tensor": (functx.remat(torch.Tensor.exp), torch.exp),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_a_region_and_the_function(form):
    ours, plain = FORMS[form]

    def gradient(f):
        x = X.clone().requires_grad_()
        out = f(x)
        return out, torch.autograd.grad(out.sum(), x)

    assert_same(gradient(ours), gradient(plain), eps=8)
    batch = numbers(3, 4)
    assert_same(
        functx.vmap(functx.grad(lambda x: ours(x).sum()))(batch),
        functx.vmap(functx.grad(lambda x: plain(x).sum()))(batch),
        eps=8,
    )
    if form not in ("of torch", "a method of a tensor"):
        assert count(gradient, ours)["exp"] == 2


def test_name_documentation_and_signature_are_kept():
    for f in (rematted, decorated, decorated_with_options):
        assert f.__name__ in ("body", "decorated", "decorated_with_options")
        assert f.__doc__ == "What a region does."
        assert f.__module__ == __name__
        assert inspect.signature(f) == inspect.signature(body)
    assert rematted.__wrapped__ is body


class TestPickle:
    @pytest.mark.parametrize(
        "f", [decorated, layers.method, rematted, functx.remat(functools.partial(body, scale=2.0))]
    )
    def test_a_region_pickles_where_its_function_does(self, f):
        loaded = pickle.loads(pickle.dumps(f))
        x = X.clone().requires_grad_()
        assert_same(loaded(x), f(x))
        assert count(lambda: loaded(x).sum().backward())["exp"] == 2
        with pytest.raises((pickle.PicklingError, AttributeError)):
            pickle.dumps(functx.remat(lambda x: x))

    def test_options_travel(self):
        f = functx.remat(
            body, policy=functx.checkpoint_policies.everything_saveable, static_argnums=(1,)
        )
        loaded = pickle.loads(pickle.dumps(f))
        x = X.clone().requires_grad_()
        assert count(lambda: loaded(x, 2.0).sum().backward())["exp"] == 1
        with pytest.raises(ValueError, match="static_argnums"):
            loaded(x)


class TestStaticArguments:
    @staticmethod
    def power(x, n, mode="sin"):
        assert isinstance(n, int)
        return getattr(torch, mode)(x) ** n

    @pytest.mark.parametrize(("static", "grad"), [(1, True), (-2, False), ((-1, 1), True)])
    def test_by_place(self, static, grad):
        f = functx.remat(self.power, static_argnums=static)
        x = X.clone().requires_grad_(grad)
        assert_same(f(x, 2, "cos"), torch.cos(X) ** 2)
        assert_same(functx.grad(lambda x: f(x, 2, "cos").sum())(X), -2 * X.cos() * X.sin(), eps=8)

    @pytest.mark.parametrize("static", ["n", ("n", "mode")])
    def test_by_name(self, static):
        f = functx.remat(self.power, static_argnames=static)
        assert_same(f(X.clone().requires_grad_(), n=3, mode="exp"), X.exp() ** 3)

    @pytest.mark.parametrize(("static", "grad"), [(3, True), (-4, False), ((0, 3), True)])
    def test_out_of_range(self, static, grad):
        f = functx.remat(self.power, static_argnums=static)
        with pytest.raises(ValueError, match=r"static_argnums.*3"):
            f(X.clone().requires_grad_(grad), 2, "sin")

    @pytest.mark.parametrize("static", ["n", (1, "n"), 1.5, None, True])
    def test_of_a_wrong_type(self, static):
        with pytest.raises(TypeError, match="static_argnums"):
            functx.remat(self.power, static_argnums=static)


@pytest.mark.parametrize("modules", [nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict()])
def test_a_list_of_modules_is_an_error_that_names_apply_remat(modules):
    with pytest.raises(TypeError, match="apply_remat"):
        functx.remat(modules)


@pytest.mark.parametrize("f", [3, torch.ones(2), [body], nn.Linear])
def test_what_is_no_function_or_module_is_an_error_as_is_a_class(f):
    with pytest.raises(TypeError, match=r"remat: expected a function or module, got"):
        functx.remat(f)


@pytest.mark.parametrize(
    "options",
    [
        {"determinism_check": "sometimes"},
        {"preserve_rng_state": "sometimes"},
        {"policy": 3},
        {"use_reentrant": False},
    ],
)
def test_options_that_are_not_known_are_an_error(options):
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        functx.remat(body, **options)(X.clone().requires_grad_())


@pytest.mark.parametrize("prevent_cse", [True, False])
def test_the_option_of_jax_that_means_nothing_here_is_taken(prevent_cse):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f = functx.remat(body, prevent_cse=prevent_cse)
    assert_same(f(X.clone().requires_grad_()), body(X))


def test_a_call_as_of_torch_s_checkpoint_says_how_it_is_called_here():
    with pytest.raises(TypeError, match=r"remat\(f\)\(x\).*functx\.checkpoint\(f, x\)"):
        functx.remat(torch.sin, torch.ones(3))
