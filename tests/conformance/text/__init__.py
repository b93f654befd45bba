"""The life of text requests, in every API that has them, over HTTP/1.1, HTTP/2 and gRPC: whoever asks, and
however it ends, the client hears of it, what was held is given back, and it is counted.
"""
