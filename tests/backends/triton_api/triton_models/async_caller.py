"""Calls two models at once, from a coroutine."""

import asyncio

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        return [await self.both(request) for request in requests]

    async def both(self, request):
        tensor = pb_utils.get_input_tensor_by_name(request, "IN")
        asked = {"model_name": "double", "requested_output_names": ["OUT"], "inputs": [tensor]}
        calls = [pb_utils.InferenceRequest(**asked) for _ in range(2)]
        found = await asyncio.gather(*(call.async_exec() for call in calls))
        arrays = [pb_utils.get_output_tensor_by_name(r, "OUT").as_numpy() for r in found]
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", arrays[0] + arrays[1])])
