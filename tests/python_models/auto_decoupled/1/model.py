"""Becomes decoupled by `auto_complete_config`: a response for each of N, then the end."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        auto_complete_model_config.add_input({"name": "N", "data_type": "TYPE_INT32", "dims": [1]})
        auto_complete_model_config.add_output({"name": "I", "data_type": "TYPE_INT32", "dims": [1]})
        auto_complete_model_config.set_model_transaction_policy({"decoupled": True})
        return auto_complete_model_config

    def initialize(self, args):
        import json

        assert pb_utils.using_decoupled_model_transaction_policy(json.loads(args["model_config"]))

    async def execute(self, requests):
        import asyncio

        for request in requests:
            sender = request.get_response_sender()
            for index in range(int(pb_utils.get_input_tensor_by_name(request, "N").as_numpy()[0])):
                await asyncio.sleep(0.001)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("I", np.array([index], np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
