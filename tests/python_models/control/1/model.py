"""Loads, unloads or asks after a model, as its input says."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            what, model = (text.decode() for text in request.inputs()[0].as_numpy())
            try:
                said = str(getattr(pb_utils, what)(model))
            except pb_utils.TritonModelException as error:
                said = f"refused: {error}"
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([said], object))]))
        return responses
