"""How long other ports, `status` and the daemon's end wait while one port waits for a steward that is stopped, beside a steward
that runs: testkit's example `held_up`, which says how it is measured. A sample: `ms`, the longest of `status_ms`, `vmm_ms` (a VMM
is served by another port) and `end_ms` (from SIGTERM to the end).
"""

from . import example
from .process import NotHere

CONTENDERS = ("runs", "stopped")


def wait(run, contender):
    """One contender."""
    if not run.steward:
        raise NotHere("no steward")
    binaries = [f"VHOST_AF_XDP_BIN={run.binary}", f"VHOST_AF_XDP_STEWARD_BIN={run.steward}"]
    return example.sample(run, contender, ["env", *binaries, example.program("held_up"), contender])
