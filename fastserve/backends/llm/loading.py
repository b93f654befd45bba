"""From a checked folder to an engine: weights, a share of memory, one step to see that it runs.

Decoders get a BatchEngine; encoders (BERT and its relatives) an EmbedEngine over padded batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import AutoModel, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from fastserve.backends.frameworks.torch_tensors import bound_memory, device_of, open_device
from fastserve.backends.llm import torch_model
from fastserve.backends.llm.embedding import EmbedEngine
from fastserve.backends.llm.engine import BatchEngine, describe_engine, try_model
from fastserve.backends.llm.folder import ENCODERS, check_folder, read_ends
from fastserve.backends.llm.kv_cache import CacheSize, find_cache_size, host_bytes, shape_of
from fastserve.backends.llm.pooling import find_pooling, with_pooling
from fastserve.backends.llm.protocols import TextRequest
from fastserve.backends.llm.torch_model import TorchModel
from fastserve.backends.model_errors import clean, is_out_of_memory
from fastserve.codec.generation import Info, TextNote
from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.settings.model_options import TextOptions


def read_encoder(folder: Path, dtype: torch.dtype | str) -> tuple[Any, dict[str, Any]]:
    """Return the model of a checked folder, without its training head, and its loading info."""
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
    """Return the tokens of a text at most. RoBERTa counts its positions from the one behind its
    padding's."""
    behind = config.pad_token_id + 1 if config.model_type in ("roberta", "xlm-roberta") else 0
    return int(config.max_position_embeddings) - behind


class Encoder:
    """An encoder on a device. `how` is TextOptions.pooling."""

    def __init__(self, model: Any, how: str, device: torch.device) -> None:
        self._model: Any = model.to(device)
        self._how, self._device = how, device
        self._pad = int(getattr(model.config, "pad_token_id", 0) or 0)

    def embed(self, requests: list[TextRequest]) -> np.ndarray:
        """Return embeddings [requests, width]. Raises MemoryError."""
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


Made = TypeVar("Made")
_UNUSED = ("pooler.", "bert.pooler.", "roberta.pooler.")
"""Prefixes of an encoder's weights that embeddings do not need."""


def open_engine(folder: Path, options: TextOptions, config: Mapping[str, Any]) -> BatchEngine | EmbedEngine:
    """Raises ConfigError and ServeError; see TextBackend.load. Of `config` these count: device,
    device_memory_bytes and threads, which are torch's own when 0."""
    said = check_folder(folder)
    pooling = find_pooling(folder, options, said["model_type"])
    options = with_pooling(options, pooling)
    place, bound = open_device(torch, device_of(config)), int(config.get("device_memory_bytes") or 0)
    bound_memory(torch, place, bound)
    if threads := int(config.get("threads", 1)):
        torch.set_num_threads(threads)
    if said["model_type"] in ENCODERS:
        return _open_encoder(folder, options, place, pooling.most)
    return _open_decoder(folder, options, place, bound, read_ends(folder, said))


def _open_encoder(folder: Path, options: TextOptions, place: torch.device, most: int) -> EmbedEngine:
    model = _read(folder, lambda: read_encoder(folder, _find_dtype(options.dtype, place)))
    positions = most_positions(model.config)
    if options.max_tokens > positions:
        raise ConfigError(f"text.max_tokens: given {options.max_tokens}, allowed: at most {positions}")
    tokens = options.max_prompt_tokens or options.max_tokens or min(most or positions, positions)
    if tokens > positions:
        raise ConfigError(f"text.max_prompt_tokens: given {tokens}, allowed: at most {positions}")
    info = Info(
        vocab_size=model.config.vocab_size,
        max_tokens=tokens + 1,
        max_prompt_tokens=tokens,
        max_new_tokens=1,
        slots=options.max_sequences,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(place),
        tokenizer=options.tokenizer,
        embeds=model.config.hidden_size,
        writes=False,
    )
    encoder = _fit(lambda: Encoder(model, options.pooling, place), "no memory for the weights")
    encoder.embed([TextRequest(0, [0, 0], TextNote(embeds=True))])
    return EmbedEngine(encoder.embed, info, options, encoder.close)


def _open_decoder(
    folder: Path, options: TextOptions, place: torch.device, bound: int, ends: list[int]
) -> BatchEngine:
    weights = _read_weights(folder, _find_dtype(options.dtype, place))
    room = _find_room(options, weights, place, bound)
    dtype = str(weights.dtype).removeprefix("torch.")
    info = describe_engine(options, weights.config, room, ends, dtype, str(place))

    def make() -> TorchModel:
        placed = weights.to(place)
        model = TorchModel(placed, torch_model.make_cache(shape_of(placed.config), room, placed.dtype, place))
        try_model(model)
        return model

    words = f"no memory for the weights and a cache of {info.kv_tokens} tokens: lower text.kv_bytes"
    return BatchEngine(_fit(make, words), info, options)


def _fit(make: Callable[[], Made], words: str) -> Made:
    """Return the result of `make`. Raises ServeError with `words` when memory is short."""
    try:
        return make()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ServeError(Kind.RESOURCE_EXHAUSTED, words) from None


def _read_weights(folder: Path, dtype: torch.dtype | str) -> Any:
    """Return the decoder of a checked folder. Raises ConfigError when weights are broken or missing."""
    torch_model.register()
    return _read(
        folder,
        lambda: AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=torch_model.NAME,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        ),
    )


def _read(folder: Path, read: Callable[[], tuple[Any, dict[str, Any]]]) -> Any:
    """Read a folder with transformers. Raises ConfigError when weights are broken or missing."""
    disable_progress_bar()
    try:
        model, said = read()
    except Exception as error:
        text = clean(f"{type(error).__name__}: {error}", str(folder))
        raise ConfigError(f"transformers cannot read the folder: {text}") from error
    missing = sorted(key for key in said["missing_keys"] if not key.startswith(_UNUSED))
    if missing:
        raise ConfigError(f"the weights lack {len(missing)} tensors, {missing[0]} among them")
    return model.eval()


def _find_dtype(name: str, device: torch.device) -> torch.dtype | str:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    found: torch.dtype = getattr(torch, name)
    return found


def _find_room(options: TextOptions, weights: Any, device: torch.device, device_bytes: int) -> CacheSize:
    memory = host_bytes() if device.type == "cpu" else device_bytes or torch.cuda.mem_get_info(device)[1]
    token_bytes = shape_of(weights.config).token_bytes(weights.dtype.itemsize)
    return find_cache_size(options, weights.config.max_position_embeddings, token_bytes, memory)
