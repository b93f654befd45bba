"""The load generator behind `fastserve bench`: connections in processes of their own, one histogram.

`protocols` names the ways a model can be asked; `tfserving`, `v2` and `v2_memory` write the requests.
`generator` is one process of connections (`grpc_calls` those of gRPC), `run` starts and gathers them,
`report` prints. Processes talk in lines of JSON over pipes.
"""
