"""Text models without workers: a TextEngine stepped on the test's own loop, behind the engine's face.

    with LocalEngine() as engine:
        engine.add("m1", Scripted([(100, "Hello"), (101, " world"), (2, None)], eos={2}))
        texts = Texts(engine.context)                    # or a dialect: SPEC.build(engine.context, options)
        async with listening(dialect) as port: ...       # over real sockets
        await engine.idle()                              # every sequence has ended, every slot is free

`Scripted` answers every prompt with the same tokens, within the limits of its Info.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from fastserve._ext.text_tokens import Flow
from fastserve.backends.llm.protocols import Out, TextEngine, TextRequest
from fastserve.codec.generation import Extra, Finish, Heard, Info, Record, TextNote, write_text
from fastserve.demo import demo_repository
from fastserve.errors import Kind, Reason, ServeError
from fastserve.metrics import Registry
from fastserve.net.listener import HttpListener
from fastserve.repository.catalog import Catalog
from fastserve.repository.model_config import ModelConfig
from fastserve.repository.version import Version, VersionState
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.dialect import Dialect, ServingContext
from fastserve.settings import Limits

SMALL = {
    "hidden_size": 32,
    "head_dim": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
Said = tuple[int, str | None]
"""A token and its text; None leaves the text to the model's tokenizer, or says that it has none."""


class Scripted:
    """A TextEngine that says `script`: the tokens themselves, or what gives them for a request. Where the
    script ends, its last token goes on, for as long as the request wants. `fail_after` tokens it fails."""

    def __init__(
        self,
        script: Iterable[Said] | Callable[[TextRequest], Iterable[Said]],
        *,
        eos: set[int] | None = None,
        info: Info | None = None,
        fail_after: int = -1,
        took_us: int = 1000,
    ) -> None:
        self._script, self._eos, self._fail_after, self._took_us = script, eos or set(), fail_after, took_us
        given = info or Info(vocab_size=1 << 20, tokenizer="words", slots=64)
        self.info = msgspec.structs.replace(given, eos_ids=sorted(self._eos))
        self._running: dict[int, Saying] = {}
        self.seen: list[TextRequest] = []
        """Every request there was."""
        self.stepped = 0

    def submit(self, request: TextRequest) -> None:
        self.seen.append(request)
        said = self._script(request) if callable(self._script) else self._script
        self._running[request.rid] = Saying(request, _for_ever(said))

    def cancel(self, rid: int, why: Finish) -> None:
        if rid in self._running:
            self._running[rid].ended = why

    def step(self, out: Out) -> None:
        self.stepped += 1
        for rid, one in list(self._running.items()):
            if self._advance(one, out):
                del self._running[rid]

    def _advance(self, one: Saying, out: Out) -> bool:
        rid, note = one.request.rid, one.request.note
        if note.deadline_ns and time.monotonic_ns() >= note.deadline_ns:
            one.ended = Finish.TIMEOUT
        if one.ended:
            out.end(rid, one.ended)
        elif one.count == self._fail_after:
            one.ended = Finish.FAILED
            out.end(rid, Finish.FAILED, write_text(Extra(message="the engine failed", kind=13)))
        elif out.room(rid):
            token, text = next(one.script)
            one.count += 1
            one.ended = self._finish(token, one.count, note)
            extra = b"" if text is None else write_text(Extra(text=text))
            out.token(rid, token, one.ended, self._took_us, extra)
        return bool(one.ended)

    def _finish(self, token: int, count: int, note: TextNote) -> Finish:
        sampling = note.sampling
        if token in self._eos and not sampling.ignore_eos:
            return Finish.EOS
        if token in sampling.stop_ids:
            return Finish.STOP
        return Finish.LENGTH if count >= sampling.max_new_tokens else Finish.NONE

    def pending(self) -> int:
        return len(self._running)

    def close(self) -> None:
        self._running.clear()


