"""Loads and unloads the model `files`, and says whether it is ready: from its first line to its last."""

import os

import numpy as np
import triton_python_backend_utils as pb_utils

OTHER = "files"


class TritonPythonModel:
    def initialize(self, args):
        if not pb_utils.is_model_ready(model_name=OTHER, model_version="1"):
            pb_utils.load_model(model_name=OTHER)

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        word = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0].decode()
        try:
            if word == "load":
                pb_utils.load_model(model_name=OTHER)
            elif word == "unload":
                pb_utils.unload_model(model_name=OTHER)
            elif word == "nothing":
                pb_utils.load_model(model_name="not_there")
            elif word == "folder":
                return self.say(os.path.basename(pb_utils.get_model_dir()))
            said = str(pb_utils.is_model_ready(OTHER, "" if word == "any" else "1"))
        except pb_utils.TritonModelException as error:
            return self.say(str(error))
        return self.say(said)

    def say(self, text):
        out = pb_utils.Tensor("OUT", np.array([text.encode()], dtype=object))
        return pb_utils.InferenceResponse([out])

    def finalize(self):
        pb_utils.unload_model(model_name=OTHER)
