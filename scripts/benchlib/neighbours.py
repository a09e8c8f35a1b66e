"""What a guest loses of its throughput beside another one on the same worker that is hostile: testkit's example `neighbour`,
which says how it is measured. A sample: `kpps`, thousand frames a second that the honest guest gets out.
"""

import json
import os

from . import example
from .process import Failed, Process

# Alone, beside a thread that only burns CPU time (the hostile guest is a thread, too), and beside each kind of
# hostile guest.
CONTENDERS = ("alone", "busy", "lies", "comes-and-goes", "kicks", "garbage", "no-calls", "changes-memory")


def rate(run, contender, placement):
    """One contender."""
    os.environ["VHOST_AF_XDP_BIN"] = run.binary
    if run.steward:
        os.environ["VHOST_AF_XDP_STEWARD_BIN"] = run.steward
    argv = [example.program("neighbour"), contender, placement, str(run.seconds)]
    with Process(contender, argv, run.log_dir) as process:
        run.remember(process)
        process.wait(run.seconds + 60)
        try:
            return json.loads(process.log().strip().splitlines()[-1])
        except (ValueError, IndexError) as error:
            raise Failed(f"{contender} printed no JSON: {process.log_tail()}") from error
