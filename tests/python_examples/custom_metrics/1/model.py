"""Adds and subtracts, and counts the nanoseconds that it takes in a metric of its own."""

import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.family = pb_utils.MetricFamily(
            name="requests_process_latency_ns",
            description="Cumulative time spent processing requests",
            kind=pb_utils.MetricFamily.COUNTER,
        )
        self.metric = self.family.Metric(labels={"model": args["model_name"], "version": args["model_version"]})

    def execute(self, requests):
        started = time.time_ns()
        responses = []
        for request in requests:
            first, second = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("INPUT0", "INPUT1")
            )
            tensors = [pb_utils.Tensor("OUTPUT0", first + second), pb_utils.Tensor("OUTPUT1", first - second)]
            responses.append(pb_utils.InferenceResponse(output_tensors=tensors))
        before = self.metric.value()
        self.metric.increment(time.time_ns() - started)
        pb_utils.Logger.log_info(f"from {before} to {self.metric.value()}")
        return responses
