"""Makes CALLS calls at once to a decoupled model with RESPONSES responses each, or to a plain one for 0; adds them up."""

import asyncio

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        return [await self.answer(request) for request in requests]

    async def answer(self, request):
        calls, responses = (int(tensor.as_numpy()[0]) for tensor in request.inputs())
        self.errors = []
        make = self.stream if responses else self.single
        totals = await asyncio.gather(*(make(responses) for _ in range(calls)))
        outputs = [
            pb_utils.Tensor("TOTAL", np.array([sum(totals)], np.int32)),
            pb_utils.Tensor("ERRORS", np.array(self.errors, object)),
        ]
        return pb_utils.InferenceResponse(outputs)

    def request(self, model, name, output, value):
        array = np.array([[value]] if model == "square" else [value], np.int32)
        return pb_utils.InferenceRequest(
            model_name=model, requested_output_names=[output], inputs=[pb_utils.Tensor(name, array)]
        )

    async def single(self, _):
        response = await self.request("crashy", "INPUT0", "OUTPUT0", 0).async_exec()
        if response.has_error():
            self.errors.append(response.error().message().encode())
            return 0
        return 1

    async def stream(self, count):
        total = 0
        async for response in await self.request("square", "IN", "OUT", count).async_exec(decoupled=True):
            if response.has_error():
                self.errors.append(response.error().message().encode())
            else:
                total += 1
        return total
