"""Models of Hugging Face with checkpointing: per-sample gradients, training, less memory."""

import functools
import warnings

import pytest
import torch
from references import assert_same, peak

import functx
from functx._core import compiler_warnings

from . import hf

pytest.importorskip("transformers")
diffusers = pytest.importorskip("diffusers")

from transformers import DynamicCache  # noqa: E402
from transformers.modeling_layers import GradientCheckpointingLayer  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing_enable.*:FutureWarning",
    "ignore:functx.*cache of keys",
    "ignore:.*use_cache:UserWarning",
    "ignore:There is a performance drop",  # experts are counted by histc
)
LENGTH = 28
WAYS = ("patch", "apply")


def per_sample(model, inputs):
    loss = lambda parameters, inputs: functx.functional_call(model, parameters, (), inputs).loss
    return functx.vmap(functx.grad(loss), (None, 0), randomness="different")(
        hf.parameters(model), inputs
    )


@pytest.mark.parametrize("name", [name for name in hf.CLASSES if name != "mixtral"])
def test_per_sample_gradients_are_those_of_the_model_in_less_memory(name):
    inputs, plain = hf.batch(name, length=LENGTH), hf.build(name)
    expected, plain_peak = per_sample(plain, inputs), peak(per_sample, plain, inputs)
    assert all(g.shape[0] == 3 for g in expected.values())
    assert sum(g.abs().max() > 1e-6 for g in expected.values()) > len(expected) / 2
    model, context = hf.checkpointed(plain, WAYS[[*hf.CLASSES].index(name) % 2])
    with context:
        assert_same(per_sample(model, inputs), expected, eps=64)
        assert peak(per_sample, model, inputs) < 0.8 * plain_peak


def test_recorded_router_logits_are_an_error_under_transforms():
    model = functx.apply_remat(hf.build("mixtral"), "gradient_checkpointing")
    with pytest.raises(functx.RematError, match="without being returned"):
        per_sample(model, hf.batch("mixtral"))


@pytest.mark.parametrize(("name", "attention"), [("bert", "sdpa"), ("llama", "eager")])
def test_padding_is_masked_by_example(name, attention):
    """Of a mask that vmap maps, transformers can't ask whether it masks anything."""
    model = functx.apply_remat(hf.build(name, attention=attention), "gradient_checkpointing")
    inputs = {key: value[:, 0] for key, value in hf.batch(name, length=LENGTH).items()}
    inputs["attention_mask"] = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [2], [5]])).long()
    pair = (model, lambda output: output.loss)
    mapped = functx.per_sample.grads(pair)(inputs)
    assert_same(mapped, functx.per_sample.grads(pair, chunk_size=1)(inputs), eps=64)


def train(model, inputs, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, dict(model.state_dict())


@pytest.mark.parametrize(
    ("name", "way", "attention"),
    [("bert", "patch", "sdpa"), ("vit", "apply", "sdpa"), ("t5", "patch", "eager")],
)
def test_training_with_dropout_is_that_of_the_model(name, way, attention):
    inputs = {k: v.flatten(0, 1) for k, v in hf.batch(name).items()}
    build = {"dropout": 0.2, "attention": attention}
    model, context = hf.checkpointed(hf.build(name, **build), way)
    with context:
        ours = train(model, inputs)
    assert_same(ours, train(hf.build(name, **build), inputs), eps=256)


@pytest.mark.parametrize("name", ["llama", "bart"])
def test_no_cache_of_keys_is_used_where_a_derivative_is_taken(name, monkeypatch):
    def run(model):
        ids = hf.batch(name)["input_ids"][0]
        inputs = {"decoder_input_ids": ids} if name == "bart" else {}  # of labels it makes no cache
        loss = model(ids, **inputs, use_cache=True).logits.square().mean()
        return torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)

    monkeypatch.setattr(compiler_warnings, "_told", set())  # of other tests
    model = functx.apply_remat(hf.build(name), "gradient_checkpointing")
    with pytest.warns(RuntimeWarning, match=r"without a cache of keys.*use_cache=False"):
        ours = run(model)
    assert_same(ours, run(hf.build(name)), eps=64)


