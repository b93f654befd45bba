"""CUDA graphs of one process are captured one at a time, and nothing waits for the whole device meanwhile.

    with CAPTURING:
        ...

A capture forbids unsafe calls to its own thread alone (`thread_local`), but whoever synchronises the device
or the context while any stream of it is capturing is refused, and may end that capture (CUDA's guide,
"Prohibited and Unhandled Operations"). torch.cuda.graph does so before it begins, ONNX Runtime may when it
opens a session, and in a shared worker these are threads of one context. Runs of a model do not, nor wait.
"""

from __future__ import annotations

import threading

CAPTURING = threading.Lock()
