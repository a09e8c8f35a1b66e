"""How long an honest lease waits beside a user whose every request is refused: the steward's example `lease_wait`, which says how it is
measured. A sample: `us` and `p99_us` of a lease, `refused` requests meanwhile.
"""

from . import example
from .process import NotHere

# Connections of the other user.
CONNECTIONS = {"quiet": 0, "refused-1": 1, "refused-16": 16}
LEASES = 100


def wait(run, contender):
    """One contender."""
    if not run.steward:
        raise NotHere("no steward")
    argv = [example.program("lease_wait", "steward"), run.steward, str(CONNECTIONS[contender]), str(LEASES)]
    return example.sample(run, contender, argv)
