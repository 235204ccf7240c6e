"""Writes that function modes are not shown, in some of the runs that are alike but for them."""

import threading

import pytest
import torch
from known import KNOWN, Calls, pulled
from references import assert_same

import functx

pytestmark = pytest.mark.usefixtures("forgotten")

X = torch.linspace(0, 1, 9, dtype=torch.float64).reshape(3, 3)


def hidden(write):
    with torch._C.DisableTorchFunction(), torch.no_grad():
        write()


def elsewhere(write):
    thread = threading.Thread(target=write)
    thread.start()
    thread.join()


class Flag:
    """Whether it is written; nothing else of a run depends on it."""

    up = False


def made(flag, way, x):
    m = torch.ones_like(x)
    if flag.up:
        way(lambda: m.mul_(3))
    return (m * x).exp()


def computed(flag, way, x):
    """And gone, when the body has ended."""
    h = x.sin()
    if flag.up:
        way(lambda: h.detach().mul_(3))
    return (h * 2).exp()


def by_a_view(flag, way, x):
    m = torch.ones_like(x)
    v = m[0]
    if flag.up:
        way(lambda: v.fill_(3))
    return (m * x).exp()


def in_a_list(flag, way, x):
    m = torch.ones_like(x)
    if flag.up:
        way(lambda: m.mul_(3))
    return (torch.cat([m, x])[:3] * x).exp()


def by_name(flag, way, x):
    m = torch.ones_like(x)
    if flag.up:
        way(lambda: m.mul_(3))
    return torch.mul(input=m, other=x).exp()


def again(flag, way, x):
    """To what is written to in every run."""
    m = torch.ones_like(x).mul_(2)
    if flag.up:
        way(lambda: m.mul_(3))
    return (m * x).exp()


BODIES = (made, computed, by_a_view, in_a_list, by_name, again)
WAYS = {
    "plain": lambda f, x: torch.autograd.grad(f(x.requires_grad_()).sum(), x)[0],
    "grad": lambda f, x: functx.grad(lambda x: f(x).sum())(x),
    "vmap(grad)": lambda f, x: functx.vmap(functx.grad(lambda x: f(x).sum()))(torch.stack([x, x])),
}


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(
    ("stack", "way"), [*((stack, hidden) for stack in WAYS), ("plain", elsewhere)]
)
def test_a_write_that_is_not_shown(body, stack, way):
    """Before, in and after runs that are known: the gradients are those of what is there."""
    flag, called = Flag(), []
    region = functx.remat(lambda x: body(flag, way, x))
    for step in range(2 * KNOWN + 4):
        flag.up = KNOWN < step < KNOWN + 3 or step == 2 * KNOWN + 3
        ours = WAYS[stack](region, X.clone())
        assert_same(ours, WAYS[stack](lambda x: body(flag, way, x), X.clone()), eps=4)
        called.append(ours.sum().item())
    assert len({round(total, 6) for total in called}) == 2


def test_runs_that_write_alike_are_known():
    """What is written to in every run has the same version in each."""
    calls = Calls(lambda x: (torch.ones_like(x).mul_(2) * x).exp())
    replays = [calls.replays(pulled, X)[0] for _ in range(KNOWN + 4)]
    assert replays[0] == 1
    assert replays[KNOWN:] == [0] * 4


@pytest.mark.parametrize("use", [torch.add, lambda a, b: torch.stack([a, b]).sum(0)])
@pytest.mark.parametrize("first", [0, KNOWN + 1])
def test_what_is_made_in_inference_mode_has_no_version(use, first):
    """Such a run is not known, and no error, also after runs that are."""
    flag = Flag()

    def body(x):
        with torch.inference_mode(flag.up):
            m = torch.ones(3, 3, dtype=torch.float64)
        return use(x.sin(), m).sin()

    region = functx.remat(body)
    for step in range(KNOWN + 4):
        flag.up = step >= first
        assert_same(WAYS["plain"](region, X.clone()), WAYS["plain"](body, X.clone()), eps=4)
