"""Decoupled: a response for each element of IN, DELAY milliseconds apart, and WAIT milliseconds of its own time."""

import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            values, delays, wait = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("IN", "DELAY", "WAIT")
            )
            sender = request.get_response_sender()
            threading.Thread(target=self.answer, args=(sender, values, delays), daemon=True).start()
            time.sleep(wait[0] / 1000)

    def answer(self, sender, values, delays):
        for index, (value, delay) in enumerate(zip(values, delays, strict=True)):
            time.sleep(delay / 1000)
            made = {"OUT": np.array([value], np.int32), "IDX": np.array([index], np.uint32)}
            tensors = [pb_utils.Tensor(name, array) for name, array in made.items()]
            sender.send(pb_utils.InferenceResponse(output_tensors=tensors))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
