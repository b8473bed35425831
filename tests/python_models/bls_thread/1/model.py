"""Calls another model out of a thread that `initialize` starts; requests are told what came of it."""

import queue
import threading

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.asked, self.answered = queue.Queue(), queue.Queue()
        threading.Thread(target=self.call, daemon=True).start()

    def call(self):
        while True:
            self.asked.get()
            request = pb_utils.InferenceRequest(
                model_name="crashy",
                requested_output_names=["OUTPUT0"],
                inputs=[pb_utils.Tensor("INPUT0", np.zeros(1, np.int32))],
            )
            response = request.exec()
            self.answered.put(response.error().message() if response.has_error() else "good")

    def execute(self, requests):
        self.asked.put(None)
        words = [self.answered.get(timeout=10)]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array(words, object))])]
