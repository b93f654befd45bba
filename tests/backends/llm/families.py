"""A config of a few thousand weights for each family of decoders that is served, besides those of folders.py.

Windows are shorter than the prompts, and what a family has beyond others is on: caps, multipliers, norms of
queries, experts, biases, parallel residuals.
"""

from __future__ import annotations

from typing import Any

from tests.backends.llm.folders import EOS, LENGTH, SIZE, VOCAB

_HEAD = SIZE | {"head_dim": 8}
_KINDS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
_NO_GROUPS = {name: value for name, value in SIZE.items() if name != "num_key_value_heads"}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 6,
}
_ENDS = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": EOS, "tie_word_embeddings": False}
_GPT: dict[str, Any] = _ENDS | {"n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 4}
_MULTIPLIERS = {
    "embedding_multiplier": 2.0,
    "logits_scaling": 0.5,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.4,
}
_NEO: dict[str, Any] = _ENDS | {
    "max_position_embeddings": LENGTH,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 16,
}
_MPT: dict[str, Any] = _ENDS | {
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": LENGTH,
    "expansion_ratio": 2,
}
_XGLM: dict[str, Any] = _ENDS | {
    "max_position_embeddings": LENGTH,
    "d_model": 32,
    "ffn_dim": 48,
    "num_layers": 2,
    "attention_heads": 4,
    "pad_token_id": 0,
}
_MIXED = _HEAD | _KINDS | _EXPERTS | {"moe_intermediate_size": 16}
_GEMMA3 = _HEAD | _KINDS | {"query_pre_attn_scalar": 8}
_EYE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_EYE |= {"image_size": 16, "patch_size": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("AfmoeConfig", _MIXED),
    "apertus": ("ApertusConfig", SIZE),
    "arcee": ("ArceeConfig", SIZE),
    "biogpt": ("BioGptConfig", _NO_GROUPS),
    "bitnet": ("BitNetConfig", SIZE),
    "codegen": ("CodeGenConfig", _GPT | {"n_ctx": LENGTH, "rotary_dim": 4}),
    "cohere": ("CohereConfig", SIZE | {"use_qk_norm": True}),
    "cohere2": ("Cohere2Config", SIZE | _KINDS),
    "cohere2_moe": ("Cohere2MoeConfig", _MIXED),
    "ctrl": ("CTRLConfig", _GPT | {"dff": 48}),
    "cwm": ("CwmConfig", _HEAD | _KINDS),
    "deepseek_v2": ("DeepseekV2Config", SIZE | _ROUTED | _LATENT | {"first_k_dense_replace": 1}),
    "deepseek_v3": (
        "DeepseekV3Config",
        SIZE | _ROUTED | _LATENT | {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
    ),
    "diffllama": ("DiffLlamaConfig", SIZE),
    "ernie4_5": ("Ernie4_5Config", _HEAD),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        _HEAD | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    ),
    "exaone4": ("Exaone4Config", SIZE | _KINDS),
    "exaone_moe": ("ExaoneMoeConfig", _MIXED),
    "falcon": ("FalconConfig", _NO_GROUPS | {"alibi": False}),
    "falcon_alibi": ("FalconConfig", _NO_GROUPS | {"alibi": True, "multi_query": False}),
    "falcon_new": ("FalconConfig", _NO_GROUPS | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "flex_olmo": ("FlexOlmoConfig", SIZE | _EXPERTS),
    "gemma": ("GemmaConfig", _HEAD),
    "gemma3": ("Gemma3Config", {"text_config": _GEMMA3, "vision_config": _EYE, "eos_token_id": EOS}),
    "gemma3_text": ("Gemma3TextConfig", _GEMMA3),
    "gemma4_text": ("Gemma4TextConfig", _MIXED),
    "glm": ("GlmConfig", _HEAD),
    "glm4": ("Glm4Config", _HEAD),
    "glm4_moe": ("Glm4MoeConfig", _HEAD | _ROUTED | {"first_k_dense_replace": 1}),
    "gpt_bigcode": ("GPTBigCodeConfig", _GPT | {"multi_query": True}),
    "gpt_neo": ("GPTNeoConfig", _NEO),
    "gpt_neox": ("GPTNeoXConfig", _NO_GROUPS),
    "gpt_neox_sequential": ("GPTNeoXConfig", _NO_GROUPS | {"use_parallel_residual": False}),
    "gpt_neox_japanese": ("GPTNeoXJapaneseConfig", _NO_GROUPS | {"intermediate_multiple_size": 2}),
    "gpt_oss": ("GptOssConfig", _HEAD | _LOCAL | _KINDS),
    "gptj": ("GPTJConfig", _GPT | {"rotary_dim": 4}),
    "granite": ("GraniteConfig", SIZE | _MULTIPLIERS),
    "granite_swa": ("GraniteSWAConfig", _MIXED),
    "granitemoe_swa": ("GraniteMoeSWAConfig", _MIXED | _LOCAL),
    "granitemoe": ("GraniteMoeConfig", SIZE | _LOCAL | _MULTIPLIERS),
    "granitemoeshared": (
        "GraniteMoeSharedConfig",
        SIZE | _LOCAL | _MULTIPLIERS | {"shared_intermediate_size": 16},
    ),
    "helium": ("HeliumConfig", _HEAD),
    "hunyuan_v1_dense": ("HunYuanDenseV1Config", _HEAD),
    "hunyuan_v1_moe": ("HunYuanMoEV1Config", _HEAD | {"num_experts": 4, "moe_topk": 2}),
    "jetmoe": ("JetMoeConfig", SIZE | _LOCAL | {"kv_channels": 8}),
    "laguna": ("LagunaConfig", _MIXED),
    "llama4_text": (
        "Llama4TextConfig",
        _HEAD | _LOCAL | {"num_experts_per_tok": 1, "intermediate_size_mlp": 48, "attention_chunk_size": 16},
    ),
    "mellum": ("MellumConfig", _MIXED),
    "mimo_v2_flash": ("MiMoV2FlashConfig", _MIXED | {"n_routed_experts": 4}),
    "minicpm3": ("MiniCPM3Config", SIZE | _LATENT),
    "minimax_m2": ("MiniMaxM2Config", _HEAD | _LOCAL),
    "ministral": ("MinistralConfig", _HEAD | _KINDS),
    "ministral3": ("Ministral3Config", _HEAD),
    "mixtral": ("MixtralConfig", SIZE | _LOCAL | {"sliding_window": 16}),
    "modernbert-decoder": ("ModernBertDecoderConfig", _NO_GROUPS | {"local_attention": 16}),
    "mpt": ("MptConfig", _MPT),
    "nanochat": ("NanoChatConfig", SIZE),
    "nemotron": ("NemotronConfig", SIZE),
    "olmo": ("OlmoConfig", SIZE | {"clip_qkv": 1.0}),
    "olmo2": ("Olmo2Config", SIZE),
    "olmo3": ("Olmo3Config", SIZE | _KINDS),
    "olmoe": ("OlmoeConfig", SIZE | _EXPERTS),
    "opt": ("OPTConfig", _NO_GROUPS | {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "persimmon": ("PersimmonConfig", _NO_GROUPS),
    "phi": ("PhiConfig", SIZE),
    "phi3": ("Phi3Config", SIZE | {"sliding_window": 16}),
    "phimoe": ("PhimoeConfig", SIZE | _LOCAL | {"sliding_window": 16}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        SIZE | _EXPERTS | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    ),
    "qwen3_moe": ("Qwen3MoeConfig", _HEAD | _EXPERTS | {"moe_intermediate_size": 16}),
    "seed_oss": ("SeedOssConfig", _HEAD),
    "smollm3": ("SmolLM3Config", SIZE | {"no_rope_layers": [1, 0]}),
    "solar_open": ("SolarOpenConfig", _HEAD | _ROUTED),
    "stablelm": ("StableLmConfig", SIZE | {"qk_layernorm": True, "use_qkv_bias": True}),
    "stablelm_parallel": ("StableLmConfig", SIZE | {"use_parallel_residual": True}),
    "starcoder2": ("Starcoder2Config", SIZE | {"sliding_window": 16}),
    "vaultgemma": ("VaultGemmaConfig", _HEAD | {"sliding_window": 16, "query_pre_attn_scalar": 8}),
    "xglm": ("XGLMConfig", _XGLM),
    "youtu": ("YoutuConfig", SIZE | _LATENT),
}
"""Of each family its class of transformers', and its fields."""

OFTEN = frozenset({
    "gemma", "gemma3_text", "gpt_neox", "gpt_neox_sequential", "granite", "mixtral", "olmo2", "phi", "phi3",
    "smollm3", "starcoder2",  # these have a forward that is written out
    "cohere2", "exaone4", "glm4", "gpt_bigcode", "gpt_oss", "minimax_m2", "olmo3", "opt", "qwen3_moe",
    "codegen", "deepseek_v3", "falcon_alibi", "gemma4_text", "gpt_neo", "gptj", "llama4_text", "mpt",
})  # fmt: skip
"""Families that `make test` tries; `make torture` tries all. Those that are not written out are one for each
way in which they differ: windows, experts, shared heads, biases of positions, latent keys."""
