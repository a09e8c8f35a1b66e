"""Several queue pairs over as many queues of a NIC, on one CPU or on both.

*copy*, *direct*, *copy-polling* and *dpdk* have the back end's CPU alone, one thread for all pairs. *-both* have a second thread on the guest's CPU, which it
shares with the guest that polls there. From the guest its testpmd fills one transmit queue after the other, and pair N sends by queue N. To the
guest come 1024 flows of UDP that testkit's example `flows` sends: the kernel chooses a queue for each by its hash, as a NIC would (RSS). `least_queue_percent`
says how even that is: what the queue with the fewest frames has of its share, as the guest counted.

Ours is one device of N pairs. The peer is N devices of one pair, which is how DPDK gets at N queues of a veth (testpmd.py); the rings,
the sockets, and the order in which either testpmd goes through them are the same.
"""

from contextlib import ExitStack

from . import example, measure, ours, testpmd
from .net import Veth
from .process import Process

OURS = ("copy", "direct", "copy-polling", "copy-both", "direct-both", "copy-polling-both")
DPDK = ("dpdk", "dpdk-both")
FLOWS = 1024


def take(run, contender, direction, pairs):
    """A sample."""
    with ExitStack() as stack:
        veth = stack.enter_context(Veth(pairs))
        join = join_devices if contender in DPDK else join_pairs
        backend, count = join(run, stack, contender, veth, direction, pairs)
        if direction == "from-guest":
            result = measure.rate(run, veth.arrived, backend)
        else:
            start_flows(run, stack, veth)
            result = measure.rate(run, lambda: sum(count()), backend)
        frames = count()
        result["least_queue_percent"] = min(frames) * pairs / sum(frames) * 100
        # Of one worker only.
        if contender.endswith("-both"):
            result.pop("batch", None)
            result.pop("idle_rounds_percent", None)
        return result


def join_pairs(run, stack, contender, veth, direction, pairs):
    """Our daemon and a guest that has one device of so many pairs; returns the daemon, and what gives the frames of each pair by the guest."""
    path = measure.socket_path(run)
    cpus = cpus_of(run, contender)
    placement, spin_us = measure.placement_and_spin(contender.removesuffix("-both"))
    listed, further = ",".join(map(str, cpus)), ["--workers", str(len(cpus))]
    backend = ours.daemon(run, listed, path, placement, veth.nic, veth.near, pairs, spin_us=spin_us, further=further)
    measure.start_backend(run, stack, backend, path)
    guest = measure.start_guest(run, stack, path, direction, 64, pairs)
    return backend, lambda: guest.stats()[f"q_{counter(direction)}"][:pairs]


def join_devices(run, stack, contender, veth, direction, pairs):
    """The same of the peer, and a guest that has so many devices of one pair."""
    paths = [measure.socket_path(run, f".{pair}") for pair in range(pairs)]
    backend = testpmd.peer_on_nic(run, cpus_of(run, contender), paths, veth.nic, veth.near)
    # It makes its ports one after the other.
    measure.start_backend(run, stack, backend, paths[-1])
    guest = measure.up(run, stack, testpmd.guest_of_devices(run, run.guest_cpu, paths, direction, 64))
    return backend, lambda: [guest.stats(port)[counter(direction)] for port in range(pairs)]


def cpus_of(run, contender):
    """Where the back end runs."""
    return [run.backend_cpu, run.guest_cpu] if contender.endswith("-both") else [run.backend_cpu]


def counter(direction):
    """What the guest calls the frames that it sends or gets."""
    return "opackets" if direction == "from-guest" else "ipackets"


def start_flows(run, stack, veth):
    """Frames onto the wire, of many flows."""
    argv = [example.program("flows"), veth.wire, "64", str(FLOWS), str(run.pause_us)]
    run.remember(stack.enter_context(Process("flows", argv, run.log_dir, veth.far, run.guest_cpu)))
