"""The transformers backend: classifiers of texts, tokens and pairs are what the library's pipelines say, and
embeddings what sentence-transformers makes of a text alone."""

from __future__ import annotations

import json
import random
import shutil
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastserve.backends import create
from fastserve.errors import ConfigError, ServeError
from fastserve.repository.model_config import config_json, parse_model_config
from tests import proc
from tests.late import Late
from tests.running import CLI, STOP_S, Running, free_port, start

pytest.importorskip("torch")
transformers = Late("transformers")
WORDS = [
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "what", "a", "fine", "day", "!", "Linz", "Graz"),
    *("is", "not", "far", "from", "here", "Paris"),
]
SIZE: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 24,
}
LABELS = {0: "bad", 1: "good", 2: "neither"}
KINDS = {
    "sentiment": "BertForSequenceClassification",
    "entities": "BertForTokenClassification",
    "rerank": "BertForSequenceClassification",
    "encoder": "BertModel",
}


def write_folder(folder: Path, name: str) -> Path:
    """Write a model of random weights, as its authors would save it."""
    import torch

    torch.manual_seed(len(name))
    labels = {0: "x"} if name == "rerank" else LABELS
    config = transformers.BertConfig(**SIZE, id2label=labels, label2id={v: k for k, v in labels.items()})
    model = getattr(transformers, KINDS[name])(config)
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(8)  # so that answers differ
    model.save_pretrained(folder)
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = transformers.BertTokenizerFast(vocab=vocabulary, do_lower_case=False, model_max_length=24)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("labels") / "models"
    for name in KINDS:
        write_folder(root / name / "1", name)
    return root


def make_texts(count: int) -> list[str]:
    """Texts of 1 to 20 words, some of which the model does not know."""
    numbers = random.Random(count)
    return [" ".join(numbers.choices([*WORDS[5:], "unknown"], k=1 + at % 20)) for at in range(count)]


def load(folder: Path, **changes: Any) -> Any:
    backend = create(config_json(parse_model_config({"backend": "transformers", **changes})), folder, 0)
    backend.load()
    return backend


def packed(texts: list[str]) -> Any:
    return np.array([text.encode() for text in texts], object)


def test_texts_are_labelled_as_the_pipeline_does(folders: Path) -> None:
    backend = load(folders / "sentiment/1", parameters={"batch_tokens": 100})
    texts = make_texts(60)
    classify = transformers.pipeline("text-classification", str(folders / "sentiment/1"), top_k=None)
    found = backend.run({"text": packed(texts)})
    assert {label.decode() for label in found["labels"]} > {"good"}
    for at, told in enumerate(classify(texts)):
        wanted = {one["label"]: one["score"] for one in told}
        named = dict(zip(LABELS.values(), found["scores"][at].tolist(), strict=True))
        assert named == pytest.approx(wanted, abs=1e-5)
        assert found["labels"][at].decode() == told[0]["label"]
    assert backend.run({"text": packed([])})["scores"].shape == (0, 3)
    backend.close()


def test_tokens_are_counted_where_that_is_asked_for(folders: Path) -> None:
    texts = make_texts(20)
    for parameters in ({}, {"json_output": "said"}):
        backend = load(folders / "sentiment/1", parameters={"count_tokens": True, **parameters})
        found = backend.run({"text": packed(texts)})
        assert set(found) == set(backend.outputs) >= {"tokens"}
        assert found["tokens"].tolist() == [1 + len(text.split()) + 1 for text in texts]
        assert backend.run({"text": packed([])})["tokens"].shape == (0,)
        backend.close()


@pytest.mark.parametrize("strategy", ["none", "simple"])
def test_tokens_are_labelled_as_the_pipeline_does(folders: Path, strategy: str) -> None:
    backend = load(folders / "entities/1", parameters={"aggregation_strategy": strategy})
    texts = make_texts(20)
    tag = transformers.pipeline(
        "token-classification", str(folders / "entities/1"), aggregation_strategy=strategy
    )
    found = [json.loads(text) for text in backend.run({"text": packed(texts)})["entities"]]
    for mine, wanted in zip(found, [tag(text) for text in texts], strict=True):
        assert len(mine) == len(wanted) > 0
        for one, other in zip(mine, wanted, strict=True):
            assert one.pop("score") == pytest.approx(float(other.pop("score")), abs=1e-5)
            assert one == other
    backend.close()


