"""/v1/rerank, /v1/score and /v1/classify over models of tensors, in real workers."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from fastserve.dialects.openai.scoring import MOST_REPEATED, find_classes, find_pairs
from fastserve.repository.model_config import parse_model_config
from fastserve.repository.version import Version
from fastserve.settings import TextgenOptions
from tests.app.apps import RunningApp, write_app
from tests.dialects.text_common.serving import Hosted, Reply

SOURCE = """
import os, signal, time
import numpy as np

class Model:
    def __init__(self, config):
        self.outputs, self.inputs = config["parameters"]["outputs"], config["parameters"]["inputs"]
        self.counts = "int32" if "probabilities" in self.outputs else "int64"

    def run(self, inputs):
        columns = [[text.decode() for text in inputs[name].reshape(-1)] for name in self.inputs]
        if any("KILL" in text for column in columns for text in column):
            os.kill(os.getpid(), signal.SIGKILL)
        if any("RAISE" in text for column in columns for text in column):
            raise ValueError("this text is not scored")
        if any("SLOW" in text for column in columns for text in column):
            time.sleep(3)
        return {name: make(self, columns) for name, make in MAKERS.items() if name in self.outputs}


def overlap(one, other):
    # Words of the first text, as a share of the words of the second; NaN for no words.
    words = set(other.split())
    return len(words & set(one.split())) / len(words) if words else float("nan")

def score(model, columns):
    return np.array([overlap(*pair) for pair in zip(*columns)], np.float32)

def classes(model, columns):
    return np.array([[len(text), 5, text.count("a")] for text in columns[0]], np.float32)

def labels(model, columns):
    found = np.empty(len(columns[0]), object)
    found[:] = [text.upper().encode() for text in columns[0]]
    return found

