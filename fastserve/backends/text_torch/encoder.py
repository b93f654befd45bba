"""Encoders (BERT and its relatives): texts as a padded batch, their hidden states made one vector each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModel

from fastserve.backends.device_faults import is_out_of_memory
from fastserve.backends.text_engine import TextRequest


def read_encoder(folder: Path, dtype: torch.dtype | str) -> tuple[Any, dict[str, Any]]:
    """The model of a checked folder, without the head that it was trained with; and what was said of it."""
    model, said = AutoModel.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation="sdpa",
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    return model, said


def most_positions(config: Any) -> int:
    """Tokens of a text. RoBERTa counts its positions from the one behind its padding's."""
    behind = config.pad_token_id + 1 if config.model_type in ("roberta", "xlm-roberta") else 0
    return int(config.max_position_embeddings) - behind


class Encoder:
    """`how` is TextOptions.pooling."""

    def __init__(self, model: Any, how: str, device: torch.device) -> None:
        self._model: Any = model.to(device)
        self._how, self._device = how, device
        self._pad = int(getattr(model.config, "pad_token_id", 0) or 0)

    def embed(self, requests: list[TextRequest]) -> np.ndarray:
        """[requests, width]. Raises MemoryError."""
        try:
            with torch.inference_mode():
                found: np.ndarray = self._run([request.ids for request in requests]).float().cpu().numpy()
                return found
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        raise MemoryError("torch has no memory for this batch")

    def close(self) -> None:
        """Drops the weights."""
        self._model = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _run(self, texts: list[list[int]]) -> torch.Tensor:
        sizes = torch.tensor([len(ids) for ids in texts])
        longest = int(sizes.max())
        tokens = torch.tensor([ids + [self._pad] * (longest - len(ids)) for ids in texts])
        mask = (torch.arange(longest) < sizes[:, None]).to(self._device)
        made = self._model(input_ids=tokens.to(self._device), attention_mask=mask.long())
        return self._pool(made.last_hidden_state, mask, sizes.to(self._device))

    def _pool(self, states: torch.Tensor, mask: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        if self._how == "cls":
            return states[:, 0]
        if self._how == "last":
            return states[torch.arange(len(sizes), device=self._device), sizes - 1]
        return (states * mask[..., None]).sum(1) / sizes[:, None]
