"""The life of a request, the same for every dialect and transport: each case here runs for each way in.

What a way is, and how one is added: `ways.py`. What goes wrong where: `steps.py`. The server: `rig.py`.
"""
