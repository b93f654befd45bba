"""What `@fastserve.model` finds out about a function, and what it refuses."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastserve
from fastserve.app.models_folder import app_files, configs_of, list_paths, stamp_app, write_models
from fastserve.backends.script.declaration import declare, declared, forget_declared
from fastserve.backends.script.json_body import BodyReader, write_json
from fastserve.backends.script.json_schema import Array, is_array, tensor_of
from fastserve.errors import ConfigError, ServeError

Numbers: Any = Array["int32"]
Flags: Any = Array["bool"]
Pair: Any = Array["float32", 2]


@pytest.fixture(autouse=True)
def nothing_declared() -> Iterator[None]:
    forget_declared()
    yield
    forget_declared()


def test_arrays_are_types() -> None:
    assert tensor_of(Array["float32", 4]) == {"dtype": "float32", "shape": [4]}
    assert tensor_of(Array["str"]) == {"dtype": "bytes", "shape": []}
    assert tensor_of(Array[np.int64, None, 3]) == {"dtype": "int64", "shape": [-1, 3]}
    assert tensor_of(Array[float, ...]) == {"dtype": "float32", "shape": None}
    assert not is_array(Array)
    for wrong in ("float33", ("float32", -2), ("float32", "a")):
        with pytest.raises(TypeError, match="Array"):
            Array[wrong]


def test_a_decorated_function_stays_what_it_was() -> None:
    @fastserve.model
    def twice(x: int) -> int:
        return 2 * x

    assert twice(2) == 4
    assert [one.key for one in declared()] == ["twice/1"]


def test_kinds() -> None:
    def arrays(x: Numbers) -> tuple[Numbers, Flags]: ...  # type: ignore[empty-body]
    def mixed(x: Numbers, y: int) -> int: ...  # type: ignore[empty-body]
    def yields() -> Any:
        yield 1

    async def later() -> None: ...

    made = declare(arrays)
    assert (made.kind, list(made.outputs)) == ("arrays", ["output_0", "output_1"])
    assert [declare(one).kind for one in (mixed, yields, later)] == ["json", "stream", "stream"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": "a/b"}, "name"),
        ({"path": "greet"}, "path"),
        ({"path": "/v2/models/x"}, "path"),
        ({"name": "metrics"}, "path"),
        ({"version": 0}, "version"),
        ({"batch": -1}, "batch"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        declare(lambda x: x, **{"name": "f", **options})


def test_functions_that_are_refused() -> None:
    def silent(x: Numbers): ...  # type: ignore[no-untyped-def]
    def scattered(x: int, *y: int) -> int: ...  # type: ignore[empty-body]
    def two(x: int, y: int) -> list[int]: ...  # type: ignore[empty-body]

    with pytest.raises(TypeError, match="declare what it returns"):
        declare(silent)
    with pytest.raises(TypeError, match=r"\*y"):
        declare(scattered)
    with pytest.raises(TypeError, match="takes one list"):
        declare(two, batch=4)
    with pytest.raises(TypeError, match="predict"):
        declare(type("Empty", (), {}))
    with pytest.raises(TypeError, match="functions and classes"):
        declare(5)


def test_versions_and_names() -> None:
    fastserve.model(lambda x: x, name="f", version=1)
    with pytest.raises(ValueError, match="two models"):
        fastserve.model(write_json, name="f", version=1)
    fastserve.model(write_json, name="f", version=2, path="/f2")
    configs = configs_of(declared(), Path("/app.py"))
    assert configs["f"]["version_policy"] == "all"
    assert list_paths(configs) == {"/f": "f/1", "/f2": "f/2"}
    fastserve.model(lambda x: x, name="g", path="/f")
    with pytest.raises(ConfigError, match="/f is given to"):
        list_paths(configs_of(declared(), Path("/app.py")))


def read(function: Any, body: bytes) -> Any:
    return BodyReader(inspect.signature(function, eval_str=True), "f").read(body)


def test_bodies() -> None:
    def options(a: int, /, b: float = 0.5, *, c: list[int] | None = None) -> None: ...
    def rest(a: int, **more: Any) -> None: ...
    def array(x: Pair, k: int) -> None: ...
    def whole(text: str, /) -> None: ...
    def defaulted(x: Any = 7) -> None: ...

    assert read(options, b'{"a": 1, "c": [2]}') == ((1,), {"b": 0.5, "c": [2]})
    assert read(rest, b'{"a": 1, "z": {"y": 2}}') == ((), {"a": 1, "z": {"y": 2}})
    assert read(whole, b'"text"') == (("text",), {})
    assert read(defaulted, b"") == ((7,), {})
    _, named = read(array, b'{"x": [1, 2], "k": 3}')
    assert named["x"].dtype == np.float32
    for function, body in (
        (options, b'{"a": 1, "d": 2}'),
        (rest, b'{"a": "1"}'),
        (array, b'{"x": [1], "k": 3}'),
    ):
        with pytest.raises(ServeError):
            read(function, body)


def test_folders_of_models(tmp_path: Path) -> None:
    app, root = tmp_path / "src" / "app.py", tmp_path / "root"
    (app.parent / "inner").mkdir(parents=True)
    (app.parent / ".venv").mkdir()
    for place in (app, app.parent / "inner" / "b.py", app.parent / ".venv" / "c.py"):
        place.write_text("")
    assert [file.name for file in app_files(app)] == ["app.py", "b.py"]
    before = stamp_app(app)
    (app.parent / "inner" / "b.py").write_text("1")
    assert stamp_app(app) != before
    root.mkdir()
    fastserve.model(lambda x: x, name="f")
    write_models(configs_of(declared(), app), root)
    assert (root / "f" / "1").is_dir()
    forget_declared()
    fastserve.model(lambda x: x, name="g")
    write_models(configs_of(declared(), app), root)
    assert [folder.name for folder in root.iterdir()] == ["g"]
