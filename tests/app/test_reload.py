"""`fastserve run FILE --reload`: changes are taken up while it serves, and no request is lost."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastserve.app.reload import Watch, imported_files
from tests.app.apps import ColdApp, RunningApp, write_app
from tests.running import Running, until

APP = """
    import time


    @fastserve.model
    def greet(name: str):
        from helper import said

        return said(name)


    @fastserve.model
    def slow(parts: int, mark: str):
        for number in range(parts):
            yield number
            while number == 0 and not __import__("os").path.exists(mark):
                time.sleep(0.005)
"""
HELPER = "def said(name):\n    return f'{} {{name}}'\n"


class Script:
    """A script with a module, of which a server takes up what is written."""

    def __init__(self, folder: Path) -> None:
        self.file = write_app(folder, APP)
        self.helper("first")

    def helper(self, word: str) -> None:
        (self.file.parent / "helper.py").write_text(HELPER.format(word))


@pytest.fixture(scope="module", params=["processes", "in_process"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple]:  # type: ignore[type-arg]
    folder = tmp_path_factory.mktemp("reload")
    script = Script(folder)
    in_process = request.param == "in_process"
    kind, options = (ColdApp, ("--in-process",)) if in_process else (RunningApp, ())
    with kind(script.file, folder / "log", "--reload", *options) as app:
        yield script, app


def greeting(app: RunningApp) -> str:
    return str(app.ask("/greet", {"name": "Ann"}))


def test_a_change_of_a_module_is_taken_up_and_no_request_is_lost(served: tuple[Script, RunningApp]) -> None:
    script, app = served
    script.helper("again")
    host, _, port = app.http.partition(":")
    peer = http.client.HTTPConnection(host, int(port), timeout=60)  # one connection, all the while
    answers: set[str] = set()

    def ask() -> bool:
        peer.request("POST", "/greet", b'{"name": "Ann"}')
        reply = peer.getresponse()
        said = reply.read()
        assert reply.status == 200, said
        answers.add(json.loads(said))
        return "second Ann" in answers

    until(lambda: greeting(app) == "again Ann", "the module is read anew")
    script.helper("second")
    until(ask, "the module is read anew")
    peer.close()
    assert answers <= {"again Ann", "second Ann"}


def test_a_stream_that_runs_is_answered_to_its_end(served: tuple[Script, RunningApp], tmp_path: Path) -> None:
    script, app = served
    host, _, port = app.http.partition(":")
    peer = http.client.HTTPConnection(host, int(port), timeout=60)
    mark = tmp_path / "mark"
    peer.request("POST", "/slow", json.dumps({"parts": 3, "mark": str(mark)}).encode())
    reply = peer.getresponse()
    assert reply.readline() == b"0\n"
    script.helper("third")
    until(lambda: greeting(app) == "third Ann", "the module is read anew")
    mark.touch()
    assert reply.read() == b"1\n2\n"
    peer.close()


def test_a_script_that_cannot_be_run_changes_nothing(served: tuple[Script, RunningApp]) -> None:
    script, app = served
    text, before = script.file.read_text(), greeting(app)

    def told() -> int:
        return app.log.read_text().count("the next change of app.py")

    for broken in (text + "\n)(\n", text + "\nraise ValueError('oh')\n", "import fastserve\n"):
        count = told()
        script.file.write_text(broken)
        until(lambda count=count: told() > count, "the error is told")  # type: ignore[misc]
        assert greeting(app) == before
    assert "unmatched ')'" in app.log.read_text()
    script.file.write_text(text + "\n\n@fastserve.model\ndef more():\n    return 5\n")
    until(lambda: app.post("/more", {})[0] == 200, "there is a model more")
    script.file.write_text(text)
    until(lambda: app.post("/more", {})[0] != 200, "it is gone")
    assert greeting(app) == before


def test_the_first_script_may_be_broken(tmp_path: Path) -> None:
    file = tmp_path / "app.py"
    file.write_text("import fastserve\n)(\n")
    app = RunningApp(file, tmp_path / "log", "--reload")

    def mend() -> None:
        until(lambda: "the next change" in app.log.read_text(), "the error is told")
        write_app(tmp_path, "@fastserve.model\ndef f():\n    return 1\n")

    (tmp_path / "log").touch()
    mending = threading.Thread(target=mend)
    mending.start()
    with app:
        assert app.ask("/f", {}) == 1
    mending.join()


def test_reloading_polls(tmp_path: Path) -> None:
    file = write_app(tmp_path, APP)
    server: Running = RunningApp(file, tmp_path / "log", "--reload", "--model-control", "explicit", ends=1)
    with pytest.raises(AssertionError, match="model_control: given explicit with --reload, allowed: poll"):
        server.__enter__()


def test_files_that_a_script_imports(tmp_path: Path) -> None:
    texts = {
        "app.py": "import a, numpy\nfrom pack import one\nfrom pack.deep.two import x\n",
        "a.py": "def f():\n    import b\n",
        "b.py": ")(",
        "other.py": "",
        "pack/__init__.py": "",
        "pack/one.py": "from . import three\nfrom .deep import four\n",
        "pack/three.py": "",
        "pack/deep/two.py": "from ..three import y\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = {str(file.relative_to(tmp_path)) for file in imported_files(tmp_path / "app.py")}
    assert {name for name in found if (tmp_path / name).exists()} == set(texts) - {"other.py"}
    assert {"numpy.py", "pack/deep/four.py"} <= found


def test_contents_count_and_not_times(tmp_path: Path) -> None:
    file = write_app(tmp_path, "import helper\n")
    watch = Watch(file)
    assert watch.changed()
    first = watch.stamp
    file.write_text(file.read_text())
    (tmp_path / "unused.py").write_text("x = 1")
    assert not watch.changed()
    (tmp_path / "helper.py").write_text("x = 1")
    assert watch.changed()
    assert watch.stamp != first
    (tmp_path / "helper.py").unlink()
    assert watch.changed()
    assert watch.stamp == first
