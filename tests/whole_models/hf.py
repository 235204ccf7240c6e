"""Tiny random models of Hugging Face: transformers of many families, and a U-Net of diffusers."""

import os
from typing import Any, NamedTuple

import torch

import functx

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def sizes(text):
    """``"a=1 b=2"`` as a dictionary."""
    return {key: int(value) for key, value in (pair.split("=") for pair in text.split())}


class Case(NamedTuple):
    """A model to build (its class and its configuration's), and the kind of its inputs."""

    model: str
    config: str
    options: dict[str, Any]
    kind: str = "causal"


TEXT = sizes(
    "vocab_size=31 hidden_size=16 intermediate_size=24 num_hidden_layers=3 num_attention_heads=2"
    " max_position_embeddings=32 pad_token_id=0 bos_token_id=1 eos_token_id=2"
)
GPT2 = sizes("vocab_size=31 n_embd=16 n_layer=3 n_head=2 n_positions=32")
IMAGES = sizes(
    "hidden_size=16 intermediate_size=24 num_hidden_layers=3 num_attention_heads=2"
    " image_size=8 patch_size=2 num_channels=1"
)
T5 = sizes(
    "vocab_size=31 d_model=16 d_kv=8 d_ff=24 num_layers=2 num_heads=2 decoder_start_token_id=0"
)
BART = sizes(
    "vocab_size=31 d_model=16 encoder_layers=2 decoder_layers=2 encoder_attention_heads=2"
    " decoder_attention_heads=2 encoder_ffn_dim=24 decoder_ffn_dim=24 max_position_embeddings=32"
    " decoder_start_token_id=0"
) | {"forced_eos_token_id": None}
GROUPED = TEXT | {"num_key_value_heads": 1}
EXPERTS = GROUPED | {
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
    "experts_implementation": "batched_mm",  # the others depend on values, which vmap can't
}
TASKS = {
    "causal": "ForCausalLM",
    "labels": "ForSequenceClassification",
    "images": "ForImageClassification",
    "translation": "ForConditionalGeneration",
}


def of(name, options, kind="causal", config="", task=""):
    return Case(name + (task or TASKS[kind]), (config or name) + "Config", options, kind)


CASES = {
    "gpt2": of("GPT2", GPT2 | sizes("bos_token_id=1 eos_token_id=2"), task="LMHeadModel"),
    "llama": of("Llama", GROUPED),
    "bert": of("Bert", TEXT, "labels"),
    "vit": of("ViT", IMAGES, "images"),
    "mixtral": of("Mixtral", EXPERTS),
    "t5": of("T5", T5, "translation"),
    "bart": of("Bart", BART, "translation"),
}


def build(name, dropout=0.0, dtype=torch.float64, attention="eager"):
    """A model in training mode, from a fixed seed."""
    import transformers

    case = CASES[name]
    config = getattr(transformers, case.config)(**case.options)
    for key in vars(config):
        if key.endswith(("dropout", "dropout_prob", "pdrop", "dropout_rate", "layerdrop")):
            setattr(config, key, dropout)
    config._attn_implementation = attention
    torch.manual_seed(0)
    return getattr(transformers, case.model)(config).to(dtype).train()


def batch(name, examples=3, length=6, dtype=torch.float64):
    """Inputs of some examples, with a first dimension for the examples and one of size 1."""
    g = torch.Generator().manual_seed(1)
    kind = CASES[name].kind
    if kind == "images":
        pixels = torch.rand(examples, 1, 1, 8, 8, generator=g, dtype=dtype)
        return {"pixel_values": pixels, "labels": torch.randint(0, 2, (examples, 1), generator=g)}
    ids = torch.randint(3, 31, (examples, 1, length), generator=g)
    if kind == "labels":
        return {"input_ids": ids, "labels": torch.randint(0, 2, (examples, 1), generator=g)}
    inputs = {"input_ids": ids, "labels": ids.clone()}
    if kind == "translation":
        inputs["labels"] = torch.randint(3, 31, (examples, 1, length - 1), generator=g)
    return inputs


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
        with functx.patch_checkpoint():
            model.gradient_checkpointing_enable()
        model.disable_input_require_grads()  # for the reentrant checkpoint; no transform allows it
        return model, functx.patch_checkpoint()
    return functx.apply_remat(model, "gradient_checkpointing"), torch.enable_grad()