def test_pairs_have_the_score_of_the_model_alone(folders: Path) -> None:
    """Each pair in a batch of its own, by the library."""
    import torch

    backend = load(folders / "rerank/1")
    assert list(backend.inputs) == ["text", "text_pair"]
    texts = make_texts(12)
    question = ["what is Linz ?"] * 12
    found = backend.run({"text": packed(question), "text_pair": packed(texts)})["scores"][:, 0]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folders / "rerank/1").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders / "rerank/1")
    for score, text in zip(found, texts, strict=True):
        pair = tokenizer(question[0], text, return_tensors="pt", truncation=True, max_length=24)
        with torch.inference_mode():
            assert score == pytest.approx(float(model(**pair).logits.sigmoid()), abs=1e-5)
    assert len(set(found.tolist())) > 6
    backend.close()


def test_long_texts_are_cut_off_or_refused(folders: Path) -> None:
    long = ["day " * 40]
    backend = load(folders / "sentiment/1")
    cut = backend.run({"text": packed(long)})["scores"]
    same = backend.run({"text": packed(["day " * 22])})["scores"]
    np.testing.assert_allclose(cut, same, atol=1e-6)
    backend.close()
    strict = load(folders / "sentiment/1", parameters={"truncate": False})
    with pytest.raises(ServeError, match="row 1: the text has 42 tokens, allowed: up to 24"):
        strict.run({"text": packed(["fine", *long])})
    with pytest.raises(ServeError, match="row 0: not UTF-8"):
        strict.run({"text": np.array([b"\xff"], object)})
    strict.close()


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({"aggregation_strategy": "best"}, "allowed: none, simple, first, average, max"),
        ({"top_k": 3}, 'parameters: given "top_k", allowed: aggregation_strategy'),
    ],
)
def test_what_parameters_cannot_say(tmp_path: Path, parameters: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load(tmp_path, parameters=parameters)


def test_folders_that_label_nothing(tmp_path: Path, folders: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["T5ForConditionalGeneration"]}')
    with pytest.raises(ConfigError, match=r'architectures: given "T5ForCond.*", allowed: a model For'):
        load(tmp_path)
    told = json.loads((folders / "sentiment/1/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(told))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ConfigError, match=r"pytorch_model.bin is a pickle: .* import AutoModelForSequenceCl"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(ConfigError, match="transformers cannot read the folder"):
        load(tmp_path)


def test_weights_that_are_missing_are_not_made_up(tmp_path: Path, folders: Path) -> None:
    """transformers would give the classifier of an encoder's weights random ones."""
    transformers.BertModel(transformers.BertConfig(**SIZE)).save_pretrained(tmp_path)
    for file in (folders / "sentiment/1").iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ConfigError, match=r"the weights lack 2 tensors, classifier.bias among them"):
        load(tmp_path)


SAYS_IDENTITY = {"activation_fn": "torch.nn.modules.linear.Identity"}


@pytest.mark.parametrize(
    ("file", "fields", "parameters", "is_logit"),
    [
        ("config.json", {"sentence_transformers": SAYS_IDENTITY}, {}, True),
        ("config.json", {"sbert_ce_default_activation_function": SAYS_IDENTITY["activation_fn"]}, {}, True),
        ("config_sentence_transformers.json", SAYS_IDENTITY, {}, True),
        ("config_sentence_transformers.json", SAYS_IDENTITY, {"function_to_apply": "sigmoid"}, False),
        ("config_sentence_transformers.json", {}, {"function_to_apply": "none"}, True),
        ("config.json", {"problem_type": "regression"}, {}, True),
        ("config.json", {}, {}, False),
    ],
)
def test_a_reranker_has_the_function_that_its_authors_chose(
    tmp_path: Path, folders: Path, file: str, fields: Any, parameters: Any, is_logit: bool
) -> None:
    """As CrossEncoder of sentence-transformers, which saved its choice in three places over the years."""
    import torch

    shutil.copytree(folders / "rerank/1", tmp_path, dirs_exist_ok=True)
    place = tmp_path / file
    told = json.loads(place.read_text()) if place.exists() else {}
    place.write_text(json.dumps({**told, **fields}))
    backend = load(tmp_path, parameters=parameters)
    pair = {"text": packed(["what is Linz ?"]), "text_pair": packed(["a fine day"])}
    found = backend.run(pair)["scores"]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    with torch.inference_mode():
        logits = model(**tokenizer("what is Linz ?", "a fine day", return_tensors="pt")).logits
    wanted = logits if is_logit else logits.sigmoid()
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-5)
    backend.close()


def test_a_function_that_is_not_known(tmp_path: Path, folders: Path) -> None:
    shutil.copytree(folders / "rerank/1", tmp_path, dirs_exist_ok=True)
    (tmp_path / "config_sentence_transformers.json").write_text('{"activation_fn": "mine.Squash"}')
    with pytest.raises(ConfigError, match=r'activation_fn: given "mine.Squash", allowed: Identity, Sigmoid'):
        load(tmp_path)


def embeddings_alone(folder: Path, texts: list[str], how: str) -> Any:
    """Embeddings of length 1, each text in a batch of its own, by the library."""
    import torch

    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found = []
    for text in texts:
        with torch.inference_mode():
            tokens = tokenizer(text, return_tensors="pt", truncation=True, max_length=24)
            states = model(**tokens).last_hidden_state[0].numpy()
        made = {"mean": states.mean(0), "cls": states[0], "last": states[-1]}[how]
        found.append(made / np.linalg.norm(made))
    return np.array(found)


@pytest.mark.parametrize("how", ["mean", "cls", "last"])
def test_an_encoder_has_the_embeddings_of_sentence_transformers(folders: Path, how: str) -> None:
    backend = load(folders / "encoder/1", parameters={"pooling": how, "batch_tokens": 100})
    texts = make_texts(30)
    found = backend.run({"text": packed(texts)})["embedding"]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, embeddings_alone(folders / "encoder/1", texts, how), atol=2e-6)
    assert backend.run({"text": packed([])})["embedding"].shape == (0, 16)
    backend.close()