MAKERS = {
    "scores": lambda model, columns: score(model, columns)[:, None],
    "score": score,
    "y": lambda model, columns: score(model, columns).astype(np.float64),
    "probabilities": classes,
    "labels": labels,
    "tokens": lambda model, columns: np.array(
        [sum(len(text.split()) for text in row) for row in zip(*columns)], model.counts
    ),
}
"""
TEXT = {"dtype": "bytes", "shape": []}
PAIR = {"text_pair": TEXT, "text": TEXT}
MODELS: dict[str, dict[str, Any]] = {
    "pairs": {"inputs": PAIR, "outputs": {"scores": {"dtype": "float32", "shape": [1]}}, "max_batch_size": 8},
    "counts": {
        "inputs": PAIR,
        "outputs": {"score": {"dtype": "float32", "shape": []}, "tokens": {"dtype": "int64", "shape": []}},
        "max_batch_size": 4,
    },
    "counted": {
        "inputs": {"text": TEXT},
        "outputs": {
            "tokens": {"dtype": "int32", "shape": []},
            "probabilities": {"dtype": "float32", "shape": [3]},
        },
        "max_batch_size": 4,
    },
    "single": {
        "inputs": {"question": {"dtype": "bytes", "shape": [1]}, "passage": TEXT},
        "outputs": {"y": {"dtype": "float64", "shape": []}, "labels": TEXT},
        "max_batch_size": 4,
    },
    "whole": {
        "inputs": {"text": {"dtype": "bytes", "shape": [-1]}, "text_pair": {"dtype": "bytes", "shape": [-1]}},
        "outputs": {"score": {"dtype": "float32", "shape": [-1]}},
        "max_batch_size": 0,
    },
    "classes": {
        "inputs": {"text": TEXT},
        "outputs": {"labels": TEXT, "probabilities": {"dtype": "float32", "shape": [3]}},
        "max_batch_size": 8,
    },
    "bare": {
        "inputs": {"x": {"dtype": "bytes", "shape": [1]}},
        "outputs": {"probabilities": {"dtype": "float32", "shape": [3]}},
        "max_batch_size": 4,
    },
}
DOCUMENTS = ["a dog", "a cat", "the cat sat", "nothing", "a cat"]
SHARES = [0.5, 1.0, 1 / 3, 0.0, 1.0]
QUERY = "a cat"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    folder = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1" / "model.py").write_text(SOURCE)
        inputs = ["text", "text_pair"] if "text_pair" in config["inputs"] else list(config["inputs"])
        parameters = {"inputs": inputs, "outputs": list(config["outputs"])}
        told = {"backend": "python", **config, "parameters": parameters}
        (folder / name / "model.yaml").write_text(yaml.safe_dump(told, sort_keys=False))
    with Hosted(folder, TextgenOptions(), ("kserve_v2", "tfserving", "textgen")) as opened:
        yield opened
        opened.settle()


def rerank(server: Hosted, path: str = "/v1/rerank", **more: Any) -> Reply:
    return server.post(path, {"model": "pairs", "query": QUERY, "documents": DOCUMENTS, **more})


def refused(reply: Reply, param: str | None, words: str, status: int = 400) -> None:
    error = reply.json["error"]
    assert (reply.status, error["param"]) == (status, param), reply
    assert words in error["message"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
@pytest.mark.parametrize("model", ["pairs", "single", "whole"])
def test_documents_come_by_their_scores(server: Hosted, path: str, model: str) -> None:
    said = rerank(server, path, model=model).json
    assert (said["model"], said["id"][:7]) == (model, "rerank-")
    assert [one["index"] for one in said["results"]] == [1, 4, 0, 2, 3]
    assert [one["document"]["text"] for one in said["results"]] == [DOCUMENTS[at] for at in (1, 4, 0, 2, 3)]
    scores = [one["relevance_score"] for one in said["results"]]
    assert scores == pytest.approx(sorted(SHARES, reverse=True), abs=1e-6)


def test_forms_of_a_rerank(server: Hosted) -> None:
    top = rerank(server, top_n=2, return_documents=False).json["results"]
    assert top == [{"index": 1, "relevance_score": 1.0}, {"index": 4, "relevance_score": 1.0}]
    assert len(rerank(server, top_n=0).json["results"]) == len(rerank(server, top_n=99).json["results"]) == 5
    objects = rerank(server, documents=[{"text": "a cat", "title": "x"}, "b"]).json["results"]
    assert [one["document"] for one in objects] == [{"text": "a cat"}, {"text": "b"}]
    (unknown, known) = rerank(server, documents=["", "b"]).json["results"][::-1]
    assert (unknown["index"], unknown["relevance_score"], known["relevance_score"]) == (0, None, 0.0)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank"])
def test_reranks_in_teis_form(server: Hosted, path: str) -> None:
    asked: dict[str, Any] = {"model": "pairs", "query": QUERY, "texts": ["", *DOCUMENTS[:2]]}
    sent = {"raw_scores": False, "truncate": True, "truncation_direction": "Right"}
    best = [{"index": 2, "score": 1.0}, {"index": 1, "score": 0.5}, {"index": 0, "score": None}]
    assert server.post(path, {**asked, **sent}).json == best
    (top,) = server.post(path, {**asked, "top_n": 1, "return_text": True}).json
    assert top == {"index": 2, "score": 1.0, "text": "a cat"}
    for more, param, words in (
        ({"texts": []}, "texts", "length >= 1"),
        ({"texts": [{"text": "a"}]}, "texts[0]", "expected str"),
        ({"texts": ["x"] * 2049}, "texts", "has 2049 texts, allowed: at most 2048"),
        ({"documents": ["a"]}, "texts", "cannot be beside `documents`"),
        ({"texts": None}, "documents", "is required"),
    ):
        refused(server.post(path, {**asked, **more}), param, words)


def test_a_model_that_counts_its_tokens_tells_them(server: Hosted) -> None:
    """As vLLM's and Jina's replies do; a model that tells no number has no usage."""
    count = sum(len(each.split()) for each in DOCUMENTS) + len(DOCUMENTS) * len(QUERY.split())
    told = rerank(server, model="counts", top_n=1).json
    assert told["usage"] == {"prompt_tokens": count, "total_tokens": count}
    assert len(told["results"]) == 1
    asked = {"model": "counts", "text_1": QUERY, "text_2": ["a dog", "one"]}
    assert server.post("/v1/score", asked).json["usage"]["total_tokens"] == 7
    asked = {"model": "counted", "input": ["a b", "c"]}
    assert server.post("/v1/classify", asked).json["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    for path, model in (("/v1/rerank", "pairs"), ("/v1/score", "pairs"), ("/v1/classify", "classes")):
        fields = {"query": "a", "documents": ["a"], "text_1": "a", "text_2": "a", "input": "a"}
        assert "usage" not in server.post(path, {"model": model, **fields}).json


def test_more_documents_than_a_batch_and_than_may_be(server: Hosted) -> None:
    documents = [f"a cat {'x ' * (at % 7)}" if at % 7 else "a cat" for at in range(2048)]
    found = rerank(server, documents=documents).json["results"]
    assert sorted(one["index"] for one in found) == list(range(2048))
    assert {one["index"] for one in found[:293]} == set(range(0, 2048, 7))
    refused(rerank(server, documents=["x"] * 2049), "documents", "has 2049 texts, allowed: at most 2048")
    half = "x" * (MOST_REPEATED // 2)
    assert rerank(server, query=half, documents=["x", "y"], return_documents=False).status == 200
    refused(rerank(server, query=half + "x", documents=["x", "y"]), "query", "once for each of 2 texts")


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
@pytest.mark.parametrize(
    ("ones", "others", "expected"),
    [
        (QUERY, DOCUMENTS, SHARES),
        ([QUERY], "a dog", [0.5]),
        (["a", "cat", "b"], ["a cat", "cat", "a"], [0.5, 1.0, 0.0]),
    ],
)
def test_scores_of_pairs(server: Hosted, path: str, ones: Any, others: Any, expected: list[float]) -> None:
    said = server.post(path, {"model": "pairs", "text_1": ones, "text_2": others}).json
    assert (said["object"], said["model"], said["id"][:6]) == ("list", "pairs", "score-")
    assert [(one["index"], one["object"]) for one in said["data"]] == [
        (at, "score") for at in range(len(expected))
    ]
    assert [one["score"] for one in said["data"]] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("path", ["/v1/classify", "/classify"])
def test_classes_of_texts(server: Hosted, path: str) -> None:
    said = server.post(path, {"model": "classes", "input": ["banana", "xy"]}).json
    assert (said["object"], said["model"], said["id"][:9]) == ("list", "classes", "classify-")
    assert said["data"] == [
        {"index": 0, "label": "BANANA", "probs": [6.0, 5.0, 3.0], "num_classes": 3},
        {"index": 1, "label": "XY", "probs": [2.0, 5.0, 0.0], "num_classes": 3},
    ]
    bare = server.post(path, {"model": "bare", "input": "banana"}).json["data"]
    assert bare == [{"index": 0, "label": "LABEL_0", "probs": [6.0, 5.0, 3.0], "num_classes": 3}]


def test_models_that_do_not_fit_are_named(server: Hosted) -> None:
    refused(rerank(server, model="classes"), None, "model 'classes' scores no pairs of texts: that takes two")
    refused(
        server.post("/v1/classify", {"model": "pairs", "input": "x"}), None, "'pairs' classifies no texts"
    )
    refused(rerank(server, model="nobody"), "model", "'nobody' does not exist", 404)
    refused(server.post("/rerank", {"query": "a", "documents": ["b"]}), "model", "is required")


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"documents": []}, "documents", "length >= 1"),
        ({"documents": ["x", 5]}, "documents[1]", "expected str | object"),
        ({"documents": [{"title": "x"}]}, "documents[0].text", "is required"),
        ({"documents": "x"}, "documents", "expected array"),
        ({"query": ["x"]}, "query", "expected str"),
        ({"top_n": -1}, "top_n", "expected int >= 0"),
        ({"max_tokens_per_doc": 10}, "max_tokens_per_doc", "is not supported"),
        ({"rank_fields": ["title"]}, "rank_fields", "is not supported"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "is not supported"),
        ({"activation": False}, "activation", "is not supported"),
        ({"priority": 3}, "priority", "is not supported"),
        ({"timeout": 0}, "timeout", "expected int >= 1"),
    ],
)
def test_keys_of_a_rerank_that_are_refused(server: Hosted, more: Any, param: str, words: str) -> None:
    refused(rerank(server, **more), param, words)


def test_texts_that_do_not_pair_are_refused(server: Hosted) -> None:
    for ones, others, param, words in (
        (["a", "b"], ["a", "b", "c"], "text_1", "has 2 texts, allowed: 1, or 3 as `text_2`"),
        ([], "a", "text_1", "has 0 texts, allowed: 1, or 1"),
        ([], [], "text_2", "must not be empty"),
        ("a", [], "text_2", "must not be empty"),
    ):
        refused(server.post("/score", {"model": "pairs", "text_1": ones, "text_2": others}), param, words)
    refused(server.post("/classify", {"model": "classes", "input": []}), "input", "must not be empty")
    assert rerank(server, activation=True, softmax=True, truncate_prompt_tokens=None).status == 200


def test_a_model_that_fails_or_dies_says_so(server: Hosted) -> None:
    refused(rerank(server, documents=["RAISE"]), None, "this text is not scored", 500)
    dead = rerank(server, documents=["KILL"])
    assert dead.status == 503, dead
    assert rerank(server).status == 200  # of the next worker


@pytest.mark.parametrize(("path", "model"), [("/v1/rerank", "pairs"), ("/v1/classify", "classes")])
def test_time_that_is_up(server: Hosted, path: str, model: str) -> None:
    """The body's `timeout` ends a request whose text is computed for longer."""
    asked = {"model": model, "query": QUERY, "documents": ["SLOW"], "input": "SLOW", "timeout": 1}
    refused(server.post(path, asked), None, "time", 504)
    assert server.post(path, {**asked, "documents": ["a"], "input": "a", "timeout": 60}).status == 200


