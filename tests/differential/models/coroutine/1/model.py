"""execute() as a coroutine."""

import asyncio

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        return await asyncio.gather(*(self.answer(request) for request in requests))

    async def answer(self, request):
        await asyncio.sleep(0.001)
        array = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", 2 * array)])