class Saying:
    """One that runs."""

    def __init__(self, request: TextRequest, script: Iterator[Said]) -> None:
        self.request, self.script = request, script
        self.count = 0
        self.ended = Finish.NONE


def _for_ever(said: Iterable[Said]) -> Iterator[Said]:
    token = None
    for token in said:
        yield token
    if token is not None:
        yield from itertools.repeat(token)


class LocalRun:
    """A front's part of a sequence (codec.text.Run)."""

    def __init__(self, loop: Loop, rid: int, heard: Heard) -> None:
        self._loop, self._rid, self.heard = loop, rid, heard
        self.behind = 0
        self.flow: Flow | None = None

    def taken(self, records: int) -> None:
        self.behind -= records
        assert self.behind >= 0
        self._loop.wake()

    def cancel(self, why: Finish = Finish.CANCELLED) -> None:
        self._loop.engine.cancel(self._rid, why)
        self._loop.wake()


class Loop:
    """One TextEngine, stepped while anything is pending; one call of `heard` a sequence and step, or rather
    every `steps` steps."""

    def __init__(self, engine: TextEngine, reader_tokens: int, pause_s: float, steps: int) -> None:
        self.engine, self._reader_tokens, self._pause_s, self._steps = engine, reader_tokens, pause_s, steps
        self.runs: dict[int, LocalRun] = {}
        self.most_waiting = 1024
        self._rids = itertools.count(1)
        self._came: dict[int, list[Record]] = {}
        self._timer: asyncio.Handle | None = None

    def generate(self, ids: Sequence[int], note: TextNote, heard: Heard) -> LocalRun:
        if len(self.runs) >= self.most_waiting:
            raise ServeError(
                Kind.UNAVAILABLE, "too many requests are waiting", reason=Reason.QUEUE_FULL, retry_after_s=1.0
            )
        rid = next(self._rids)
        note = msgspec.msgpack.decode(write_text(note), type=TextNote)  # as it arrives in a worker
        self.engine.submit(TextRequest(rid, list(ids), note, time.monotonic_ns()))
        self.runs[rid] = LocalRun(self, rid, heard)
        self.wake()
        return self.runs[rid]

    def wake(self) -> None:
        if self._timer is None and self.engine.pending():
            self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._turn)

    def _turn(self) -> None:
        self._timer = None
        for _ in range(self._steps):
            self.engine.step(self)
        came, self._came = self._came, {}
        for rid, records in came.items():
            run = self.runs[rid]
            run.behind += len(records)
            if records[-1][1]:
                del self.runs[rid]
            if run.flow is not None and run.flow.take(records, time.monotonic_ns()):
                run.taken(len(records))
            else:
                run.heard(records)
        if any(self.room(rid) for rid in self.runs):
            self.wake()

    # --- backends.llm.protocols.Out

    def token(
        self, rid: int, token: int, finish: Finish = Finish.NONE, took_us: int = 0, extra: bytes = b""
    ) -> None:
        self._came.setdefault(rid, []).append((token, int(finish), took_us, extra))

    def end(self, rid: int, finish: Finish, extra: bytes = b"") -> None:
        self._came.setdefault(rid, []).append((-1, int(finish), 0, extra))

    def room(self, rid: int) -> bool:
        return self.runs[rid].behind + len(self._came.get(rid, ())) < self._reader_tokens


