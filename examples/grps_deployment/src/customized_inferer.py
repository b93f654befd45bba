"""y = 2x, and y in words."""

from grps_framework.apis.grps_pb2 import GrpsMessage
from grps_framework.model_infer.inferer import ModelInferer, inferer_register

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


class Double(ModelInferer):
    """A list of numbers in, twice each out."""

    def load(self):
        self.factor = self._args["factor"]
        return True

    def infer(self, inp, context):
        return [self.factor * number for number in inp]

    def batch_infer(self, inp, contexts):
        return [self.infer(one, context) for one, context in zip(inp, contexts, strict=True)]


class Words(ModelInferer):
    """Spells str_data; a word at a time to who wants a stream, and as plain text on the path /words."""

    def load(self):
        return True

    def infer(self, inp, context):
        request = context.get_http_request()
        text = request.get_data(as_text=True) if request is not None else inp.str_data
        words = [DIGITS[int(sign)] if sign.isdigit() else sign for sign in text]
        if context.if_streaming():
            for word in words:
                if request is not None:
                    context.customized_http_stream_respond(word + "\n")
                else:
                    context.stream_respond(GrpsMessage(str_data=word))
        elif request is not None:
            context.set_http_response(" ".join(words))
        return GrpsMessage(str_data=" ".join(words))


inferer_register.register("double", Double())
inferer_register.register("words", Words())
