"""Calls the model that is named by its input and gives what that gave, or its error. A stream's numbers are gathered."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        name = pb_utils.get_input_tensor_by_name(request, "MODEL").as_numpy()[0].decode()
        call = pb_utils.InferenceRequest(
            model_name=name,
            requested_output_names=["OUTPUT0"],
            inputs=[pb_utils.get_input_tensor_by_name(request, "INPUT0")],
        )
        responses = list(call.exec(decoupled=True)) if name == "stream" else [call.exec()]
        numbers = []
        for response in responses:
            if response.has_error():
                error = response.error()
                return pb_utils.InferenceResponse(
                    error=pb_utils.TritonError(f"{name} said: {error.message()}", error.code())
                )
            numbers.append(pb_utils.get_output_tensor_by_name(response, "OUTPUT0").as_numpy())
        array = np.concatenate(numbers) if numbers else np.zeros(0, np.int32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array)])
