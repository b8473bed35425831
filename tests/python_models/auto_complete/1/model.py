"""Has no configuration file: everything is in `auto_complete_config`."""

import json

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        written = auto_complete_model_config.as_dict()
        assert not written["input"]
        for name in ("INPUT0", "INPUT1"):
            auto_complete_model_config.add_input({"name": name, "data_type": "TYPE_FP32", "dims": [4]})
        for name in ("OUTPUT0", "OUTPUT1"):
            auto_complete_model_config.add_output({"name": name, "data_type": "TYPE_FP32", "dims": [4]})
        auto_complete_model_config.set_max_batch_size(4)
        auto_complete_model_config.set_dynamic_batching()
        return auto_complete_model_config

    def initialize(self, args):
        self.config = json.loads(args["model_config"])
        assert self.config["max_batch_size"] == 4
        assert pb_utils.get_input_config_by_name(self.config, "INPUT1")["dims"] == [4]

    def execute(self, requests):
        responses = []
        for request in requests:
            first, second = (tensor.as_numpy() for tensor in request.inputs())
            tensors = [pb_utils.Tensor("OUTPUT0", first + second), pb_utils.Tensor("OUTPUT1", first - second)]
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses
