"""A region whose names are all unknown to its policy warns, once.

The kind: a name in the policy and a name in the code are two strings, and where they differ the
region recomputes what it was meant to keep, without any other sign. This holds for every policy
that keeps values by name, alone or combined, under transforms and in traces. It does not hold where
a policy lists what it does *not* keep, nor where one of the names is found, here or in a region
inside, nor where nothing has a name.
"""

import warnings

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import functx
from functx import checkpoint_name, checkpoint_policies

names = checkpoint_policies.save_only_these_names
dots = checkpoint_policies.dots_saveable
X = torch.tensor([0.1, 0.2, 0.3])
fresh = iter(range(10**6))  # the warning comes once for each policy and set of names


def body(name):
    return lambda x: checkpoint_name(checkpoint_name(x.sin(), name).exp(), f"{name}_2").cos().sum()


def said(f, *args):
    """The warnings of two calls."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        f(*args)
        f(*args)
    caught = [w for w in caught if str(w.message).startswith("remat: ")]  # others are torch's
    # (Functions that are traced have no file of their own.)
    assert all(w.filename in (__file__, "<string>") for w in caught)
    assert all(w.category is RuntimeWarning for w in caught)
    return [str(w.message) for w in caught]


def of_two_collections(saved, moved):
    return checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[saved],
        names_which_can_be_offloaded=[moved],
        offload_src="device",
        offload_dst="pinned_host",
    )


POLICIES = {
    "no such name": (lambda name: names("nothing"), 1),
    "two": (lambda name: names("nothing", "either"), 1),
    "or": (lambda name: dots | names("nothing"), 1),
    "and": (lambda name: dots & names("nothing"), 1),
    "offloaded": (lambda name: checkpoint_policies.offload(names("nothing")), 1),
    "two collections": (lambda name: of_two_collections("nothing", "either"), 1),
    "one is found": (lambda name: names(name, "nothing"), 0),
    "one is found in the second collection": (lambda name: of_two_collections("a", name), 0),
    "or of names": (lambda name: names("nothing") | names(name), 0),
    "one is found in what is left out": (lambda name: names("nothing") | ~names(name), 0),
    "not": (lambda name: ~names("nothing"), 0),
    "but these": (lambda name: checkpoint_policies.save_any_names_but_these("nothing"), 0),
    "except": (lambda name: checkpoint_policies.save_anything_except_these_names("nothing"), 0),
    "no names": (lambda name: names(), 0),
    "operators": (lambda name: dots, 0),
    "none": (lambda name: None, 0),
}


@pytest.mark.parametrize("which", POLICIES)
def test_policies_that_keep_by_name_warn_and_others_do_not(which):
    name = f"value_{next(fresh)}"
    policy, count = POLICIES[which]
    region = functx.remat(body(name), policy=policy(name))
    found = said(functx.grad(region), X)
    assert len(found) == count
    for message in found:
        assert f"{name!r}, '{name}_2'" in message
        assert repr(policy(name)) in message
        assert "Did you mean" not in message


def backward(region):
    return lambda x: region(x.clone().requires_grad_()).backward()


STACKS = {
    "backward": backward,
    "grad": functx.grad,
    "vmap of grad": lambda f: lambda x: functx.vmap(functx.grad(f))(x[:, None]),
    "hessian": functx.hessian,
    "jvp": lambda f: lambda x: functx.jvp(f, (x,), (x,)),
    "torch.func": torch.func.grad,
    "jit": lambda f: functx.jit(functx.grad(f)),
    "make_fx": lambda f: make_fx(functx.grad(f)),
    "per_sample": lambda f: lambda x: functx.per_sample.norms(lambda w, x: f(w * x))(x, x[None]),
}


@pytest.mark.parametrize("which", STACKS)
def test_the_warning_comes_once_under_transforms_and_in_traces(which):
    name = f"value_{next(fresh)}"
    region = functx.remat(body(name), policy=names(f"{name}x"))
    (message,) = said(STACKS[which](region), X)
    assert f"Did you mean {name!r}?" in message


def test_many_regions_of_one_policy_warn_once_together():
    name = f"value_{next(fresh)}"
    policy = names("nothing")
    regions = [functx.remat(body(name), policy=policy) for _ in range(12)]
    assert len(said(functx.grad(lambda x: sum(region(x) for region in regions)), X)) == 1


def test_a_name_counts_where_it_is_given_inside_of_an_inner_region():
    name = f"value_{next(fresh)}"
    inner = functx.remat(lambda x: checkpoint_name(x.sin(), name).cos())
    outer = lambda policy: functx.remat(lambda x: inner(x).sum(), policy=policy)
    assert said(functx.grad(outer(names(name))), X) == []
    assert len(said(functx.grad(outer(names("nothing"))), X)) == 1
    own = functx.remat(lambda x: checkpoint_name(x.sin(), name).cos(), policy=names(name))
    both = functx.remat(lambda x: checkpoint_name(own(x), "out").sum(), policy=names("out"))
    assert said(functx.grad(both), X) == []


def test_the_name_of_an_input_and_a_body_without_names_are_no_mistakes():
    name = f"value_{next(fresh)}"

    def f(x):
        return (checkpoint_name(x, name).sin() * checkpoint_name(x.cos(), f"{name}_2")).sum()

    assert said(functx.grad(functx.remat(f, policy=names(name))), X) == []
    assert said(functx.grad(functx.remat(torch.sum, policy=names("nothing"))), X) == []
    with torch.no_grad():  # nothing is differentiated, and nothing would be kept
        assert said(functx.remat(body(f"{name}_3"), policy=names("nothing")), X) == []
