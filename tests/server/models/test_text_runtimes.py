"""The demo's language model in numpy and with torch behind one server: every API answers alike."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fastserve.demo import demo_repository
from tests.late import Late
from tests.running import Running, until

torch, torch_files = Late("torch"), Late("safetensors.torch")
PROMPT = "LAWYER, n."
OURS, TORCHS = "ours", "torchs"
ADAPTER, MERGED = "poet", "merged"
"""An adapter of TORCHS, and the model whose weights have it."""


def copy_demo(folder: Path, runtime: str, more: str = "") -> None:
    shutil.copytree(demo_repository() / "scribe", folder)
    (folder / "model.yaml").write_text(f"backend: text\ntext: {{runtime: {runtime}{more}}}\n")


def add_adapter(adapted: Path, merged: Path) -> None:
    """Write an adapter into one version, and its products into the weights of another."""
    weights = torch_files.load_file(merged / "model.safetensors")
    place, tensors, dice = adapted / "adapters" / ADAPTER, {}, torch.Generator().manual_seed(3)
    for name in [name for name in weights if name.endswith(("q_proj.weight", "down_proj.weight"))]:
        outputs, inputs = weights[name].shape
        down, up = (torch.randn(shape, generator=dice) * 0.1 for shape in ((4, inputs), (outputs, 4)))
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        tensors |= {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up}
        weights[name] = weights[name].float() + 2 * (up @ down)
    place.mkdir(parents=True)
    torch_files.save_file(tensors, place / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
    (place / "adapter_config.json").write_text(json.dumps(said))
    torch_files.save_file(weights, merged / "model.safetensors")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("runtimes")
    for name, runtime in ((OURS, "numpy"), (MERGED, "numpy"), (TORCHS, "torch")):
        copy_demo(folder / "models" / name, runtime, ", pooling: mean, max_sequences: 8")
    add_adapter(folder / "models" / TORCHS / "1", folder / "models" / MERGED / "1")
    config = folder / "config.yaml"
    config.write_text(f"textgen: {{default_model: {TORCHS}}}")
    with Running(folder / "models", folder / "log", "--config", str(config), torch=True) as running:
        yield running.http


def post(server: str, target: str, body: Any) -> Any:
    head = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://{server}{target}", json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return reply.read()


def content(reply: bytes, model: str) -> Any:
    """A reply without what differs between two alike: times, ids, the model's name and rounding."""
    text = re.sub(
        r'"(id|created|prefill_time|decode_time)":\s*("[^"]*"|\d{6,}|[\d.]+|null)', "", reply.decode()
    )
    text = text.replace(f'"{model}"', '"model"')
    return re.sub(r"-?\d+\.\d{4,}(e-?\d+)?", lambda found: f"{float(found[0]):.3f}", text)


GREEDY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0}
SEEDED = {"max_new_tokens": 9, "do_sample": True, "seed": 3}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", GREEDY),
    "seeds": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 12, "temperature": 1, "seed": 7, "n": 3}),
    "logprobs": ("/v1/completions", GREEDY | {"logprobs": 3, "echo": True}),
    "stop": ("/v1/completions", GREEDY | {"stop": ["who"]}),
    "stream": ("/v1/completions", GREEDY | {"stream": True}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}], "seed": 1}),
    "generate": ("/v2/models/{model}/generate", {"text_input": PROMPT, "parameters": SEEDED}),
    "generate_stream": ("/v2/models/{model}/generate_stream", {"text_input": PROMPT, "parameters": SEEDED}),
}


@pytest.mark.parametrize(("target", "body"), CASES.values(), ids=CASES)
def test_both_runtimes_answer_alike(server: str, target: str, body: dict[str, Any]) -> None:
    made = [
        content(post(server, target.format(model=model), {"model": model, **body}), model)
        for model in (OURS, TORCHS)
    ]
    assert made[0] == made[1]
    assert len(made[0]) > 40


@pytest.mark.parametrize("case", ["completion", "seeds", "logprobs", "stream", "chat"])
def test_an_adapter_answers_as_the_model_that_has_it(server: str, case: str) -> None:
    target, body = CASES[case]
    asked = [(target, {**body, "model": model}, model) for model in (ADAPTER, MERGED, OURS)]
    with ThreadPoolExecutor(4) as pool:  # beside one without an adapter
        beside = pool.submit(post, server, target, {**body, "model": TORCHS})
        made = [content(post(server, where, given), model) for where, given, model in asked]
        assert content(beside.result(), TORCHS) == made[2]
    assert made[0] == made[1] != made[2]


def test_tgis_adapter_id(server: str) -> None:
    asked = {"inputs": PROMPT, "parameters": {"max_new_tokens": 12, "adapter_id": ADAPTER}}
    found = json.loads(post(server, "/generate", asked))["generated_text"]
    told = json.loads(post(server, "/v1/completions", GREEDY | {"model": MERGED, "max_tokens": 12}))
    assert found == told["choices"][0]["text"]


def test_vectors_are_alike(server: str) -> None:
    asked = {"input": [PROMPT, "In the beginning"], "encoding_format": "float"}
    ours, torchs = (
        json.loads(post(server, "/v1/embeddings", {"model": model, **asked})) for model in (OURS, TORCHS)
    )
    for one, other in zip(ours["data"], torchs["data"], strict=True):
        assert one["embedding"] == pytest.approx(other["embedding"], abs=1e-5)


@pytest.mark.parametrize("model", [OURS, TORCHS])
def test_a_client_that_leaves_ends_its_stream(server: str, model: str) -> None:
    link = http.client.HTTPConnection(server, timeout=60)
    body = {"model": model, "prompt": PROMPT, "max_tokens": 500, "ignore_eos": True, "stream": True}
    link.request("POST", "/v1/completions", json.dumps(body))
    reply = link.getresponse()
    assert reply.readline().startswith(b"data: ")
    reply.close()
    link.close()

    def cancelled() -> bool:
        with urllib.request.urlopen(f"http://{server}/metrics", timeout=60) as page:
            counted = f'sequences_total{{finish="cancelled",model="{model}",version="1"}} 1'
            return counted in page.read().decode()

    until(cancelled, "its sequence is cancelled")
