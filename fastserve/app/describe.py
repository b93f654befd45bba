"""`python -m fastserve.app.describe FILE`: the models of a script, as JSON on standard output.

The process that serves imports nothing of a script's: this one runs it, and ends. What the script prints goes
to standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

from fastserve.app.models_folder import configs_of
from fastserve.errors import ConfigError

FAILED = 3  # the script's own fault, which it has told already
REFUSED = 4  # a sentence on standard output


class Description:
    """The models of a script, while a process finds them out."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._said = open(os.memfd_create("described"), "w+b")  # noqa: SIM115 - closed by `close`
        self._process = self._execute()

    def _execute(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "fastserve.app.describe", str(self._file)]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._said)

    @property
    def done(self) -> bool:
        """Whether the script has been run."""
        return self._process.poll() is not None

    def read(self) -> dict[str, dict[str, Any]]:
        """Return the fields of model.yaml of each model, once the script has been run. Raises ConfigError."""
        status = self._process.wait()
        self._said.seek(0)
        said = self._said.read()
        if status == 0:
            described: dict[str, dict[str, Any]] = json.loads(said)
            return described
        if status == REFUSED:
            raise ConfigError(said.decode("utf-8", "replace"))
        raise ConfigError(f"{self._file.name} could not be run; what it said is above")

    def close(self) -> None:
        """End the process, if it still runs."""
        self._process.kill()
        self._process.wait()
        self._said.close()


def describe_script(file: Path) -> dict[str, dict[str, Any]]:
    """Return the fields of model.yaml of each model of a script. Raises ConfigError."""
    with contextlib.closing(Description(file)) as description:
        return description.read()


def main(arguments: list[str]) -> int:
    """Run the script and print its models."""
    from fastserve.backends.script.loading import load_script

    file = Path(arguments[0])
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        try:
            text = json.dumps(configs_of(load_script(file), file))
        except ConfigError as fault:
            out.write(str(fault))
            return REFUSED
        except BaseException:  # sys.exit() in a script as well
            traceback.print_exc()
            return FAILED
        out.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
