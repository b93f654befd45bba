"""Models of rows beside MLServer and beside a FastAPI app that calls the library: rates of single rows, and
what a batch of 1,000 rows costs beside the library alone.

    python -m bench.tabular --mlserver /tmp/mls/bin/python    with mlserver, mlserver-sklearn and -xgboost,
                                                              fastapi, uvicorn and "uvloop<0.22"
    python -m bench.tabular                                   batches alone

Each model has 100 trees and 30 columns. wrk asks with 32 connections and one row a request, the servers in
turns, one worker each; the rates are medians, and the answers are compared before anything is measured.
MLServer batches as its documentation recommends (max_batch_size 32, max_batch_time 0.01). A batch is a
request of 1,000 rows from one client, in V2's raw form and in its JSON, which is written beforehand. The
library's own time is that of its call in this process; the fastest of the calls counts, on both sides.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.litserve import ask, free_port, rate_of, stop
from fastserve import Client

TREES, COLUMNS = 100, 30
BATCH, CALLS = 1000, 40
START_S = 120.0
MODELS = {
    "xgboost": ("mlserver_xgboost.XGBoostModel", "FP32"),
    "sklearn": ("mlserver_sklearn.SKLearnModel", "FP64"),
}
# MLServer answers the class of both, and waits up to 10 ms for a batch to fill.
OURS = {
    "xgboost": "backend: xgboost\nparameters: {outputs: [labels]}\n",
    "sklearn": "backend: sklearn\nparameters: {trust_pickle: true, outputs: [predictions]}\n",
}
TRUST: dict[str, list[str]] = {"xgboost": [], "sklearn": ["--trust-pickle"]}
FASTAPI = """
import sys
import fastapi, uvicorn
{open}

app = fastapi.FastAPI()

@app.post("/predict")
def predict(body: dict):
    return {{"predictions": call(body["instances"])}}

uvicorn.run(app, port=int(sys.argv[1]), log_level="error")
"""
OPENED = {
    "xgboost": """
import numpy, xgboost
model = xgboost.Booster(model_file="model.json")
model.set_param({"nthread": 1})
def call(rows):
    return (model.inplace_predict(numpy.array(rows, "float32")) > 0.5).astype(int).tolist()
""",
    "sklearn": """
import joblib
model = joblib.load("model.joblib")
def call(rows):
    return model.predict(rows).tolist()
""",
}


def train(folder: Path) -> Any:
    """Write both models, and return rows for them."""
    import xgboost
    from sklearn.datasets import load_breast_cancer
    from sklearn.ensemble import RandomForestClassifier

    data, kinds = load_breast_cancer(return_X_y=True)
    booster = xgboost.XGBClassifier(n_estimators=TREES, max_depth=6).fit(data, kinds)
    booster.save_model(folder / "model.json")
    forest = RandomForestClassifier(TREES, random_state=0).fit(data, kinds)
    (folder / "model.joblib").write_bytes(pickle.dumps(forest))
    return data


@contextlib.contextmanager
def started(command: list[str], url: str, body: Any, folder: Path, **environment: str) -> Iterator[bytes]:
    """Run a server until it has answered; what it said."""
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=log,
            stderr=log,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    try:
        end = time.monotonic() + START_S
        while (answer := ask(url, body)) is None:
            if time.monotonic() > end or process.poll() is not None:
                raise SystemExit((folder / "log").read_text()[-3000:])
            time.sleep(0.2)
        yield answer
    finally:
        stop(process)


def write_mlserver(folder: Path, kind: str, uri: str, port: int) -> None:
    """Write MLServer's settings."""
    (folder / "model-settings.json").write_text(
        json.dumps(
            {
                "name": kind,
                "implementation": MODELS[kind][0],
                "parameters": {"uri": uri},
                "max_batch_size": 32,
                "max_batch_time": 0.01,
            }
        )
    )
    ports = {"http_port": port, "grpc_port": free_port(), "metrics_port": free_port()}
    (folder / "settings.json").write_text(
        json.dumps({"host": "127.0.0.1", "debug": False, "parallel_workers": 1, **ports})
    )


