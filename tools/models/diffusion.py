"""Models of diffusers at small sizes: configurations, and keyword arguments that they take.

A shape stands for normal numbers, ``TIMES`` for time steps, one for each of two inputs.
"""

import torch

from functx.compat._crosscheck.precision import Widened
from functx.compat.testing import small_models

UNET = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}
VAE = UNET | {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}
CROSS = UNET | {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "cross_attention_dim": 16,
    "attention_head_dim": 4,
}
DIT = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2}
DROPS = {"dropout": 0.1}
PATCHES = DIT | {"sample_size": 8, "patch_size": 2, "in_channels": 4}
MMDIT = {"joint_attention_dim": 16, "pooled_projection_dim": 16}
TIMES = torch.tensor([3, 400])
TEXT, LATENT, IMAGE = (2, 6, 16), (2, 4, 8, 8), (2, 3, 16, 16)

MODELS = {
    "UNet2DModel": (
        UNET
        | DROPS
        | {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "attention_head_dim": 4}
        | {"up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "sample_size": 16},
        {"sample": IMAGE, "timestep": TIMES},
    ),
    "UNet2DConditionModel": (
        CROSS | DROPS | {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "sample_size": 8},
        {"sample": LATENT, "timestep": TIMES, "encoder_hidden_states": TEXT},
    ),
    "ControlNetModel": (
        CROSS | {"conditioning_embedding_out_channels": (4, 8)},
        {"sample": LATENT, "timestep": TIMES, "encoder_hidden_states": TEXT}
        | {"controlnet_cond": IMAGE},
    ),
    "AutoencoderKL": (VAE | {"sample_size": 16}, {"sample": IMAGE}),
    "AutoencoderTiny": (
        {"encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8)}
        | {"num_encoder_blocks": (1, 2), "num_decoder_blocks": (2, 1)},
        {"sample": IMAGE},
    ),
    "VQModel": (VAE | {"num_vq_embeddings": 16}, {"sample": IMAGE}),
    "Transformer2DModel": (
        DIT | DROPS | {"in_channels": 8, "norm_num_groups": 4, "cross_attention_dim": 16},
        {"hidden_states": (2, 8, 4, 4), "encoder_hidden_states": TEXT},
    ),
    "DiTTransformer2DModel": (
        PATCHES | DROPS | {"num_embeds_ada_norm": 10},
        {"hidden_states": LATENT, "timestep": TIMES, "class_labels": torch.tensor([1, 7])},
    ),
    "PixArtTransformer2DModel": (
        PATCHES | DROPS | {"cross_attention_dim": 16, "caption_channels": 16},
        {"hidden_states": LATENT, "timestep": TIMES, "encoder_hidden_states": TEXT}
        | {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
    ),
    "SD3Transformer2DModel": (
        PATCHES | MMDIT | {"caption_projection_dim": 16, "pos_embed_max_size": 8},
        {"hidden_states": (2, 4, 8, 8), "timestep": TIMES, "encoder_hidden_states": TEXT}
        | {"pooled_projections": (2, 16)},
    ),
    "FluxTransformer2DModel": (
        DIT | MMDIT | {"in_channels": 4, "num_single_layers": 2, "axes_dims_rope": (4, 2, 2)},
        {"hidden_states": (2, 16, 4), "timestep": (2,), "encoder_hidden_states": TEXT}
        | {"pooled_projections": (2, 16), "img_ids": (16, 3), "txt_ids": (6, 3)},
    ),
    "AuraFlowTransformer2DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 8, "num_mmdit_layers": 1}
        | {"num_single_dit_layers": 1, "joint_attention_dim": 16, "caption_projection_dim": 16}
        | {"sample_size": 8, "pos_embed_max_size": 16},
        {"hidden_states": LATENT, "timestep": (2,), "encoder_hidden_states": TEXT},
    ),
    "SanaTransformer2DModel": (
        DIT
        | DROPS
        | {"in_channels": 4, "out_channels": 4, "num_cross_attention_heads": 2, "sample_size": 8}
        | {"cross_attention_head_dim": 8, "cross_attention_dim": 16, "caption_channels": 16},
        {"hidden_states": LATENT, "timestep": TIMES, "encoder_hidden_states": TEXT},
    ),
    "CogVideoXTransformer3DModel": (
        DIT
        | DROPS
        | {"in_channels": 4, "out_channels": 4, "time_embed_dim": 4, "text_embed_dim": 16}
        | {"sample_width": 8, "sample_height": 8, "sample_frames": 9, "max_text_seq_length": 6},
        {"hidden_states": (2, 3, 4, 8, 8), "timestep": TIMES, "encoder_hidden_states": TEXT},
    ),
    "WanTransformer3DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2, "ffn_dim": 32}
        | {"in_channels": 4, "out_channels": 4, "text_dim": 16, "rope_max_seq_len": 32},
        {"hidden_states": (2, 4, 2, 8, 8), "timestep": TIMES, "encoder_hidden_states": TEXT},
    ),
}


def find(name):
    """A class of models, its configuration, and keyword arguments that the model takes.

    Of a name that is none of `MODELS`, as of a model type of transformers.
    """
    if name not in MODELS:
        with Widened():  # some take no float64, for all that they cast to float32
            return small_models.find(name)
    import diffusers

    config, inputs = MODELS[name]
    generator = torch.Generator().manual_seed(1)
    drawn = {
        n: torch.randn(x, generator=generator) if isinstance(x, tuple) else x
        for n, x in inputs.items()
    }
    return getattr(diffusers, name), config, drawn
