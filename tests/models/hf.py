"""Tiny random models of Hugging Face: transformers of many families, and a U-Net of diffusers."""

import os

import torch

import functx

os.environ.setdefault("HF_HUB_OFFLINE", "1")
CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "bert": "BertForSequenceClassification",
    "vit": "ViTForImageClassification",
    "mixtral": "MixtralForCausalLM",
    "t5": "T5ForConditionalGeneration",
    "bart": "BartForConditionalGeneration",
}
OPTIONS = {
    "mixtral": {
        "output_router_logits": True,
        "router_aux_loss_coef": 0.5,
        "_experts_implementation": "batched_mm",  # the others depend on values, which vmap can't
    },
    "t5": {"decoder_start_token_id": 0},
    "vit": {"patch_size": 8},
}


def sizes(text):
    """``"a=1 b=2"`` as a dictionary."""
    return {key: int(value) for key, value in (pair.split("=") for pair in text.split())}


def build(name, dropout=0.0, dtype=torch.float64, attention="eager", layers=None, **options):
    """A model in training mode, from a fixed seed."""
    import transformers

    from functx.compat.testing import small_models

    config = small_models.small(transformers.CONFIG_MAPPING[name]())
    for key in vars(config):
        if key.endswith(("dropout", "dropout_prob", "pdrop", "dropout_rate", "layerdrop")):
            setattr(config, key, dropout)
    for key, value in (OPTIONS.get(name, {}) | options).items():
        setattr(config, key, value)
    if layers is not None:
        config.num_hidden_layers = layers
    config._attn_implementation, config.use_cache = attention, True
    torch.manual_seed(0)
    return getattr(transformers, CLASSES[name])(config).to(dtype).train()


def batch(name, examples=3, length=6, dtype=torch.float64):
    """Inputs of some examples, with a first dimension for the examples and one of size 1."""
    g = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 2, (examples, 1), generator=g)
    if name == "vit":
        pixels = torch.rand(examples, 1, 3, 64, 64, generator=g, dtype=dtype)
        return {"pixel_values": pixels, "labels": labels}
    ids = torch.randint(3, 31, (examples, 1, length), generator=g)
    if name == "bert":
        return {"input_ids": ids, "labels": labels}
    return {
        "input_ids": ids,
        "labels": ids.flip(2)[..., 1:].clone() if name in ("t5", "bart") else ids,
    }


def parameters(model):
    """Detached parameters by name, tied ones once."""
    return {name: p.detach() for name, p in model.named_parameters()}


def build_unet():
    """A U-Net of diffusers with attention, in training mode, from a fixed seed."""
    import diffusers

    torch.manual_seed(0)
    model = diffusers.UNet2DModel(
        **sizes("sample_size=16 in_channels=1 out_channels=1 layers_per_block=1 norm_num_groups=4"),
        attention_head_dim=4,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return model.double().train()


def checkpointed(model, way):
    """``model``, checkpointed, and the context to use it in."""
    if way == "patch":
        model.gradient_checkpointing_enable()
        return model, functx.patch_checkpoint()
    return functx.apply_remat(model, "gradient_checkpointing"), torch.enable_grad()
