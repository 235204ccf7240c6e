"""remat of any callable: what may go in, what may come out, and every way to differentiate it."""

import collections
import functools

import pytest
import torch
from cases import DTYPE, numbers
from programs import body, check_call
from references import assert_same, count

import functx

pytestmark = pytest.mark.usefixtures("hooks")

Pair = collections.namedtuple("Pair", ["first", "second"])


class Scale:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return x.sin() * self.factor

    def method(self, x, power=2):
        return (x.sin() * self.factor) ** power

    @functx.remat
    def decorated(self, x, power=2):
        return (x.sin() * self.factor) ** power

    @functx.remat(policy=None)
    def decorated_with_arguments(self, x):
        return x.sin() * self.factor

    @staticmethod
    @functx.remat
    def static(x):
        return x.sin()

    @classmethod
    @functx.remat
    def of_class(cls, x):
        return x.sin() * len(cls.__name__)


class TestCallables:
    @pytest.mark.parametrize(
        "f",
        [
            body,
            lambda x: x.sin() * 2,
            torch.sin,
            torch.Tensor.exp,
            functools.partial(torch.pow, exponent=3),
            functools.partial(torch.mul, torch.tensor(2.0, dtype=DTYPE)),
            Scale(3.0),
            Scale(3.0).method,
            functools.partial(Scale(3.0).method, power=3),
            functx.grad(lambda x: x.sin().sum()),
            functx.vmap(torch.sin),
            functx.remat(body),
        ],
    )
    def test_any_callable(self, f):
        check_call(f, numbers(3))

    @pytest.mark.parametrize(
        "name", ["decorated", "decorated_with_arguments", "static", "of_class"]
    )
    def test_decorated_methods(self, name):
        scale = Scale(5.0)
        undecorated = {
            "decorated": lambda x: (x.sin() * 5) ** 2,
            "decorated_with_arguments": lambda x: x.sin() * 5,
            "static": torch.sin,
            "of_class": lambda x: x.sin() * 5,
        }[name]
        x = numbers(3)
        assert_same(getattr(scale, name)(x), undecorated(x))
        gradients = [
            functx.grad(lambda x, f=f: f(x).sum())(x) for f in (getattr(scale, name), undecorated)
        ]
        assert_same(*gradients)

    def test_methods_bind_to_their_instance(self):
        first, second = Scale(2.0), Scale(3.0)
        x = numbers(3)
        assert_same(first.decorated(x, power=1), x.sin() * 2)
        assert_same(second.decorated(x, power=1), x.sin() * 3)
        assert_same(Scale.decorated(second, x, 1), x.sin() * 3)

    def test_decorator_bare_and_with_arguments(self):
        @functx.remat
        def bare(x):
            return x.sin()

        @functx.remat()
        def empty(x):
            return x.sin()

        @functx.remat(policy=None, preserve_rng_state=False)
        def arguments(x):
            return x.sin()

        x = numbers(3)
        for f in (bare, empty, arguments):
            assert_same(functx.grad(lambda x, f=f: f(x).sum())(x), x.cos())

    def test_metadata(self):
        @functx.remat
        def documented(x: torch.Tensor, *, flag: bool = False) -> torch.Tensor:
            """A docstring."""
            return x

        assert documented.__name__ == "documented"
        assert documented.__doc__ == "A docstring."
        assert documented.__module__ == __name__
        assert documented.__annotations__["flag"] in (bool, "bool")
        assert documented.__wrapped__ is not documented


