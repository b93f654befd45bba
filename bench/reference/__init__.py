"""The hand-written server that the table compares with: an upper bound for pure Python, not a server.

One process, uvloop + httptools + orjson + numpy, nothing between the socket and the model: no
routes, no limits, no validation, no error handling.
"""
