"""The demo repository, asked as users ask it: real held-out digits through a real server."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

from fastserve.server.banner import demo_requests
from fastserve.settings import Listener, Settings
from tests.server.rig import Client, run, serving

HELD_OUT = json.loads((Path(__file__).parents[2] / "vectors" / "digits_test.json").read_text())
LEAST_ACCURACY = 0.97


async def post(client: Client, target: str, body: object) -> dict:
    raw = json.dumps(body).encode()
    client.writer.write(
        b"POST %b HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n%b" % (target.encode(), len(raw), raw)
    )
    status, answer = await client.page()
    assert status == 200, answer
    return json.loads(answer)


def test_the_answers_of_the_readme():
    """Every curl line of the README that asks a model of the demo, and the answer shown below it."""
    text = (Path(__file__).parents[3] / "README.md").read_text()
    shown = re.findall(
        r"curl http://127.0.0.1:8000(/v1/\S+) -d '([^']*)'\n```\n\n```json\n(.*?)```", text, re.DOTALL
    )
    assert [target for target, _, _ in shown] == [
        f"/v1/models/{m}:predict" for m in ("digits", "half_plus_two")
    ]

    async def main():
        async with serving("demo", load_models=("digits", "half_plus_two")) as served:
            client = await served.client()
            for target, body, answer in shown:
                got = (await post(client, target, json.loads(body)))["predictions"]
                for row, wanted in zip(got, json.loads(answer)["predictions"], strict=True):
                    if isinstance(wanted, dict):  # another processor may round the last digits otherwise
                        np.testing.assert_allclose(row.pop("scores"), wanted.pop("scores"), rtol=1e-4)
                    assert row == wanted

    run(main())


def test_the_running_server_reads_held_out_digits():
    truth = np.array(HELD_OUT["digits"])

    async def main():
        async with serving("demo", load_models=("digits", "half_plus_two")) as served:
            client = await served.client()
            body = {"instances": HELD_OUT["images"]}
            rows = (await post(client, "/v1/models/digits:predict", body))["predictions"]
            examples = [{"image": [float(v) for v in image]} for image in HELD_OUT["images"]]
            target = "/v1/models/digits/labels/stable:classify"
            classes = await post(client, target, {"signature_name": "classify", "examples": examples})
        return rows, classes

    answers: list = []

    async def keep():
        answers.extend(await main())

    run(keep())
    rows, classes = answers
    assert len(rows) == len(truth) == 359, "more rows than a batch holds: split and joined again"
    assert np.mean([row["digit"] for row in rows] == truth) >= LEAST_ACCURACY
    assert classes["results"] == classes["result"], "the seed's name and the wire's"
    best = [max(pairs, key=lambda pair: pair[1])[0] for pairs in classes["results"]]
    assert np.mean(np.array(best, int) == truth) >= LEAST_ACCURACY


def test_the_streaming_request_of_the_welcome():
    """As it is printed, by curl: words come one after the other, and together they are the whole text."""
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("there is no curl")

    async def main():
        async with serving("demo", load_models=("scribe",)) as served:
            line = demo_requests(Listener(f"127.0.0.1:{served.port}"), Settings(), ("scribe",))[0]
            asked = [curl, "-s", "--max-time", "30", *shlex.split(line)[1:]]
            process = await asyncio.create_subprocess_exec(*asked, stdout=asyncio.subprocess.PIPE)
            return (await process.communicate())[0]

    found: list[bytes] = []

    async def keep():
        found.append(await main())

    run(keep())
    *events, last = [json.loads(line[6:]) for line in found[0].split(b"\n\n") if line]
    assert 1 < len(events) <= 39  # it may come to its end before
    assert "".join(event["token"]["text"] for event in events) in last["generated_text"]
    assert all(event["decode_time"] > 0 for event in events[1:])
    assert re.search(r"[a-z]{2,} [a-z]{2,}", last["generated_text"])


def test_the_stream_of_the_readme():
    """The request and its events, but for their times."""
    text = (Path(__file__).parents[3] / "README.md").read_text()
    found = re.search(r"curl -N http://127.0.0.1:8000(\S+) -d '(.*?)'\n```\n\n```\n(.*?)```", text, re.DOTALL)
    assert found is not None

    def events(body: str) -> list[dict]:
        times = {"prefill_time", "decode_time"}
        read = [json.loads(line[6:]) for line in body.splitlines() if line]
        return [{key: value for key, value in event.items() if key not in times} for event in read]

    got: list[str] = []

    async def main():
        async with serving("demo", load_models=("scribe",)) as served:
            url = f"http://127.0.0.1:{served.port}{found[1]}"
            asked = ["curl", "-s", "--max-time", "30", url, "-d", found[2]]
            process = await asyncio.create_subprocess_exec(*asked, stdout=asyncio.subprocess.PIPE)
            got.append((await process.communicate())[0].decode())

    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    run(main())
    assert events(got[0]) == events(found[3])
