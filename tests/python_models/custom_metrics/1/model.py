"""Counts what it is given, and says how its metrics refuse what they cannot do."""

import numpy as np
import triton_python_backend_utils as pb_utils

MetricFamily = pb_utils.MetricFamily


class TritonPythonModel:
    def initialize(self, args):
        self.families = [
            MetricFamily(name="asked_total", description="What was asked.", kind=MetricFamily.COUNTER),
            MetricFamily(name="last_asked", description="What was asked last.", kind=MetricFamily.GAUGE),
            MetricFamily(name="asked", description="How it was spread.", kind=MetricFamily.HISTOGRAM),
        ]
        counter, gauge, histogram = self.families
        self.counter = counter.Metric(labels={"model": args["model_name"]})
        self.gauge = gauge.Metric(labels={"model": args["model_name"]})
        self.histogram = histogram.Metric(labels={"model": args["model_name"]}, buckets=[1, 10])

    def execute(self, requests):
        responses = []
        for request in requests:
            value = float(request.inputs()[0].as_numpy()[0])
            self.counter.increment(value)
            self.gauge.set(value)
            self.histogram.observe(value)
            words = [str(self.counter.value()), str(self.gauge.value()), *map(refusal, self.refused())]
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array(words, object))]))
        return responses

    def refused(self):
        return (
            lambda: self.counter.increment(-1),
            lambda: self.counter.set(1),
            self.histogram.value,
            lambda: MetricFamily(name="asked_total", description="", kind=MetricFamily.GAUGE),
        )


def refusal(attempt):
    try:
        attempt()
    except pb_utils.TritonModelException as error:
        return str(error)
    return "done"
