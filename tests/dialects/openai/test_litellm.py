"""litellm, unmodified: chats with tools and schemas, responses, Anthropic's messages and reranking. `make
test-extras` has the library."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fastserve.demo import demo_repository
from tests.dialects.openai.test_scoring import MODELS, SOURCE
from tests.running import Running

SCRIPT = """
import json, sys
import litellm, pydantic

url, infinity = sys.argv[1:]
place = {"api_base": url + "/v1", "api_key": "none"}
asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200, "temperature": 0}
chat = {"model": "openai/scribe", **place, **asked}
days = {"type": "integer", "minimum": 1, "maximum": 9}
schema = {"type": "object", "properties": {"days": days}, "required": ["days"]}
function = {"name": "visit", "description": "A visit", "parameters": schema}
tools = {"tools": [{"type": "function", "function": function}], "parallel_tool_calls": False}
response = {
    "model": "openai/scribe", **place, "input": "hi", "max_output_tokens": 200, "temperature": 0,
    "tools": [{"type": "function", **function}], "tool_choice": "required", "parallel_tool_calls": False,
}

class Visit(pydantic.BaseModel):
    days: int = pydantic.Field(ge=1, le=9)

def told(**fields):
    return of(litellm.completion(**{**chat, **fields}).choices[0])

def of(choice):
    call = (choice.message.tool_calls or [None])[0]
    called = choice.message.function_call if call is None else call.function
    return [choice.finish_reason, called.name, called.arguments]

def reranked(model, base, **more):
    asked = {"query": "a cat", "documents": ["a dog", "a cat"], "top_n": 1, **more}
    found = litellm.rerank(model=model, api_base=base, api_key="none", **asked)
    texts = [one["document"]["text"] if one.get("document") else None for one in found.results]
    return [[one["index"], one["relevance_score"], text] for one, text in zip(found.results, texts)]

whole = litellm.completion(**chat, **tools, tool_choice="required").choices[0]
call = whole.message.tool_calls[0]
past = [
    *asked["messages"], whole.message.model_dump(),
    {"role": "tool", "tool_call_id": call.id, "content": "done"},
]
named = {"type": "function", "function": {"name": "visit"}}
chunks = list(litellm.completion(**chat, **tools, tool_choice=named, stream=True))
events = list(litellm.responses(**response, stream=True))
found = {
    "whole": of(whole),
    "streamed": of(litellm.stream_chunk_builder(chunks, messages=asked["messages"]).choices[0]),
    "functions": told(functions=[function], function_call={"name": "visit"}),
    "vllm": told(model="hosted_vllm/scribe", **tools, tool_choice=named),
    "anthropic": told(model="anthropic/scribe", api_base=url, **tools, tool_choice="required"),
    "after": litellm.completion(**{**chat, "messages": past}, **tools).choices[0].message.content,
    "schema": litellm.completion(**chat, response_format=Visit).choices[0].message.content,
    "response": [
        [item.type, item.name, item.arguments] for item in litellm.responses(**response).output
    ],
    "events": [str(event.type.value) for event in events],
    "text": litellm.text_completion(
        model="text-completion-openai/scribe", **place, prompt="hi", max_tokens=3
    ).choices[0].text,
    "rerank": [
        *[reranked(f"{name}/pairs", url) for name in ("hosted_vllm", "cohere", "jina_ai", "huggingface")],
        *[reranked("infinity/pairs", base) for base in (infinity, infinity + "/v1")],
        reranked("infinity/pairs", url, return_documents=False),
    ],
}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the library has said, in a process of its own: it keeps its clients open."""
    if importlib.util.find_spec("litellm") is None:
        pytest.skip("there is no litellm")
    folder = tmp_path_factory.mktemp("demo")
    shutil.copytree(demo_repository() / "scribe", folder / "models" / "scribe")
    pairs = folder / "models" / "pairs"
    (pairs / "1").mkdir(parents=True)
    (pairs / "1" / "model.py").write_text(SOURCE)
    parameters = {"inputs": ["text", "text_pair"], "outputs": list(MODELS["counts"]["outputs"])}
    told = {"backend": "python", **MODELS["counts"], "parameters": parameters}
    (pairs / "model.yaml").write_text(yaml.safe_dump(told, sort_keys=False))
    script = Path(folder / "ask.py")
    script.write_text(SCRIPT)
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # it asks the internet otherwise
    scoring = Path(shutil.copytree(pairs, folder / "scoring" / "pairs")).parent
    flavor = "--textgen-rerank-flavor", "infinity"
    with (
        Running(folder / "models", folder / "log") as running,
        Running(scoring, folder / "other.log", *flavor) as other,
    ):
        ran = subprocess.run(
            [sys.executable, str(script), f"http://{running.http}", f"http://{other.http}"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
        )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("way", ["whole", "streamed", "functions", "vllm", "anthropic"])
def test_calls_of_tools(found: Any, way: str) -> None:
    finish, name, arguments = found[way]
    assert (finish, name) == ("function_call" if way == "functions" else "tool_calls", "visit")
    assert json.loads(arguments)["days"] in range(1, 10)


def test_answers_after_a_call_and_of_a_schema(found: Any) -> None:
    assert found["after"]
    assert found["text"]
    assert json.loads(found["schema"])["days"] in range(1, 10)


def test_responses(found: Any) -> None:
    ((kind, name, arguments),) = found["response"]
    assert (kind, name) == ("function_call", "visit")
    assert json.loads(arguments)["days"] in range(1, 10)
    assert found["events"][-3:] == [
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_reranking(found: Any) -> None:
    """In the forms of vLLM, Cohere, Jina, TEI and Infinity."""
    assert found["rerank"] == [[[1, 1.0, "a cat"]]] * 6 + [[[1, 1.0, None]]]
