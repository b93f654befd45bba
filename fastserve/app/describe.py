"""`python -m fastserve.app.describe FILE`: the models of a script, as JSON on standard output.

The process that serves imports nothing of a script's: this one runs it, and ends. What the script prints goes
to standard error.
"""

from __future__ import annotations

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


def describe_script(file: Path) -> dict[str, dict[str, Any]]:
    """Return the fields of model.yaml of each model of a script. Raises ConfigError."""
    command = [sys.executable, "-m", "fastserve.app.describe", str(file)]
    done = subprocess.run(command, stdout=subprocess.PIPE)
    if done.returncode == 0:
        described: dict[str, dict[str, Any]] = json.loads(done.stdout)
        return described
    if done.returncode == REFUSED:
        raise ConfigError(done.stdout.decode("utf-8", "replace"))
    raise ConfigError(f"{file.name} could not be run; what it said is above")


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
