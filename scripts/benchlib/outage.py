"""How long a guest is without its back end when that is killed and started again at once. A sample: `ms` from the kill to
the first frame that comes out of the wire again, the median of some kills, and `longest_ms`.

The guest listens, and the back end is vhost-user's client, as where a back end may be started again under a VMM. The
guest sends without a pause, over packed rings: DPDK's front end begins those anew with each back end, and tells of
split ones that they begin at 0, which our daemon refuses. Ours is started by root, as the peer is. Frames are counted once a millisecond.
"""

import os
import statistics
import time
from contextlib import ExitStack

from . import lease, measure, ours, testpmd
from .net import Veth
from .process import Failed

CONTENDERS = ("copy", "direct", "dpdk")
KILLS = 5
LIMIT_S = 30


def backend(run, contender, path, veth):
    """One that connects to the guest."""
    if contender == "dpdk":
        return testpmd.peer_on_nic(run, [run.backend_cpu], [path], veth.nic, veth.near, client=True)
    return ours.client(run, run.backend_cpu, path, contender, veth.nic, veth.near)


def outage(run, contender):
    """One contender, killed several times."""
    path = measure.socket_path(run)
    with ExitStack() as stack:
        veth = stack.enter_context(Veth())
        guest = stack.enter_context(testpmd.guest(run, run.guest_cpu, path, "from-guest", 64, packed=True, server=True))
        run.remember(guest)
        guest.until("its socket", lambda: os.path.exists(path))
        # Started by root or not, our daemon connects to it as nobody.
        lease.hand_over(run.log_dir)
        os.chmod(path, 0o777)
        times = []
        with ExitStack() as first:
            process = first.enter_context(backend(run, contender, path, veth))
            run.remember(process)
            await_frame(process, veth, veth.arrived())
            # It flows steadily before each kill.
            time.sleep(run.warmup_s)
            killed = process.kill()
        for _ in range(KILLS):
            with backend(run, contender, path, veth) as process:
                await_frame(process, veth, veth.arrived())
                times.append((time.monotonic() - killed) * 1000)
                time.sleep(run.warmup_s)
                killed = process.kill()
    return {"ms": statistics.median(times), "longest_ms": max(times), "samples_ms": times}


def await_frame(process, veth, before):
    """Waits for a frame more than `before`."""
    deadline = time.monotonic() + LIMIT_S
    while veth.arrived() == before:
        process.check()
        if time.monotonic() > deadline:
            raise Failed(f"{process.name}: no frame within {LIMIT_S} s: {process.log_tail()}")
        time.sleep(0.001)
