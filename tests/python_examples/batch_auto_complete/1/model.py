"""Adds and subtracts, and writes its own configuration."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        declared = auto_complete_model_config.as_dict()
        known = [tensor["name"] for tensor in declared["input"] + declared["output"]]
        for number in range(2):
            if f"INPUT{number}" not in known:
                auto_complete_model_config.add_input({"name": f"INPUT{number}", "data_type": "TYPE_FP32", "dims": [4]})
            if f"OUTPUT{number}" not in known:
                auto_complete_model_config.add_output(
                    {"name": f"OUTPUT{number}", "data_type": "TYPE_FP32", "dims": [4]}
                )
        auto_complete_model_config.set_max_batch_size(4)
        return auto_complete_model_config

    def execute(self, requests):
        responses = []
        for request in requests:
            first, second = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("INPUT0", "INPUT1")
            )
            tensors = [pb_utils.Tensor("OUTPUT0", first + second), pb_utils.Tensor("OUTPUT1", first - second)]
            responses.append(pb_utils.InferenceResponse(output_tensors=tensors))
        return responses
