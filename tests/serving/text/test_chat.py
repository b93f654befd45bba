"""Chat templates: what transformers makes of them, and what they may not do."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastserve.errors import Kind, ServeError
from fastserve.serving.text import sandbox
from fastserve.serving.text.chat import ChatTemplate

CHATML = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, seen=false) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if not ns.seen and message.role == "user" %}
        {%- set ns.seen = true %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}
    {%- else %}
        {%- set content = message.content | map(attribute='text') | join('') %}
    {%- endif %}
    {%- if loop.first and message.role == 'system' and tools %}{% continue %}{%- endif %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' + content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>' }}
    {{ loop.index0 }}/{{ ns.last }}
{%- endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}<think></think>{%- endif %}
{% endif %}"""
LLAMA = """{% if messages[0]['role'] == 'system' %}
  {% set loop_messages = messages[1:] %}
  {% set system_message = messages[0]['content'] %}
{% else %}
{% set loop_messages = messages %}
{% endif %}
{{ bos_token }}{% for message in loop_messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate') }}
{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'].strip() + ' [/INST]' }}
{% else %}{% generation %}{{ ' ' ~ message['content'] ~ ' ' ~ eos_token }}{% endgeneration %}
{% endif %}
{% else %}nobody said anything{% endfor %}"""
MACROS = """{% macro row(key, value, depth=0) %}
{{ '  ' * depth }}{{ key }}={% if value is mapping %}
{% for k, v in value|dictsort %}{{ row(k, v, depth + 1) }}{% endfor %}
{% else %}{{ value|tojson(indent=2) }}{% endif %}
{% endmacro %}
{% for m in messages recursive %}{{ loop.depth }}{{ row(m.role, m) }}
{%- if m.parts %}{{ loop(m.parts) }}{% endif %}{% endfor %}
{{ '%s of %05.1f' % (messages|length, 2.5) }} {{ '{:>6}|{}'.format('a', "b") }} {{ 2 ** 10 }}
{{ [1] + [2] * 3 }}
{{ 'x'|center(7) }}|{{ messages|map(attribute='role')|unique|join(', ') }}{{ strftime_now('%%') }}
{% set d = dict(a=1) %}{{ d.a }}{{ dict.fromkeys is defined }}"""
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  héllo ☃ <b> "},
    {"role": "assistant", "content": "<think>so</think>\nyes"},
    {"role": "user", "content": "and?"},
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"a": [1, None, "é<"]}}}
CONFIG = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "lstrip": False},
    "tokenizer_class": "X",
    "model_max_length": 9,
}


def folder_of(path: Path, template: str | None, **config: Any) -> Path:
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    (path / "tokenizer_config.json").write_text(json.dumps({**CONFIG, **config}))
    return path


def render(
    folder: Path,
    messages: list[dict[str, Any]] = TALK,
    tools: list[dict[str, Any]] | None = None,
    prompt: bool = True,
    **more: Any,
) -> str:
    return asyncio.run(ChatTemplate(folder, "m").render(messages, tools, prompt, more))


