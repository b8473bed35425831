"""Decoupled: a response for each element of IN, each after its DELAY, out of a thread that outlives `execute`."""

import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.running = 0
        self.changed = threading.Condition()

    def execute(self, requests):
        for request in requests:
            inputs = [pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("IN", "DELAY")]
            with self.changed:
                self.running += 1
            threading.Thread(target=self.respond, args=(request.get_response_sender(), *inputs), daemon=True).start()
        wait = pb_utils.get_input_tensor_by_name(requests[0], "WAIT").as_numpy()
        time.sleep(wait[0] / 1000)

    def respond(self, sender, values, delays):
        for index, value in enumerate(values):
            time.sleep(delays[index] / 1000)
            tensors = [pb_utils.Tensor("OUT", np.array([value], np.int32))]
            tensors.append(pb_utils.Tensor("IDX", np.array([index], np.uint32)))
            sender.send(pb_utils.InferenceResponse(tensors))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        with self.changed:
            self.running -= 1
            self.changed.notify_all()

    def finalize(self):
        with self.changed:
            self.changed.wait_for(lambda: not self.running, 10)
        pb_utils.Logger.log_info(f"repeat ends with {self.running} running")
