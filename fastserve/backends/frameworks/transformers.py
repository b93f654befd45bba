"""The transformers backend: a folder of Hugging Face's form whose model answers a text with tensors.

    config.json, architectures      outputs
    ...ForSequenceClassification    labels, scores [labels]: as pipeline("text-classification"); of one label
                                    scores [1] alone, of a text and a text_pair: a reranker
    ...ForTokenClassification       entities: JSON, as pipeline("token-classification")
    ...Model, or a modules.json     embedding [width]: as sentence-transformers' encode

`parameters`: `pairs: true` adds the input text_pair, `function_to_apply` and `aggregation_strategy` are those
of the pipelines, `pooling` and `normalize` those of an encoder, `truncate: false` refuses texts that the
model cannot take whole, and `batch_tokens` bounds a padded batch. With `json_output: NAME` there is one
output, JSON of what the task's pipeline returns for a row; of an encoder that is feature-extraction.
`count_tokens: true` adds the output `tokens`, the number of each row's tokens.

Rows of a batch run in order of their lengths, so that few places are padding. Nothing is fetched, no code of
the folder is run, and pickled weights are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from fastserve.backends.llm.backend import import_loading
from fastserve.backends.llm.folder import FAMILIES, UNBOUNDED, check_weights, most_positions, read_json
from fastserve.backends.llm.pooling import BERT, MODULES, counts_prompt, find_pooling, finish_vector
from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.settings.fields import fault_text
from fastserve.settings.model_options import TextOptions
from fastserve.tensor import DTYPES, TensorSpec

if TYPE_CHECKING:
    from fastserve.backends.base import Arrays

TEXT, PAIR = "text", "text_pair"
COUNT = "tokens"
SAVED = "config_sentence_transformers.json"
LABELS, SCORES, ENTITIES, EMBEDDING = "labels", "scores", "entities", "embedding"
SEQUENCES, TOKENS, ENCODER = "ForSequenceClassification", "ForTokenClassification", "Model"
MOST_TOKENS = 16384
"""Tokens of a padded batch; one text alone may have more."""
_STRATEGIES = ("none", "simple", "first", "average", "max")
_FUNCTIONS = ("sigmoid", "softmax", "none")
_POOLINGS = ("mean", "cls", "last")
_PARAMETERS = (
    "aggregation_strategy",
    "batch_tokens",
    "count_tokens",
    "function_to_apply",
    "json_output",
    "normalize",
    "pairs",
    "pooling",
    "truncate",
)
Tokens = Mapping[str, Sequence[Any]]
"""The tokenizer's output for some rows, without padding."""


class TextTask(Protocol):
    """A model of one task: from texts to results, and from these to outputs."""

    @property
    def outputs(self) -> Mapping[str, TensorSpec]:
        """The outputs of `pack`."""

    def run(self, texts: Sequence[str], tokens: Tokens) -> Sequence[Any]:
        """Return the result of each row."""

    def pack(self, rows: Sequence[Any]) -> Arrays:
        """Return the outputs of results."""

    def tell(self, row: Any) -> Any:
        """Return a result as the task's pipeline does, for JSON."""


