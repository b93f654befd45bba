"""The entry of a fork server that imports little and forks toys of workers (fake_worker.py). FAKE_FORKS in
its environment says what is wrong with it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from functools import partial

from fastserve.workers import fork_server, main
from tests.workers.fake_worker import serve

fork_server.IMPORTED = dict.fromkeys(fork_server.IMPORTED, ("fastserve.backends.frameworks.python",))
main.main = partial(main.main, serve=serve)

if __name__ == "__main__":
    wrong = os.environ.get("FAKE_FORKS", "")
    if wrong == "a thread":
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    elif wrong == "no such module":
        fork_server.IMPORTED = dict.fromkeys(fork_server.IMPORTED, ("no_such_module",))
    elif wrong == "dies":
        sys.exit(3)
    elif wrong == "hangs":
        signal.pause()
    elif wrong == "no processes":

        def refuse() -> int:
            raise BlockingIOError(11, "Resource temporarily unavailable")

        os.fork = refuse
    sys.exit(fork_server.main(sys.argv[1:]))
