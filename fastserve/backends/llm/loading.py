"""From a checked folder to an engine: weights, a share of memory, one step to see that it runs.

Decoders get a BatchEngine; encoders (BERT and its relatives) an EmbedEngine over padded batches. The
transformers backend reads its models here too. Whatever is read lies in the folder, is no pickle and no code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from fastserve.backends.frameworks.torch_tensors import bound_memory, device_of, open_device
from fastserve.backends.llm import torch_model
from fastserve.backends.llm.embedding import EmbedEngine
from fastserve.backends.llm.engine import BatchEngine, describe_engine, open_grammars, try_model
from fastserve.backends.llm.folder import (
    FAMILIES,
    check_folder,
    find_adapters,
    most_positions,
    read_ends,
)
from fastserve.backends.llm.generic_model import AlignedCache, GenericModel, find_layer_shapes, open_generic
from fastserve.backends.llm.kv_cache import find_cache_size, host_bytes, shape_of
from fastserve.backends.llm.lora import Adapters
from fastserve.backends.llm.pooling import find_pooling, with_pooling
from fastserve.backends.llm.protocols import TextRequest
from fastserve.backends.llm.torch_model import TorchModel
from fastserve.backends.model_errors import clean, is_out_of_memory
from fastserve.codec.generation import Info, TextNote
from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.settings.model_options import TextOptions

LOCAL = {"local_files_only": True, "trust_remote_code": False}
WEIGHTS = {**LOCAL, "use_safetensors": True, "output_loading_info": True}


def load_encoder(folder: Path, dtype: torch.dtype | str = torch.float32) -> Any:
    """Return the model of a folder, without its training head. Raises ConfigError."""
    return _read(folder, lambda: AutoModel.from_pretrained(folder, dtype=dtype, **WEIGHTS), _UNUSED)


def load_model(folder: Path, kind: str) -> Any:
    """Return a model in float32, by the name of its class, AutoModelForSequenceClassification and such.
    Raises ConfigError."""
    read = getattr(transformers, kind).from_pretrained
    return _read(folder, lambda: read(folder, dtype=torch.float32, **WEIGHTS))


def load_tokenizer(folder: Path) -> Any:
    """Return a folder's tokenizer. Raises ConfigError."""
    with _reading(folder):
        return transformers.AutoTokenizer.from_pretrained(folder, **LOCAL)