class LocalEngine:
    """An engine (fastserve.engine.Engine) over TextEngines of this process."""

    def __init__(self) -> None:
        self.catalog = Catalog()
        self.loops: dict[Version, Loop] = {}
        self.registry = Registry()
        self.context = ServingContext(engine=self, registry=self.registry)

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.registry.close()

    def add(
        self,
        name: str,
        engine: TextEngine,
        folder: Path | None = None,
        *,
        reader_tokens: int = 256,
        pause_s: float = 0.0,
        steps: int = 1,
    ) -> Version:
        """Serve a model; `folder` is where its tokenizer.json lies."""
        version = Version(name, 1, folder or Path(tempfile.gettempdir()), ModelConfig(backend="onnx"))
        self.loops[version] = Loop(engine, reader_tokens, pause_s, steps)
        self.catalog.put(version)
        for state in (VersionState.LOADING, VersionState.AVAILABLE):
            self.catalog.move(version, state)
        return version

    def remove(self, version: Version) -> None:
        """Its life is over."""
        for state in (VersionState.UNLOADING, VersionState.END):
            self.catalog.move(version, state)
        del self.loops[version]

    def text_info(self, version: Version) -> Info | None:
        return self.loops[version].engine.info if version in self.loops else None

    def generate(self, version: Version, ids: Sequence[int], note: TextNote, heard: Heard) -> LocalRun:
        return self.loops[version].generate(ids, note, heard)

    async def infer(self, version: Version, request: InferRequest) -> InferResponse:
        raise NotImplementedError

    def stream(self, version: Version, request: InferRequest) -> AsyncIterator[InferResponse]:
        raise NotImplementedError

    async def idle(self, limit_s: float = 60.0) -> None:
        """Return when no sequence runs."""
        end = time.monotonic() + limit_s
        while any(loop.runs or loop.engine.pending() for loop in self.loops.values()):
            assert time.monotonic() < end, "sequences run on"
            await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def listening(*dialects: Dialect) -> AsyncIterator[int]:
    """The port of an HTTP listener that speaks these dialects."""
    listener = HttpListener("127.0.0.1", 0, list(dialects), Limits())
    await listener.open()
    for dialect in dialects:
        dialect.open()
    try:
        yield listener.address[1]
    finally:
        for dialect in dialects:
            dialect.close()
        await listener.drain(5.0)
        await listener.close()


def copy_small(folder: Path) -> Path:
    """Write the demo's scribe to `folder`, with its tokens and a fortieth of its weights, which nobody has
    trained; return the folder. A token takes 0.3 ms of CPU, and scribe's 3.5."""
    import numpy as np  # a front's tests have none

    model = Path(shutil.copytree(demo_repository() / "scribe", folder))
    (model / "model.yaml").write_text("backend: text\ntext: {runtime: numpy}\n")
    config = model / "1" / "config.json"
    said = {**json.loads(config.read_text()), **SMALL}
    config.write_text(json.dumps(said))
    vocabulary, hidden, inner, dim = (
        said[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim")
    )
    queries, keys, layer = (
        dim * said["num_attention_heads"],
        dim * said["num_key_value_heads"],
        "model.layers.0",
    )
    shapes = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "lm_head.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
        f"{layer}.input_layernorm.weight": (hidden,),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
        f"{layer}.self_attn.q_proj.weight": (queries, hidden),
        f"{layer}.self_attn.k_proj.weight": (keys, hidden),
        f"{layer}.self_attn.v_proj.weight": (keys, hidden),
        f"{layer}.self_attn.o_proj.weight": (hidden, queries),
        f"{layer}.mlp.gate_proj.weight": (inner, hidden),
        f"{layer}.mlp.up_proj.weight": (inner, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, inner),
    }
    drawn = np.random.default_rng(7)
    tensors = {
        name: (np.ones(shape) if len(shape) == 1 else drawn.normal(0, 0.2, shape)).astype("<f4").tobytes()
        for name, shape in shapes.items()
    }
    ends = list(itertools.accumulate(map(len, tensors.values()), initial=0))
    header = {
        name: {"dtype": "F32", "shape": shapes[name], "data_offsets": place}
        for name, place in zip(tensors, itertools.pairwise(ends), strict=True)
    }
    written = json.dumps(header).encode()
    weights = len(written).to_bytes(8, "little") + written + b"".join(tensors.values())
    (model / "1" / "model.safetensors").write_bytes(weights)
    return model
