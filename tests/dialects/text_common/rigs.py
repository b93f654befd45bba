"""The scripted models of the conformance cases: what they say, whatever they are asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fastserve.backends.llm.protocols import TextRequest
from fastserve.codec.generation import Info
from tests.text_rig import Said, Scripted

SAMPLE_1: list[Said] = [
    (626, "am"), (263, " a"), (5176, " French"), (17739, " photograph"), (261, "er"), (2729, " based"),
    (297, " in"), (3681, " Paris"), (29889, "."), (13, "\n"), (29902, "I"), (505, " have"), (1063, " been"),
    (27904, " shooting"), (1951, " since"), (306, " I"), (471, " was"), (29871, " "), (29896, "1"),
    (29945, "5"),
]  # fmt: skip
SAMPLE_2: list[Said] = [(5122, ":"), (7552, ")"), (40, "I"), (2776, "'m"), (4102, " ")]
HELLO: list[Said] = [(100, "Hello"), (101, " world"), (2, "")]


@dataclass
class Rig:
    """One: what its model says, and the options of the dialect before it."""

    script: list[Said]
    eos: set[int] = field(default_factory=set)
    info: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    pause_s: float = 0.0

    def engine(self) -> Scripted:
        info = {"vocab_size": 1 << 20, "tokenizer": "words", "slots": 64, **self.info}
        return Scripted(self.script, eos=self.eos, info=Info(**info))


RIGS = {
    "llm-seed1": Rig(SAMPLE_1),
    "llm-seed2": Rig(SAMPLE_2, options={"full_text": True}),
    "llm-eos": Rig(HELLO, eos={2}),
    "llm-slow": Rig(HELLO, eos={2}, info={"slots": 1}, pause_s=3.0),
    "llm-utf8": Rig([(200, "中")]),
    "llm-limits": Rig([(7, "x")], info={"max_prompt_tokens": 8, "max_tokens": 16, "max_new_tokens": 6}),
}
PROFILES: dict[str, dict[str, Any]] = {
    "recommended": {},
    "mindie-2.2+": {"token_id_style": "list", "most_timeout_s": 65535, "seed_bits": 63},
}


def prompt_of(request: TextRequest) -> str:
    """Return the prompt of a scripted model whose engine takes text."""
    return request.note.text
