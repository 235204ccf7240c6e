"""Rule 4: writes, hooks and flags on tensors that the region did not make."""

import pytest
import torch
from cases import numbers
from references import assert_same

import functx

from .refusals import refused, same

X = numbers(4)


def leaf():
    return X.clone().requires_grad_()


def zeros():
    return torch.zeros(4, dtype=X.dtype)


WRITES = {
    "an item": lambda buffer, a: buffer.__setitem__(1, a[1] * 2),  # an item
    "a slice": lambda buffer, a: buffer[1:].copy_(a[1:] * 2),  # a slice
    "add_": lambda buffer, a: buffer.add_(a),  # add_
}
ways = pytest.mark.parametrize("way", ["backward", "grad", "vmap(grad)"])


def differentiate(way, f):
    if way == "backward":
        return torch.autograd.grad(f(leaf()).sum(), leaf(), allow_unused=True)
    gradient = functx.grad(lambda x: f(x).sum())
    return gradient(X) if way == "grad" else functx.vmap(gradient)(numbers(3, 4))


@pytest.mark.parametrize(
    ("write", "way", "held"),
    [
        ("an item", "backward", "captured"),
        ("a slice", "grad", "captured"),
        ("add_", "vmap(grad)", "captured"),
        ("an item", "vmap(grad)", "captured"),
        ("a slice", "backward", "argument"),
        ("add_", "grad", "argument"),
    ],
)
def test_history_written_into_what_the_region_did_not_make_is_an_error(write, way, held):
    def f(x):
        buffer = torch.zeros_like(x)  # made under the transforms: else torch itself refuses

        def region(a, argument=buffer):
            WRITES[write](buffer if held == "captured" else argument, a)
            return a.sin()

        return functx.remat(region)(x, *([buffer] if held == "argument" else []))

    with refused(f"# {write}", "return|detach"):
        differentiate(way, f)


def test_history_written_into_a_tensor_of_the_region_around_is_an_error():
    def outer(a):
        buffer = zeros()

        def inner(a):
            buffer.copy_(a * 2)  # here
            return a.sin()

        return functx.remat(inner)(a.cos()) * buffer

    with refused("# here", "return|detach"):
        functx.remat(outer)(leaf())


def test_a_capture_with_history_written_in_place_is_an_error():
    h = leaf() * 2

    def region(a):
        h.mul_(a)  # here
        return h.sin()

    with refused("# here", "clone|return|out of place", shape=(4,)):
        functx.remat(region)(leaf())


@ways
def test_an_input_with_history_written_in_place_is_an_error(way):
    def region(h):
        h.mul_(2)  # here
        return h.sin()

    with refused("# here", "clone|return|out of place", shape=(4,)):
        differentiate(way, lambda x: functx.remat(region)(x * 1))


def writes(x):
    y = x.sin()
    y.mul_(2)
    y += x
    y[1] = x[0].exp()
    y[2:].mul_(x[:2])
    y.view(2, 2).t().add_(x.exp().view(2, 2))
    z = torch.zeros_like(y)
    z[1:3] = y[:2]
    z.masked_fill_(x > 0.5, 3.0)
    return z * y.relu_() + torch.zeros_like(x).copy_(y)


def scatters(x):
    index = torch.tensor([2, 0, 2])
    y = x * 3
    y.index_add_(0, index, x[:3].sin())
    y.index_put_((index[:1],), x[:1] * 3)
    return y.clone().scatter_(0, index, x[:3].cos()) * y.sin()


@pytest.mark.parametrize("region", [writes, scatters])
def test_writes_into_what_the_region_made_are_right(region):
    def program(remat):
        x, gradient = leaf(), functx.grad(lambda x: remat(region)(x).exp().sum())
        found = torch.autograd.grad(remat(region)(x).exp().sum(), x)
        return found, gradient(X) if region is scatters else functx.vmap(gradient)(numbers(3, 4))

    same(program, eps=16)


HOOKS = {
    "register_hook": lambda t: t.register_hook(lambda g: g * 3),  # register_hook
    "retain_grad": lambda t: t.retain_grad(),  # retain_grad
    "register_post_accumulate_grad_hook": (
        lambda t: t.register_post_accumulate_grad_hook(print)  # register_post_accumulate_grad_hook
    ),
}


