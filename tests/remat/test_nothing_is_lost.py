"""Rule 4: a tensor that leaves without being returned; writes, hooks and flags on others."""

import threading

import pytest
import torch
from cases import DTYPE, judged_by, numbers
from references import assert_same

import functx

from .refusals import refused, right_or_refused, same

X = numbers(4)


def leaves(aux, read=True):
    """A body that leaves the sine of its argument behind, which its result reads or does not."""

    def body(x):
        h = x.sin()
        aux.append(h)
        return (h if read else x).exp()

    return body


def appended(remat):
    aux = []
    return lambda x: remat(leaves(aux))(x).sum() + (aux.pop() * X).sum()


def twice(remat):
    """Of two regions, read in a third."""

    def f(x):
        aux = []
        y = remat(leaves(aux, False))(remat(leaves(aux, False))(x))
        return remat(lambda y: (y * aux[0] * aux[1]).sum())(y) + (aux[0] * aux[1]).sum()

    return f


def by_attribute(remat):
    class Holder:
        pass

    def region(x):
        Holder.aux_loss = x.sin().square().sum()
        return x.exp()

    return lambda x: remat(region)(x).sum() + 3 * Holder.aux_loss


def of_an_inner_region(remat):
    """Kept by the inner of three regions, read in the next and outside of all."""
    aux = []
    outer = lambda x: remat(leaves(aux, False))(x * 2) * aux[-1]

    def f(x):
        out = remat(lambda x: remat(outer)(x))(x).sum() + (aux[-1] * X).sum()
        aux.clear()
        return out

    return f


ESCAPES = [appended, twice, by_attribute, of_an_inner_region]
escapes = pytest.mark.parametrize("build", ESCAPES, ids=lambda f: f.__name__)


@escapes
@judged_by(same)
def test_in_plain_autograd_it_is_a_further_result(remat, build):
    w, x = numbers(4, start=1.0).requires_grad_(), X.clone().requires_grad_()
    (first,) = torch.autograd.grad(build(remat)(x), x, create_graph=True)
    around = remat(lambda x: build(remat)(x * w))(x)
    second = torch.autograd.grad((first * X).sum(), x)
    return first, second, torch.autograd.grad(around, (x, w))


class Box:
    def __init__(self, value):
        self.value = value


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("of", [lambda x: x, torch.sin], ids=["an input", "a result"])
@judged_by(same)
def test_what_an_object_holds_that_is_all_the_region_returns_has_its_gradient(remat, of, inner):
    x = X.clone().requires_grad_()
    h = x.sin() if inner else x
    out = remat(lambda x: Box(of(x)))(h)
    return torch.autograd.grad(h.sum() + (out.value**2).sum(), x)


@escapes
def test_under_grad_it_is_an_error(build):
    # which line, the one that made it or the region's call, the contract leaves open
    with refused("", "return", shape=() if build is by_attribute else (4,)):
        functx.grad(build(functx.remat))(X)


WAYS = {
    "vmap(grad)": lambda f: functx.vmap(functx.grad(f))(numbers(3, 4)),
    "jacrev(grad)": lambda f: functx.jacrev(functx.grad(f))(X),
    "jvp": lambda f: functx.jvp(f, (X,), (X.cos(),)),
    "jacfwd": lambda f: functx.jacfwd(f)(X),
    "torch.func.grad": lambda f: torch.func.grad(f)(X),
    "vjp": lambda f: functx.vjp(f, X)[1](torch.ones((), dtype=DTYPE)),
}


@pytest.mark.parametrize(
    ("build", "way"), [((appended, of_an_inner_region)[i % 2], way) for i, way in enumerate(WAYS)]
)
def test_under_other_transforms_it_is_never_a_constant(build, way):
    right_or_refused(lambda remat: WAYS[way](build(remat)), eps=16)


OTHER_WAYS_TO_LEAVE = {
    "as a view": lambda x, aux: (aux.append((h := x.sin())[1:]), h.exp())[1],
    "and by return": lambda x, aux: (aux.append(x.sin()), aux[0])[1],
    "as a leaf": lambda x, aux: (aux.append(x.detach().sin().requires_grad_()), aux[0] * x)[1],
}


@pytest.mark.parametrize("way", OTHER_WAYS_TO_LEAVE)
@judged_by(right_or_refused)
def test_other_ways_to_leave_are_right_or_an_error(remat, way):
    aux, x = [], X.clone().requires_grad_()
    value = remat(lambda x: OTHER_WAYS_TO_LEAVE[way](x, aux))(x).sum()
    if way != "as a leaf":
        value = value + (aux[0] * X[: len(aux[0])]).sum()
    value.backward()
    return x.grad, aux[0].grad if aux[0].is_leaf else None


