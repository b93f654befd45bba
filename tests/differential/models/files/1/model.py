"""A model of several files: beside model.py, beside config.pbtxt, and a package."""

import helper
import triton_python_backend_utils as pb_utils
from scale_of_files import SCALE

from .deep import DEEP
from .deep.er import DEEPER
from .helper import FACTOR


class TritonPythonModel:
    def execute(self, requests):
        factor = FACTOR * SCALE * DEEP * DEEPER * helper.FACTOR
        arrays = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", factor * array)]) for array in arrays]
