"""Counts what it sees in metrics of its own, and answers with what counter and gauge stand at; -1 ends it."""

import os

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        family = pb_utils.MetricFamily
        self.families = [
            family(name="seen_numbers", description="Numbers seen.", kind=family.COUNTER),
            family(name="last_number", description="The last number.", kind=family.GAUGE),
            family(name="numbers", description="All of them.", kind=family.HISTOGRAM),
        ]
        counter, gauge, histogram = self.families
        labels = {"model": args["model_name"], "version": args["model_version"]}
        self.seen, self.last = counter.Metric(labels=labels), gauge.Metric(labels=labels)
        self.spread = histogram.Metric(labels=labels, buckets=[1.0, 2.5, 10.0])

    def execute(self, requests):
        return [self.count(request) for request in requests]

    def count(self, request):
        for number in pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().tolist():
            if number == -1:
                os._exit(1)
            self.seen.increment(1.5)
            self.last.set(number)
            self.last.increment(0.25)
            self.spread.observe(number)
        out = np.array([self.seen.value(), self.last.value()], np.float32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out)])
