"""Segmentation, coalescing and checksums alone, without a guest, beside the kernel's: testkit's example `offload_cost`, which says how
each is measured. A sample: `ns` a segment (or a sum), `gbytes_per_s` of payload.
"""

import json

from . import example
from .process import Failed, Process

CONTENDERS = {
    "segment": ["copy", "reference", "kernel-copy", "kernel-reference"],
    "coalesce": ["verify", "partial", "kernel-verify", "kernel-partial", "kernel-hop"],
    "checksum": ["simd", "portable"],
}
SIZES = {"segment": (1448, 8948), "coalesce": (1448, 8948), "checksum": (64, 1448, 65000)}
# What ours is compared with.
REFERENCES = ("kernel-copy", "kernel-reference", "kernel-verify", "kernel-partial", "portable")


def cost(run, contender, what, size):
    """One contender, on the back end's CPU."""
    argv = [example.program("offload_cost"), what, contender, str(size), str(run.seconds)]
    with Process(contender, argv, run.log_dir, cpu=run.backend_cpu) as process:
        run.remember(process)
        process.wait(run.seconds + 30)
        try:
            result = json.loads(process.log())
        except ValueError as error:
            raise Failed(f"{contender} printed no JSON: {process.log_tail()}") from error
    return {"ns": result["ns"], "gbytes_per_s": result["gbytes_per_second"], "what": result["what"]}