class TextTensorBackend:
    """Runs a classifier of texts, of tokens or of pairs, or an encoder."""

    def __init__(self, config: Mapping[str, Any], version_dir: Path, instance: int) -> None:
        self._config, self._folder = config, version_dir
        self._parameters: Mapping[str, Any] = config.get("parameters") or {}
        for name in self._parameters:
            if name not in _PARAMETERS:
                raise ConfigError(fault_text("parameters", name, ", ".join(_PARAMETERS)))
        self._choice("aggregation_strategy", _STRATEGIES)
        self._choice("function_to_apply", _FUNCTIONS)
        self._choice("pooling", _POOLINGS)
        self._batch_tokens = int(self._parameters.get("batch_tokens", MOST_TOKENS))
        self._truncates = bool(self._parameters.get("truncate", True))
        self._json = str(self._parameters.get("json_output", ""))
        self._counts = bool(self._parameters.get("count_tokens", False))
        self.inputs: dict[str, TensorSpec] = {}
        self.outputs: dict[str, TensorSpec] = {}
        self._tokenizer: Any = None
        self._task: TextTask | None = None
        self._prepare: Callable[[str], str] | None = None
        self._most = 0

    def load(self) -> None:
        """Read the folder. Raises ConfigError for one whose model has another task, or that transformers
        cannot read, ServeError where torch or transformers are missing."""
        told = read_json(self._folder / "config.json")
        kinds = [str(name) for name in told.get("architectures") or ()]
        kind = next((one for one in (SEQUENCES, TOKENS) if any(name.endswith(one) for name in kinds)), "")
        model_type = str(told.get("model_type"))
        encodes = any(name.endswith(ENCODER) for name in kinds) or FAMILIES.get(model_type) == "encoder"
        if not (kind or encodes or (self._folder / MODULES).exists()):
            allowed = f"a model {SEQUENCES}, {TOKENS}, or an encoder alone (...{ENCODER})"
            raise ConfigError(fault_text("config.json: architectures", ", ".join(kinds), allowed))
        check_weights(self._folder, f"AutoModel{kind}")
        loading = import_loading()
        import torch

        torch.set_num_threads(max(1, int(self._config.get("threads", 1))))
        self._tokenizer = loading.load_tokenizer(self._folder)
        most = 0
        if kind:
            model = loading.load_model(self._folder, f"AutoModel{kind}")
        if kind == SEQUENCES:
            function = self._parameters.get("function_to_apply") or _find_function(model.config, self._folder)
            self._task = Classifier(model, self._tokenizer, function)
        elif kind == TOKENS:
            strategy = self._parameters.get("aggregation_strategy", "none")
            self._task = Tagger(model, self._tokenizer, strategy)
        else:
            self._prepare = _read_preparation(self._folder)
            model = loading.load_encoder(self._folder)
            self._task, most = self._make_encoder(loading, model, model_type)
        places = (self._tokenizer.model_max_length, most_positions(model.config), most or UNBOUNDED)
        self._most = min(*places, UNBOUNDED)
        # Rows are padded once they are sorted, which the tokenizer would warn of.
        self._tokenizer.deprecation_warnings["Asking-to-pad-a-fast-tokenizer"] = True
        pairs = self._parameters.get("pairs", kind == SEQUENCES and model.config.num_labels == 1)
        names = (TEXT, PAIR) if pairs and kind == SEQUENCES else (TEXT,)
        self.inputs = {name: TensorSpec(name, DTYPES["bytes"], ()) for name in names}
        self.outputs = dict(self._task.outputs)
        if self._json:
            self.outputs = {self._json: TensorSpec(self._json, DTYPES["bytes"], (1,))}
        if self._counts:
            self.outputs |= _specs((COUNT, "int32", ()))

    def run(self, inputs: Arrays) -> Arrays:
        """Run one batch; see Backend.run. Raises ServeError INVALID_ARGUMENT for a text that is not UTF-8,
        or too long where nothing is cut off."""
        assert self._task is not None
        texts = [_read_texts(name, inputs[name]) for name in self.inputs]
        if not texts[0]:
            return self._pack([], [])
        if self._prepare is not None:
            texts = [list(map(self._prepare, side)) for side in texts]
        encoded = self._encode(texts)
        lengths = [len(ids) for ids in encoded["input_ids"]]
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        rows: list[Any] = [None] * len(order)
        for batch in _batches(order, lengths, self._batch_tokens):
            tokens = {key: [some[at] for at in batch] for key, some in encoded.items()}
            found = self._task.run([texts[0][at] for at in batch], tokens)
            for at, row in zip(batch, found, strict=True):
                rows[at] = row
        return self._pack(rows, lengths)

    def close(self) -> None:
        """Drop the model."""
        self._task = self._tokenizer = None

    def _choice(self, name: str, allowed: Sequence[str]) -> None:
        given = self._parameters.get(name)
        if given is not None and given not in allowed:
            raise ConfigError(fault_text(f"parameters.{name}", given, ", ".join(allowed)))

    def _make_encoder(self, loading: Any, model: Any, model_type: str) -> tuple[TextEncoder, int]:
        given = {key: value for key, value in self._parameters.items() if key in ("pooling", "normalize")}
        pooling = find_pooling(self._folder, msgspec.convert(given, TextOptions), model_type)
        encoder = loading.Encoder(model, pooling.how or "mean", loading.torch.device("cpu"))
        width = int(model.config.hidden_size)
        return TextEncoder(encoder, width, whole=bool(self._json), normalize=pooling.normalize), pooling.most

    def _encode(self, texts: Sequence[Sequence[str]]) -> Tokens:
        """Return the tokens of each row, without padding. Raises ServeError for a row that is too long."""
        cut: dict[str, Any] = {"truncation": True, "max_length": self._most} if self._truncates else {}
        found: Tokens = self._tokenizer(*texts, verbose=False, **cut)
        for at, ids in enumerate(found["input_ids"]):
            if len(ids) > self._most:
                raise ServeError(
                    Kind.INVALID_ARGUMENT,
                    f"row {at}: the text has {len(ids)} tokens, allowed: up to {self._most}",
                )
        return found

    def _pack(self, rows: Sequence[Any], lengths: Sequence[int]) -> Arrays:
        assert self._task is not None
        counts = {COUNT: np.asarray(lengths, np.int32)} if self._counts else {}
        if not self._json:
            return {**self._task.pack(rows), **counts}
        return {self._json: _write_json([self._task.tell(row) for row in rows])[:, None], **counts}


