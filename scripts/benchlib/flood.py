"""What a flood of new flows costs another port of the same worker, with so many filter rules: testkit's example
`flood`, which says how it is measured. A sample: `kpps`, thousand frames a second of the other port's guest that the
daemon takes, and `flood_kpps` of the one that floods. The flood of one flow has as many frames a second as that of new
flows.
"""

from . import example
from .process import NotHere

CONTENDERS = ("alone", "one-flow", "new-flows")
RULES = (10, 10_000)


def rate(run, contender, rules):
    """One contender."""
    if not run.steward:
        raise NotHere("no steward")
    binaries = [f"VHOST_AF_XDP_BIN={run.binary}", f"VHOST_AF_XDP_STEWARD_BIN={run.steward}"]
    argv = [example.program("flood"), contender, str(rules), str(run.seconds), str(run.backend_cpu), str(run.guest_cpu)]
    return example.sample(run, contender, ["env", *binaries, *argv])
