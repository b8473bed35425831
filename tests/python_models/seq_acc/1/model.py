"""Adds up the numbers of a sequence; the sum is kept by the server."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            value, start, number, state = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy()
                for name in ("INPUT0", "START", "CORRID", "STATE_IN")
            )
            assert number.flat[0] == request.correlation_id()
            assert bool(start.flat[0]) == bool(request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START)
            total = value if start.flat[0] else value + state
            tensors = [pb_utils.Tensor(name, total.astype(np.int32)) for name in ("OUTPUT0", "STATE_OUT")]
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses
