"""Adds up the responses of a decoupled model for many requests at once."""

import asyncio

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        return await asyncio.gather(*(self.answer(request) for request in requests))

    async def answer(self, request):
        asked = pb_utils.InferenceRequest(
            model_name="square_int32",
            requested_output_names=["OUT"],
            inputs=[pb_utils.get_input_tensor_by_name(request, "IN")],
        )
        total = np.zeros(1, np.int32)
        async for answer in await asked.async_exec(decoupled=True):
            if answer.has_error():
                return pb_utils.InferenceResponse(error=answer.error())
            if len(answer.output_tensors()) > 0:
                total += pb_utils.get_output_tensor_by_name(answer, "OUT").as_numpy()
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("SUM", total)])
