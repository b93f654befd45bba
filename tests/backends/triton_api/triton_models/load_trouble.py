"""Goes wrong while it loads, in the way its parameter `how` says."""

import json
import os
import signal
import sys
import threading


class TritonPythonModel:
    def initialize(self, args):
        how = json.loads(args["model_config"])["parameters"]["how"]["string_value"]
        if how == "raises":
            raise RuntimeError("cannot start")
        if how == "exits":
            os._exit(5)
        if how == "leaves":
            sys.exit("enough")
        if how == "segfaults":
            os.kill(os.getpid(), signal.SIGSEGV)
        if how == "hangs":
            threading.Event().wait()

    def execute(self, requests):
        return []
