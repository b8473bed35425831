"""Decoupled: counts up, one number every 20 ms, until it is cancelled."""

import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(int(pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy().flat[0])):
                if sender.is_cancelled():
                    pb_utils.Logger.log_warn(f"stream was cancelled before {number}")
                    break
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.array([number], np.int32))]))
                time.sleep(0.02)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
