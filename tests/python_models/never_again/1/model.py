"""Has its request scheduled again, though its configuration does not have that."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.seen = 0

    def execute(self, requests):
        (request,) = requests
        count = request.inputs()[0].as_numpy()
        if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
            self.seen = 0
        self.seen += 1
        if self.seen < count[0]:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            return None
        request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", count * 0 + self.seen)])]
