"""gradient_checkpointing_enable(), apply_remat, patch_checkpoint and their ends, in any order.

The kind: transformers and peft leave things in a model that outlast what made them. Enabling stores
torch's checkpoint in each layer, and hangs a hook on the embeddings that calls `requires_grad_()`,
which torch refuses inside of transforms; disabling leaves the hook. So a model must work in every
state that a sequence of these calls can bring it into, frozen or not. Per-sample gradients are
those of the plain model, and the model's hooks and flags are as before the call. Plain training,
with torch's own checkpoint too, gives the parameters of adapters their gradients.
"""

import contextlib

import pytest
import torch
from references import assert_same, count, peak

import functx

from . import hf

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing.*:FutureWarning",  # the names before transformers 5.23
    "ignore:functx.*cache of keys",
    "ignore:There is a performance drop",  # of torch: fused attention, and experts by histc
)
MODELS = ("gpt2", "llama")


class Steps:
    """What a user may do to a model, by name."""

    def __init__(self, model):
        self.model, self.patches = model, []

    def enable(self, **options):
        self.model.gradient_checkpointing_enable(**options)

    def reentrant(self):
        self.enable(gradient_checkpointing_kwargs={"use_reentrant": True})

    def disable(self):
        self.model.gradient_checkpointing_disable()

    def apply(self):
        functx.apply_remat(self.model, "gradient_checkpointing")

    def remove(self):
        functx.remove_remat(self.model)

    def patch(self):
        self.patches.append(functx.patch_checkpoint())

    def unpatch(self):
        self.patches.pop().undo()

    def hook(self):
        self.model.enable_input_require_grads()


@contextlib.contextmanager
def after(model, order):
    """The model, as it is after these steps; patches end with the block."""
    steps = Steps(model)
    try:
        for step in order.split():
            getattr(steps, step)()
        yield model
    finally:
        while steps.patches:
            steps.unpatch()


def state(model):
    """All that a transform could leave changed in a model: hooks, flags, the forward, slots."""
    return [
        (
            [*module._forward_hooks.items(), *module._forward_pre_hooks.items()],
            [*module._backward_hooks.items(), *module._parameters.items()],
            vars(module).get("forward"),
            vars(module).get("gradient_checkpointing"),
            vars(module).get("_gradient_checkpointing_func"),
            [p.requires_grad for p in module._parameters.values() if p is not None],
        )
        for module in model.modules()
    ]


def trained(model):
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def loss_of(model):
    return lambda parameters, inputs: functx.functional_call(model, parameters, (), inputs).loss


def per_sample(model, inputs):
    return functx.vmap(functx.grad(loss_of(model)), (None, 0), randomness="different")(
        trained(model), inputs
    )


def by_backward(model, inputs):
    """Gradients of one backward pass of the first example."""
    model.zero_grad()
    model(**{key: value[0] for key, value in inputs.items()}).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def check(model, inputs, expected, backward=True):
    before = state(model)
    assert_same(per_sample(model, inputs), expected, eps=256)
    assert state(model) == before
    if backward:
        first = {name: gradients[0] for name, gradients in expected.items()}
        assert_same(by_backward(model, inputs), first, eps=256)


ORDERS = (
    "enable disable",
    "enable apply",
    "apply enable",
    "enable apply disable",
    "enable disable apply",
    "reentrant apply remove disable",
    "enable patch",
    "patch enable",
    "patch reentrant disable",
    "enable apply patch",
    "patch apply reentrant remove",
    "apply patch enable remove",
    "enable patch unpatch disable",
    "hook",
)


@pytest.mark.parametrize("name", MODELS)
def test_twelve_blocks_work_after_every_order(name):
    plain, inputs = hf.build(name, layers=12), hf.batch(name)
    assert len(functx.remat_regions(functx.apply_remat(plain, "gradient_checkpointing"))) == 12
    functx.remove_remat(plain)
    expected = per_sample(plain, inputs)
    for order in ORDERS:
        with after(hf.build(name, layers=12), order) as model:
            check(model, inputs, expected, backward=False)


def lora(name, **options):
    """A model whose base is frozen, with adapters that are not zero."""
    config = peft.LoraConfig(r=2, target_modules=TARGETS[name], fan_in_fan_out=name == "gpt2")
    model = peft.get_peft_model(hf.build(name, **options), config).double()
    for key, parameter in model.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter)
    return model


TARGETS = {"gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"]}


@pytest.mark.parametrize("name", MODELS)
def test_adapters_of_a_frozen_base_work_after_every_order(name):
    plain, inputs = lora(name), hf.batch(name)
    expected = per_sample(plain, inputs)
    assert all(gradients.abs().amax() > 0 for gradients in expected.values())
    state_dict = plain.state_dict()
    for order in (f"hook {order}" for order in ORDERS):
        with after(lora(name), order) as model:
            model.load_state_dict(state_dict)
            check(model, inputs, expected)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", ["enable", "reentrant"])
def test_plain_training_of_adapters_needs_the_hook_and_still_has_it(name, way):
    model, inputs = lora(name), hf.batch(name)
    expected = by_backward(model, inputs)
    assert all(gradient.abs().amax() > 0 for gradient in expected.values())
    with after(model, f"{way} apply patch"):
        per_sample(model, inputs)
    functx.remove_remat(model)
    assert_same(by_backward(model, inputs), expected, eps=64)  # by torch's checkpoint
    if way == "reentrant":
        embeddings = model.get_input_embeddings()
        assert len(embeddings._forward_hooks) > 0
        embeddings._forward_hooks.clear()
        with pytest.raises(RuntimeError), pytest.warns(UserWarning, match="None of the inputs"):
            by_backward(model, inputs)


