"""Several queue pairs over as many queues of a NIC, on one CPU or on both.

*copy*, *direct* and *dpdk* (one pair only) have the back end's CPU alone, one thread for all pairs. *-both* have a second thread on the guest's CPU, which it
shares with the guest that polls there. From the guest its testpmd fills one transmit queue after the other, and pair N sends by queue N. To the
guest come 1024 flows of UDP that testkit's example `flows` sends: the kernel chooses a queue for each by its hash, as a NIC would (RSS). `least_queue_percent`
says how even that is: what the queue with the fewest frames has of its share, as the guest counted.
"""

from contextlib import ExitStack

from . import example, measure, ours, testpmd
from .net import Veth
from .process import Process

OURS = ("copy", "direct", "copy-both", "direct-both")
# Its driver takes a veth to have one queue, as that tells no combined channels (`xdp_get_channels_info`, drivers/net/af_xdp of DPDK 22.11).
DPDK = ("dpdk", "dpdk-both")
FLOWS = 1024


def take(run, contender, direction, pairs):
    """A sample."""
    path = measure.socket_path(run)
    with ExitStack() as stack:
        veth = stack.enter_context(Veth(pairs))
        backend = measure.start_backend(run, stack, backend_on(run, contender, path, veth, pairs), path)
        guest = measure.start_guest(run, stack, path, direction, 64, pairs)
        if direction == "from-guest":
            result = measure.rate(run, veth.arrived, backend)
            frames = guest.stats()["q_opackets"]
        else:
            start_flows(run, stack, veth)
            result = measure.rate(run, lambda: guest.stats()["ipackets"], backend)
            frames = guest.stats()["q_ipackets"]
        frames = frames[:pairs]
        result["least_queue_percent"] = min(frames) * pairs / sum(frames) * 100
        # Of one worker only.
        if contender.endswith("-both"):
            result.pop("batch", None)
            result.pop("idle_rounds_percent", None)
        return result


def backend_on(run, contender, path, veth, pairs):
    """The back end, on one CPU or on both."""
    name = contender.removesuffix("-both")
    cpus = [run.backend_cpu] if name == contender else [run.backend_cpu, run.guest_cpu]
    if name == "dpdk":
        return testpmd.peer_on_nic(run, cpus, path, veth.nic, veth.near)
    listed = ",".join(map(str, cpus))
    return ours.daemon(run, listed, path, name, veth.nic, veth.near, pairs, further=["--workers", str(len(cpus))])


def start_flows(run, stack, veth):
    """Frames onto the wire, of many flows."""
    argv = [example.program("flows"), veth.wire, "64", str(FLOWS), str(run.pause_us)]
    run.remember(stack.enter_context(Process("flows", argv, run.log_dir, veth.far, run.guest_cpu)))
