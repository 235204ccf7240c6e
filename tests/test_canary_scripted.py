"""Private names of TorchScript and of ragged tensors: they are there, and do what is relied on."""

import warnings

import torch
from torch import nn
from torch.nested._internal import nested_tensor

from functx import _torch_scripted


def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


def test_a_replica_has_other_tensors():
    module = scripted()
    owner = _torch_scripted.owner_of(module.forward)
    modules = _torch_scripted.modules_of(owner)
    assert len(modules) == 3
    names = [n for m in modules for n, _ in _torch_scripted.parameters_of(m)]
    assert names == ["weight", "bias", "weight", "bias"]
    tensors = []
    for m in modules:
        tensors += [t for _, t in _torch_scripted.parameters_of(m)]
        tensors += [t for _, t in _torch_scripted.buffers_of(m)]
    assert tensors[0] is module.state_dict(keep_vars=True)["0.weight"]
    own = [t.clone() for t in tensors]
    copies = _torch_scripted.replica(owner, iter(own))
    assert next(t for _, t in _torch_scripted.parameters_of(copies[1])) is own[0]
    assert next(t for _, t in _torch_scripted.parameters_of(modules[1])) is tensors[0]
    assert _torch_scripted.trains(copies[2])
    assert dict(_torch_scripted.attributes_of(copies[2]))["training"] is True
    assert _torch_scripted.method_of(copies[0], "forward")(torch.ones(3, 2)).shape == (3, 2)


def test_calls_of_scripts_can_be_wrapped():
    assert all("__call__" in vars(k) for k in (_torch_scripted.FUNCTION, _torch_scripted.METHOD))


def test_what_ragged_views_are_given_is_made_by_a_function_of_the_module():
    assert callable(nested_tensor._nt_view_dummy)