def test_an_encoder_which_has_no_cache_is_told_of_none(monkeypatch):
    monkeypatch.setattr(compiler_warnings, "_told", set())  # of other tests
    model, inputs = hf.build("bart"), {k: v[0] for k, v in hf.batch("bart").items()}
    functx.apply_remat(model, "gradient_checkpointing")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model(**inputs, use_cache=False)  # though its layers are given that of the config
    assert not [w for w in said if "functx" in str(w.message)]


def test_the_warning_of_a_cache_is_all_that_the_compiler_says(monkeypatch):
    class Layer(GradientCheckpointingLayer):
        def forward(self, x, cache=None):
            return x.sin()

    monkeypatch.setattr(compiler_warnings, "_told", set())  # of other tests
    torch._dynamo.reset()
    model = functx.apply_remat(torch.nn.Sequential(Layer()), Layer)
    x = torch.ones(3, requires_grad=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        out = torch.compile(lambda x: model[0](x, DynamicCache()), backend="eager")(x)
    assert_same(out, x.sin())
    assert [w.category for w in said if "functx" in str(w.message)] == [RuntimeWarning]
    assert not [w for w in said if "lru_cache" in str(w.message)]
    torch._dynamo.reset()


@pytest.mark.parametrize("where", ["gradient_checkpointing", "model.layers.*"])
@pytest.mark.parametrize("before", [True, False])
def test_what_transformers_checkpoints_as_well_is_told_so(before, where, monkeypatch):
    """Layers that have a forward of their own, as accelerate gives them, call that of the class."""
    monkeypatch.setattr(compiler_warnings, "_told", set())  # of other tests
    model, inputs = hf.build("llama"), {k: v[0] for k, v in hf.batch("llama").items()}
    for layer in model.model.layers:
        layer.forward = functools.partial(type(layer).forward, layer)
    if before:
        model.gradient_checkpointing_enable()
    functx.apply_remat(model, where)
    if not before:
        model.gradient_checkpointing_enable()
    told = r"once more than necessary.*gradient_checkpointing_disable"
    with pytest.warns(RuntimeWarning, match=told):
        loss = model.train()(**inputs).loss
    ours = torch.autograd.grad(loss, list(model.parameters()))
    plain = hf.build("llama")
    assert_same(ours, torch.autograd.grad(plain(**inputs).loss, list(plain.parameters())), eps=64)
    loss = lambda model: lambda params: functx.functional_call(model, params, (), inputs).loss
    params = {n: p.detach() for n, p in model.named_parameters()}
    with functx.patch_checkpoint():  # also of a model that was enabled before
        assert_same(functx.grad(loss(model))(params), functx.grad(loss(plain))(params), eps=64)


@pytest.mark.sweep  # the compiler takes seconds for the smallest of models
def test_a_checkpointed_model_can_be_compiled():
    torch._dynamo.reset()
    inputs = {k: v.flatten(0, 1) for k, v in hf.batch("llama", dtype=torch.float32).items()}

    def gradients(model, compiled):
        run = torch.compile(model, backend="aot_eager") if compiled else model
        run(**inputs, use_cache=False).loss.backward()
        return [p.grad for p in model.parameters()]

    model, context = hf.checkpointed(hf.build("llama"), "apply")
    with context:
        assert_same(gradients(model, True), gradients(hf.build("llama"), False), eps=1e4)
    torch._dynamo.reset()


@pytest.mark.parametrize("way", WAYS)
def test_per_sample_gradients_of_a_u_net(way):
    g = torch.Generator().manual_seed(1)
    images = torch.randn(3, 1, 1, 16, 16, generator=g, dtype=torch.float64)
    model = hf.build_unet()

    def gradients():
        def loss(parameters, image, step):
            out = functx.functional_call(model, parameters, (image, step))
            return (out.sample - image).square().mean()

        steps = torch.tensor([[3], [50], [900]])
        return functx.vmap(functx.grad(loss), (None, 0, 0))(hf.parameters(model), images, steps)

    expected, plain_peak = gradients(), peak(gradients)
    context = torch.enable_grad()
    if way == "patch":
        model.enable_gradient_checkpointing()  # looks torch's function up in each call
        context = functx.patch_checkpoint()
    else:
        functx.apply_remat(model, "gradient_checkpointing")
    with context:
        assert_same(gradients(), expected, eps=256)
        assert peak(gradients) < 0.85 * plain_peak


def test_a_transformer_of_diffusers_with_one_list_of_blocks():
    torch.manual_seed(0)
    options = "num_attention_heads=2 attention_head_dim=8 in_channels=4 out_channels=4 num_layers=2"
    options += " cross_attention_dim=16 sample_size=16 patch_size=2 caption_channels=8"
    model = diffusers.PixArtTransformer2DModel(
        **hf.sizes(options), use_additional_conditions=False
    ).double()
    g = torch.Generator().manual_seed(1)
    image = torch.randn(1, 4, 16, 16, generator=g, dtype=torch.float64)
    caption = torch.randn(1, 5, 8, generator=g, dtype=torch.float64)

    def gradients():
        out = model(image, caption, torch.tensor([3])).sample.square().mean()
        return torch.autograd.grad(out, list(model.parameters()), materialize_grads=True)

    expected, plain_peak = gradients(), peak(gradients)
    functx.apply_remat(model, "gradient_checkpointing")
    assert_same(gradients(), expected, eps=64)
    assert peak(gradients) < 0.8 * plain_peak


def inputs_of(name, **options):
    return {key: value[0] for key, value in hf.batch(name, **options).items()}


@pytest.mark.parametrize("way", WAYS)
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


def test_a_cache_of_keys_as_an_argument_is_an_error_that_names_use_cache():
    def region(x, cache):
        keys, values = cache.update(x.sin(), x.cos(), 0)
        return keys * values

    x = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    with pytest.raises(functx.RematError, match="use_cache=False"):
        functx.remat(region)(x.clone().requires_grad_(), DynamicCache())
    with pytest.raises(functx.RematError, match="use_cache=False"):
        functx.grad(lambda x: functx.remat(region)(x, cache=DynamicCache()).sum())(x)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_trained_prefix_names_regions_of_the_mlps_and_these_work(name):
    """Prefix tuning hands the model a cache that holds a trained prefix."""
    ids = inputs_of(name)["input_ids"]

    def gradient(model):
        model = model.double().eval()
        config = model.config
        heads, width = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        heads = getattr(config, "num_key_value_heads", heads)
        prefix = torch.ones(len(ids), heads, 2, width, dtype=torch.float64).cos().requires_grad_()
        cache = DynamicCache()
        for layer in range(config.num_hidden_layers):
            cache.update(prefix + layer, prefix - layer, layer)
        loss = model(ids, past_key_values=cache, labels=ids).loss
        return torch.autograd.grad(loss, prefix)[0]

    with pytest.raises(functx.RematError, match=r"apply_remat\(model, '\*\*.mlp'\)") as caught:
        gradient(functx.apply_remat(hf.build(name), "gradient_checkpointing"))
    assert "Call the model with use_cache=False" not in str(caught.value)
    regions = functx.apply_remat(hf.build(name), "**.mlp")
    assert_same(gradient(regions), gradient(hf.build(name)), eps=64)


def test_generation_uses_its_cache():
    model = functx.apply_remat(hf.build("llama").eval(), "gradient_checkpointing")
    ids = inputs_of("llama")["input_ids"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = model.generate(ids, max_new_tokens=5, do_sample=False)
    plain = hf.build("llama").eval()
    assert torch.equal(ours, plain.generate(ids, max_new_tokens=5, do_sample=False))