class Encoder:
    """An encoder on a device. `how` is TextOptions.pooling."""

    def __init__(self, model: Any, how: str, device: torch.device) -> None:
        self._model: Any = model.to(device)
        self._how, self._device = how, device
        self._pad = int(getattr(model.config, "pad_token_id", 0) or 0)

    def embed(self, requests: list[TextRequest]) -> np.ndarray:
        """Return embeddings [requests, width]. Raises MemoryError."""
        try:
            return self.vectors([request.ids for request in requests])
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

    def vectors(self, texts: list[list[int]]) -> np.ndarray:
        """Return embeddings [texts, width] of tokens."""
        with torch.inference_mode():
            states, mask, sizes = self._run(texts)
            found: np.ndarray = self._pool(states, mask, sizes).float().cpu().numpy()
        return found

    def states(self, texts: list[list[int]]) -> list[np.ndarray]:
        """Return the states [tokens, width] of each text's tokens."""
        with torch.inference_mode():
            states = self._run(texts)[0].float().cpu().numpy()
        return [row[: len(ids)] for row, ids in zip(states, texts, strict=True)]

    def _run(self, texts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return states [texts, longest, width], the mask of their places, and the texts' sizes."""
        sizes = torch.tensor([len(ids) for ids in texts])
        longest = int(sizes.max())
        tokens = torch.tensor([ids + [self._pad] * (longest - len(ids)) for ids in texts])
        mask = (torch.arange(longest) < sizes[:, None]).to(self._device)
        made = self._model(input_ids=tokens.to(self._device), attention_mask=mask.long())
        return made.last_hidden_state, mask, sizes.to(self._device)

    def _pool(self, states: torch.Tensor, mask: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        if self._how == "cls":
            return states[:, 0]
        if self._how == "last":
            return states[torch.arange(len(sizes), device=self._device), sizes - 1]
        return (states * mask[..., None]).sum(1) / sizes[:, None]


Made = TypeVar("Made")
_UNUSED = ("pooler.", "bert.pooler.", "roberta.pooler.")
"""Beginnings of names of an encoder's weights that embeddings do not need."""


def open_engine(folder: Path, options: TextOptions, config: Mapping[str, Any]) -> BatchEngine | EmbedEngine:
    """Raises ConfigError and ServeError; see TextBackend.load. Of `config` these count: device,
    device_memory_bytes and threads, which are torch's own when 0."""
    said = check_folder(folder, options)
    pooling = find_pooling(folder, options, said["model_type"])
    options = with_pooling(options, pooling)
    place, bound = open_device(torch, device_of(config)), int(config.get("device_memory_bytes") or 0)
    bound_memory(torch, place, bound)
    if threads := int(config.get("threads", 1)):
        torch.set_num_threads(threads)
    if options.quantization == "int8":
        _check_int8(options, place)
    form = FAMILIES[said["model_type"]]
    if form == "encoder":
        return _open_encoder(folder, options, place, pooling.most)
    generic = form in ("generic", "tried")
    return _open_decoder(folder, options, place, bound, read_ends(folder, said), generic=generic)


def _open_encoder(folder: Path, options: TextOptions, place: torch.device, most: int) -> EmbedEngine:
    model = load_encoder(folder, _find_dtype(options.dtype, place))
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
    if options.quantization == "int8":
        torch_model.use_int8(model)
    encoder = _fit(lambda: Encoder(model, options.pooling, place), "no memory for the weights")
    encoder.embed([TextRequest(0, [0, 0], TextNote(embeds=True))])
    return EmbedEngine(encoder.embed, info, options, encoder.close)


def _open_decoder(
    folder: Path, options: TextOptions, place: torch.device, bound: int, ends: list[int], *, generic: bool
) -> BatchEngine:
    weights = _read_weights(folder, _find_dtype(options.dtype, place), generic=generic)
    config, memory = weights.config.get_text_config(), _find_memory(place, bound)
    dtype = str(weights.dtype).removeprefix("torch.")
    if generic:
        shapes = find_layer_shapes(weights)
        numbers = sum(shape.elements for shape in shapes)
    else:
        shape = shape_of(config)
        numbers = shape.token_bytes(1)
    adapters = Adapters.read(find_adapters(folder), weights)
    room = find_cache_size(
        options, _find_positions(config, options), numbers * weights.dtype.itemsize, memory - adapters.nbytes
    )
    info = describe_engine(options, config, room, ends, dtype, str(place))
    info = msgspec.structs.replace(info, adapters=adapters.names)

    def make() -> TorchModel | GenericModel:
        placed, int8 = weights.to(place), options.quantization == "int8"
        if generic and int8:
            torch_model.use_int8(placed)
        if generic:
            return open_generic(placed, AlignedCache(shapes, room, placed.dtype, place))
        cache = torch_model.make_cache(shape, room, placed.dtype, place)
        model = TorchModel(placed, cache, int8=int8, adapters=adapters.to(place) if adapters.names else None)
        try_model(model, len(adapters.names))
        return model

    words = f"no memory for the weights and a cache of {info.kv_tokens} tokens: lower text.kv_bytes"
    grammars = open_grammars(folder, options, info)
    return BatchEngine(_fit(make, words), info, options, grammars, drafts_alone=generic)


def _fit(make: Callable[[], Made], words: str) -> Made:
    """Return the result of `make`. Raises ServeError with `words` when memory is short."""
    try:
        return make()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ServeError(Kind.RESOURCE_EXHAUSTED, words) from None


def _read_weights(folder: Path, dtype: torch.dtype | str, *, generic: bool) -> Any:
    """Return the decoder of a checked folder. Raises ConfigError when weights are broken or missing."""
    torch_model.register()
    given = {**WEIGHTS, "dtype": dtype, "attn_implementation": None if generic else torch_model.NAME}
    return _read(folder, lambda: AutoModelForCausalLM.from_pretrained(folder, **given), _UNUSED)


def _read(folder: Path, read: Callable[[], tuple[Any, dict[str, Any]]], unused: tuple[str, ...] = ()) -> Any:
    """Read a model with transformers. Raises ConfigError when weights are broken, or missing and not
    `unused`: transformers would make some up."""
    with _reading(folder):
        model, said = read()
    missing = sorted(key for key in said["missing_keys"] if not key.startswith(unused))
    if missing:
        raise ConfigError(f"the weights lack {len(missing)} tensors, {missing[0]} among them")
    return model.eval()


def _check_int8(options: TextOptions, device: torch.device) -> None:
    """Raise ConfigError where int8 weights cannot be used."""
    if device.type != "cpu":
        raise ConfigError(f"text.quantization: int8 runs on a CPU, the device is {device}")
    if options.dtype not in ("auto", "float32"):
        raise ConfigError(f"text.quantization: int8 computes in float32, text.dtype says {options.dtype}")
    has_call = hasattr(torch.ops.quantized, torch_model.INT8_CALL)
    if not has_call or "fbgemm" not in torch.backends.quantized.supported_engines:
        raise ConfigError("text.quantization: int8 needs FBGEMM, which this machine's torch does not have")


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Raise ConfigError for whatever transformers raises."""
    disable_progress_bar()
    try:
        yield
    except Exception as error:
        text = clean(f"{type(error).__name__}: {error}", str(folder))
        raise ConfigError(f"transformers cannot read the folder: {text}") from error


def _find_dtype(name: str, device: torch.device) -> torch.dtype | str:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    found: torch.dtype = getattr(torch, name)
    return found


def _find_memory(device: torch.device, device_bytes: int) -> int:
    return host_bytes() if device.type == "cpu" else device_bytes or torch.cuda.mem_get_info(device)[1]


def _find_positions(config: Any, options: TextOptions) -> int:
    """Return the tokens that a model was made for. Families without a bound (ALiBi) take what
    text.max_tokens says, or what they were trained with."""
    found = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
    return int(found or options.max_tokens or UNBOUND_TOKENS)


UNBOUND_TOKENS = 2048
"""Tokens of a sequence where neither the model nor text.max_tokens has a bound."""
