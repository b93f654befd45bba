"""GPUs: the driver by ctypes, the inventory of a machine, and readings of load. No framework is imported.

cuda        the CUDA driver and clients' handles; for workers, which have a context. Never called in a front
process inventory   the devices that CUDA gives to a process of this server, found by a child process nvml
load and memory use; NVML makes no context, so a front process may read it
"""
