"""`functx.jit` takes ``mode=`` and ``options=`` as torch.compile does, or says why not."""

import pickle

import pytest
import torch
from cases import numbers
from references import assert_same

import functx
from functx._torch import compiler


def test_options_go_to_the_compiler_beside_those_of_functx(monkeypatch):
    seen = []

    def inductor(module, _, options):
        seen.append(options)
        return lambda args: module(*args)

    monkeypatch.setattr(compiler, "inductor", inductor)
    functx.jit(torch.sin)(numbers(3))
    found = functx.jit(torch.sin, options={"epilogue-fusion": False})(numbers(3))
    assert_same(found, numbers(3).sin(), eps=4)
    functx.jit(mode="max-autotune-no-cudagraphs")(torch.sin)(numbers(3))
    plain, own, tuned = seen
    assert own == {**plain, "epilogue_fusion": False}
    assert tuned == {**plain, "max_autotune": True, "coordinate_descent_tuning": True}
    assert plain["fallback_random"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "fast"}, r"mode is 'fast', expected one of \('default'"),
        ({"mode": "reduce-overhead"}, "CUDA graphs are not supported.*no-cudagraphs"),
        ({"options": {"triton.cudagraphs": True}}, "CUDA graphs are not supported"),
        ({"options": {"fallback_random": False}}, "fallback_random must be True"),
        ({"options": {"no_such": 1}}, r"no option 'no_such'.*list_options"),
        ({"mode": "default", "options": {}}, "not both"),
        ({"mode": "default", "backend": "aot_eager"}, "for the backend inductor only"),
    ],
)
def test_what_can_not_be_asked_for_is_an_error_at_once(options, words):
    with pytest.raises(ValueError, match=words):
        functx.jit(torch.sin, **options)


def test_a_copy_has_the_same_options():
    jitted = functx.jit(torch.sin, options={"epilogue_fusion": False})
    assert pickle.loads(pickle.dumps(jitted)).backend == jitted.backend
