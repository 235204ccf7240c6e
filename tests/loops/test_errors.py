"""What loops refuse, before they run and when they are pulled back."""

import pytest
import torch
from cases import numbers
from references import assert_same

import functx
from functx import _schedules

pytestmark = pytest.mark.usefixtures("no_hooks")

X = numbers(64, 4)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"slots": 0}, ValueError, "slots is 0"),
        ({"slots": 1.5}, TypeError, "slots must be an int"),
        ({"slots": 2, "steps": 497}, ValueError, "need 3 slots or more, got 2"),
        ({"steps": -1}, ValueError, "expected 0 or more"),
        ({"steps": 2.0}, TypeError, "steps must be an int"),
        ({"steps": None}, TypeError, "give the number of steps, or a condition"),
        ({"steps": None, "cond": True}, TypeError, "expected a callable"),
        ({"steps": None, "cond": bool, "slots": 4}, ValueError, "slots are for loops of a given"),
        ({"steps": None, "cond": lambda x: x > 0}, ValueError, "must be one boolean"),
    ],
)
def test_a_loop_refuses(kwargs, error, message):
    with pytest.raises(error, match=message):
        functx.remat_loop(torch.sin, X, **{"steps": 100, **kwargs})


@pytest.mark.parametrize(
    ("body", "args", "error", "message"),
    [
        (lambda c, x: c, (X, X), TypeError, "must return a pair"),
        (lambda c, x: (c[:1], x), (X, X), TypeError, "leaf 0 was a torch.float64 tensor"),
        (lambda c, x: (c.float(), x), (X, X), TypeError, "torch.float32"),
        (lambda c, x: ((c, c), x), (X, X), TypeError, "structure"),
        (lambda c, x: (c, x), (X, 1.0), TypeError, "xs must be tensors"),
        (lambda c, x: (c, x), (X, X[0, 0]), ValueError, "leading dimension"),
        (lambda c, x: (c, x), (X, X, 3), ValueError, "agree on one number"),
        (lambda c, x: (c, x), (X, (X, X[:2])), ValueError, "agree on one number"),
        (lambda c, x: (c, x), (X,), ValueError, "length must be given"),
        (lambda i, x: (i + 1, (x,) if i else x), (0, X), TypeError, "differ in structure"),
        (3, (X, X), TypeError, "expected a callable"),
    ],
)
def test_a_scan_refuses(body, args, error, message):
    with pytest.raises(error, match=message):
        functx.remat_scan(body, *args)


def test_a_chain_refuses():
    layers = [torch.sin] * 3
    for segments in (0, 4, -1):
        with pytest.raises(ValueError, match="3 functions can be cut into 1 to 3 segments"):
            functx.remat_sequential(layers, segments, X)
    for segments in (2.0, True, None):
        with pytest.raises(TypeError, match="segments must be an int"):
            functx.remat_sequential(layers, segments, X)
    with pytest.raises(TypeError, match="expected a callable"):
        functx.remat_sequential([torch.sin, X], 1, X)


def test_the_deepest_nest_works_and_one_step_more_is_an_error():
    steps = _schedules.reach(1, _schedules.DEEPEST)

    def loop(x, steps):
        return functx.remat_loop(torch.sin, x, steps, slots=1).sum()

    def plain(x):
        for _ in range(steps):
            x = x.sin()
        return x.sum()

    assert_same(functx.grad(lambda x: loop(x, steps))(X[:1]), functx.grad(plain)(X[:1]))
    with pytest.raises(ValueError, match="need 2 slots"):
        loop(X, steps + 1)


@pytest.mark.parametrize(
    ("body", "state", "message"),
    [
        (lambda s: (s[0] + 1, s[1]), lambda x: (0, x), "must be tensors; got 0 and then 1"),
        (lambda s: (s[0] * 2, s[0]), lambda x: (x,), "body must return a state of the structure"),
    ],
)
def test_states_that_vmap_can_not_mask_are_an_error(body, state, message):
    def loop(x):
        return functx.remat_loop(body, state(x), lambda s: s[-1].sum() < 9)[-1]

    with pytest.raises(TypeError, match=message):
        functx.vmap(loop)(numbers(3, start=1.0))


@pytest.mark.parametrize("change", ["another factor", "fewer factors", "a condition that ends"])
def test_a_step_that_changes_before_the_backward_is_an_error(change):
    x, w, v = (numbers(3, start=i).requires_grad_() for i in (0.0, 1.0, 2.0))
    factors, most = [w, v], [5]

    def step(state):
        y = torch.sin(state[1])
        for factor in factors:
            y = y * factor
        return state[0] + 1, y

    _, y = functx.remat_loop(step, (0, x), lambda s: s[0] < most[0])
    if change == "a condition that ends":
        most[0] = 2
    else:
        factors[:] = [w, v, v] if change == "another factor" else [w]
    with pytest.raises(functx.ReplayError, match="rule 3"):
        y.sum().backward()
