"""The table of what a GPU worker reaches: python -m bench.gpu [--seconds 10] [--simulated]

    host to device    DMA out of a batch slot against plain pinned memory: 600 KB pictures, 8, 32, 64 at once
    throughput        ResNet-50- and BERT-base-shaped models, bf16, batch 32: through the whole server with
                      raw V2 requests of 64 connections, against a loop whose inputs are on the device
    idle              of the device between consecutive batches under that load
    latency           what the server adds at one connection, p50
    shared memory     a request whose tensors stay on the device, 600 KB against 6 MB

Without a GPU it says what is missing, and measures nothing; --simulated runs the script to its end all the
same, over the host's memory and with small models, and says that these are no numbers of a GPU.
"""

from __future__ import annotations

import argparse
import sys

from bench.gpu.host import Missing, what_is_missing


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--simulated", action="store_true", help="a dry run that needs no GPU")
    options = parser.parse_args(arguments)
    missing = [] if options.simulated else what_is_missing()
    if missing:
        print("bench.gpu measures a CUDA device, and cannot here:")
        for one in missing:
            print(f"  - {one}")
        return 2
    from bench.gpu import measured, place

    try:
        for line in measured.table(options.seconds, place.Simulated() if options.simulated else place.Real()):
            print(line, flush=True)
    except Missing as fault:
        print(f"bench.gpu: {fault}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
