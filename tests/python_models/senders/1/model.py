"""Not decoupled, but answers by response senders, as its input says."""

import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        array = pb_utils.get_input_tensor_by_name(request, "HOW").as_numpy()
        how = array.flat[0].decode()
        response = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)])
        if how == "plain":
            return response
        sender = request.get_response_sender()
        if how == "now":
            sender.send(response, FINAL)
        elif how == "in two":
            sender.send(response)
            sender.send(flags=FINAL)
        elif how == "later":
            threading.Thread(target=self.later, args=(sender, response)).start()
        elif how == "dropped":
            del sender
        else:
            response = self.wrongly(how, sender, response, array)
            sender.send(response, FINAL)
        return None

    def later(self, sender, response):
        time.sleep(0.05)
        sender.send(response, FINAL)

    def wrongly(self, how, sender, response, array):
        try:
            if how == "end first":
                sender.send(flags=FINAL)
            if how == "bad flag":
                sender.send(response, 6)
            if how == "nothing":
                sender.send()
        except pb_utils.TritonModelException as error:
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([[str(error)]], object))])
        return response
