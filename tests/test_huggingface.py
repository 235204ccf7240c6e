"""Models of Hugging Face with checkpointing: per-sample gradients, training, less memory."""

import copy
import warnings

import hf
import hf_more
import pytest
import torch
from references import assert_same, peak

import functx

transformers = pytest.importorskip("transformers")
pytest.importorskip("diffusers")

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing_enable.*:FutureWarning",
    "ignore:functx.*cache of keys",
    "ignore:There is a performance drop",  # experts are counted by histc
)

LENGTH = 28
WAYS = ("patch", "apply")
# Hooks record router logits, which leave the layers otherwise than by return.
RECORDING = ("mixtral", "qwen2_moe")


def checkpointed(model, way):
    """``model``, checkpointed, and the context to use it in."""
    if way == "patch":
        with functx.patch_checkpoint():
            model.gradient_checkpointing_enable()
        model.disable_input_require_grads()  # for the reentrant checkpoint; no transform allows it
        return model, functx.patch_checkpoint()
    return functx.apply_remat(model, "gradient_checkpointing"), torch.enable_grad()


def per_sample(model, inputs):
    def loss(parameters, inputs):
        return functx.functional_call(model, parameters, (), inputs).loss

    return functx.vmap(functx.grad(loss), (None, 0), randomness="different")(
        hf.parameters(model), inputs
    )


@pytest.fixture(scope="module")
def references():
    """Per-sample gradients and peak bytes without checkpointing, by model."""
    cache = {}

    def of(name):
        if name not in cache:
            model, inputs = hf.build(name), hf.batch(name, length=LENGTH)
            cache[name] = per_sample(model, inputs), peak(per_sample, model, inputs)
        return cache[name]

    return of


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [name for name in hf.CASES if name not in RECORDING])
def test_per_sample_gradients(name, way, references):
    expected, plain_peak = references(name)
    assert all(g.shape[0] == 3 for g in expected.values())
    assert sum(g.abs().max() > 1e-6 for g in expected.values()) > len(expected) / 2
    model, context = checkpointed(hf.build(name), way)
    inputs = hf.batch(name, length=LENGTH)
    with context:
        assert_same(per_sample(model, inputs), expected, eps=64)
        assert peak(per_sample, model, inputs) < 0.8 * plain_peak


@pytest.mark.sweep
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", hf_more.MORE)
def test_per_sample_gradients_of_more(name, way):
    inputs = hf.batch(name)
    model, context = checkpointed(hf.build(name), way)
    with context:
        assert_same(per_sample(model, inputs), per_sample(hf.build(name), inputs), eps=1024)


def test_without_functx_they_raise():
    model = hf.build("llama")
    model.gradient_checkpointing_enable()
    with pytest.raises(RuntimeError, match=r"requires_grad_|saved tensor hooks"):
        per_sample(model, hf.batch("llama"))


@pytest.mark.parametrize("name", RECORDING)
def test_recorded_router_logits_are_an_error_under_transforms(name):
    model = functx.apply_remat(hf.build(name), "gradient_checkpointing")
    with pytest.raises(functx.RematError, match="otherwise than by return"):
        per_sample(model, hf.batch(name))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_padding(name, attention):
    """Of a mask that vmap maps, transformers can't ask whether it masks anything."""
    model = functx.apply_remat(hf.build(name, attention=attention), "gradient_checkpointing")
    inputs = {key: value[:, 0] for key, value in hf.batch(name, length=LENGTH).items()}
    inputs["attention_mask"] = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [2], [5]])).long()
    pair = (model, lambda output: output.loss)
    mapped = functx.per_sample.grads(pair)(inputs)
    assert_same(mapped, functx.per_sample.grads(pair, chunk_size=1)(inputs), eps=64)


@pytest.mark.parametrize("name", ["llama", "bert", "mixtral", "bart"])
@pytest.mark.parametrize("way", WAYS)
def test_recorded_outputs(name, way):
    """Hidden states, attentions, router logits: as many, the same, and on the tape."""
    wanted = {"output_hidden_states": True, "output_attentions": True, "use_cache": False}
    if name == "bert":
        del wanted["use_cache"]

    def run(model):
        inputs = {k: v[0] for k, v in hf.batch(name).items()}
        out = model(**inputs, **wanted)
        recorded = [
            t
            for key, value in out.items()
            if isinstance(value, tuple) and key != "past_key_values"
            for t in value
        ]
        assert len(recorded) >= 6
        total = sum(t.square().sum() for t in recorded if t is not None)
        return recorded, torch.autograd.grad(total, list(model.parameters()), allow_unused=True)

    model, context = checkpointed(hf.build(name), way)
    with context:
        ours = run(model)
    expected = run(hf.build(name))
    assert_same(ours[0], expected[0])
    pairs = [(a, b) for a, b in zip(ours[1], expected[1], strict=True) if b is not None]
    assert_same(*zip(*pairs, strict=True), eps=512)


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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit", "t5", "mixtral"])
def test_training_with_dropout(name, way, attention):
    if (name, attention) == ("t5", "sdpa"):
        attention = "eager"
    inputs = {k: v.flatten(0, 1) for k, v in hf.batch(name).items()}
    build = {"dropout": 0.2, "attention": attention}
    model, context = checkpointed(hf.build(name, **build), way)
    with context:
        ours = train(model, inputs)
    assert_same(ours, train(hf.build(name, **build), inputs), eps=256)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_per_sample_gradients_with_dropout(name):
    """Each example has its own mask, the same in the replay as in the forward."""

    def run(model):
        torch.manual_seed(5)
        return per_sample(model, hf.batch(name))

    model = functx.apply_remat(hf.build(name, dropout=0.3), "gradient_checkpointing")
    assert_same(run(model), run(hf.build(name, dropout=0.3)), eps=64)