def test_what_sentence_transformers_has_saved_holds(tmp_path: Path, folders: Path) -> None:
    """The pooling, no normalization, the default prompt, lower case, and the longest text."""
    shutil.copytree(folders / "encoder/1", tmp_path, dirs_exist_ok=True)
    modules = [{"type": "sentence_transformers.models.Transformer", "path": ""}]
    modules.append({"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"})
    (tmp_path / "1_Pooling").mkdir()
    pooling = {"pooling_mode_cls_token": True, "include_prompt": True}
    saved = {"default_prompt_name": "query", "prompts": {"query": "what is "}}
    bert = {"max_seq_length": 8, "do_lower_case": True}
    for name, value in (
        ("modules.json", modules),
        ("1_Pooling/config.json", pooling),
        ("config_sentence_transformers.json", saved),
        ("sentence_bert_config.json", bert),
    ):
        (tmp_path / name).write_text(json.dumps(value))
    backend = load(tmp_path)
    found = backend.run({"text": packed(["A FINE day from here not far", "A FINE day from here"])})[
        "embedding"
    ]
    assert np.linalg.norm(found[0]) > 1.5
    np.testing.assert_allclose(
        found[0], found[1], atol=1e-6
    )  # six words and two marks, with the prompt's two
    wanted = embeddings_alone(folders / "encoder/1", ["what is a fine day from"], "cls")
    np.testing.assert_allclose(found[:1] / np.linalg.norm(found[0]), wanted, atol=2e-6)
    backend.close()
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps({**pooling, "include_prompt": False}))
    with pytest.raises(ConfigError, match="a default prompt that the pooling leaves out"):
        load(tmp_path)
    saved["default_prompt_name"] = "document"
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(saved))
    with pytest.raises(ConfigError, match='default_prompt_name: given "document", allowed: query'):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("sentiment", "text-classification"),
        ("rerank", "text-classification"),
        ("entities", "token-classification"),
        ("encoder", "feature-extraction"),
    ],
)
def test_json_is_what_the_pipeline_returns(folders: Path, name: str, task: str) -> None:
    backend = load(folders / name / "1", parameters={"json_output": "output", "pairs": False})
    assert {key: spec.shape for key, spec in backend.outputs.items()} == {"output": (1,)}
    texts = make_texts(12)
    found = backend.run({"text": packed(texts)})["output"]
    assert found.shape == (12, 1)
    wanted = transformers.pipeline(task, str(folders / name / "1"))(texts)
    for text, value in zip(found[:, 0], wanted, strict=True):
        hold_close(json.loads(text), value)
    assert backend.run({"text": packed([])})["output"].shape == (0, 1)
    backend.close()