@pytest.mark.parametrize("order", ["hook", "hook enable apply", "hook reentrant patch"])
def test_every_transform_works(order):
    name = "llama"
    plain, inputs = lora(name), hf.batch(name, length=4)
    state_dict = plain.state_dict()
    one = {key: value[0] for key, value in inputs.items()}

    def logits(model):
        return lambda parameters: functx.functional_call(model, parameters, (), one).logits[
            0, 0, :2
        ]

    def plain_vmap(model):
        outputs = functx.vmap(lambda inputs: model(**inputs).loss, randomness="different")(inputs)
        wanted = [p for p in model.parameters() if p.requires_grad]
        return torch.autograd.grad(outputs.sum(), wanted)

    samples = functx.per_sample
    calls = {
        "grad": lambda m: functx.grad(loss_of(m))(trained(m), one),
        "grad(vmap)": lambda m: functx.grad(
            lambda p: functx.vmap(loss_of(m), (None, 0), randomness="different")(p, inputs).sum()
        )(trained(m)),
        "jacrev": lambda m: functx.jacrev(logits(m), chunk_size=1)(trained(m)),
        "jvp(grad)": lambda m: functx.jvp(
            lambda p: functx.grad(loss_of(m))(p, one), (trained(m),), (trained(m),)
        ),
        "vmap below autograd": plain_vmap,
        "grads": lambda m: samples.grads(loss_of(m))(trained(m), inputs),
        "grads of chunks": lambda m: samples.grads(loss_of(m), chunk_size=2)(trained(m), inputs),
        "norms": lambda m: samples.norms(loss_of(m))(trained(m), inputs),
        "norms one by one": lambda m: samples.norms(loss_of(m), chunk_size=1)(trained(m), inputs),
        "clipped_sum": lambda m: samples.clipped_sum(loss_of(m), max_norm=0.1, chunk_size=2)(
            trained(m), inputs
        ),
        "a module and a loss": lambda m: samples.norms((m, lambda out: out.loss))(
            {key: value[:, 0] for key, value in inputs.items()}
        ),
    }
    expected = {key: call(plain) for key, call in calls.items()}
    with after(lora(name), order) as model:
        model.load_state_dict(state_dict)
        before = state(model)
        for key, call in calls.items():
            assert_same(call(model), expected[key], eps=512)
            assert state(model) == before


OTHERS = ("bert", "vit", "t5", "bart", "mixtral")


@pytest.mark.parametrize("name", OTHERS)
def test_other_families_work_after_enabling(name):
    """T5 and Bart share embeddings, vision models have no hook, experts are chosen by values."""
    inputs, records = hf.batch(name), {"mixtral": {"output_router_logits": False}}.get(name, {})
    build = lambda: hf.build(name, **records)
    expected = per_sample(build(), inputs)
    for order in (
        "hook",
        "enable disable",
        "enable apply",
        "enable patch",
        "patch reentrant apply",
    ):
        with after(build(), order) as model:
            check(model, inputs, expected, backward=False)


def test_a_region_takes_the_place_of_the_checkpoint_of_its_layer():
    inputs = {key: value[0] for key, value in hf.batch("llama").items()}

    def products(order):
        with after(hf.build("llama"), order) as model:
            counts = count(lambda: model(**inputs).loss.backward())
        return {name: n for name, n in counts.items() if "mm" in name}

    assert products("enable apply") == products("apply enable") == products("apply")
    assert products("apply")["mm"] > products("disable")["mm"]


@pytest.mark.parametrize("order", ["enable apply", "apply reentrant", "enable patch"])
def test_memory_falls_whatever_the_order(order):
    plain, inputs = hf.build("gpt2", layers=6), hf.batch("gpt2", length=20)
    plain_peak = peak(per_sample, plain, inputs)
    with after(hf.build("gpt2", layers=6), order) as model:
        per_sample(model, inputs)
        assert peak(per_sample, model, inputs) < 0.75 * plain_peak


def test_torchs_checkpoint_left_on_is_an_error_that_names_what_works():
    inputs = hf.batch("llama")
    with (
        after(hf.build("llama"), "enable") as model,
        pytest.raises(RuntimeError, match=r"patch_checkpoint.*gradient_checkpointing_disable\(\)"),
    ):
        per_sample(model, inputs)


@pytest.mark.parametrize("before", [False, True])
def test_a_u_net_of_diffusers_works_enabled_before_or_after(before):
    pytest.importorskip("diffusers")
    g = torch.Generator().manual_seed(1)
    images = torch.randn(2, 1, 1, 16, 16, generator=g, dtype=torch.float64)

    def gradients(model):
        def loss(parameters, image):
            out = functx.functional_call(model, parameters, (image, torch.tensor([3])))
            return (out.sample - image).square().mean()

        return functx.vmap(functx.grad(loss), (None, 0))(hf.parameters(model), images)

    model = hf.build_unet()
    expected = gradients(model)
    if before:
        model.enable_gradient_checkpointing()
    with functx.patch_checkpoint():
        if not before:
            model.enable_gradient_checkpointing()
        assert_same(gradients(model), expected, eps=256)
    functx.apply_remat(model, "gradient_checkpointing")
    with pytest.raises(RuntimeError, match=r"diffusers disable_gradient_checkpointing\(\)"):
        gradients(model)
    model.disable_gradient_checkpointing()
    assert_same(gradients(model), expected, eps=256)
