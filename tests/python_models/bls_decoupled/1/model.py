"""Decoupled: hands the responses of another decoupled model on, as they come."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            array = request.inputs()[0].as_numpy().reshape(1, 1)
            call = pb_utils.InferenceRequest(
                model_name="square", requested_output_names=["OUT"], inputs=[pb_utils.Tensor("IN", array)]
            )
            for response in call.exec(decoupled=True):
                if response.has_error():
                    sender.send(pb_utils.InferenceResponse(error=response.error()))
                    continue
                value = pb_utils.get_output_tensor_by_name(response, "OUT").as_numpy().astype(np.int32).reshape(1)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
