"""What 8 and 64 guests of a network cost that do nothing: testkit's example `idle_guests`, which says how it is measured. A sample:
`kib` of the daemon's memory for each guest, and `cpu_percent` of a core for all of them together.
"""

from . import example

CONTENDERS = ("8", "64")


def cost(run, contender):
    """One contender."""
    binaries = [f"VHOST_AF_XDP_BIN={run.binary}"]
    return example.sample(run, contender, ["env", *binaries, example.program("idle_guests"), contender])
