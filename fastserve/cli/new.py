"""`fastserve new NAME`: a folder to start from, which runs and passes its test as it is written."""

from __future__ import annotations

import re
from pathlib import Path

import click

REQUIREMENTS = """# and fastserve, by the path of its wheel: the name belongs to another project on the index
pytest
"""
APP = {
    "app.py": '''"""{name}: models that fastserve serves."""

import fastserve


@fastserve.model
def greet(name: str, times: int = 1) -> dict:
    return {{"text": f"Hello {{name}}! " * times}}


@fastserve.model(batch=64)
def scale(x: fastserve.Array["float32", 4]) -> fastserve.Array["float32", 4]:
    return x * 3  # x: [rows, 4], rows of many callers


if __name__ == "__main__":
    fastserve.serve()
''',
    "test_app.py": '''"""pytest"""

import json
import re
import subprocess
import sys
import urllib.request

import numpy as np

import app


def test_functions_are_plain_functions():
    assert app.greet("Ann") == {{"text": "Hello Ann! "}}
    assert app.scale(np.ones((2, 4), np.float32)).tolist() == [[3, 3, 3, 3], [3, 3, 3, 3]]


def test_the_server_answers():
    command = [sys.executable, "-m", "fastserve", "run", "app.py", "--http", "127.0.0.1:0", "--grpc", "off"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            address = re.search(r"http://\\S+", server.stdout.readline())[0]
            body = json.dumps({{"x": [1, 2, 3, 4]}}).encode()
            with urllib.request.urlopen(f"{{address}}/scale", body) as reply:
                assert json.load(reply) == [3, 6, 9, 12]
        finally:
            server.terminate()
''',
    "requirements.txt": REQUIREMENTS,
    "README.md": """# {name}

```sh
fastserve run app.py --reload                               # a change of app.py is served when it is saved
curl http://127.0.0.1:8000/greet -d '{{"name": "Ann"}}'
```

`pip install -r requirements.txt` before, `pytest` for the test.
""",
}
PYTHON = {
    "models/{name}/model.yaml": """backend: python
inputs: {{x: {{dtype: float32, shape: [4]}}}} # without the axis of rows
outputs: {{y: {{dtype: float32, shape: [4]}}}}
max_batch_size: 64
""",
    "models/{name}/1/model.py": '''"""Version 1 of {name}."""


class Model:
    def __init__(self, config):
        self.device = config["device"]

    def load(self):
        """Read weights here; files lie in the folder of this one."""

    def run(self, inputs):
        return {{"y": inputs["x"] * 3}}  # [rows, 4], rows of many callers
''',
    "test_model.py": '''"""pytest"""

import json
import re
import subprocess
import sys
import urllib.request


def test_the_server_answers():
    command = [sys.executable, "-m", "fastserve", "serve", "models", "--http", "127.0.0.1:0", "--grpc", "off"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            address = re.search(r"http://\\S+", server.stdout.readline())[0]
            body = json.dumps({{"instances": [[1, 2, 3, 4]]}}).encode()
            with urllib.request.urlopen(f"{{address}}/v1/models/{name}:predict", body) as reply:
                assert json.load(reply) == {{"predictions": [[3, 6, 9, 12]]}}
        finally:
            server.terminate()
''',
    "requirements.txt": REQUIREMENTS,
    "README.md": """# {name}

```sh
fastserve serve models
curl http://127.0.0.1:8000/v1/models/{name}:predict -d '{{"instances": [[1, 2, 3, 4]]}}'
```

`pip install -r requirements.txt` before, `pytest` for the test. A folder `2` beside `1` takes over while the
server runs. `version_policy: all` in model.yaml keeps both: `/v1/models/{name}/versions/1:predict`.
""",
}
KINDS = {"app": APP, "python": PYTHON}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


def write_start(folder: Path, kind: str) -> list[Path]:
    """Write the files of a kind, and return them. Raises FileExistsError for a folder that holds something
    already, OSError."""
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(folder.name)
    written = []
    for place, text in KINDS[kind].items():
        file = folder / place.format(name=folder.name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.format(name=folder.name))
        written.append(file)
    return written


@click.command(short_help="Write a folder to start from.")
@click.argument("folder", metavar="NAME", type=click.Path(path_type=Path))
@click.option("--kind", type=click.Choice(list(KINDS)), default="app", help="A script, or a model's folder.")
def new(folder: Path, kind: str) -> None:
    """Write a folder NAME: models, a test, a README with the commands, requirements.

    \b
    Examples:
      fastserve new hello               app.py with functions, for fastserve run
      fastserve new hello --kind python a model repository with one Python model, for fastserve serve
    """
    if not _NAME.fullmatch(folder.name):
        raise click.ClickException(
            f"NAME: given {folder.name!r}, allowed: 1 to 128 of letters, digits, _ . -"
        )
    try:
        written = write_start(folder, kind)
    except FileExistsError:
        raise click.ClickException(f"{folder} is not empty") from None
    except OSError as fault:
        raise click.ClickException(f"{folder} cannot be written: {fault.strerror}") from None
    for file in written:
        click.echo(file)
    start = "fastserve run app.py --reload" if kind == "app" else "fastserve serve models"
    click.echo(f"\ncd {folder} && {start}")
