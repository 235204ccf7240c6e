"""What a body asks of a tensor about its tape (``grad_fn``, ``is_leaf``): as without remat."""

import gc
import weakref

import pytest
import torch
from cases import numbers
from programs import identity
from references import assert_same
from test_right_hung_on_given import HOW, Box, region
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

import functx

X = numbers(4)


def names_of(node, depth=4):
    """The names of nodes from one on, as a tree."""
    if node is None or not depth:
        return None
    return node.name(), [names_of(below, depth - 1) for below, _ in node.next_functions]


QUESTIONS = {
    "grad_fn": lambda t: names_of(t.grad_fn),
    "grad_fn is None": lambda t: t.grad_fn is None,
    "is_leaf": lambda t: t.is_leaf,
    "output_nr": lambda t: t.output_nr,
    "version": lambda t: t._version,
    "is_view": lambda t: t._is_view(),
    "base": lambda t: None if t._base is None else [*t._base.shape],
    "retains_grad": lambda t: t.retains_grad,
    "hooks": lambda t: [h is not None and len(h) for h in (t._backward_hooks,)],
    "hooks after": lambda t: t._post_accumulate_grad_hooks is not None,
}


def retained(x):
    h = x * 2
    h.retain_grad()
    return h


def hooked(x):
    h = x * 2
    h.register_hook(lambda g: g * 3)
    return h


def hooked_leaf(x):
    if x.is_leaf:
        x.register_hook(lambda g: g * 3)
        x.register_post_accumulate_grad_hook(lambda t: None)
    return x


TENSORS = {
    "leaf": hooked_leaf,
    "computed": lambda x: x * 2,
    "written to": lambda x: (x * 2).mul_(3),
    "a view": lambda x: (x * 2).view(2, 2)[1],
    "a view of a leaf": lambda x: x[1:],
    "one of several": lambda x: torch.stack([x, x * 3]).unbind()[1],
    "hooked": hooked,
    "a constant": lambda x: X[1:],
}


def number(answer):
    """An answer as a number to compute with."""
    return 1 + sum(map(ord, repr(answer))) % 97 / 100


def program(remat, how, make, question, asked):
    def loss(x):
        t = make(x)

        def body(t):
            first = QUESTIONS[question](t)
            y = t.sin()
            # From what the body makes, a walk ends at stand-ins.
            own = names_of(y.grad_fn, 1) if question == "grad_fn" else QUESTIONS[question](y)
            then = QUESTIONS[question](t), own
            asked.append((first, then))
            return (y * number(first) * number(then)).sum()

        return region(remat, how, t, body) + (x * x).sum()

    return loss


def gradients(remat, how, make, question):
    """By two ways, five runs each, so that the last ones are known; and what was told."""
    found, asked = [], []
    f = program(remat, how, make, question, asked)
    for _ in range(5):
        leaf = X.clone().requires_grad_()
        f(leaf).backward()
        found.append(leaf.grad)
    if make is not retained:
        for _ in range(5):
            found.append(functx.grad(f)(X))
        found.append(functx.vmap(functx.grad(f))(torch.stack([X, -X])))
    return found, asked


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("how", HOW)
def test_answers_are_those_without_remat(how, question):
    for name, make in {**TENSORS, "retained": retained}.items():
        expected, told = gradients(identity, how, make, question)
        actual, in_region = gradients(functx.remat, how, make, question)
        assert_same(actual, expected, 8)
        runs = [*dict.fromkeys(map(repr, in_region))]
        assert runs == [*dict.fromkeys(map(repr, told))], name


@pytest.mark.parametrize("how", ["argument", "capture", "nested"])
def test_the_second_derivative(how):
    def f(remat, t):
        def body(t):
            return t.sin() * (2 if t.grad_fn is None else 3) * (5 if t.is_leaf else 7)

        return region(remat, how, t, body).sum()

    def second(remat):
        return functx.hessian(lambda x: f(remat, x * 2))(X)

    assert_same(second(functx.remat), second(identity), 8)


def test_what_the_body_makes():
    def body(x):
        y = x * 3
        before = y._version, y.is_leaf, y.retains_grad, y._base is None
        y.mul_(2)
        y.retain_grad()
        v = x.view(2, 2)
        after = y._version, y.is_leaf, y.retains_grad, v._base is x, y.grad_fn.name()
        kept.append((before, after))
        return y * number((before, after)) + v.sum()

    def run(remat):
        kept.clear()
        x = X.clone().requires_grad_()
        for _ in range(5):
            remat(body)(x).sum().backward()
        return x.grad, [*dict.fromkeys(kept)]

    kept = []
    (ours, told), (plain, expected) = run(functx.remat), run(identity)
    assert told == expected
    assert_same(ours, plain, 8)


@pytest.mark.parametrize("first_asks", [False, True])
def test_nodes_of_the_body_may_be_asked_for_in_some_runs(first_asks):
    """A replay has its own, so nothing is told; what is told about others is not mixed up."""

    def body(x):
        y = x.sin()
        if asks[0]:
            asked.append(y.grad_fn.name())
        return y * (2 if x.grad_fn is None else 3)

    asks, asked = [first_asks], []
    x = X.clone().requires_grad_()
    y, expected = functx.remat(body)(x * 2), body(x * 2)
    asks[0] = not first_asks
    assert_same(torch.autograd.grad(y.sum(), x), torch.autograd.grad(expected.sum(), x), 8)
    assert {*asked} == {"SinBackward0"}


