"""From a checked folder to an engine: weights, a share of memory, one step to see that it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from fastserve.backends.base import clean
from fastserve.backends.device_claims import bound_memory
from fastserve.backends.device_faults import is_out_of_memory
from fastserve.backends.embedding import EmbedEngine
from fastserve.backends.text.engine import Engine
from fastserve.backends.text.model import Chunk, Plan
from fastserve.backends.text_engine import TextRequest
from fastserve.backends.text_torch import attention
from fastserve.backends.text_torch.cache import RowCache, shape_of
from fastserve.backends.text_torch.encoder import Encoder, most_positions, read_encoder
from fastserve.backends.text_torch.folder import ENCODERS, check_folder, read_ends
from fastserve.backends.text_torch.memory import Room, find_room, host_bytes
from fastserve.backends.text_torch.sentences import find_pooling, with_pooling
from fastserve.backends.text_torch.torch_model import TorchModel
from fastserve.backends.torch import device_of, open_device
from fastserve.codec.text import Info, TextNote
from fastserve.config.text import TextOptions
from fastserve.errors import ConfigError, Kind, ServeError

Made = TypeVar("Made")
_UNUSED = ("pooler.", "bert.pooler.", "roberta.pooler.")
"""Of an encoder: what it was trained with, and vectors are not made of."""


def open_engine(folder: Path, options: TextOptions, config: Mapping[str, Any]) -> Engine | EmbedEngine:
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
) -> Engine:
    weights = _read_weights(folder, _find_dtype(options.dtype, place))
    room = _find_room(options, weights, place, bound)
    info = _describe(options, weights, room, ends, str(place))

    def make() -> TorchModel:
        placed = weights.to(place)
        model = TorchModel(placed, RowCache(shape_of(placed.config), room, placed.dtype, place))
        _try(model)
        return model

    words = f"no memory for the weights and a cache of {info.kv_tokens} tokens: lower text.kv_bytes"
    return Engine(_fit(make, words), info, options)


def _fit(make: Callable[[], Made], words: str) -> Made:
    """What is made, or the words where there is no memory for it."""
    try:
        return make()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ServeError(Kind.RESOURCE_EXHAUSTED, words) from None


def _read_weights(folder: Path, dtype: torch.dtype | str) -> Any:
    """The model of a checked folder that writes. Raises ConfigError when weights are broken or missing."""
    attention.register()
    return _read(
        folder,
        lambda: AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=attention.NAME,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        ),
    )


def _read(folder: Path, read: Callable[[], tuple[Any, dict[str, Any]]]) -> Any:
    """What transformers reads of a folder. Raises ConfigError when weights are broken or missing."""
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


def _find_room(options: TextOptions, weights: Any, device: torch.device, device_bytes: int) -> Room:
    memory = host_bytes() if device.type == "cpu" else device_bytes or torch.cuda.mem_get_info(device)[1]
    token_bytes = shape_of(weights.config).token_bytes(weights.dtype)
    return find_room(options, weights.config.max_position_embeddings, token_bytes, memory)


def _describe(options: TextOptions, weights: Any, room: Room, ends: list[int], device: str) -> Info:
    """What the engine says of itself."""
    prompt = min(options.max_prompt_tokens or room.tokens - 1, room.tokens - 1)
    if options.max_prompt_tokens > prompt:
        text = f"given {options.max_prompt_tokens}, allowed: at most {prompt}, one less than max_tokens"
        raise ConfigError(f"text.max_prompt_tokens: {text}")
    return Info(
        vocab_size=weights.config.vocab_size,
        max_tokens=room.tokens,
        max_prompt_tokens=prompt,
        max_new_tokens=min(options.max_new_tokens, room.tokens - 1),
        slots=room.slots,
        kv_tokens=room.slots * room.tokens,
        eos_ids=ends,
        dtype=str(weights.dtype).removeprefix("torch."),
        device=device,
        tokenizer=options.tokenizer,
        embeds=weights.config.hidden_size if options.pooling else 0,
    )


def _try(model: TorchModel) -> None:
    """One step of each kind: what does not run is found at load, and the first request does not wait for
    what a first step sets up."""
    model.forward(Plan(np.zeros(2, np.int64), np.arange(2), 0, [Chunk(0, 0, 2, 0)], np.array([1])))
    model.forward(Plan(np.zeros(1, np.int64), np.array([2]), 1, [], np.zeros(1, np.int64)))
    model.cache.wipe(0, 3)
