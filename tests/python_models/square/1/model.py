"""Decoupled: IN responses that hold IN; none for 0; an error after the first for 13; for 99 it forgets to end."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            count = int(value.flat[0])
            if count == 77:
                raise ValueError("seventy-seven")
            for _ in range(1 if count in (13, 99) else count):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value.astype(np.int32))]))
            if count == 13:
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("thirteen")))
            if count != 99:
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
