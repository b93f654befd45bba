"""The image's health check: exit status 0 while the server is live, on its first HTTP listener."""

import http.client
import os
import sys


def main() -> int:
    """Ask /healthz/live of this container's own server, and return the exit status."""
    listeners = (os.environ.get("FASTSERVE_LISTEN") or os.environ.get("FASTSERVE_HTTP") or ":8000").split()
    port = int(listeners[0].partition("=")[0].rpartition(":")[2])
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        link.request("GET", "/healthz/live")
        return 0 if link.getresponse().status == 200 else 1
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        link.close()


if __name__ == "__main__":
    sys.exit(main())