class TestArguments:
    def test_positional_and_keyword(self):
        def f(x, y, *rest, scale, **more):
            return x * y.sin() + sum(r.exp() for r in rest) * scale + more["z"]

        check_call(f, numbers(3), numbers(3, start=1.0), numbers(3), scale=numbers(1), z=numbers(3))

    def test_pytrees(self):
        def f(tree, pair, *, options):
            (a, b), c = tree["x"], tree["deep"][0]["y"]
            return a * b + c * pair.first / options["scale"][0] + pair.second

        check_call(
            f,
            {"x": (numbers(3), numbers(3, start=1.0)), "deep": [{"y": numbers(3, start=2.0)}]},
            Pair(numbers(3), 2.0),
            options=collections.OrderedDict(scale=[numbers(1, start=0.4)], mode="fast"),
        )

    def test_what_is_no_tensor_passes_through(self):
        seen = []

        def f(x, none, flag, text, integer, real, dtype, function, slots):
            seen.append((none, flag, text, integer, real, dtype, function, slots))
            assert isinstance(flag, bool)
            return x * integer if flag and none is None and text == "mode" else x

        arguments = (None, True, "mode", 3, 0.5, torch.float32, body, slice(1, 2))
        check_call(f, numbers(3), *arguments)
        assert all(entry == arguments for entry in seen)

    def test_default_arguments(self):
        check_call(lambda x, power=3, *, y=None: x**power if y is None else y, numbers(3))

    def test_flags_choose_the_branch_at_each_call(self):
        region = functx.remat(lambda x, square: x * x if square else x.sin())
        x = numbers(3)
        for square, expected in ((True, 2 * x), (False, x.cos()), (True, 2 * x)):
            gradient = functx.grad(lambda x, square=square: region(x, square).sum())(x)
            assert_same(gradient, expected)

    def test_the_same_tensor_twice(self):
        check_call(lambda x: functx.remat(torch.mul)(x, x), numbers(3))
        x = numbers(3).requires_grad_()
        functx.remat(lambda a, b: a.sin() * b)(x, x).sum().backward()
        assert_same(x.grad, x.cos() * x + x.sin(), eps=2)

    def test_views_of_one_tensor(self):
        def f(x):
            return functx.remat(lambda a, b, c: a * b + c.sum())(x[:2], x[1:], x.view(3, 1))

        x = numbers(3)
        expected = functx.grad(lambda x: (x[:2] * x[1:] + x.view(3, 1).sum()).sum())(x)
        assert_same(functx.grad(lambda x: f(x).sum())(x), expected, eps=2)

    def test_integer_and_bool_tensors(self):
        index, mask = torch.tensor([0, 2]), torch.tensor([True, False, True])
        check_call(lambda x, i, m: x[i] * x[m].sin(), numbers(3), index, mask)

    def test_arguments_are_not_changed(self):
        x = numbers(3).requires_grad_()
        arguments = [x, {"y": x}]
        region = functx.remat(lambda a: a[0] * a[1]["y"])
        region(arguments).sum().backward()
        assert arguments[0] is x
        assert arguments[1]["y"] is x

    @pytest.mark.parametrize(
        "x",
        [
            numbers(4, 3).T,
            numbers(6)[::2],
            numbers(1, 3).expand(4, 3),
            numbers(0, 3),
            numbers(),
            torch.complex(numbers(3), numbers(3, start=1.0)),
            numbers(3).float(),
            numbers(3).bfloat16(),
        ],
        ids=[
            "transposed",
            "strided",
            "expanded",
            "empty",
            "scalar",
            "complex",
            "float",
            "bfloat16",
        ],
    )
    def test_kinds_of_tensors(self, x):
        def value(f, x):
            x = x.detach().requires_grad_()
            out = f(x)
            return out, torch.autograd.grad(out.abs().sum(), x)

        assert_same(value(functx.remat(body), x), value(body, x))
        per_example = [functx.vmap(f)(x) if x.dim() else f(x) for f in (functx.remat(body), body)]
        assert_same(*per_example)