@pytest.mark.parametrize("clients", [4, 64])
def test_many_clients_get_their_own_answers(server: Hosted, clients: int) -> None:
    def ask(at: int) -> bool:
        documents = [f"w{at}", f"w{at} other", "other"]
        results = rerank(server, query=f"w{at}", documents=documents).json["results"]
        return [(one["index"], one["relevance_score"]) for one in results] == [(0, 1.0), (1, 0.5), (2, 0.0)]

    with ThreadPoolExecutor(clients) as threads:
        assert all(threads.map(ask, range(clients), timeout=120))


def version_of(inputs: dict[str, Any], outputs: dict[str, Any], rows: int = 4) -> Version:
    def specs(given: dict[str, Any]) -> dict[str, Any]:
        return {name: {"dtype": dtype, "shape": shape} for name, (dtype, shape) in given.items()}

    config = {
        "backend": "python", "inputs": specs(inputs), "outputs": specs(outputs), "max_batch_size": rows
    }  # fmt: skip
    return Version("m", 1, Path(), parse_model_config(config))


TEXTS = {"a": ("bytes", []), "b": ("bytes", [1])}


@pytest.mark.parametrize(
    ("inputs", "outputs", "rows", "wanted"),
    [
        (TEXTS, {"x": ("float32", [])}, 4, "x"),
        (TEXTS, {"x": ("float32", []), "score": ("float64", [1])}, 4, "score"),
        (TEXTS, {"x": ("float32", []), "z": ("float64", [1])}, 4, None),  # which of them?
        (TEXTS, {"x": ("float32", [2])}, 4, None),
        (TEXTS, {"x": ("int64", [])}, 4, None),
        ({"a": ("bytes", [])}, {"x": ("float32", [])}, 4, None),
        ({"a": ("bytes", [2]), "b": ("bytes", [])}, {"x": ("float32", [])}, 4, None),
        ({"a": ("bytes", []), "b": ("float32", [])}, {"x": ("float32", [])}, 4, None),
        ({"a": ("bytes", [-1]), "b": ("bytes", [-1])}, {"x": ("float32", [-1])}, 0, "x"),
        ({"a": ("bytes", [2]), "b": ("bytes", [-1])}, {"x": ("float32", [-1])}, 0, None),
    ],
)
def test_models_of_pairs(inputs: Any, outputs: Any, rows: int, wanted: str | None) -> None:
    found = find_pairs(version_of(inputs, outputs, rows))
    assert (None if found is None else found.scores.name) == wanted
    assert found is None or [spec.name for spec in found.inputs] == ["a", "b"]