@pytest.mark.parametrize("nested", [False, True])
def test_the_base_is_computed_with(nested):
    def body(v):
        return (v * v._base.sum() + v.view(-1)._base.prod()).sum()

    def run(remat):
        x = X.clone().requires_grad_()
        f = remat(lambda v: remat(body)(v)) if nested else remat(body)
        for _ in range(5):
            f((x * 2)[1:]).backward()
        return x.grad

    assert_same(run(functx.remat), run(identity), 8)


def test_the_base_is_the_argument():
    def body(x, v):
        return v * (2 if v._base is x else 3)

    def run(remat):
        x = X.clone().requires_grad_()
        y = x * 1
        remat(body)(y, y[1:]).sum().backward()
        return x.grad

    assert_same(run(functx.remat), run(identity))


@pytest.mark.parametrize("nested", [False, True])
def test_hooks_on_the_node_of_an_argument(nested):
    """They hang on that node itself, once."""

    def run(remat):
        called = []

        def body(h):
            h.grad_fn.register_prehook(lambda gs: called.append(gs[0]))
            h.grad_fn.register_hook(lambda gs, outs: (gs[0] * 3,))
            return h.sin()

        x = X.clone().requires_grad_()
        h = x.exp()
        f = remat(lambda h: remat(body)(h)) if nested else remat(body)
        (f(h) + h).sum().backward()
        return called, x.grad

    assert_same(run(functx.remat), run(identity), 8)


def test_another_answer_is_another_run():
    """Known runs are told from those that were told something else."""

    def body(x):
        return x * (2 if x.is_leaf else 3)

    def run(remat):
        f, found = remat(body), []
        for i in range(16):
            x = X.clone().requires_grad_()
            f(x * 1 if i % 8 == 7 else x).sum().backward()
            found.append(x.grad)
        return found

    assert_same(run(functx.remat), run(identity))


def test_nothing_is_held_longer():
    x = X.clone().requires_grad_()
    h = x.exp()
    node = h.grad_fn
    node.metadata["held"] = Box()
    ref = weakref.ref(node.metadata["held"])
    y = functx.remat(lambda h: h.sin() * (2 if h.grad_fn is None else 3))(h)
    del h, node
    y.sum().backward()
    assert ref() is not None  # by the edges of the region's node
    del y
    gc.collect()
    assert ref() is None


class _Passing(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return self._run(func, args, kwargs or {})

    def _run(self, func, args, kwargs):
        return func(*args, **kwargs)


@pytest.mark.parametrize("inside", [False, True])
def test_under_a_mode_of_the_users(inside):
    """It passes on what the engine asks, too."""

    def run(remat):
        def body(h):
            return remat(lambda h: h.sin() * (2 if h.grad_fn is None else 3))(h * h) * h

        def moded(h):
            with _Passing():
                return body(h)

        x = X.clone().requires_grad_()
        if inside:
            remat(moded)(x * 2).sum().backward()
        else:
            with _Passing():
                remat(body)(x * 2).sum().backward()
        return x.grad

    assert_same(run(functx.remat), run(identity), 8)


@pytest.mark.parametrize("question", ["is_leaf", "grad_fn", "output_nr"])
def test_where_replays_are_not_compared_it_is_an_error(question):
    f = functx.remat(lambda t: t * number(QUESTIONS[question](t)), determinism_check="none")
    x = X.clone().requires_grad_()
    t = torch.stack([x, x * 3]).unbind()[1]
    with pytest.raises(functx.RematError, match=r"asks for .* pass the answer"):
        f(t)
    assert_same(f(x), x * number(QUESTIONS[question](x)))


def test_edges_given_to_grad():
    def body(h, edge):
        y = h.sin().sum()
        return torch.autograd.grad(y, [edge(h)], create_graph=True)[0].exp()

    def theirs(h):
        return GradientEdge(h.grad_fn, h.output_nr)

    x = X.clone().requires_grad_()
    with pytest.raises(functx.RematError, match=r"grad_fn .* Give it the tensor"):
        functx.remat(lambda h: body(h, theirs))(x * 2)
    ours = functx.remat(lambda h: body(h, get_gradient_edge))(x * 2)
    assert_same(ours, body(x * 2, get_gradient_edge))

    def moded(h):
        with _Passing():  # it calls what torch's own code asks
            return body(h, get_gradient_edge)

    assert_same(functx.remat(moded)(x * 2), moded(x * 2))


def test_an_optimizer_of_an_argument():
    """Torch's own code asks whether it is a leaf, to refuse."""
    x = X.clone().requires_grad_()

    def body(h):
        torch.optim.SGD([h])
        return h * 2

    assert_same(functx.remat(body)(x), body(x))
    with pytest.raises(ValueError, match="non-leaf"):
        body(x * 1)
    with pytest.raises(functx.RematError, match=r"is_leaf.* pass the answer"):
        functx.remat(body)(x * 1)


@pytest.mark.parametrize("times", [1, 2])
def test_what_the_body_has_written_to(times):
    """It is what the region has made of it: its node, and how often it was written to."""

    def run(remat):
        told, x = [], X.clone().requires_grad_()

        def body(h):
            for _ in range(times):
                h.mul_(2)
            told.append((h._version, h.grad_fn.name(), h.is_leaf, h.output_nr))
            return h * number(told[-1])

        for _ in range(5):
            remat(body)((x * 3).add_(1)).sum().backward()
        return x.grad, [*dict.fromkeys(told)]

    (ours, told), (plain, expected) = run(functx.remat), run(identity)
    assert told == expected
    assert_same(ours, plain, 8)
