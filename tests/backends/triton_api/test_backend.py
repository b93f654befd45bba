"""Models written for Triton's Python backend, in real workers: they run unchanged, and fail alone."""

from __future__ import annotations

import asyncio
import json
import re

import numpy as np
import pytest

from fastserve.errors import Kind, ServeError
from fastserve.repository.triton_config.reading import config_json
from fastserve.tensor import DTYPES, Tensor
from tests.backends.triton_api.rig import ANY, NAMES, TEXT, entry, model, repeating, request, run, serving

PAIR = [entry(name, "TYPE_INT32", 2) for name in ("A", "B")]
BOTH = [entry(name, "TYPE_INT32", 2) for name in ("SUM", "DIFF")]
TEXTS = [{"name": "IN", **TEXT}], [{"name": "OUT", **TEXT}]
FAILED = "Failed to process the request(s) for model 'trouble_0', message: "
AT = "\n\nAt:\n"
TYPES = [name for name in NAMES if name not in ("TYPE_BYTES", "TYPE_COMPLEX64", "TYPE_COMPLEX128")]
TYPES = [name for name in TYPES if not name.startswith(("TYPE_FLOAT", "TYPE_BFLOAT"))]


def words(error: ServeError) -> str:
    """Its own words, without the place."""
    return error.message.partition(AT)[0]


def test_rows_of_many_requests_run_together(tmp_path):
    async def work() -> None:
        async with serving(tmp_path, model("add_sub", PAIR, BOTH, max_batch_size=8)) as at:
            rows = [np.array([[i, 2 * i]], np.int32) for i in range(20)]
            found = await asyncio.gather(*(at.ask("add_sub", {"A": r, "B": r}) for r in rows))
            for row, outputs in zip(rows, found, strict=True):
                np.testing.assert_array_equal(outputs["SUM"], 2 * row)
                np.testing.assert_array_equal(outputs["DIFF"], 0 * row)
            one = await at.ask("add_sub", {"A": rows[1], "B": rows[2]}, outputs=("DIFF",))
            assert list(one) == ["DIFF"]

    run(work())


def test_echo_of_every_type(tmp_path):
    ins = [entry(f"IN{i}", name, -1) for i, name in enumerate(TYPES)]
    outs = [entry(f"OUT{i}", name, -1) for i, name in enumerate(TYPES)]

    async def work() -> None:
        async with serving(tmp_path, model("echo", ins, outs)) as at:
            for count in (3, 0):
                given = {}
                for number, name in enumerate(TYPES):
                    dtype = DTYPES[NAMES[name]]
                    raw = (
                        b"\2\0\0\0\xff\0" * count
                        if dtype.name == "bytes"
                        else b"\1" * dtype.item_bytes * count
                    )
                    given[f"IN{number}"] = Tensor(dtype, (count,), raw)
                response = await at.engine.infer(at.version("echo"), request(given))
                for number in range(len(TYPES)):
                    sent, got = given[f"IN{number}"], response.outputs[f"OUT{number}"]
                    assert (got.dtype, got.shape, bytes(got.data)) == (sent.dtype, sent.shape, sent.data)
                response.release()

    run(work())


