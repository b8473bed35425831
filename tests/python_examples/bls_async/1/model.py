"""Asks two models at once; the sum comes from one, the difference from the other."""

import asyncio

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        responses = []
        for request in requests:
            inputs = [pb_utils.get_input_tensor_by_name(request, name) for name in ("INPUT0", "INPUT1")]
            asked = [
                pb_utils.InferenceRequest(model_name=model, requested_output_names=[output], inputs=inputs)
                for model, output in (("pytorch", "OUTPUT0"), ("add_sub", "OUTPUT1"))
            ]
            answers = await asyncio.gather(*(one.async_exec() for one in asked))
            for answer in answers:
                if answer.has_error():
                    raise pb_utils.TritonModelException(answer.error().message())
            tensors = [
                pb_utils.get_output_tensor_by_name(answer, output)
                for answer, output in zip(answers, ("OUTPUT0", "OUTPUT1"), strict=True)
            ]
            responses.append(pb_utils.InferenceResponse(output_tensors=tensors))
        return responses