@pytest.mark.parametrize(
    ("hook", "what"),
    [
        ("register_hook", "an argument"),
        ("register_hook", "a capture"),
        ("retain_grad", "a capture"),
        ("retain_grad", "an argument"),
        ("register_post_accumulate_grad_hook", "a parameter"),
        ("register_hook", "a parameter"),
        ("register_hook", "an argument under grad"),
    ],
)
def test_hooks_on_what_the_region_did_not_make_are_an_error(hook, what):
    h, w = leaf() * 2, torch.nn.Parameter(X.clone())

    def region(a):
        HOOKS[hook]({"a capture": h, "a parameter": w}.get(what, a))
        return a.sin() * h * w

    with refused(f"# {hook}", "outside|before"):
        if what == "an argument under grad":
            functx.grad(lambda x: functx.remat(region)(x * 2).sum())(X)
        functx.remat(region)(h)


def test_hooks_on_what_the_region_made_are_right():
    def program(remat):
        def region(a):
            h = a.sin()
            h.register_hook(lambda g: g * 3)
            return h.exp()

        x = leaf()
        return torch.autograd.grad(remat(region)(x).sum(), x), functx.grad(
            lambda x: remat(region)(x).sum()
        )(X)

    same(program)


FLAGS = {
    "requires_grad_()": lambda t: t.requires_grad_(),  # requires_grad_()
    "requires_grad = True": lambda t: setattr(t, "requires_grad", True),  # requires_grad = True
    "freeze": lambda t: t.requires_grad_(False),  # freeze
}


@pytest.mark.parametrize(
    ("flag", "what"),
    [
        ("requires_grad_()", "an argument"),
        ("requires_grad = True", "a capture"),
        ("freeze", "a parameter"),
    ],
)
def test_requires_grad_that_would_change_is_an_error(flag, what):
    buffer, w = zeros(), torch.nn.Parameter(X.clone())

    def region(a, b):
        FLAGS[flag]({"an argument": b, "a capture": buffer}.get(what, w))
        return a * (b + buffer) * w

    with refused(f"# {flag}", "outside|before"):
        functx.remat(region)(leaf(), X.clone())


def test_requires_grad_that_changes_nothing_is_right():
    w = torch.nn.Parameter(X.clone())

    def region(a):
        for flag in ("requires_grad_()", "requires_grad = True"):
            FLAGS[flag](w)
            FLAGS[flag](a.detach().clone())
        return a * w

    x = leaf()
    functx.remat(region)(x).sum().backward()
    assert_same((x.grad, w.grad), (X, X))


CHANGES = {
    "a key": (lambda c, h: c.update(h=h), {}),
    "a key deep inside": (lambda c, h: c["a"].update(h=h), {"a": {}}),
    "an item": (lambda c, h: c.append(h), []),
    "a number": (lambda c, h: c.append(1), []),
    "a key less": (lambda c, h: c.pop("a"), {"a": X}),
}


class TestContainers:
    """Arguments that the region changes."""

    @staticmethod
    def fills(x, cache):
        cache["h"] = x.sin()
        cache.setdefault("deep", []).append(x.cos())
        return cache

    @pytest.mark.parametrize("way", ["backward", "grad"])
    def test_a_dict_that_is_filled_and_returned_is_right(self, way):
        def program(remat):
            def loss(x):
                cache = remat(self.fills)(x, {})
                assert sorted(cache) == ["deep", "h"]
                return (cache["h"] * cache["deep"][0] * X).sum()

            x = leaf()
            return torch.autograd.grad(loss(x), x) if way == "backward" else functx.grad(loss)(X)

        same(program)

    @pytest.mark.parametrize(
        ("change", "way"), [(c, ["backward", "grad"][i % 2]) for i, c in enumerate(CHANGES)]
    )
    def test_one_that_is_changed_and_not_returned_is_an_error(self, change, way):
        make, container = CHANGES[change]
        container = container.copy()

        def region(x, container):
            make(container, x.sin())
            return x.exp()

        def loss(x):
            return functx.remat(region)(x, container).sum()

        with pytest.raises(functx.RematError, match="return") as caught:
            loss(leaf()) if way == "backward" else functx.grad(loss)(X)
        assert type(container).__name__ in str(caught.value)


@pytest.mark.parametrize(
    "f",
    [
        lambda y: y,
        lambda y: y[:2],
        lambda y: y.view(3),
        lambda y: (y.sin(), y.view(3))[1],
    ],
)
def test_a_result_that_shares_its_memory_can_not_be_written_in_place(f):
    """torch says so; what it shares it with would not know."""
    x = numbers(3).requires_grad_()
    y = x * 1
    shared = functx.remat(lambda y: (f(y), y.view(3)[1:]))(y)[0]
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        shared.mul_(3)
    functx.remat(lambda y: y.sin())(y).mul_(3)


def test_nor_can_two_results_that_share_it():
    both = functx.remat(lambda y: [z := y * 2, z[:2]])(numbers(3).requires_grad_())
    for result in both:
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            result.mul_(3)