class TestResults:
    @pytest.mark.parametrize(
        "f",
        [
            lambda x: None,
            lambda x: (),
            lambda x: {"a": x.sin(), "b": [x.exp(), (x,)]},
            lambda x: Pair(x.sin(), "text"),
            lambda x: (x.sin(), 3, None, True, "text"),
            lambda x: collections.OrderedDict(first=x.sin(), second=x.cos()),
            lambda x: torch.max(x, dim=0),
            lambda x: [],
            lambda x: 2.0,
        ],
    )
    def test_any_pytree(self, f):
        x = numbers(3)
        expected, actual = f(x), functx.remat(f)(x)
        assert type(actual) is type(expected)
        assert_same(actual, expected)

        def scalar(x, f):
            leaves = torch.utils._pytree.tree_leaves(f(x))
            return sum(leaf.sum() for leaf in leaves if isinstance(leaf, torch.Tensor)) + x.sum()

        assert_same(functx.grad(scalar)(x, functx.remat(f)), functx.grad(scalar)(x, f))

    def test_integer_output(self):
        def f(x):
            return x.sin(), x.argmax(), x > 0

        check_call(f, numbers(3))
        out = functx.remat(f)(numbers(3).requires_grad_())
        assert [t.requires_grad for t in out] == [True, False, False]
        ours, theirs = (functx.vmap(f)(numbers(2, 3)) for f in (functx.remat(f), f))
        assert_same(ours, theirs)

    def test_an_input_as_output(self):
        check_call(lambda x, y: (x, y.sin(), x), numbers(3), numbers(3))
        x = numbers(3).requires_grad_()
        (out,) = functx.remat(lambda x: (x,))(x)
        assert out.data_ptr() == x.data_ptr()
        assert_same(functx.grad(lambda x: (functx.remat(lambda x: x)(x) * x).sum())(x), 2 * x)

    def test_a_view_of_an_input_as_output(self):
        x = numbers(4)
        check_call(lambda x: x.view(2, 2).T, x)
        assert functx.remat(lambda x: x[1:])(x).data_ptr() == x[1:].data_ptr()

    def test_an_output_twice(self):
        def f(x):
            y = x.sin()
            return y, y, {"again": y}

        check_call(f, numbers(3))
        first, second, _ = functx.remat(f)(numbers(3).requires_grad_())
        assert first.data_ptr() == second.data_ptr()

    def test_outputs_that_require_no_gradient(self):
        def f(x):
            with torch.no_grad():
                y = x.exp()
            return x.sin() * y, y, x.detach(), torch.ones(2)

        check_call(f, numbers(3))
        out = functx.remat(f)(numbers(3).requires_grad_())
        assert [t.requires_grad for t in out] == [True, False, False, False]
        x = numbers(3)
        ours = functx.grad(lambda x: total_of(functx.remat(f)(x)))(x)
        assert_same(ours, functx.grad(lambda x: total_of(f(x)))(x))

    def test_only_some_outputs_are_used(self):
        x = numbers(3).requires_grad_()
        first, second, _ = functx.remat(lambda x: (x.sin(), x.exp(), x * 2))(x)
        assert_same(torch.autograd.grad(second.sum(), x, retain_graph=True)[0], x.exp())
        assert_same(torch.autograd.grad(first.sum(), x)[0], x.cos())


def total_of(outputs):
    return sum(leaf.sum() for leaf in outputs)


def test_regions_are_independent_of_each_other():
    """Two calls of one region hold their own inputs."""
    region = functx.remat(body)
    x, y = numbers(3).requires_grad_(), numbers(3, start=1.0).requires_grad_()
    first, second = region(x), region(y)
    assert_same(torch.autograd.grad(second.sum(), y), torch.autograd.grad(body(y).sum(), y))
    assert_same(torch.autograd.grad(first.sum(), x), torch.autograd.grad(body(x).sum(), x))


def test_the_function_runs_once_in_the_forward():
    calls = []

    def f(x, w):
        calls.append(1)
        return x.sin() * w

    w = numbers(3).requires_grad_()
    functx.remat(f)(numbers(3), w)
    assert len(calls) == 1
    calls.clear()
    functx.vmap(functx.remat(f), (0, None))(numbers(2, 3), w)
    assert len(calls) == 1
    counts = count(functx.grad(lambda x: functx.remat(body)(x).sum()), numbers(3))
    assert counts["exp"] <= 2