def hold_close(found: Any, wanted: Any) -> None:
    """Numbers of JSON may differ in float32's last digits."""
    assert type(found) is type(wanted) or isinstance(found, float)
    if isinstance(found, dict):
        assert found.keys() == wanted.keys()
        for key, value in found.items():
            hold_close(value, wanted[key])
    elif isinstance(found, list):
        for one, other in zip(found, wanted, strict=True):
            hold_close(one, other)
    elif isinstance(found, float):
        assert found == pytest.approx(float(wanted), abs=1e-4)
    else:
        assert found == wanted


@pytest.fixture(scope="module")
def server(folders: Path) -> Iterator[Running]:
    root = folders.parent / "served"
    shutil.copytree(folders, root)
    shutil.copytree(folders / "encoder/1", root / "vectors/1")
    (root / "vectors/model.yaml").write_text("backend: transformers\n")
    with Running(root, folders.parent / "log", torch=True) as running:
        yield running


def post(server: Running, path: str, body: object) -> Any:
    request = urllib.request.Request(f"http://{server.http}{path}", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def test_a_folder_without_a_config_is_served_over_each_api(server: Running, folders: Path) -> None:
    texts = make_texts(5)
    classify = transformers.pipeline("text-classification", str(folders / "sentiment/1"))
    wanted = [one["label"] for one in classify(texts)]
    found = post(server, "/v1/models/sentiment:predict", {"instances": texts})["predictions"]
    assert [one["labels"] for one in found] == wanted
    tensor = {"name": "text", "shape": [5], "datatype": "BYTES", "data": texts}
    body = {"inputs": [tensor], "outputs": [{"name": "labels"}]}
    (output,) = post(server, "/v2/models/sentiment/infer", body)["outputs"]
    assert output["data"] == wanted
    pairs = {"inputs": {"text": texts[:2], "text_pair": texts[2:4]}}
    assert len(post(server, "/v1/models/rerank:predict", pairs)["outputs"]) == 2
    found = post(server, "/v1/models/entities:predict", {"instances": ["Linz is fine"]})["predictions"]
    assert [one["word"] for one in json.loads(found[0])] == ["Linz", "is", "fine"]


def test_an_encoder_is_asked_for_text_or_for_tensors(server: Running, folders: Path) -> None:
    """The text engine answers OpenAI's API, and `backend: transformers` those of tensors: with one vector."""
    texts = make_texts(4)
    wanted = embeddings_alone(folders / "encoder/1", texts, "mean")
    made = post(server, "/v1/embeddings", {"model": "encoder", "input": texts})["data"]
    np.testing.assert_allclose([one["embedding"] for one in made], wanted, atol=2e-6)
    tensor = {"name": "text", "shape": [4], "datatype": "BYTES", "data": texts}
    (output,) = post(server, "/v2/models/vectors/infer", {"inputs": [tensor]})["outputs"]
    assert (output["name"], output["shape"], output["datatype"]) == ("embedding", [4, 16], "FP32")
    np.testing.assert_allclose(np.reshape(output["data"], (4, 16)), wanted, atol=2e-6)
    found = post(server, "/v1/models/vectors:predict", {"instances": texts})["predictions"]
    np.testing.assert_allclose(found, wanted, atol=2e-6)


def test_folders_are_asked_for_scores(server: Running, folders: Path) -> None:
    """/v1/rerank, /v1/score and /v1/classify, whose models are found by the names of their tensors."""
    documents = make_texts(6)
    backend = load(folders / "rerank/1")
    pairs = {"text": packed(["what is Linz ?"] * 6), "text_pair": packed(documents)}
    scores = backend.run(pairs)["scores"][:, 0]
    backend.close()
    body = {"model": "rerank", "query": "what is Linz ?", "documents": documents}
    found = post(server, "/v1/rerank", body)["results"]
    assert [one["index"] for one in found] == np.argsort(-scores, kind="stable").tolist()
    for one in found:
        assert one["relevance_score"] == pytest.approx(scores[one["index"]], abs=1e-5)
    asked = {"model": "rerank", "text_1": "what is Linz ?", "text_2": documents}
    made = post(server, "/v1/score", asked)["data"]
    assert [one["score"] for one in made] == pytest.approx(scores.tolist(), abs=1e-5)
    classify = transformers.pipeline("text-classification", str(folders / "sentiment/1"))
    told = post(server, "/v1/classify", {"model": "sentiment", "input": documents})["data"]
    for one, wanted in zip(told, classify(documents), strict=True):
        assert (one["label"], one["num_classes"]) == (wanted["label"], 3)
        assert max(one["probs"]) == pytest.approx(wanted["score"], abs=1e-5)


def test_workers_that_need_torch_are_forked(server: Running) -> None:
    workers = {proc.name_of(pid): pid for pid in proc.children_of(server.pid)}
    assert {"fs:vectors/1#0", "fs:encoder/1#0", "fs:entities/1#0", "fs:fork server"} <= workers.keys()
    commands = {name: Path(f"/proc/{pid}/cmdline").read_bytes() for name, pid in workers.items()}
    cold = [name for name, command in commands.items() if b"fastserve.workers" in command]
    assert not cold, "started by exec, and imports torch for itself: see tests/warm.py"


def test_folders_of_mlserver_are_served_with_its_replies(folders: Path, tmp_path: Path) -> None:
    """MLServer 1.7's codec: one output of JSON for each row, whatever the input is called."""
    ports = {"http_port": free_port(), "grpc_port": free_port(), "metrics_port": free_port()}
    (tmp_path / "settings.json").write_text(json.dumps({"host": "127.0.0.1", **ports}))
    tasks = {"sentiment": "text-classification", "entities": "ner"}
    for name, task in tasks.items():
        (tmp_path / name).mkdir()
        extra = {"task": task, "pretrained_model": str(folders / name / "1")}
        kind = "mlserver_huggingface.HuggingFaceRuntime"
        told = {"name": name, "implementation": kind, "parameters": {"extra": extra}}
        (tmp_path / name / "model-settings.json").write_text(json.dumps(told))
    texts = make_texts(3)
    more = {"FASTSERVE_DRAIN_DELAY_S": "0"}
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-m", CLI, "mlserver", "start", str(tmp_path)]
        running = start(command, log.fileno(), torch=True, more=more)
    try:
        assert running.stdout is not None
        assert b"ready" in running.stdout.readline(), (tmp_path / "log").read_text()
        for name, task in tasks.items():
            wanted = transformers.pipeline(task, str(folders / name / "1"))(texts)
            for title, shape in (("args", [3]), ("array_inputs", [3, 1]), ("args", [3])):
                tensor = {"name": title, "shape": shape, "datatype": "BYTES", "data": texts}
                url = f"http://127.0.0.1:{ports['http_port']}/v2/models/{name}/infer"
                request = urllib.request.Request(url, json.dumps({"inputs": [tensor]}).encode())
                with urllib.request.urlopen(request, timeout=60) as reply:
                    (output,) = json.load(reply)["outputs"]
                assert (output["name"], output["shape"], output["datatype"]) == ("output", [3, 1], "BYTES")
                for text, value in zip(output["data"], wanted, strict=True):
                    hold_close(json.loads(text), value)
        running.send_signal(signal.SIGTERM)
        assert running.wait(STOP_S) == 0
    finally:
        running.kill()
        running.wait()
        assert running.stdout is not None
        running.stdout.close()
