"""Gathers the responses of `repeat` in a coroutine."""

import asyncio

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        return await asyncio.gather(*(self.gather(request) for request in requests))

    async def gather(self, request):
        call = pb_utils.InferenceRequest(
            model_name="repeat",
            requested_output_names=["OUT"],
            inputs=[pb_utils.get_input_tensor_by_name(request, "IN")],
        )
        found = []
        for response in await call.async_exec(decoupled=True):
            if response.has_error():
                return pb_utils.InferenceResponse(error=response.error())
            if response.output_tensors():
                found.append(pb_utils.get_output_tensor_by_name(response, "OUT").as_numpy())
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.concatenate(found))])
