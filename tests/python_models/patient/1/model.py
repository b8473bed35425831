"""Waits until its request is cancelled, then says so in the log."""

import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        (request,) = requests
        if not request.inputs()[0].as_numpy()[0]:
            return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())])]
        pb_utils.Logger.log_info("patient waits")
        while not request.is_cancelled():
            time.sleep(0.005)
        pb_utils.Logger.log_info("patient was cancelled")
        error = pb_utils.TritonError("gone", pb_utils.TritonError.CANCELLED)
        return [pb_utils.InferenceResponse(error=error)]
