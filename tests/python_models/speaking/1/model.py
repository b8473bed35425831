"""Says its input in the server's log, at every level, and on the standard output."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        pb_utils.Logger.log_info("speaking is initialized")

    def execute(self, requests):
        logger = pb_utils.Logger
        for request in requests:
            text = request.inputs()[0].as_numpy()[0].decode()
            logger.log_info(f"info {text}")
            logger.log_warn(f"warn {text}")
            logger.log_error(f"error {text}")
            logger.log_verbose(f"verbose {text}")
            logger.log(f"plain {text}")
            logger.log(f"chosen {text}", logger.WARNING)
            print(f"printed {text}")
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())]) for request in requests
        ]
