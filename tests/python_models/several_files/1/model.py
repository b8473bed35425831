"""Imports modules that lie beside it and in the model's directory."""

import beside_the_model
import in_the_directory
import numpy as np
import triton_python_backend_utils as pb_utils

from . import beside_the_model as relative


class TritonPythonModel:
    def execute(self, requests):
        words = [beside_the_model.WORD, in_the_directory.WORD, relative.WORD]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array(words, object))]) for _ in requests]
