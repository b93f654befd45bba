"""Models of a few thousand random weights, one of each family, saved as the folders that are served."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from tests.late import Late

transformers = Late("transformers")
VOCAB, LENGTH, EOS = 97, 128, 5
SIZE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
PLAIN = ("gpt2", "bloom")
"""Families that run in transformers' code; the others' forward is written out."""
_WINDOWS = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
_STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_positions": LENGTH,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "scale_attn_by_inverse_layer_idx": True,
}
_BLOOM: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_GEMMA2 = {"head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SIZE),
    "qwen2": ("Qwen2Config", SIZE | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", SIZE | {"head_dim": 8}),
    "mistral": ("MistralConfig", SIZE | {"sliding_window": 24}),
    "qwen2_windows": ("Qwen2Config", SIZE | _WINDOWS),
    "llama_biased": ("LlamaConfig", SIZE | {"attention_bias": True, "mlp_bias": True}),
    "llama_stretched": ("LlamaConfig", SIZE | {"rope_parameters": _STRETCHED}),
    "mistral_gelu": ("MistralConfig", SIZE | {"sliding_window": 24, "hidden_act": "gelu"}),
    "gpt2": ("GPT2Config", _GPT2),
    "gemma2": ("Gemma2Config", SIZE | _GEMMA2),
    "bloom": ("BloomConfig", _BLOOM),
}
"""Of families of each form a class of transformers', and its fields: all tests run on these. families.py has
the others."""


def make_config(kind: str, fields: dict[str, Any]) -> Any:
    """One of transformers' classes, from whose progress bars nothing may be left: they have a thread."""
    transformers.utils.logging.disable_progress_bar()
    return getattr(transformers, kind)(**deepcopy(fields))


def save_model(folder: Path, family: str, *, spread: float = 0.25, **saving: Any) -> Any:
    """Weights wide enough for logits that differ by more than rounding. The model, as transformers has it."""
    return save_config(folder, make_config(*CONFIGS[family]), spread=spread, **saving)


def save_config(folder: Path, config: Any, *, spread: float = 0.25, **saving: Any) -> Any:
    """The same for a config of transformers. Biases are about 0, weights of norms about 1."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, weight in model.named_parameters():
        mean = float(weight.ndim < 2 and not name.endswith("bias"))
        torch.nn.init.normal_(weight, mean=mean, std=spread)
    model.save_pretrained(folder, **saving)
    return model


def read_model(folder: Path) -> Any:
    """The model of a folder as transformers reads it: of some families, not all of what was saved."""
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def generate(model: Any, prompt: list[int], count: int, **settings: Any) -> list[int]:
    """Generate with transformers, as the oracle."""
    ids = torch.tensor([prompt])
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        **settings,
    )
    found: list[int] = made[0, len(prompt) :].tolist()
    return found
