"""Calls that a script makes: `fastserve.serve()` and `fastserve.App`.

Workers run the script too, so nothing of the server is imported before it is known who calls.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastserve.backends.script.declaration import model
from fastserve.backends.script.loading import end_script
from fastserve.errors import ConfigError, check_system


class App:
    """The models of a script, for those who like to have them as an object. There is one app a process:
    instances share it."""

    model = staticmethod(model)

    def serve(self, **settings: Any) -> None:
        """Serve them; see `serve`."""
        serve(**settings)

    def to_repository(self, folder: str | Path) -> None:
        """Write them as a repository that `fastserve serve FOLDER` serves, with the script's files in it.
        Raises SystemExit with a sentence where that cannot be."""
        end_script()
        try:
            check_system()
            from fastserve.app.serving import write_repository

            write_repository(Path(folder))
        except ConfigError as fault:
            raise SystemExit(f"fastserve: {fault}") from None


def serve(**settings: Any) -> None:
    """Serve the models that the script has declared, until a signal ends the server.

    Keywords are the flags of `fastserve serve`: http="127.0.0.1:8080", frontends=2. Where a worker runs the
    script for its models, this call ends that. Raises SystemExit where the server could not start, TypeError
    for an unknown keyword.
    """
    end_script()
    try:
        check_system()
        from fastserve.app.serving import serve_declared

        status = serve_declared(settings)
    except ConfigError as fault:
        raise SystemExit(f"fastserve: {fault}") from None
    if status:
        raise SystemExit(status)
