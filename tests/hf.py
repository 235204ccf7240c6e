"""Tiny random models of Hugging Face: transformers of many families, and a U-Net of diffusers."""

import os
from typing import Any, NamedTuple

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 1}
EXPERTS = {
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
    "experts_implementation": "batched_mm",  # the others depend on values, which vmap can't
}
NAMES_OF_GPT2 = {
    "vocab_size": 31,
    "n_embd": 16,
    "n_layer": 3,
    "n_head": 2,
    "n_positions": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Case(NamedTuple):
    """A model to build, and the kind of its inputs."""

    model: str
    config: str
    options: dict[str, Any]
    kind: str = "causal"


CASES = {
    "gpt2": Case("GPT2LMHeadModel", "GPT2Config", NAMES_OF_GPT2),
    "llama": Case("LlamaForCausalLM", "LlamaConfig", SIZES | GROUPED),
    "mistral": Case("MistralForCausalLM", "MistralConfig", SIZES | GROUPED | {"sliding_window": 4}),
    "qwen2": Case("Qwen2ForCausalLM", "Qwen2Config", SIZES | GROUPED),
    "bert": Case("BertForSequenceClassification", "BertConfig", SIZES, "labels"),
    "vit": Case(
        "ViTForImageClassification",
        "ViTConfig",
        {k: v for k, v in SIZES.items() if "token" not in k and k != "vocab_size"}
        | {"image_size": 8, "patch_size": 2, "num_channels": 1},
        "images",
    ),
    "mixtral": Case(
        "MixtralForCausalLM", "MixtralConfig", SIZES | GROUPED | EXPERTS | {"num_local_experts": 3}
    ),
    "qwen2_moe": Case(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        SIZES
        | GROUPED
        | EXPERTS
        | {
            "num_experts": 3,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8,
            "decoder_sparse_step": 1,
        },
    ),
    "t5": Case(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 31,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 24,
            "num_layers": 2,
            "num_heads": 2,
            "decoder_start_token_id": 0,
        },
        "translation",
    ),
    "bart": Case(
        "BartForConditionalGeneration",
        "BartConfig",
        {
            "vocab_size": 31,
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
            "max_position_embeddings": 32,
            "decoder_start_token_id": 0,
            "forced_eos_token_id": None,
        },
        "translation",
    ),
    "gemma2": Case("Gemma2ForCausalLM", "Gemma2Config", SIZES | GROUPED | {"head_dim": 8}),
    "phi": Case("PhiForCausalLM", "PhiConfig", SIZES),
    "opt": Case(
        "OPTForCausalLM",
        "OPTConfig",
        {k: v for k, v in SIZES.items() if k != "intermediate_size"}
        | {"ffn_dim": 24, "word_embed_proj_dim": 16},
    ),
    "falcon": Case("FalconForCausalLM", "FalconConfig", SIZES),
    "gpt_neox": Case("GPTNeoXForCausalLM", "GPTNeoXConfig", SIZES),
}


def case_of(name):
    """A case of this file, or of `hf_more`."""
    if name in CASES:
        return CASES[name]
    from hf_more import MORE

    return MORE[name]


def build(name, dropout=0.0, dtype=torch.float64, attention="eager"):
    """A model in training mode, from a fixed seed."""
    import transformers

    case = case_of(name)
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
    kind = case_of(name).kind
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


def build_unet(dtype=torch.float64):
    """A U-Net of diffusers with attention, in training mode, from a fixed seed."""
    import diffusers

    torch.manual_seed(0)
    return (
        diffusers.UNet2DModel(
            sample_size=16,
            in_channels=1,
            out_channels=1,
            layers_per_block=1,
            block_out_channels=(8, 16),
            norm_num_groups=4,
            attention_head_dim=4,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )
        .to(dtype)
        .train()
    )