def test_what_does_not_require_grad_or_is_gone_at_the_end_is_no_error():
    log, scratch = [], []

    def logs(x):
        h = x.sin()
        log.extend([h.detach(), h.detach().sum().item()])
        return h.exp()

    def drops(x):
        scratch.append(x.sin())
        return scratch.pop().exp()

    x, expected = X.clone().requires_grad_(), X.cos() * X.sin().exp()
    functx.remat(logs)(x).sum().backward()
    assert_same((log[0], x.grad), (X.sin(), expected), eps=8)
    for body in (logs, drops):
        found = functx.grad(lambda x, f=body: functx.remat(f)(x).sum())(X)
        assert_same(found, expected, eps=8)


@pytest.mark.parametrize("captured", [False, True])
def test_what_a_thread_of_the_region_computes_is_refused(captured):
    w = numbers(3, start=2.0).requires_grad_()

    def f(x):
        found = []
        thread = threading.Thread(target=lambda: found.append((x * w if captured else x).sin()))
        thread.start()
        thread.join()
        return found[0] * 2

    with pytest.raises(functx.RematError, match="start the thread outside"):
        functx.remat(f)(numbers(3).requires_grad_())


def test_what_leaves_below_a_transform_and_requires_grad_in_plain_autograd_is_refused():
    w, kept = numbers(3, start=2.0).requires_grad_(), []

    def outer(x):
        out = functx.remat(lambda x: (kept.append(w.sin()), x * w)[1])(x)
        return out * kept.pop()

    with pytest.raises(functx.RematError, match="leaves the region without being returned"):
        functx.jacfwd(outer)(numbers(3))


leaf = lambda: X.clone().requires_grad_()
zeros = lambda: torch.zeros(4, dtype=X.dtype)


WRITES = {
    "an item": lambda buffer, a: buffer.__setitem__(1, a[1] * 2),  # an item
    "a slice": lambda buffer, a: buffer[1:].copy_(a[1:] * 2),  # a slice
    "add_": lambda buffer, a: buffer.add_(a),  # add_
}


def differentiate(way, f):
    if way == "backward":
        return torch.autograd.grad(f(leaf()).sum(), leaf(), allow_unused=True)
    gradient = functx.grad(lambda x: f(x).sum())
    return gradient(X) if way == "grad" else functx.vmap(gradient)(numbers(3, 4))


@pytest.mark.parametrize("held", ["captured", "argument"])
@pytest.mark.parametrize(("write", "way"), [*zip(WRITES, ["backward", "grad", "vmap(grad)"])])
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


@pytest.mark.parametrize("way", ["backward", "grad", "vmap(grad)", "a capture"])
def test_an_input_with_history_written_in_place_is_an_error(way):
    def region(h):
        h.mul_(2)  # here
        return h.sin()

    with refused("# here", "clone|return|out of place", shape=(4,)):
        if way == "a capture":
            h = leaf() * 2
            functx.remat(lambda a: region(h) * a)(leaf())
        differentiate(way, lambda x: functx.remat(region)(x * 1))


def scatters(x):
    index = torch.tensor([2, 0, 2])
    y = x * 3
    y.index_add_(0, index, x[:3].sin())
    y.index_put_((index[:1],), x[:1] * 3)
    return y.clone().scatter_(0, index, x[:3].cos()) * y.sin()


@judged_by(same, eps=16)
def test_writes_into_what_the_region_made_are_right(remat):
    x, gradient = leaf(), functx.grad(lambda x: remat(scatters)(x).exp().sum())
    return torch.autograd.grad(remat(scatters)(x).exp().sum(), x), gradient(X)


HOOKS = {
    "register_hook": lambda t: t.register_hook(lambda g: g * 3),  # register_hook
    "retain_grad": lambda t: t.retain_grad(),  # retain_grad
    "register_post_accumulate_grad_hook": (
        lambda t: t.register_post_accumulate_grad_hook(print)  # register_post_accumulate_grad_hook
    ),
}
PLACES = ["a capture", "a parameter", "a capture under grad"]


@pytest.mark.parametrize(
    ("hook", "what"),
    [
        *(("register_hook", what) for what in PLACES),
        ("retain_grad", "a capture"),
        ("register_post_accumulate_grad_hook", "a parameter"),
    ],
)
def test_hooks_on_what_the_region_did_not_make_are_an_error(hook, what):
    h, w = leaf() * 2, torch.nn.Parameter(X.clone())

    def region(a):
        HOOKS[hook]({"a parameter": w}.get(what, h))
        return a.sin() * h * w

    with refused(f"# {hook}", "outside|before"):
        if what == "a capture under grad":
            functx.grad(lambda x: functx.remat(region)(x * 2).sum())(X)
        functx.remat(region)(X)


FLAGS = {
    "requires_grad_()": lambda t: t.requires_grad_(),  # requires_grad_()
    "requires_grad = True": lambda t: setattr(t, "requires_grad", True),  # requires_grad = True
    "detach_": lambda t: t.detach_(),  # detach_
}