@pytest.mark.parametrize(
    ("template", "messages", "tools", "more"),
    [
        (CHATML, TALK, None, {}),
        (CHATML, TALK, [TOOL], {"enable_thinking": False}),
        (CHATML, [{"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]}], None, {}),
        (LLAMA, TALK[:3], None, {}),
        (LLAMA.replace("messages[0]['role']", "'a'"), [], None, {}),
        (MACROS, [{"role": "a", "parts": [{"role": "b", "deep": {"x": {"y": [1, "é"]}}}]}], None, {}),
        ("{{ bos_token }}{% for m in messages %}{{ m['content'] }}\n{% endfor %}", TALK, None, {}),
    ],
)
def test_the_prompt_is_the_one_transformers_makes(
    tmp_path: Path, template: str, messages: list[dict[str, Any]], tools: Any, more: dict[str, Any]
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    for prompt in (True, False):
        given = {"add_generation_prompt": prompt, "bos_token": "<s>", "eos_token": "</s>", **more}
        expected = render_jinja_template([messages], tools, chat_template=template, **given)[0][0]
        assert render(folder_of(tmp_path, template), messages, tools, prompt, **more) == expected


@pytest.mark.parametrize(
    ("config", "files", "tools", "expected"),
    [
        ({"chat_template": "config"}, {}, None, "config"),
        ({"chat_template": "config"}, {"chat_template.jinja": "file"}, None, "file"),
        ({"chat_template": [{"name": "default", "template": "d"}]}, {}, [TOOL], "d"),
        (
            {"chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]},
            {},
            [TOOL],
            "t",
        ),
        ({}, {"chat_template.jinja": "d", "chat_templates/tool_use.jinja": "t"}, [TOOL], "t"),
        ({}, {"chat_template.jinja": "{{ eos_token }}{{ pad_token is defined }}"}, None, "</s>False"),
        (
            {},
            {"chat_template.jinja": "{{ bos_token }}", "special_tokens_map.json": '{"bos_token":"o"}'},
            [],
            "<s>",
        ),
    ],
)
def test_where_templates_are_found(
    tmp_path: Path, config: dict[str, Any], files: dict[str, str], tools: Any, expected: str
) -> None:
    folder_of(tmp_path, None, **config)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert render(tmp_path, tools=tools) == expected


LATE = """{% if own is defined %}{% set tools = own %}{% endif %}
{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}"""


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"chat_template.jinja": "{{ messages }} tools"}, ""),
        (
            {"chat_template.jinja": "{% for tool in tools %}{% endfor %}"},
            "{% for tool in tools %}{% endfor %}",
        ),
        ({"chat_template.jinja": "d", "chat_templates/tool_use.jinja": "{{ tools }}"}, "{{ tools }}"),
        ({"chat_template.jinja": LATE}, LATE),
    ],
)
def test_templates_that_show_tools(tmp_path: Path, files: dict[str, str], found: str) -> None:
    folder_of(tmp_path, None)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert asyncio.run(ChatTemplate(tmp_path, "m").find_tools()) == found


@pytest.mark.parametrize(
    ("template", "kind", "words"),
    [
        (None, Kind.UNIMPLEMENTED, "no chat template"),
        ("{{ raise_exception('no system role') }}", Kind.INVALID_ARGUMENT, "no system role"),
        ("{{ messages[9].content }}", Kind.INVALID_ARGUMENT, "no element 9"),
        ("{{ messages[0].content + 1 }}", Kind.INVALID_ARGUMENT, "concatenate"),
        ("{% if %}", Kind.FAILED_PRECONDITION, "cannot be read"),
        ("{{ messages.append(1) }}", Kind.FAILED_PRECONDITION, "unsafe"),
        ("{{ ''.__class__.__mro__ }}", Kind.FAILED_PRECONDITION, "unsafe"),
        ("{{ namespace(_a=1) }}", Kind.FAILED_PRECONDITION, "_a"),
    ],
)
def test_whose_fault_it_is(tmp_path: Path, template: str | None, kind: Kind, words: str) -> None:
    with pytest.raises(ServeError, match=words) as fault:
        render(folder_of(tmp_path, template))
    assert fault.value.kind is kind
    assert str(tmp_path) not in fault.value.message


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(90000) %}{% for i in range(90000) %}{% endfor %}{% endfor %}",
        "{% set x %}{% for i in range(9999) %}{% for i in range(9999) %}{% endfor %}{% endfor %}{% endset %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'a' * 100000000 }}",
        "{{ 100000000 * ['a'] }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ 'a' | center(1000000000) }}",
        "{{ 'a' | indent(1000000000) }}",
        "{{ 'a'.ljust(1000000000) }}",
        "{{ '%1000000000d' % 3 }}",
        "{{ '%*d' % (1000000000, 3) }}",
        "{{ '{:1000000000}'.format(3) }}",
        "{{ '{:{w}}'.format(3, w=1000000000) }}",
        "{% set n = namespace(s='aaaa') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set n = namespace(s='aaaa') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n=namespace(s='a') %}{% for i in range(99) %}{% set n.s=n.s.replace('a','aa') %}{% endfor %}",
        "{% for i in range(90000) %}{{ 'a' * 1000 }}{% endfor %}",
    ],
)
def test_a_template_that_uses_up_too_much_is_stopped(
    tmp_path: Path, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "MOST_S", 0.5)
    with pytest.raises(ServeError, match="was stopped") as fault:
        render(folder_of(tmp_path, template))
    assert fault.value.kind is Kind.FAILED_PRECONDITION


def test_a_template_at_the_edge_of_what_it_may_use_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "MOST_TURNS", 100)
    monkeypatch.setattr(sandbox, "MOST_SIZE", 1000)
    for template, most, words in [
        ("{% for i in range(N) %}{% endfor %}", 100, "more than 100 turns of its loops"),
        (
            "{% for i in range(60) %}{% endfor %}{% for i in range(N) %}{% endfor %}",
            40,
            "more than 100 turns",
        ),
        ("{{ 'a' * N }}", 1000, "something larger than 1000"),
        ("{% set text = 'a' ~ 'b' * N %}", 999, "something larger than 1000"),
        ("{{ 'a'.center(N) }}", 1000, "a number beyond 1000"),
        ("{{ 'a' * N }}{{ 'b' * 600 }}", 400, "it wrote more than 1000 characters"),
    ]:
        render(folder_of(tmp_path, template.replace("N", str(most))))
        with pytest.raises(ServeError, match=f"the chat template was stopped: .*{words}"):
            render(folder_of(tmp_path, template.replace("N", str(most + 1))))


def test_the_page_of_limits_says_what_a_template_may_use_up() -> None:
    page = Path("docs/security.md").read_text()
    (row,) = re.findall(r"^\| resources of a chat template \| (.*?) \|", page, re.MULTILINE)
    told = re.match(r"(\d+) iterations of its loops and macros, (\d+) s, (\d+) MiB of each text", row)
    assert told is not None, row
    assert [int(number) for number in told.groups()] == [
        sandbox.MOST_TURNS, sandbox.MOST_S, sandbox.MOST_SIZE >> 20,
    ]  # fmt: skip


def test_the_loop_turns_while_a_template_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The template's time is up when the loop has turned, and not before: its turns would take seconds."""
    monkeypatch.setattr(sandbox, "MOST_TURNS", 2_000_000)
    now, looked = [0.0], threading.Event()

    def look() -> float:
        found = now[0]
        looked.set()
        return found

    monkeypatch.setattr(sandbox, "time", SimpleNamespace(monotonic=look))
    endless = "{% for i in range(90000) %}{% for i in range(90000) %}{% endfor %}{% endfor %}"
    chat = ChatTemplate(folder_of(tmp_path, endless), "m")

    async def work() -> None:
        task = asyncio.ensure_future(chat.render(TALK, None, True, {}))
        while not looked.is_set():  # it has begun
            await asyncio.sleep(0.001)
        now[0] = 2 * sandbox.MOST_S
        with pytest.raises(ServeError, match="it took longer than"):
            await task

    asyncio.run(work())
