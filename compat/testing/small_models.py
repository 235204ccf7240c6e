"""Make small models of every model type of transformers, with random weights and suitable inputs.

Weights and inputs have torch's default dtype. Configurations are made small by the names of their
numbers. Inputs are found by trying values for the names in the signature of ``forward``. A few
types need special settings.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import importlib
import inspect
import itertools
import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers import MODEL_MAPPING, PreTrainedModel, ResNetConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import functx
from functx._core import tree
from functx._models import apply_remat

TYPES = [*CONFIG_MAPPING]

# The largest values for numbers in configurations, by name; the first pattern that matches applies.
CAPS = {
    r"type_vocab|num_channels|in_chans|kernel|stride|ratio|expan|_factor|stage_names": None,
    r"index_topk": None,
    r"codebook_size": 64,
    r"vocab|num_embeddings|num_classes$": 99,
    r"experts_per|top_?k|moe_k|n_groups?$|topk_group|num_codebooks|n_codebooks|quantizers": 2,
    r"experts|num_groups|upsample_groups|landmarks|rotary_dim": 4,
    r"layers|(^|_)n_layer|depth|num_blocks|blocks_per|numb_of|num_stages?$|attends": 2,
    r"dense_replace|_shared_layers|moe_layer_start": 1,
    r"position|max_len|max_seq|seq_len$|max_source|context_length": 64,
    r"mamba_(n|num)_heads": 4,
    r"head_dim|dim_head|d_head|kv_channels|d_kv|lora_rank|head_size|num_pos_feats": 8,
    r"heads|n_head|num_queries": 2,
    r"image_size|img_size|input_size|spec_size": 64,
    r"patch_size": 16,
    r"window_size|coordinate_size": 2,
    r"window|chunk|block_size|local_attention|shape_size": 4,
    r"ffn|intermediate|mlp_dim|d_ff|feedforward|feed_forward|d_ssm": 32,
    r"size_per_layer|state_size|d_state": 8,
    r"hidden|emb|d_model|width|dim|channels|filters|projection|_size$|feat|mel|latents": 16,
    r"tokens|length|seq": 4,
}
WIDTHS = r"hidden|emb|d_model|width|dim|channels|filters|ffn|intermediate|d_ff|feature"
TOKENS = r"(token|start|end|bos|eos|pad|sep|cls|mask)_(id|index|idx)$"
COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth", "encoder_layers")
UNSET = {"head_dim": 8, "vocab_size": 99, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
UNSET |= {"num_key_value_heads": 2, "n_routed_experts": 4, "n_shared_experts": 1}
LENGTH, IDS = 8, (43, 64)

EXTRA: dict[str, dict[str, Any]] = {
    "codegen": {"n_head": 4},
    "diffllama": {"attention_dropout": 0.0},
    "esm": {"vocab_size": 99, "pad_token_id": 1, "mask_token_id": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lilt": {"hidden_size": 24},
    "mamba2": {"head_dim": 16},
    "mgp-str": {"image_size": (32, 32)},
    "nystromformer": {"num_landmarks": 4, "segment_means_seq_len": 8},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
}


def small(default: Any, fill: bool = False, scale: int = 1) -> Any:
    """A small version of a configuration; with ``fill``, numbers that are ``None`` are set."""
    values, kwargs = vars(default), {}
    declared = {f.name: f.default for f in dataclasses.fields(default)}
    counted = next((n for n in COUNTS if type(values.get(n)) is int and n in declared), None)
    count = values.get(counted, 0)
    for name, initial in declared.items():
        value = values.get(default.attribute_map.get(name, name))
        if getattr(value, "model_type", "") == "timm_backbone":  # another package
            value = ResNetConfig(out_indices=value.out_indices)  # type: ignore[call-arg]
        if hasattr(value, "to_dict"):
            kwargs[name] = small(value, fill, scale)
        elif name == "rope_parameters":
            if fill and "rope_type" in (value or {}):
                kwargs[name] = {**value, "mrope_section": [2, 1, 1]}
        elif initial is not None and initial is not dataclasses.MISSING:
            kwargs[name] = _smaller(name, value, count, scale)
        elif fill and value is None and name in UNSET:
            kwargs[name] = UNSET[name]
    indices = list(getattr(default, "out_indices", None) or ())
    if len(indices) > 1:
        if counted and max(indices) >= count > 4:  # they are layers, else stages
            kwargs[counted] = len(indices)
            indices = list(range(1, len(indices) + 1))
        kwargs["out_indices"] = indices
        kwargs.pop("out_features", None)
    if "use_cache" in declared:
        kwargs["use_cache"] = False
    return type(default)(**{**kwargs, **EXTRA.get(default.model_type, {})})


def _smaller(name: str, value: Any, count: int, scale: int) -> Any:
    if isinstance(value, (list, tuple)):
        items = [_smaller(name, item, 0, scale) for item in value]
        return type(value)(items[:2] if len(items) == count > 2 else items)
    if isinstance(value, float) and "drop" in name:
        return 0.1
    if type(value) is not int or value <= 0:
        return value
    if re.search(TOKENS, name):
        return value % IDS[0]
    cap = next((cap for pattern, cap in CAPS.items() if re.search(pattern, name)), None)
    return value if cap is None else min(value, cap * (scale if re.search(WIDTHS, name) else 1))


def _classes(config: Any) -> list[Any]:
    """The classes of models that take a configuration, the most basic ones first."""
    basic: Any = MODEL_MAPPING.get(type(config), ())
    basic = [*basic] if isinstance(basic, (tuple, list)) else [basic]
    name = type(config).__module__.replace(".configuration_", ".modeling_")
    others = [
        c
        for c in vars(importlib.import_module(name)).values()
        if isinstance(c, type) and issubclass(c, PreTrainedModel) and c.config_class is type(config)
    ]
    others = [c for c in others if c.forward is not torch.nn.Module.forward and c not in basic]
    return [*basic, *sorted(others, key=lambda c: "For" in c.__name__)]


def _candidates(name: str, config: Any, names: Any) -> list[torch.Tensor]:
    """Possible values for an argument of this name: tensors for a batch of two."""
    g = torch.Generator().manual_seed(1)

    def real(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    def number(pattern: str, default: int) -> int:
        for part in (config, *(getattr(config, n, None) for n in config.sub_configs)):
            for key, value in vars(part).items() if part is not None else ():
                if re.search(pattern, key) and type(value) in (int, list, tuple) and value:
                    return value if type(value) is int else value[0]
        return default

    side, patch = number("image_size|img_size", 64), number("patch_size", 16)
    channels = number("^(num_channels|in_chans|in_channels)$", 3)
    mel = number("mel|feature_size|input_dim|feat_size|features", 16)
    width = number("hidden_size|d_model|embed_dim", 16)
    if any("grid_thw" in n for n in names) and name in ("hidden_states", "pixel_values"):
        return [real(16, channels * number("temporal_patch", 1) * patch * patch)]
    if "grid_thw" in name:
        return [torch.tensor([[1, 4, 4]])]
    if name.endswith("input_ids"):
        return [torch.randint(*IDS, (2, LENGTH), generator=g)]
    if name == "attention_mask":
        return [torch.ones(2, LENGTH, dtype=torch.long)]
    if name == "bbox":
        box = torch.randint(0, 8, (2, LENGTH, 2), generator=g)
        return [torch.cat([box, box + 8], -1)]
    shapes = []
    if "pixel_values" in name:
        shapes = [(*n, channels, side, side) for n in ((), (2,), (number("frames", 2),))]
    elif name in ("input_features", "audio_features", "features"):
        shapes = [(64, mel), (mel, 64), (mel, 128), (1, 64, mel)]
    elif name in ("input_values", "audio_values", "waveform"):
        shapes = [(3200,), (1, 3200), (64, mel), (mel, 32)]
    elif name == "past_values":
        shapes = [(number("context_length", 64), *n) for n in ((), (number("num_input_c", 1),))]
    elif name in ("hidden_states", "inputs_embeds", "encoder_hidden_states"):
        shapes = [(LENGTH, width), (width, 8, 8)]
    return [real(2, *shape) for shape in shapes]


USUAL = ("input_ids", "decoder_input_ids", "bbox", "pixel_values", "input_features", "input_values")


def _attempts(model: Any) -> Iterator[dict[str, Any]]:
    """Candidates for the keyword arguments of a model, the most complete ones first."""
    parameters = inspect.signature(model.forward).parameters
    options = {name: _candidates(name, model.config, parameters) for name in parameters}
    main = [model.main_input_name]
    for name, p in parameters.items():
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
            main.append(name)
    seen = []
    for names in ([*USUAL, *main[1:]], [*main, "decoder_input_ids"], main):
        names = [n for n in dict.fromkeys(names) if n in parameters]
        if names and names not in seen and all(options[n] for n in names):
            seen.append(names)
            for values in itertools.product(*(options[n] for n in names)):
                yield dict(zip(names, values))


def outputs(out: Any) -> list[torch.Tensor]:
    """The floating point tensors that a model returned."""
    return [t for t in tree.leaves(out) if tree.is_tensor(t) and t.is_floating_point()]


def loss(out: Any) -> torch.Tensor:
    """A weighted sum of all outputs, with different weights."""
    total = torch.zeros(())
    for i, t in enumerate(outputs(out)):
        weights = torch.cos(torch.arange(t.numel(), dtype=total.dtype) * 1.7 + i).reshape(t.shape)
        total = total + (t.to(total.dtype) * weights).sum()
    return total


def make(cls: Any, config: Any) -> Any:
    """A model in training mode, from a fixed seed."""
    torch.manual_seed(0)
    model = cls(**config) if isinstance(config, dict) else cls(copy.deepcopy(config))
    model = model.to(torch.get_default_dtype()).train()
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point():  # some are zero at first
                p.add_(torch.randn_like(p) * 0.05)
    return model


def find(name: str) -> tuple[Any, Any, dict[str, Any]]:
    """A class of models, a small configuration for it, and keyword arguments for the model.

    Args:
        name: A model type (``"llama"``), or a class of models (``"LlamaForCausalLM"``).

    Raises:
        LookupError: The type or class does not exist.
        ValueError: No such model runs; the message has the first reason.
    """
    wanted = getattr(transformers, name, None) if name not in CONFIG_MAPPING else None
    if own := getattr(wanted, "config_class", None):
        name = own.model_type
    elif name not in CONFIG_MAPPING:
        classes = (n for n in dir(transformers) if re.search("For[A-Z]|Model$", n))
        near = difflib.get_close_matches(name, [*TYPES, *classes], cutoff=0.5)
        hint = f"; similar names are {', '.join(near)}" if near else ""
        raise LookupError(f"transformers has no model type or class of models {name!r}{hint}")
    reasons: list[Exception] = [ValueError("no class of models takes this configuration")]
    for options in ({}, {"fill": True}, {"fill": True, "scale": 4}):
        try:
            config = small(CONFIG_MAPPING[name](), **options)
            config._attn_implementation, config._experts_implementation = "eager", "batched_mm"
            for cls in [wanted] if wanted else _classes(config):
                try:
                    return cls, config, _inputs(make(cls, config))
                except Exception as error:
                    reasons.append(error)
        except Exception as error:
            reasons.append(error)
    reason = reasons[:2][-1]
    raise ValueError(
        "found no small model of this type, with inputs, that runs"
        f" ({type(reason).__name__}: {reason}); make the model in a file, and name it instead"
    )


def _inputs(model: Any) -> dict[str, Any]:
    reasons: list[Exception] = [ValueError(f"no inputs are known for {type(model).__name__}")]
    for kwargs in _attempts(model):
        try:
            if any(t.requires_grad for t in outputs(model(**kwargs))):
                return kwargs
        except Exception as error:
            reasons.append(error)
    raise reasons[:2][-1]


def loss_of(name: Any, remat: Any = None, prepare: Any = None) -> tuple[Any, tuple[Any, ...]]:
    """A function that reduces all outputs of a model in eval mode to a number, and its arguments.

    The arguments are the parameters by name, and a dict of the model's keyword arguments. The
    function closes over grids and masks whose values determine shapes, since they can't be traced.

    Args:
        name: As for `find`, or a result of `find`.
        remat: The modules that become regions, as for `functx.apply_remat`.
        prepare: A function that is called with the model first.
    """
    cls, config, inputs = find(name) if isinstance(name, str) else name
    model = make(cls, config).eval()
    if prepare is not None:
        prepare(model)
    if remat is not None:
        apply_remat(model, remat)
    params = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    given = {n: t for n, t in inputs.items() if n.endswith("ids") or outputs(t)}
    sizes = {n: t for n, t in inputs.items() if n not in given}

    def loss_of_model(params: Any, inputs: Any) -> torch.Tensor:
        rank = {n: t.ndim for n, t in given.items() if tree.is_tensor(t)}  # of a batch
        batch = {n: t[None] if t.ndim < rank[n] else t for n, t in inputs.items() if n in rank}
        return loss(functx.functional_call(model, params, (), sizes | inputs | batch))

    loss_of_model.__name__ = loss_of_model.__qualname__ = cls.__name__
    return loss_of_model, (params, given)