def compare(kind: str, python: str, rounds: int, root: Path, rows: Any) -> tuple[float, float]:
    """Print a row of the table of rates."""
    file = "model.json" if kind == "xgboost" else "model.joblib"
    ports = [free_port() for _ in range(3)]
    folders = [root / f"{kind}-{name}" for name in ("mlserver", "fastapi", "ours")]
    for folder in folders:
        folder.mkdir()
        (folder / file).write_bytes((root / file).read_bytes())
    write_mlserver(folders[0], kind, str(folders[0] / file), ports[0])
    (folders[2] / "model.yaml").write_text(OURS[kind])
    (folders[1] / "app.py").write_text(FASTAPI.format(open=OPENED[kind]))
    row = [float(value) for value in rows[0]]
    v2 = {"inputs": [{"name": "input", "shape": [1, COLUMNS], "datatype": MODELS[kind][1], "data": row}]}
    v1 = {"instances": [row]}
    base = [f"http://127.0.0.1:{port}" for port in ports]
    urls = [f"{base[0]}/v2/models/{kind}/infer", f"{base[1]}/predict", f"{base[2]}/v2/models/{kind}/infer"]
    ours = [sys.executable, "-m", "fastserve", "serve", file, "--name", kind, *TRUST[kind]]
    threads = {"OMP_NUM_THREADS": "1"}
    bin_folder = str(Path(python).parent)
    with (
        started([f"{bin_folder}/mlserver", "start", "."], urls[0], v2, folders[0], **threads) as one,
        started([python, "app.py", str(ports[1])], urls[1], v1, folders[1], **threads) as two,
        started(
            [*ours, "--http", f"127.0.0.1:{ports[2]}", "--grpc", "off"], urls[2], v2, folders[2]
        ) as three,
    ):
        said = [json.loads(one)["outputs"][0]["data"], json.loads(two)["predictions"]]
        said.append(json.loads(three)["outputs"][0]["data"])
        for other in said[:2]:
            np.testing.assert_allclose(np.ravel(other), np.ravel(said[2]), rtol=1e-6)
        bodies = (v2, v1, v2)
        rates = [
            [rate_of(url, body, folder) for url, body, folder in zip(urls, bodies, folders, strict=True)]
            for _ in range(rounds)
        ]
        mlserver, fastapi, our = (statistics.median(side) for side in zip(*rates, strict=True))
        beside = [statistics.median(one[2] / one[at] for one in rates) for at in (0, 1)]
    rates_text = f"{mlserver:,.0f} | {fastapi:,.0f} | {our:,.0f}/s"
    print(f"| {kind} | {rates_text} | {beside[0]:.1f} x | {beside[1]:.1f} x |", flush=True)
    return beside[0], beside[1]


def time_batches(kind: str, root: Path, rows: Any) -> None:
    """Print a row of the table of batches."""
    file = "model.json" if kind == "xgboost" else "model.joblib"
    folder, port = root / f"{kind}-batches", free_port()
    folder.mkdir()
    (folder / file).write_bytes((root / file).read_bytes())
    (folder / "model.yaml").write_text(OURS[kind])
    url, row = f"http://127.0.0.1:{port}", [float(value) for value in rows[0]]
    v2 = {"inputs": [{"name": "input", "shape": [1, COLUMNS], "datatype": MODELS[kind][1], "data": row}]}
    command = [sys.executable, "-m", "fastserve", "serve", file, "--name", kind, *TRUST[kind]]
    command += ["--http", f"127.0.0.1:{port}", "--grpc", "off"]
    with started(command, f"{url}/v2/models/{kind}/infer", v2, folder):
        alone, raw, text = fastest_batches(kind, folder / file, url, rows)
    times = " | ".join(f"{1000 * one:.2f} ms" for one in (alone, raw, text))
    print(f"| {kind} | {times} | {alone / raw:.2f} | {alone / text:.2f} |", flush=True)


def fastest_batches(kind: str, file: Path, url: str, rows: Any) -> tuple[float, float, float]:
    """Return the seconds of the library's own call for 1,000 rows, of a request with as many, and in JSON."""
    import xgboost

    many = np.resize(rows, (BATCH, COLUMNS)).astype("float32" if kind == "xgboost" else "float64")
    if kind == "xgboost":
        booster = xgboost.Booster(model_file=str(file))
        booster.set_param({"nthread": 1})
        call: Any = booster.inplace_predict
    else:
        call = pickle.loads(file.read_bytes()).predict

    tensor = {"name": "input", "shape": [BATCH, COLUMNS], "datatype": MODELS[kind][1]}
    body = json.dumps({"inputs": [{**tensor, "data": many.ravel().tolist()}]}).encode()
    link = http.client.HTTPConnection(url.removeprefix("http://"))

    def ask_in_json() -> None:
        link.request("POST", f"/v2/models/{kind}/infer", body)
        reply = link.getresponse()
        assert reply.status == 200, reply.read()
        reply.read()

    with Client(url) as client, contextlib.closing(link):
        model = getattr(client, kind)
        steps: list[Callable[[], object]] = [lambda: call(many), lambda: model(input=many), ask_in_json]
        found = [[seconds_of(step) for step in steps] for _ in range(CALLS)]
    alone, raw, text = map(min, zip(*found, strict=True))
    return alone, raw, text


def seconds_of(step: Callable[[], object]) -> float:
    """Return how long a call takes."""
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description="models of rows beside MLServer and FastAPI")
    parser.add_argument("--mlserver", default="", help="an interpreter that has mlserver and fastapi")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        rows = train(Path(name))
        if options.mlserver:
            print("| model | MLServer | FastAPI | here | / MLServer | / FastAPI |\n|---|---|---|---|---|---|")
            for kind in MODELS:
                compare(kind, options.mlserver, options.rounds, Path(name), rows)
        print("| 1,000 rows | the library | raw | JSON | library / raw | library / JSON |")
        print("|---|---|---|---|---|---|")
        for kind in MODELS:
            time_batches(kind, Path(name), rows)


if __name__ == "__main__":
    main()