@pytest.mark.parametrize(
    ("outputs", "scores", "labels"),
    [
        ({"p": ("float32", [3])}, "p", None),
        ({"p": ("float32", [-1]), "score": ("float32", [])}, "p", None),
        ({"label": ("bytes", []), "score": ("float32", []), "probs": ("float32", [2])}, "probs",
         "label"),
        ({"score": ("float32", [])}, "score", None),
        ({"p": ("float32", [3]), "text": ("bytes", []), "labels": ("bytes", [1])}, "p", "labels"),
        ({"p": ("float32", [3]), "q": ("float32", [3])}, "", None),
        ({"label": ("bytes", [])}, "", None),
    ],
)  # fmt: skip
def test_models_of_classes(outputs: Any, scores: str, labels: str | None) -> None:
    found = find_classes(version_of({"a": ("bytes", [])}, outputs))
    if not scores:
        assert found is None
        return
    assert found is not None
    assert found.scores.name == scores
    assert (None if found.labels is None else found.labels.name) == labels
    assert find_classes(version_of(TEXTS, outputs)) is None


def test_functions_of_an_app_score_texts(tmp_path: Path) -> None:
    """An app's function of a path's name is its own. Documents are texts, as Infinity has them."""
    script = """
        import numpy as np

        Texts, Number = fastserve.Array["bytes"], fastserve.Array["float32"]

        @fastserve.model(batch=8)
        def judge(text: Texts, text_pair: Texts) -> Number:
            pairs = zip(text, text_pair)
            return np.array([len(set(a.split()) & set(b.split())) for a, b in pairs], np.float32)

        @fastserve.model
        def score(name: str) -> str:
            return name
    """
    file = write_app(tmp_path, script)
    with RunningApp(file, tmp_path / "log", "--textgen-rerank-flavor", "infinity") as app:
        found = app.ask("/v1/rerank", {"query": QUERY, "documents": ["a dog", "a cat"]})
        assert [(one["index"], one["relevance_score"]) for one in found["results"]] == [(1, 2.0), (0, 1.0)]
        assert [one["document"] for one in found["results"]] == ["a cat", "a dog"]
        assert app.ask("/v1/score", {"text_1": QUERY, "text_2": "cat"})["data"][0]["score"] == 1.0
        assert app.ask("/score", {"name": "mine"}) == "mine"
        with urllib.request.urlopen(f"http://{app.http}/openapi.json", timeout=60) as reply:
            paths = json.loads(reply.read())["paths"]
    assert (
        paths["/v1/rerank"]["post"]["requestBody"]["content"]["application/json"]["example"]["model"]
        == "judge"
    )
    assert "/v1/classify" not in paths
