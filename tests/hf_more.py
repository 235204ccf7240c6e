"""More tiny models of transformers, for the sweep."""

from hf import CASES, EXPERTS, GROUPED, SIZES, Case

HEADS = {"head_dim": 8}
EMBEDDED = SIZES | {"embedding_size": 16}
DISTIL = {"vocab_size": 31, "dim": 16, "n_layers": 3, "n_heads": 2, "hidden_dim": 24}
GPTJ = {"vocab_size": 31, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 32}
NEO = {"vocab_size": 31, "hidden_size": 16, "num_layers": 2, "num_heads": 2}
MPT = {"vocab_size": 31, "d_model": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 32}
RECURRENT = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 2}
SWIN = {"image_size": 8, "patch_size": 2, "num_channels": 1, "embed_dim": 8, "depths": [1, 1]}
EXPERTS_OF_3 = EXPERTS | {"num_experts": 3}

MORE = {
    "distilbert": Case("DistilBertForSequenceClassification", "DistilBertConfig", DISTIL, "labels"),
    "roberta": Case(
        "RobertaForSequenceClassification",
        "RobertaConfig",
        SIZES | {"max_position_embeddings": 64},
        "labels",
    ),
    "electra": Case("ElectraForSequenceClassification", "ElectraConfig", EMBEDDED, "labels"),
    "modernbert": Case("ModernBertForSequenceClassification", "ModernBertConfig", SIZES, "labels"),
    "gemma": Case("GemmaForCausalLM", "GemmaConfig", SIZES | GROUPED | HEADS),
    "gemma3": Case("Gemma3ForCausalLM", "Gemma3TextConfig", SIZES | GROUPED | HEADS),
    "qwen3": Case("Qwen3ForCausalLM", "Qwen3Config", SIZES | GROUPED | HEADS),
    "phi3": Case("Phi3ForCausalLM", "Phi3Config", SIZES),
    "olmo2": Case("Olmo2ForCausalLM", "Olmo2Config", SIZES),
    "starcoder2": Case("Starcoder2ForCausalLM", "Starcoder2Config", SIZES | GROUPED),
    "cohere": Case("CohereForCausalLM", "CohereConfig", SIZES),
    "granite": Case("GraniteForCausalLM", "GraniteConfig", SIZES),
    "smollm3": Case("SmolLM3ForCausalLM", "SmolLM3Config", SIZES | GROUPED),
    "gptj": Case("GPTJForCausalLM", "GPTJConfig", GPTJ | {"rotary_dim": 4}),
    "gpt_neo": Case(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        NEO | {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 32},
    ),
    "mpt": Case("MptForCausalLM", "MptConfig", MPT),
    "olmoe": Case("OlmoeForCausalLM", "OlmoeConfig", SIZES | EXPERTS_OF_3),
    "qwen3_moe": Case(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        SIZES | GROUPED | EXPERTS_OF_3 | HEADS | {"moe_intermediate_size": 8},
    ),
    "mamba": Case("MambaForCausalLM", "MambaConfig", RECURRENT | {"state_size": 4}),
    "rwkv": Case("RwkvForCausalLM", "RwkvConfig", RECURRENT | {"context_length": 32}),
    "deit": Case("DeiTForImageClassification", "DeiTConfig", CASES["vit"].options, "images"),
    "dinov2": Case("Dinov2ForImageClassification", "Dinov2Config", CASES["vit"].options, "images"),
    "swin": Case(
        "SwinForImageClassification",
        "SwinConfig",
        SWIN | {"num_heads": [2, 2], "window_size": 2},
        "images",
    ),
    "mbart": Case(
        "MBartForConditionalGeneration", "MBartConfig", CASES["bart"].options, "translation"
    ),
    "mt5": Case("MT5ForConditionalGeneration", "MT5Config", CASES["t5"].options, "translation"),
}