@pytest.mark.parametrize(
    ("flag", "what"), [*zip(FLAGS, ["an argument", "an argument", "a parameter"])]
)
def test_requires_grad_that_would_change_is_an_error(flag, what):
    buffer, w = zeros(), torch.nn.Parameter(X.clone())

    def region(a, b):
        FLAGS[flag]({"an argument": b, "a capture": buffer}.get(what, w))
        return a * (b + buffer) * w

    with refused(f"# {flag}", "outside|before"):
        functx.remat(region)(leaf(), X.clone())


def test_requires_grad_that_changes_nothing_is_right():
    w, buffer = torch.nn.Parameter(X.clone()), zeros()

    def region(a):
        for flag in ("requires_grad_()", "requires_grad = True"):
            FLAGS[flag](w)
            FLAGS[flag](a.detach().clone())
        return a * w + buffer.detach_()

    x = leaf()
    functx.remat(region)(x).sum().backward()
    assert_same((x.grad, w.grad), (X, X))


@pytest.mark.parametrize("requires_grad", [True, False], ids=["a parameter", "a buffer"])
def test_data_put_into_what_the_region_did_not_make_is_an_error(requires_grad):
    """It would be the stand-in's, which is dropped; or be put there again by the replay."""
    w = X.clone().requires_grad_(requires_grad)

    def region(a):
        w.data = w.data * 0.9  # momentum
        return a * w

    with refused("# momentum", "outside|copy_", shape=(4,)):
        functx.remat(region)(leaf())
    assert_same(w, X)


def test_backward_inside_that_reaches_an_input_is_an_error():
    w = leaf()

    def region(a):
        (a.detach() * w).sin().sum().backward()  # inside
        return a * w

    with refused("# inside", "autograd.grad"):
        functx.remat(region)(leaf())


@judged_by(same)
def test_an_inner_loop_trains_a_copy_by_backward(remat):
    w = leaf()

    def region(a):
        fast = w.detach().clone().requires_grad_()
        optimizer = torch.optim.SGD([fast], lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            (a.detach() * fast).sin().sum().backward()
            optimizer.step()
        return a * w * fast.detach()

    x = leaf()
    remat(region)(x).sum().backward()
    return x.grad, w.grad


def tree(x):
    """A local function that calls itself is a cycle, which holds what it closes over."""
    rows = (x * 2).sin().unbind()

    def total(n):
        return rows[0] if n == 0 else (total(n - 1) * rows[n]).cos()

    return total(3)


@pytest.mark.parametrize("order", [1, 2])
@judged_by(same)
def test_what_but_a_cycle_holds_is_not_lost(remat, order):
    x = leaf()
    out = remat(tree)(x)
    for _ in range(order):
        (out,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out


CHANGES = {
    "a key": (lambda c, h: c.update(h=h), {}),
    "a key deep inside": (lambda c, h: c["a"].update(h=h), {"a": {}}),
    "an item": (lambda c, h: c.append(h), []),
    "a number": (lambda c, h: c.append(1), []),
    "a key less": (lambda c, h: c.pop("a"), {"a": X}),
}


class TestContainers:
    @staticmethod
    def fills(x, cache):
        cache["h"] = x.sin()
        cache.setdefault("deep", []).append(x.cos())
        return cache

    @pytest.mark.parametrize("way", ["backward", "grad"])
    @judged_by(same)
    def test_a_dict_that_is_filled_and_returned_is_right(self, remat, way):
        def loss(x):
            cache = remat(self.fills)(x, {})
            assert sorted(cache) == ["deep", "h"]
            return (cache["h"] * cache["deep"][0] * X).sum()

        x = leaf()
        return torch.autograd.grad(loss(x), x) if way == "backward" else functx.grad(loss)(X)

    @pytest.mark.parametrize(
        ("change", "way"), [(c, ["backward", "grad"][i % 2]) for i, c in enumerate(CHANGES)]
    )
    def test_one_that_is_changed_and_not_returned_is_an_error(self, change, way):
        make, container = CHANGES[change]
        container = container.copy()

        def region(x, container):
            make(container, x.sin())
            return x.exp()

        loss = lambda x: functx.remat(region)(x, container).sum()
        with pytest.raises(functx.RematError, match="return") as caught:
            loss(leaf()) if way == "backward" else functx.grad(loss)(X)
        assert type(container).__name__ in str(caught.value)


SHARES = [lambda y: (y, y[1:]), lambda y: (y.view(3), y), lambda y: (z := y * 2, z[:2])]


@pytest.mark.parametrize("f", SHARES, ids=["an input", "a view of it", "another result"])
def test_a_result_that_shares_its_memory_can_not_be_written_in_place(f):
    """torch says so; what it shares it with would not know."""
    y = numbers(3).requires_grad_() * 1
    for shared in functx.remat(f)(y):
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            shared.mul_(3)
    functx.remat(lambda y: y.sin())(y).mul_(3)