# ---- tasks


class Classifier:
    """A classifier of texts or pairs. A result is the scores of a row, [labels]."""

    def __init__(self, model: Any, tokenizer: Any, function: str) -> None:
        config = model.config
        self._model, self._tokenizer, self._function = model, tokenizer, function
        self._labels = [str(config.id2label[number]) for number in range(config.num_labels)]
        self.outputs = _specs((SCORES, "float32", (len(self._labels),)))
        if len(self._labels) > 1:
            self.outputs = _specs((LABELS, "bytes", ()), (SCORES, "float32", (len(self._labels),)))

    def run(self, texts: Sequence[str], tokens: Tokens) -> Sequence[Any]:
        """See TextTask."""
        import torch

        padded = self._tokenizer.pad(tokens, return_tensors="pt")
        with torch.inference_mode():
            logits = self._model(**padded).logits.float()
            if self._function == "sigmoid":
                logits = logits.sigmoid()
            elif self._function == "softmax":
                logits = logits.softmax(-1)
            found: Sequence[Any] = logits.numpy()
            return found

    def pack(self, rows: Sequence[Any]) -> Arrays:
        """See TextTask."""
        scores = np.asarray(rows, np.float32).reshape(len(rows), len(self._labels))
        if LABELS not in self.outputs:
            return {SCORES: scores}
        labels = np.empty(len(rows), object)
        labels[:] = [self._labels[at].encode() for at in scores.argmax(1)]
        return {LABELS: labels, SCORES: scores}

    def tell(self, row: Any) -> Any:
        """See TextTask."""
        best = int(row.argmax())
        return {"label": self._labels[best], "score": float(row[best])}


class Tagger:
    """A classifier of tokens. A result is the list that its pipeline returns."""

    def __init__(self, model: Any, tokenizer: Any, strategy: str) -> None:
        import transformers

        given = {"model": model, "tokenizer": tokenizer, "aggregation_strategy": strategy}
        self._pipeline = transformers.pipeline("token-classification", **given)
        self.outputs = _specs((ENTITIES, "bytes", ()))

    def run(self, texts: Sequence[str], tokens: Tokens) -> Sequence[Any]:
        """See TextTask."""
        found: Sequence[Any] = self._pipeline(list(texts), batch_size=len(texts))
        return found

    def pack(self, rows: Sequence[Any]) -> Arrays:
        """See TextTask."""
        return {ENTITIES: _write_json(rows)}

    def tell(self, row: Any) -> Any:
        """See TextTask."""
        return row


