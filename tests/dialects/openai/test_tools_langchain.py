"""langchain-openai, unmodified: tools and structured output of the demo's model. `make test-extras` has the
library."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from fastserve.demo import demo_repository
from tests.late import Late
from tests.running import Running

httpx, pydantic, messages = Late("httpx"), Late("pydantic"), Late("langchain_core.messages")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("langchain_openai", reason="there is no langchain-openai")
    folder = tmp_path_factory.mktemp("demo")
    shutil.copytree(demo_repository() / "scribe", folder / "models" / "scribe")
    with Running(folder / "models", folder / "log") as running:
        yield f"http://{running.http}/v1"


@pytest.fixture
def chat(url: str) -> Iterator[Any]:
    from langchain_openai import ChatOpenAI

    fields: dict[str, Any] = {"api_key": "none", "model": "scribe", "max_tokens": 300, "temperature": 0}
    with httpx.Client() as client:  # the library's own stays open
        yield ChatOpenAI(base_url=url, http_client=client, **fields)


@pytest.fixture(scope="module")
def visit() -> Any:
    days = (int, pydantic.Field(ge=1, le=9, description="How long"))
    return pydantic.create_model("Visit", __doc__="A visit", days=days, sunny=(bool, ...))


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_structured_output(chat: Any, visit: Any, method: str) -> None:
    found = chat.with_structured_output(visit, method=method).invoke("hi")
    assert isinstance(found, visit)


def test_structured_output_with_its_message(chat: Any, visit: Any) -> None:
    asked = chat.with_structured_output(visit, method="function_calling", include_raw=True, strict=True)
    found = asked.invoke("hi")
    assert found["parsing_error"] is None
    assert found["parsed"].model_dump() == found["raw"].tool_calls[0]["args"]


def test_a_conversation_with_tools(chat: Any, visit: Any) -> None:
    """A call that has to come, whole, and one by name, in a stream; its result; and words."""
    whole = chat.bind_tools([visit], tool_choice="any", parallel_tool_calls=False).invoke("hi")
    (call,) = whole.tool_calls
    assert visit.model_validate(call["args"])
    assert whole.response_metadata["finish_reason"] == "tool_calls"
    streamed = None
    for chunk in chat.bind_tools([visit], tool_choice="Visit").stream("hi"):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    (other,) = streamed.tool_calls
    assert other["args"] == call["args"]
    said = [messages.HumanMessage("hi"), streamed, messages.ToolMessage("ok", tool_call_id=other["id"])]
    words = chat.bind_tools([visit]).invoke(said, max_tokens=5)
    assert words.content
    assert words.tool_calls == []


def test_by_the_responses_api(url: str, visit: Any) -> None:
    """Words in a stream, a call that has to come, and a schema."""
    from langchain_openai import ChatOpenAI

    fields: dict[str, Any] = {"api_key": "none", "model": "scribe", "max_tokens": 300, "temperature": 0}
    with httpx.Client() as client:
        chat = ChatOpenAI(base_url=url, http_client=client, use_responses_api=True, **fields)
        assert "".join(chunk.text for chunk in chat.stream("hi", max_tokens=5))
        (call,) = (
            chat.bind_tools([visit], tool_choice="any", parallel_tool_calls=False).invoke("hi").tool_calls
        )
        assert visit.model_validate(call["args"])
        assert isinstance(chat.with_structured_output(visit, method="json_schema").invoke("hi"), visit)
