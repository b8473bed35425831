"""Adds and subtracts, in the types that the configuration says; a negative first element is an error of that request."""

import json

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.dtypes = [
            pb_utils.triton_string_to_numpy(pb_utils.get_output_config_by_name(config, name)["data_type"])
            for name in ("OUTPUT0", "OUTPUT1")
        ]
        self.greeting = config["parameters"]["greeting"]["string_value"]
        self.instance = args["model_instance_name"]

    def execute(self, requests):
        responses = []
        for request in requests:
            first = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            second = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
            if first.flat[0] < 0:
                error = pb_utils.TritonError("the first element is negative", pb_utils.TritonError.INVALID_ARG)
                responses.append(pb_utils.InferenceResponse(error=error))
                continue
            tensors = [
                pb_utils.Tensor("OUTPUT0", (first + second).astype(self.dtypes[0])),
                pb_utils.Tensor("OUTPUT1", (first - second).astype(self.dtypes[1])),
            ]
            said = {"batch": len(requests), "greeting": self.greeting, "instance": self.instance}
            asked = json.loads(request.parameters())
            responses.append(pb_utils.InferenceResponse(tensors, parameters=said if asked.get("say") else None))
        return responses
