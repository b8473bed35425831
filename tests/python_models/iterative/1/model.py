"""Decoupled: a response each time that the request is scheduled, COUNT times; then it ends."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.left = {}

    def execute(self, requests):
        for request in requests:
            key = request.correlation_id()
            if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
                self.left[key] = int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy().flat[0])
            sender = request.get_response_sender()
            self.left[key] -= 1
            value = np.array([[self.left[key]]], np.int32)
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)]))
            if self.left[key]:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            else:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL)
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
