"""A guest on a NIC's queue of its own, and guests that share such a queue in a network of 64 ports.

*copy* has the queue alone. *network* is one guest of a network whose other ports have nobody, *network-64* is a guest at every port, all busy: each
sends, or the generator sends to one after the other. What a network costs is the back end's CPU time a frame beside *copy*'s: *network* has
the same traffic, *network-64* has frames of the same size in smaller batches for each guest. In *forward* the guests send back what they get, and
frames are counted where they come back to.
"""

from contextlib import ExitStack

from . import measure, ours, testpmd
from .net import Veth

CONTENDERS = ("copy", "network", "network-64")
PORTS = 64
# Devices of one testpmd (RTE_MAX_ETHPORTS).
MOST_DEVICES = 32


def take(run, contender, direction, size):
    """A sample."""
    with ExitStack() as stack:
        veth = stack.enter_context(Veth())
        if contender == "copy":
            paths = [measure.socket_path(run)]
            backend = ours.daemon(run, run.backend_cpu, paths[0], "copy", veth.nic, veth.near)
        else:
            paths = [measure.socket_path(run, f".{port}") for port in range(PORTS)]
            backend = ours.network(run, run.backend_cpu, paths, uplink=(veth.nic, veth.near))
        measure.start_backend(run, stack, backend, paths[-1])
        busy = len(paths) if contender == "network-64" else 1
        guests = []
        for first in range(0, busy, MOST_DEVICES):
            some = dict(enumerate(paths[:busy][first : first + MOST_DEVICES], first))
            guests.append(measure.up(run, stack, testpmd.guests_of_network(run, run.guest_cpu, some, direction, size)))
        if direction == "from-guest":
            return measure.rate(run, veth.arrived, backend)
        further = ["--dst-mac", ours.mac(0), "--dst-macs", str(busy), "--src-mac", measure.FORWARDED_FROM]
        measure.start_generator(run, stack, veth, size, further)
        if direction == "forward":
            return measure.rate(run, veth.arrived, backend)
        return measure.rate(run, lambda: sum(guest.received() for guest in guests), backend)
