"""`python -m bench.reference.grpc_echo --port N --items N`: what grpcio's asyncio server allows on uvloop.

It reads each ModelInferRequest with the protobuf library, checks its tensor's size and answers one output
of `--items` floats. No model runs.
"""

from __future__ import annotations

import argparse
import math

import grpc
import grpc.aio
import uvloop

from fastserve.protos import load

PATH = "/inference.GRPCInferenceService/ModelInfer"
V2 = load("kserve_v2")
MOST_BYTES = 1 << 27


class Echo(grpc.GenericRpcHandler):
    def __init__(self, items: int) -> None:
        self.raw = bytes(4 * items)
        self.handler = grpc.unary_unary_rpc_method_handler(
            self.answer, V2.ModelInferRequest.FromString, lambda reply: reply.SerializeToString()
        )

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return self.handler if details.method == PATH else None

    async def answer(self, request: object, context: object) -> object:
        shape, raw = request.inputs[0].shape, request.raw_input_contents[0]
        assert 4 * math.prod(shape) == len(raw)
        reply = V2.ModelInferResponse(model_name=request.model_name, model_version="1", id=request.id)
        reply.outputs.add(name="y", datatype="FP32", shape=[1, len(self.raw) // 4])
        reply.raw_output_contents.append(self.raw)
        return reply


async def serve(port: int, items: int) -> None:
    options = [("grpc.max_receive_message_length", MOST_BYTES)]
    server = grpc.aio.server(handlers=[Echo(items)], options=options)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.reference.grpc_echo", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--items", type=int, required=True)
    options = parser.parse_args()
    uvloop.run(serve(options.port, options.items))


if __name__ == "__main__":
    main()
