"""Models of Hugging Face as they come: caches, router logits, hidden states, hooks."""

import warnings

import pytest
import torch
from references import assert_same
from transformers import DynamicCache
from whole_models import hf

import functx

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing_enable.*:FutureWarning",
    "ignore:.*use_cache:UserWarning",
    "ignore:There is a performance drop",  # experts are counted by histc
)
ways = pytest.mark.parametrize("way", ["patch", "apply"])


def inputs_of(name, **options):
    return {key: value[0] for key, value in hf.batch(name, **options).items()}


@ways
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_recorded_hidden_states_and_router_logits_are_on_the_tape(name, way):
    wanted = {"output_hidden_states": True, "use_cache": False}
    if name == "mixtral":
        wanted["output_router_logits"] = True

    def run(model):
        out = model(**inputs_of(name), **wanted)
        recorded = [*out.hidden_states, *(out.router_logits if name == "mixtral" else ())]
        total = sum((i + 1) * t.square().sum() for i, t in enumerate(recorded))
        gradients = torch.autograd.grad(
            total, list(model.parameters()), allow_unused=True, materialize_grads=True
        )
        return [t.detach() for t in recorded], gradients

    model, context = hf.checkpointed(hf.build(name), way)
    with context:
        ours = run(model)
    assert_same(ours, run(hf.build(name)), eps=512)


def test_a_whole_model_is_a_region():
    """Hooks that the model installs in its first call, and what they record."""

    def run(remat):
        model = hf.build("llama")
        region, found = remat(model), []
        for _ in range(2):
            out = region(**inputs_of("llama"), output_hidden_states=True, use_cache=False)
            found.append(len(out.hidden_states))
            (out.loss + sum(h.square().sum() for h in out.hidden_states)).backward()
        return found, [p.grad for p in model.parameters()]

    assert_same(run(functx.remat), run(lambda model: model), eps=512)


def test_a_cache_of_keys_as_an_argument_is_an_error_that_names_use_cache():
    def region(x, cache):
        keys, values = cache.update(x.sin(), x.cos(), 0)
        return keys * values

    x = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    with pytest.raises(functx.RematError, match="use_cache=False"):
        functx.remat(region)(x.clone().requires_grad_(), DynamicCache())
    with pytest.raises(functx.RematError, match="use_cache=False"):
        functx.grad(lambda x: functx.remat(region)(x, cache=DynamicCache()).sum())(x)


def test_generation_uses_its_cache():
    model = functx.apply_remat(hf.build("llama").eval(), "gradient_checkpointing")
    ids = inputs_of("llama")["input_ids"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = model.generate(ids, max_new_tokens=5, do_sample=False)
    plain = hf.build("llama").eval()
    assert torch.equal(ours, plain.generate(ids, max_new_tokens=5, do_sample=False))
