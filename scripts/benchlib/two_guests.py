"""TCP from one real guest to another of the same machine, beside Open vSwitch and a Linux bridge.

A contender's world (what lies between the guests, and the two) is made when it is first asked for and lives on to the end of the run, as in
tcp.py. Who polls without a pause stands still (SIGSTOP) while others are measured.

    cable           ours: two ports of a daemon, joined
    network         the same on a network, which looks at addresses
    ovs             Open vSwitch over DPDK with userspace-tso-enable, see ovs.py; without it a guest would cut and add up all by itself
    tap-bridge      two taps of QEMU's, with vnet_hdr, on a Linux bridge in a namespace of their own; no vhost-net in this kernel
    tap-bridge-intx the same with guests that have a plain PCI interrupt, as those of the others have here (tcp.py says why)

The figures are those of tcp.py: what arrived, and that by the busy time of all CPUs of the host.
"""

import os
import time
from contextlib import ExitStack

from . import ours, ovs, tcp
from .guest import Guest
from .net import Namespace, ip
from .process import Directory, threads_ns

CONTENDERS = ("cable", "network", "ovs", "tap-bridge")
FURTHER = ("tap-bridge-intx",)
MESSAGES = (4096, 65536)
GUEST_IPS = ("10.79.0.1", "10.79.0.2")


class World:
    """What lies between the guests of one contender, and the two; a `with` block. The second one has the servers."""

    def __init__(self, run, kind):
        self.run, self.kind = run, kind
        self.stack = ExitStack()
        self.between, self.guests = None, []

    def __enter__(self):
        try:
            self._make()
        except BaseException:
            self.stack.close()
            raise
        return self

    def __exit__(self, *_):
        self.stack.close()

    def _make(self):
        state = self.stack.enter_context(Directory("vax-guests."))
        paths = [os.path.join(state, f"vm{number}.sock") for number in range(2)]
        netns, options = None, [["--socket", path] for path in paths]
        if self.kind.startswith("tap"):
            netns = self.stack.enter_context(Namespace("b")).name
            options = [["--netdev", f"tap,ifname=tap{number},script=no,downscript=no"] for number in range(2)]
            options = [words + ["--intx"] * self.kind.endswith("-intx") for words in options]
            make_bridge(netns, 2)
        elif self.kind == "ovs":
            options = [["--listen", path] for path in paths]
            self.between = self.stack.enter_context(ovs.Switch(self.run, paths, tso=True)).ready()
        else:
            between = {"cable": ours.cable, "network": ours.network}[self.kind]
            self.between = self.stack.enter_context(between(self.run, None, paths, state))
            self.between.until("its sockets", lambda: all(map(os.path.exists, paths)))
        if self.between:
            self.run.remember(self.between)
        for number, words in enumerate(options):
            words += ["--ip", f"{GUEST_IPS[number]}/24", "--mac", ours.mac(number), "--mem", "512"]
            guest = Guest(os.path.join(state, f"guest{number}"), words, netns)
            guest.name = f"guest{number}"
            self.guests.append(self.stack.enter_context(guest))
            self.run.remember(guest)
        self.guests[1].run("iperf3 -s -D --logfile /tmp/iperf3.log >/dev/null 2>&1")
        self.guests[1].run(f"netcheck rr listen 0.0.0.0 {tcp.RR_PORT} >/dev/null 2>&1 &")
        self.guests[0].run(f"for i in 1 2 3 4 5 6 7 8 9 10; do ping -c 1 -W 1 {GUEST_IPS[1]} && exit 0; done; exit 1")
        self.iperf("-t", "1")
        self.rest()

    def iperf(self, *argv):
        """Runs the client; returns the end of its report."""
        command = f"iperf3 -J -i 0 -c {GUEST_IPS[1]} -p {tcp.IPERF_PORT} {' '.join(argv)} || true"
        return tcp.iperf_report(
            self.kind, lambda: self.guests[0].run(command, int(self.run.seconds) + 20), lambda: self.guests[1].run("tail -n 3 /tmp/iperf3.log")
        )

    def work(self):
        """It is its turn."""
        if self.kind == "ovs":
            self.between.go_on()
            time.sleep(0.2)

    def rest(self):
        """It is others' turn."""
        if self.kind == "ovs":
            self.between.pause()

    def cpu_ns(self):
        """CPU time so far, in nanoseconds, by name; `host` is all of it."""
        result = {"host": tcp.busy_ns(), "guest": sum(threads_ns(guest.pid) for guest in self.guests)}
        if self.between:
            result["daemon"] = self.between.cpu_ns()
        return result


def make_bridge(netns, count, *ports):
    """So many taps on a bridge, and other interfaces; the names of the taps."""
    taps = [f"tap{number}" for number in range(count)]
    ip("-n", netns, "link", "add", "br0", "type", "bridge", "forward_delay", "0", "mcast_snooping", "0")
    for tap in taps:
        ip("-n", netns, "tuntap", "add", tap, "mode", "tap", "vnet_hdr")
    for port in (*taps, *ports):
        ip("-n", netns, "link", "set", port, "master", "br0", "up")
    ip("-n", netns, "link", "set", "br0", "up")
    return taps


def throughput(run, contender, streams, message):
    """One iperf3 run, from the first guest to the second."""
    return taken(run, contender, lambda world: tcp.iperf_sample(world, "-t", str(max(1, round(run.seconds))), "-P", str(streams), "-l", str(message)))


def request_response(run, contender):
    """TCP_RR between the guests: a byte there and back."""
    return taken(run, contender, round_trips)


def round_trips(world):
    """By netcheck."""
    seconds = int(world.run.seconds) or 1
    said = world.guests[0].run(f"netcheck rr connect {GUEST_IPS[1]} {tcp.RR_PORT} {seconds}", seconds + 20)
    per_second, median_us, p99_us = map(float, said.split())
    return {"per_second": per_second, "us": median_us, "p99_us": p99_us}


def taken(run, contender, take):
    """What `take(world)` says, when it is that contender's turn."""
    return in_turn(run.worlds.get(run, ("two guests", contender), lambda: World(run, contender)), take)


def in_turn(world, take):
    """What `take(world)` says, while the world works."""
    world.work()
    try:
        return take(world)
    finally:
        world.rest()
