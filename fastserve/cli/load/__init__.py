"""The load generator behind `fastserve bench`: connections in processes of their own, one histogram.

`protocols` writes the requests, `generator` is one process of connections, `run` starts and gathers
them, `report` prints. Processes talk in lines of JSON over pipes.
"""
