"""Values in host memory: where they are, when they come back, and that nothing of them is left.

On CPU the copies are plain ones; their moments are those of a GPU.
"""

import pytest
import torch
from cases import numbers
from references import Operations, assert_same, no_garbage_collection
from torch.utils._python_dispatch import TorchDispatchMode

import functx
from functx import checkpoint_policies as cp

pytestmark = pytest.mark.usefixtures("no_hooks")

X = numbers(4, 5)
REGIONS = 4
POLICY = cp.offload(cp.save_only_these_names("kept"))


def region(x):
    return torch.sin(functx.checkpoint_name(torch.tanh(x), "kept"))


def chain(x, remat=lambda f: functx.remat(f, policy=POLICY)):
    for _ in range(REGIONS):
        x = remat(region)(x)
    return x.sum()


def autograd(f):
    def gradient(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(f(x), x)[0]

    return gradient


STACKS = {
    "autograd": autograd,
    "grad": functx.grad,
    "vmap(grad)": lambda f: functx.vmap(functx.grad(f)),
    "torch.func.grad": torch.func.grad,
    "jacrev": lambda f: functx.jacrev(f),
}


class Log(TorchDispatchMode):
    """Copies and sines, in the order in which they ran."""

    only_observes = True

    def __init__(self):
        super().__init__()
        self.log = ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.log += {"copy_": "c", "sin": "s", "tanh": "t", "cos": "d"}.get(name, "")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("stack", STACKS)
def test_copies_back_begin_one_region_ahead(stack):
    """With the first replay its own copy and the next region's; then one ahead of each."""
    gradient = STACKS[stack](chain)
    with Log() as log:
        gradient(X)
    forward, backward = log.log[: 3 * REGIONS], log.log[3 * REGIONS :]
    assert forward == "tsc" * REGIONS
    assert backward.replace("d", "").replace("s", "") == "c" * REGIONS
    assert backward.startswith("cc")  # before anything is computed
    one_ahead = [backward[: i + 1].count("c") for i, c in enumerate(backward) if c == "d"]
    assert one_ahead == [min(k + 2, REGIONS) for k in range(REGIONS)]
    assert_same(gradient(X), STACKS[stack](lambda x: chain(x, lambda f: f))(X), eps=4)


def test_nothing_is_left_after_a_backward_or_without_one():
    x = X.clone().requires_grad_()
    with no_garbage_collection(), Operations() as operations:
        value = chain(x)
        (gradient,) = torch.autograd.grad(value, x)
        del value
        assert operations.live == gradient.nbytes
        chain(x)  # never pulled back
        assert operations.live == gradient.nbytes


def test_a_region_that_is_not_pulled_back_is_fetched_once_and_freed_with_its_node():
    x, y = (X.clone().requires_grad_() for _ in range(2))
    f = functx.remat(region, policy=POLICY)
    with no_garbage_collection(), Operations() as operations:
        unused, used = f(y), f(x)
        with Log() as log:
            (gradient,) = torch.autograd.grad(used.sum(), x)
        assert log.log.count("c") == 2
        del used, unused
        assert operations.live == gradient.nbytes


def test_names_and_places_are_checked():
    with pytest.raises(TypeError, match="expected a collection of names, got the string 'a'"):
        cp.save_and_offload_only_these_names(
            names_which_can_be_saved="a",
            names_which_can_be_offloaded=["b"],
            offload_src="device",
            offload_dst="pinned_host",
        )
    with pytest.raises(TypeError, match="names are strings, got 3"):
        cp.save_only_these_names("a", 3)
    for places in (("device", "disk"), ("pinned_host", "device")):
        with pytest.raises(ValueError, match="can't offload from"):
            cp.offload_dot_with_no_batch_dims(*places)