class TestCache:
    def test_generation_uses_it(self):
        model = functx.apply_remat(hf.build("llama").eval(), "gradient_checkpointing")
        ids = hf.batch("llama")["input_ids"][0]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ours = model.generate(ids, max_new_tokens=5, do_sample=False)
        assert torch.equal(
            ours, hf.build("llama").eval().generate(ids, max_new_tokens=5, do_sample=False)
        )

    @pytest.mark.parametrize("name", ["gpt2", "llama", "bart"])
    def test_it_is_not_used_where_a_derivative_is_taken(self, name):
        def run(model):
            inputs = {k: v[0] for k, v in hf.batch(name).items()}
            loss = model(**inputs, use_cache=True).loss
            return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)

        functx._transformers._warn_once.cache_clear()
        model = functx.apply_remat(hf.build(name), "gradient_checkpointing")
        with pytest.warns(UserWarning, match=r"no cache of keys.*use_cache=False"):
            ours = run(model)
        pairs = [(a, b) for a, b in zip(ours, run(hf.build(name)), strict=True) if b is not None]
        assert_same(*zip(*pairs, strict=True), eps=64)

    def test_one_that_holds_something_is_an_error(self):
        """A prefix of keys and values: the region would read what the forward has left there."""
        model = functx.apply_remat(hf.build("llama"), "gradient_checkpointing")
        cache = transformers.DynamicCache()
        for layer in range(model.config.num_hidden_layers):
            cache.update(*torch.ones(2, 1, 1, 3, 8, dtype=torch.float64), layer)
        with pytest.raises(functx.RematError, match="use_cache=False"):
            model(input_ids=hf.batch("llama")["input_ids"][0], past_key_values=cache)


def test_what_transformers_checkpoints_already_is_refused():
    model = hf.build("llama")
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=r"gradient_checkpointing_disable"):
        functx.apply_remat(model, "gradient_checkpointing")
    unet = hf.build_unet()
    unet.enable_gradient_checkpointing()
    with pytest.raises(ValueError, match="disable_gradient_checkpointing"):
        functx.apply_remat(unet, "gradient_checkpointing")


def test_a_copy_of_a_model_and_its_state():
    model = functx.apply_remat(hf.build("llama"), "gradient_checkpointing")
    other = copy.deepcopy(model)
    other.load_state_dict(hf.build("llama").state_dict())
    inputs = hf.batch("llama")
    assert_same(per_sample(other, inputs), per_sample(model, inputs))
    functx.remove_remat(other)
    assert_same(per_sample(other, inputs), per_sample(model, inputs), eps=64)


@pytest.mark.parametrize("way", WAYS)
def test_compiled(way):
    torch._dynamo.reset()
    inputs = {k: v.flatten(0, 1) for k, v in hf.batch("llama", dtype=torch.float32).items()}

    def gradients(model, compiled):
        run = torch.compile(model, backend="aot_eager") if compiled else model
        run(**inputs, use_cache=False).loss.backward()
        return [p.grad for p in model.parameters()]

    model, context = checkpointed(hf.build("llama"), way)
    with context:
        assert_same(gradients(model, True), gradients(hf.build("llama"), False), eps=1e4)
    torch._dynamo.reset()


class TestUNet:
    @staticmethod
    def per_sample(model):
        g = torch.Generator().manual_seed(1)
        images = torch.randn(3, 1, 1, 16, 16, generator=g, dtype=torch.float64)
        steps = torch.tensor([[3], [50], [900]])

        def loss(parameters, image, step):
            out = functx.functional_call(model, parameters, (image, step))
            return (out.sample - image).square().mean()

        return functx.vmap(functx.grad(loss), (None, 0, 0))(hf.parameters(model), images, steps)

    @pytest.mark.parametrize("way", WAYS)
    def test_per_sample_gradients(self, way):
        expected, plain_peak = (
            self.per_sample(hf.build_unet()),
            peak(self.per_sample, hf.build_unet()),
        )
        model = hf.build_unet()
        if way == "patch":
            model.enable_gradient_checkpointing()  # looks torch's function up in each call
            context = functx.patch_checkpoint()
        else:
            functx.apply_remat(model, "gradient_checkpointing")
            context = torch.enable_grad()
        with context:
            assert_same(self.per_sample(model), expected, eps=256)
            assert peak(self.per_sample, model) < 0.85 * plain_peak

    def test_a_transformer_with_one_list_of_blocks(self):
        diffusers = pytest.importorskip("diffusers")
        torch.manual_seed(0)
        model = diffusers.PixArtTransformer2DModel(
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            cross_attention_dim=16,
            sample_size=16,
            patch_size=2,
            caption_channels=8,
            use_additional_conditions=False,
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

    def test_training(self):
        def gradients(model):
            x = torch.linspace(-1, 1, 512, dtype=torch.float64).reshape(2, 1, 16, 16)
            model(x, torch.tensor([5, 9])).sample.square().mean().backward()
            return [p.grad for p in model.parameters()]

        model = functx.apply_remat(hf.build_unet(), "gradient_checkpointing")
        assert_same(gradients(model), gradients(hf.build_unet()), eps=64)