class TextEncoder:
    """An encoder of texts. A result is the embedding of a row, or with `whole` the state of each token."""

    def __init__(self, encoder: Any, width: int, *, whole: bool, normalize: bool) -> None:
        self._encoder, self._width = encoder, width
        self._whole, self._normalize = whole, normalize
        self.outputs = _specs((EMBEDDING, "float32", (width,)))

    def run(self, texts: Sequence[str], tokens: Tokens) -> Sequence[Any]:
        """See TextTask."""
        ids = [list(row) for row in tokens["input_ids"]]
        if self._whole:
            found: Sequence[Any] = self._encoder.states(ids)
            return found
        return [finish_vector(one, normalize=self._normalize) for one in self._encoder.vectors(ids)]

    def pack(self, rows: Sequence[Any]) -> Arrays:
        """See TextTask."""
        return {EMBEDDING: np.asarray(rows, np.float32).reshape(len(rows), self._width)}

    def tell(self, row: Any) -> Any:
        """See TextTask."""
        return [row.tolist()]  # an axis of one, as there


def _find_function(config: Any, folder: Path) -> str:
    """Return the function that makes scores of logits: what pipeline("text-classification") applies, and of a
    model with one label what its authors have said to sentence-transformers' CrossEncoder. Raises
    ConfigError."""
    if config.problem_type == "regression":
        return "none"
    if config.num_labels > 1:
        return "sigmoid" if config.problem_type == "multi_label_classification" else "softmax"
    saved = getattr(config, "sentence_transformers", None) or _read_saved(folder)
    said = saved.get("activation_fn") or getattr(config, "sbert_ce_default_activation_function", None)
    known = {"Identity": "none", "Sigmoid": "sigmoid"}
    kind = str(said or "Sigmoid").rpartition(".")[2]
    if kind not in known:
        allowed = f"{', '.join(known)}, or another with parameters.function_to_apply"
        raise ConfigError(fault_text("activation_fn", said, allowed))
    return known[kind]


def _read_preparation(folder: Path) -> Callable[[str], str]:
    """Return what sentence-transformers makes of a text before it is tokenized: with the prompt that its
    authors have set, and in lower case. Raises ConfigError for a prompt that the pooling leaves out."""
    saved = _read_saved(folder)
    name, prompts = saved.get("default_prompt_name"), saved.get("prompts") or {}
    if name is not None and name not in prompts:
        raise ConfigError(fault_text(f"{SAVED}: default_prompt_name", name, ", ".join(prompts) or "null"))
    prompt = str(prompts[name]) if name is not None else ""
    if prompt and not counts_prompt(folder):
        raise ConfigError(
            f"{SAVED}: a default prompt that the pooling leaves out (include_prompt) is not served"
        )
    bert = folder / BERT
    lower = bool(bert.exists() and read_json(bert).get("do_lower_case"))
    return lambda text: (prompt + text).lower() if lower else prompt + text


def _read_saved(folder: Path) -> Mapping[str, Any]:
    """Return what sentence-transformers has saved of a model."""
    return read_json(folder / SAVED) if (folder / SAVED).exists() else {}


def _specs(*told: tuple[str, str, tuple[int, ...]]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, DTYPES[dtype], shape) for name, dtype, shape in told}


def _write_json(values: Sequence[Any]) -> Any:
    found = np.empty(len(values), object)
    for at, value in enumerate(values):
        found[at] = json.dumps(value, default=float, ensure_ascii=False).encode()
    return found


def _read_texts(name: str, array: Any) -> list[str]:
    found = []
    for at, value in enumerate(array.reshape(-1)):
        try:
            found.append(value.decode() if isinstance(value, bytes) else str(value))
        except UnicodeDecodeError as error:
            raise ServeError(
                Kind.INVALID_ARGUMENT, f"input {name!r}, row {at}: not UTF-8: {error.reason}"
            ) from None
    return found


def _batches(order: Sequence[int], lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield rows, in order of their lengths, that have at most so many places once they are padded."""
    batch: list[int] = []
    for at in order:
        if batch and lengths[at] * (len(batch) + 1) > most:
            yield batch
            batch = []
        batch.append(at)
    if batch:
        yield batch