def test_what_a_request_says_of_itself(tmp_path):
    outs = [{"name": name, **TEXT} for name in ("OUT", "ARGS")]
    inputs = [{"name": "IN", **TEXT}, {"name": "MORE", **TEXT, "optional": True}]

    async def work() -> None:
        async with serving(tmp_path, model("told", inputs, outs)) as at:
            version = at.version("told")
            response = await at.engine.infer(version, request({"IN": [b"x"]}))
            said = json.loads(bytes(response.outputs["OUT"].data)[4:])
            args = json.loads(bytes(response.outputs["ARGS"].data)[4:])
            assert response.parameters == {"n": 1, "s": "x", "b": True}
            response.release()
            plain = {"id": "", "corr": 0, "flags": 0, "timeout": 0, "priority": 0, "params": {}}
            known = {"wanted": ["ARGS", "OUT"], "model": ["told", 1], "cancelled": False, "inputs": ["IN"]}
            assert said == plain | known
            assert args == {
                "model_config": "told",
                "model_instance_kind": "CPU",
                "model_instance_name": "told_0",
                "model_instance_device_id": "0",
                "model_version": "1",
                "model_name": "told",
            }
            params = {"foo": "bar", "n": 3, "b": True, "f": 1.5}
            more = {"request_id": "rq", "sequence_id": "s-1", "sequence_start": True, "sequence_end": True}
            found = await at.ask(
                "told",
                {"IN": [b"x"], "MORE": [b"y"]},
                outputs=("OUT",),
                parameters=params,
                timeout_us=5000,
                priority=1,
                **more,
            )
            said = json.loads(found["OUT"][0])
            asked = {"id": "rq", "corr": "s-1", "flags": 3, "timeout": 5000, "priority": 1, "params": params}
            assert said == known | asked | {"wanted": ["OUT"], "inputs": ["IN", "MORE"]}

    run(work())


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("UNKNOWN", Kind.UNKNOWN),
        ("INTERNAL", Kind.INTERNAL),
        ("NOT_FOUND", Kind.NOT_FOUND),
        ("INVALID_ARG", Kind.INVALID_ARGUMENT),
        ("UNAVAILABLE", Kind.UNAVAILABLE),
        ("UNSUPPORTED", Kind.UNIMPLEMENTED),
        ("ALREADY_EXISTS", Kind.ALREADY_EXISTS),
    ],
)
def test_an_error_reaches_its_own_caller(trouble, word, kind):
    async def work() -> None:
        async with trouble() as at:
            good, bad = await asyncio.gather(
                at.ask("trouble", {"IN": [[b"fine"]]}),
                at.ask("trouble", {"IN": [[word.encode()]]}),
                return_exceptions=True,
            )
            assert good["OUT"].tolist() == [b"fine"]
            assert (bad.kind, bad.message) == (kind, f"the model says {word}")

    run(work())


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("!raises", f"{FAILED}ValueError: kaboom"),
        ("!few", f"{FAILED}ValueError: execute returned 0 responses for 1 requests"),
        ("!strange", f"{FAILED}TypeError: execute returned str, not InferenceResponse"),
        ("!none", "the model gave no response to this request"),
        (
            "!reschedules",
            f"{FAILED}TritonModelException: set_release_flags: given 2, allowed: 1 "
            "(TRITONSERVER_REQUEST_RELEASE_ALL): requests are not rescheduled on this server",
        ),
        (
            "!measures",
            f"{FAILED}TritonModelException: "
            "Error when creating MetricFamily: "
            "'nv_inference_count' cannot be the name of a model's own counter",
        ),
        ("!forgets", "the model gave no response to this request"),
        (
            "!misnamed",
            f"{FAILED}TritonModelException: tensor 'OUT': numpy's complex128 is no Triton datatype",
        ),
    ],
)
def test_a_model_that_misbehaves(trouble, word, text):
    async def work() -> None:
        async with trouble() as at:
            with pytest.raises(ServeError) as caught:
                await at.ask("trouble", {"IN": [[word.encode()]]})
            assert (caught.value.kind, words(caught.value)) == (Kind.INTERNAL, text)
            assert (await at.ask("trouble", {"IN": [[b"ok"]]}))["OUT"].tolist() == [b"ok"]

    run(work())


def test_an_exception_reaches_the_whole_batch_once(trouble):
    async def work() -> None:
        async with trouble() as at:
            asked = [at.ask("trouble", {"IN": [[b"!raises"]]}) for _ in range(4)]
            for error in await asyncio.gather(*asked, return_exceptions=True):
                assert words(error) == f"{FAILED}ValueError: kaboom"
                place = r"  trouble/1/model\.py\(\d+\): raises\n  trouble/1/model\.py\(\d+\): execute\n"
                assert re.fullmatch(place, error.message.partition(AT)[2])

    run(work())


@pytest.mark.parametrize(("word", "found"), [("!later", b"late"), ("!twice", b"first")])
def test_answers_through_a_sender(trouble, word, found):
    async def work() -> None:
        async with trouble() as at:
            answer = at.ask("trouble", {"IN": [[word.encode()]]})
            assert (await answer)["OUT"].tolist() == [found]

    run(work())


@pytest.mark.parametrize("word", ["!exits", "!leaves", "!segfaults"])
def test_a_worker_that_dies_fails_its_request_and_comes_back(trouble, word):
    async def work() -> None:
        async with trouble() as at:
            with pytest.raises(ServeError) as caught:
                await at.ask("trouble", {"IN": [[word.encode()]]})
            assert caught.value.kind is Kind.UNAVAILABLE
            assert (await at.ask("trouble", {"IN": [[b"ok"]]}))["OUT"].tolist() == [b"ok"]

    run(work())


def test_a_hanging_execute_is_killed(trouble):
    async def work() -> None:
        async with trouble(run_timeout_ms=2000) as at:
            with pytest.raises(ServeError):
                await at.ask("trouble", {"IN": [[b"!hangs"]]})
            assert (await at.ask("trouble", {"IN": [[b"ok"]]}))["OUT"].tolist() == [b"ok"]

    run(work())


