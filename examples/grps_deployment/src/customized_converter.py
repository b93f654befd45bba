"""Numbers out of messages, and back."""

from grps_framework.apis.grps_pb2 import GrpsMessage
from grps_framework.converter.converter import Converter, converter_register


class Numbers(Converter):
    """str_data "2", or the values of a float32 tensor, as a list of numbers."""

    def preprocess(self, inp, context):
        if inp.WhichOneof("data_oneof") == "str_data":
            return [float(inp.str_data)]
        context.put_user_data("tensor", True)
        return list(inp.gtensors.tensors[0].flat_float32)

    def postprocess(self, inp, context):
        if not context.get_user_data("tensor"):
            return GrpsMessage(str_data=f"{inp[0]:g}")
        message = GrpsMessage()
        message.gtensors.tensors.add(name="y", dtype="DT_FLOAT32", shape=[len(inp)], flat_float32=inp)
        return message

    def batch_preprocess(self, inps, contexts):
        return [self.preprocess(inp, context) for inp, context in zip(inps, contexts, strict=True)]

    def batch_postprocess(self, inp, contexts):
        return [self.postprocess(one, context) for one, context in zip(inp, contexts, strict=True)]


converter_register.register("numbers", Numbers())
