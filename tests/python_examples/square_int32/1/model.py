"""Decoupled: answers n with n responses of n, out of a thread for each request."""

import threading

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.at_work = 0
        self.changed = threading.Condition()

    def execute(self, requests):
        for request in requests:
            with self.changed:
                self.at_work += 1
            number = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            threading.Thread(target=self.answer, args=(request.get_response_sender(), number), daemon=True).start()

    def answer(self, sender, number):
        for _ in range(int(number[0])):
            sender.send(pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("OUT", number.astype(np.int32))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        with self.changed:
            self.at_work -= 1
            self.changed.notify_all()

    def finalize(self):
        with self.changed:
            self.changed.wait_for(lambda: not self.at_work)
