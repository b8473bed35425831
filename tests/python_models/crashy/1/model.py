"""Misbehaves as its input says."""

import os
import signal
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            kind = int(value.flat[0])
            if kind == 1:
                os._exit(0)
            if kind in (2, 3):
                signal.raise_signal(signal.SIGKILL if kind == 2 else signal.SIGSEGV)
            while kind == 4:
                pass
            if kind == 5:
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", value.astype(np.int64))])]
            if kind == 6:
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT9", value)])]
            if kind == 7:
                raise ValueError("planned")
            if kind == 9:
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.zeros((2, 3), np.int32))])]
            if kind == 10:
                return "text"
            if kind == 11:
                return []
            if kind == 12:
                return [value]
            if kind == 13:
                return [None]
            if kind == 14:
                raise SystemExit(3)
            if kind == 15:
                time.sleep(0.3)
            error = pb_utils.TritonError("planned") if kind == 8 else None
            tensors = [] if error else [pb_utils.Tensor("OUTPUT0", value)]
            responses.append(pb_utils.InferenceResponse(tensors, error))
        return responses
