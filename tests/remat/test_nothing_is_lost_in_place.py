"""Rule 4: writes, hooks and flags on tensors that the region did not make."""

import pytest
import torch
from cases import numbers
from references import assert_same

import functx
from remat.refusals import refused, same

X = numbers(4)


def leaf():
    return X.clone().requires_grad_()


def zeros():
    return torch.zeros(4, dtype=X.dtype)


WRITES = {
    "copy_": lambda buffer, a: buffer.copy_(a * 2),  # copy_
    "an item": lambda buffer, a: buffer.__setitem__(1, a[1] * 2),  # an item
    "a slice": lambda buffer, a: buffer[1:].copy_(a[1:] * 2),  # a slice
    "add_": lambda buffer, a: buffer.add_(a),  # add_
    "index_put_": lambda buffer, a: buffer.index_put_((torch.tensor([1]),), a[:1]),  # index_put_
    "+=": lambda buffer, a: buffer.__iadd__(a),  # +=
}
writes = pytest.mark.parametrize("write", WRITES)
ways = pytest.mark.parametrize("way", ["backward", "grad", "vmap(grad)"])


def differentiate(way, f):
    if way == "backward":
        return torch.autograd.grad(f(leaf()).sum(), leaf(), allow_unused=True)
    gradient = functx.grad(lambda x: f(x).sum())
    return gradient(X) if way == "grad" else functx.vmap(gradient)(numbers(3, 4))


@writes
@ways
def test_history_written_into_a_captured_tensor_is_an_error(write, way):
    def f(x):
        buffer = torch.zeros_like(x)  # made under the transforms: else torch itself refuses

        def region(a):
            WRITES[write](buffer, a)
            return a.sin()

        return functx.remat(region)(x)

    with refused(f"# {write}", "return|detach"):
        differentiate(way, f)


@writes
def test_history_written_into_an_argument_is_an_error(write):
    def region(a, buffer):
        WRITES[write](buffer, a)
        return a.sin()

    with refused(f"# {write}", "return|detach"):
        functx.remat(region)(leaf(), zeros())


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


def test_writes_into_what_the_region_made_are_right():
    def program(remat):
        def region(a):
            buffer = torch.zeros_like(a)
            buffer[1:] = a[1:] * 2
            buffer.add_(a.sin()).mul_(a)
            return buffer

        x = leaf()
        return torch.autograd.grad(remat(region)(x).exp().sum(), x), functx.vmap(
            functx.grad(lambda x: remat(region)(x).exp().sum())
        )(numbers(3, 4))

    same(program)


def test_writes_without_history_are_right():
    buffer = zeros()

    def region(a):
        with torch.no_grad():
            buffer.add_(a)
        buffer.mul_(0.5).add_(a.detach())
        return a.sin() * 2

    x = leaf()
    functx.remat(region)(x).sum().backward()
    assert_same((buffer, x.grad), (X * 1.5, 2 * X.cos()), eps=2)


HOOKS = {
    "register_hook": lambda t: t.register_hook(lambda g: g * 3),  # register_hook
    "retain_grad": lambda t: t.retain_grad(),  # retain_grad
}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("what", ["an argument", "a capture"])
def test_hooks_on_what_the_region_did_not_make_are_an_error(hook, what):
    h = leaf() * 2

    def region(a):
        HOOKS[hook](a if what == "an argument" else h)
        return a.sin() * h

    with refused(f"# {hook}", "outside|before"):
        functx.remat(region)(h)


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_a_captured_parameter_are_an_error(hook):
    w = torch.nn.Parameter(X.clone())

    def region(a):
        getattr(w, hook)(lambda g: None)  # here
        return a * w

    with refused("# here", "outside|before"):
        functx.remat(region)(leaf())


def test_hooks_under_grad_on_an_argument_are_an_error():
    def region(a):
        a.register_hook(lambda g: g * 3)  # here
        return a.sin()

    with refused("# here", "outside|before"):
        functx.grad(lambda x: functx.remat(region)(x * 2).sum())(X)


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
}


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("what", ["an argument", "a capture"])
def test_requires_grad_that_would_change_is_an_error(flag, what):
    buffer = zeros()

    def region(a, b):
        FLAGS[flag](b if what == "an argument" else buffer)
        return a * (b + buffer)

    with refused(f"# {flag}", "outside|before"):
        functx.remat(region)(leaf(), X.clone())


def test_a_parameter_frozen_inside_is_an_error():
    w = torch.nn.Parameter(X.clone())

    def region(a):
        w.requires_grad_(False)  # here
        return a * w

    with refused("# here", "outside|before"):
        functx.remat(region)(leaf())


@pytest.mark.parametrize("flag", FLAGS)
def test_requires_grad_that_changes_nothing_is_right(flag):
    w = torch.nn.Parameter(X.clone())

    def region(a):
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
    "a key without gradient": (lambda c, h: c.update(h=h.detach()), {}),
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

    @pytest.mark.parametrize("change", CHANGES)
    @pytest.mark.parametrize("way", ["backward", "grad"])
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
