"""GPUs: the driver by ctypes, what a machine has of them, and how they are doing. No framework is imported.

cuda     the CUDA driver; for workers and the ferry, which have a context. Never called in a front process
found    which devices CUDA would give to a process of this server, asked in a child process
nvml     how busy and how full they are; NVML makes no context, so a front process may ask
"""