@pytest.fixture
def trouble(tmp_path):
    ins, outs = [entry("IN", "TYPE_STRING", 1)], [entry("OUT", "TYPE_STRING", 1)]
    return lambda **fields: serving(tmp_path, model("trouble", ins, outs, max_batch_size=4), **fields)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raises", "RuntimeError: cannot start"),
        ("exits", "exit code 5"),
        ("leaves", re.escape("the model called exit('enough')")),
        ("segfaults", "SIGSEGV"),
        ("hangs", "load_timeout"),
    ],
)
def test_trouble_while_loading(tmp_path, how, text):
    async def work() -> None:
        config = model("load_trouble", parameters={"how": {"string_value": how}})
        with pytest.raises(ServeError, match=text):
            async with serving(tmp_path, config, load_timeout_s=1.0 if how == "hangs" else 30.0):
                pass

    run(work())


def test_inputs_a_model_keeps_stay_as_they_were(tmp_path):
    async def work() -> None:
        async with serving(tmp_path, model("keeps")) as at:
            await at.ask("keeps", {"IN": np.arange(5, dtype=np.int32)})
            for value in range(1, 10):
                before = await at.ask("keeps", {"IN": np.full(5, value, np.int32)})
                wanted = [value - 1] * 5 if value > 1 else list(range(5))
                assert before["OUT"].tolist() == wanted
            queue = at.queue("keeps")
            assert queue.ring.outstanding() == 0
            assert queue.ring.slab_pages_used() == 0  # what it keeps is its own

    run(work())


def test_auto_complete_and_async_execute(tmp_path):
    async def work() -> None:
        async with serving(tmp_path, model("complete", [], [])) as at:
            assert list(at.version("complete").inputs) == ["IN"]
            found = await at.ask("complete", {"IN": np.array([1, 2], np.float32)})
            assert found["OUT"].tolist() == [2, 4]

    run(work())


def complete_queue(how):
    return model("complete_queue", [], [], parameters={"how": {"string_value": how}})


def test_auto_complete_makes_batches(tmp_path):
    async def work() -> None:
        async with serving(tmp_path, complete_queue("batches")) as at:
            version = at.version("complete_queue")
            assert (version.batching, version.config.max_batch_size) == (True, 4)
            assert config_json(version.config)["max_batch_size"] == 4
            asked = [at.ask("complete_queue", {"IN": np.ones((1, 1), np.int32)}) for _ in range(12)]
            together = [int(found["OUT"][0, 0]) for found in await asyncio.gather(*asked)]
            assert max(together) == 4

    run(work())


def test_auto_complete_decouples(tmp_path):
    async def work() -> None:
        async with serving(tmp_path, complete_queue("decoupled")) as at:
            assert await at.listen("complete_queue", [7]) == [7, 8]

    run(work())


def test_reshape_is_what_the_model_sees(tmp_path):
    shapes = {"reshape": {"shape": [2, 2]}}
    ins = [entry("IN", "TYPE_FP32", 4, **shapes)]
    outs = [entry("OUT", "TYPE_FP32", 4, **shapes)]

    async def work() -> None:
        async with serving(tmp_path, model("echo", ins, outs, max_batch_size=4)) as at:
            found = await at.ask("echo", {"IN": np.arange(8, dtype=np.float32).reshape(2, 4)})
            assert found["OUT"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]

    run(work())


def test_strings_come_through(tmp_path):
    async def work() -> None:
        async with serving(tmp_path, model("echo", *TEXTS)) as at:
            strings = [b"", b"\xff\x00", "grüße".encode(), b"x" * 100_000]
            assert (await at.ask("echo", {"IN": np.array(strings, object)}))["OUT"].tolist() == strings

    run(work())


def test_inputs_that_lie_cost_only_their_caller(tmp_path):
    async def work() -> None:
        async with serving(tmp_path, model("echo", *TEXTS)) as at:
            lying = Tensor(DTYPES["bytes"], (2,), b"\xff\xff\xff\x7fxxxx")
            with pytest.raises(ServeError, match="cannot be read") as caught:
                await at.ask("echo", {"IN": lying})
            assert caught.value.kind is Kind.INVALID_ARGUMENT
            with pytest.raises(ServeError, match="is missing"):
                await at.ask("echo", {})
            assert ANY["dims"] == [-1]

    run(work())


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"dynamic_batching": {"priority_levels": 2, "default_priority_level": 1}}, "dynamic_batching"),
        ({"sequence_batching": {"direct": {}}}, "sequence_batching"),
    ],
)
def test_what_a_decoupled_model_cannot_have(tmp_path, fields, text):
    async def work() -> None:
        with pytest.raises(ServeError, match=f"{text}.*decoupled: given true, allowed: false"):
            async with serving(tmp_path, repeating(**fields)):
                pass

    run(work())
