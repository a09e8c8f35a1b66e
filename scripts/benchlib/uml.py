"""TCP and UDP of guests under User-mode Linux (UML), beside UML's own tap transport and Open vSwitch over DPDK.

    uml/lan/from-guest/STREAMS   TCP_STREAM: 1 or 4 connections of iperf3's, from a guest to a peer behind the uplink
    uml/lan/to-guest/STREAMS     the other way
    uml/lan/rr/STREAMS/BYTES     TCP_RR: 1 or 4 connections, requests and responses of 1, 1024 or 16384 bytes
    uml/lan/udp/DIRECTION        datagrams of 64 bytes, as fast as iperf3 sends them
    uml/guests/stream/STREAMS, uml/guests/rr/STREAMS/BYTES, uml/guests/udp    the same from one guest to another
    uml/overlay/…                as uml/guests/, with each guest on a host of its own: two namespaces, and VXLAN between them

The uplink is a veth, whose other end is the peer's or the other host's. Between guests of one host there is none. A contender's world is made when it is
first asked for and lives on to the end of the run, as in tcp.py; one that polls stands still while others are measured.

    network         ours, AF_XDP on the uplink; between guests a network without one
    network-tap     ours, the network in tap mode
    alone, cable    ours, a guest that has the uplink's queue alone; two guests that are joined
    tap             UML's vector driver with `transport=tap`, which carries checksums and TSO by vnet headers and joins
                    received segments (`gro=1`), on a Linux bridge
    underlay        ours, overlay only: the network's uplink is the kernel's vxlan device, and its underlay the veth by AF_XDP.
                    *network-tap* there is the same without `underlay`: the kernel encapsulates
    ovs             Open vSwitch over DPDK. On the LAN the uplink is DPDK's net_af_xdp, which has no offloads, so the
                    guest and the peer segment by themselves; between guests there is TSO (userspace-tso-enable). In an overlay
                    it encapsulates itself, and one polls for each host

CPUs, the same for all: the first guest on one (--guest-cpu), the second guest or the peer on the other (--backend-cpu). A
back end runs where the scheduler puts it, but the thread of Open vSwitch's that polls is on the latter. A guest is a process that
has one CPU, and its programs are processes that it traces.

CPU time: all processes of guest, back end and peer, their system calls and softirqs, and ksoftirqd (cpu_group.py).
"""

import os
import subprocess
import time
from contextlib import ExitStack

from . import ours, ovs, tcp, two_guests
from .cpu_group import CpuGroup
from .guest import Guest
from .net import Namespace, Veth, ip
from .process import Directory, Failed
from .relay import Relay

CONTENDERS = {
    "lan": ("network", "network-tap", "alone", "tap", "ovs"),
    "guests": ("network", "cable", "tap", "ovs"),
    "overlay": ("underlay", "network-tap", "tap", "ovs"),
}
STREAMS = (1, 4)
REQUESTS = (1, 1024, 16384)
DATAGRAM, MESSAGE = 64, 65536
# The guests', of which the last one has the servers, and the peer's.
IPS = {"lan": ("10.80.0.2",), "guests": ("10.80.0.1", "10.80.0.2"), "overlay": ("10.80.0.1", "10.80.0.2")}
PEER_IP = "10.80.0.3"
MEMORY_MIB = 256
# Of the hosts of an overlay, with what guests may then send in one frame.
VTEPS, VXLAN, VNI, MTU = ("10.81.0.1", "10.81.0.2"), "vx100", "100", "1450"


class World:
    """What lies between the ends of one contender, and these; a `with` block."""

    def __init__(self, run, place, kind):
        self.run, self.place, self.kind = run, place, kind
        self.stack = ExitStack()
        self.veth = self.group = None
        self.guests, self.switches = [], []

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
        self.group = self.stack.enter_context(CpuGroup(("guest", "daemon", "peer")))
        state = self.stack.enter_context(Directory("vax-uml."))
        if self.place == "lan":
            self.veth = self.stack.enter_context(Veth())
            ip("-n", self.veth.far, "address", "add", f"{PEER_IP}/24", "dev", self.veth.wire)
        addresses = IPS[self.place]
        if self.place == "overlay":
            nics, hosts = self._overlay(state)
        elif self.kind == "tap":
            nics, netns = self._bridge(len(addresses))
            hosts = [netns] * len(addresses)
        else:
            nics, hosts = self._sockets(state, len(addresses)), [None] * len(addresses)
        for number, (address, nic, netns) in enumerate(zip(addresses, nics, hosts)):
            words = ["--accel", "uml", "--mem", str(MEMORY_MIB), "--ip", f"{address}/24", *nic]
            prefix = self._at("guest", (self.run.guest_cpu, self.run.backend_cpu)[number])
            guest = Guest(os.path.join(state, f"guest{number}"), words, netns, prefix)
            guest.name = f"guest{number}"
            self.guests.append(self.stack.enter_context(guest))
            self.run.remember(guest)
        if self.place == "overlay":
            for guest in self.guests:
                guest.run(f"ip link set eth0 mtu {MTU}")
        self.guests[-1].run("iperf3 -s -D --logfile /tmp/iperf3.log >/dev/null 2>&1")
        self.guests[-1].run(f"netcheck rr listen 0.0.0.0 {tcp.RR_PORT} >/dev/null 2>&1 &")
        self.client(f"for i in 1 2 3 4 5 6 7 8 9 10; do ping -c 1 -W 1 {addresses[-1]} && exit 0; done; exit 1")
        # TCP's memory of the route.
        self.iperf("-t", "1")
        self.rest()

    def _bridge(self, count):
        """A bridge, taps on it, and the uplink; the guests' options, and its namespace."""
        netns = self.veth.near if self.veth else self.stack.enter_context(Namespace("b")).name
        taps = two_guests.make_bridge(netns, count, *([self.veth.nic] if self.veth else []))
        return [["--netdev", f"transport=tap,ifname={tap},depth=128,gro=1"] for tap in taps], netns

    def _sockets(self, state, count):
        """A back end that listens; the guests' options."""
        paths = [os.path.join(state, f"vm{number}.sock") for number in range(count)]
        uplink = (self.veth.nic, self.veth.near) if self.veth else None
        if self.kind == "ovs":
            behind = [f"{path}.ovs" for path in paths]
            for ends in zip(paths, behind):
                self.stack.enter_context(Relay(*ends))
            switch = ovs.Switch(self.run, behind, tso=not uplink, uplink=uplink, directory=state)
            self.switches.append(self.stack.enter_context(switch).ready())
            if uplink:
                # Nobody would finish the checksums that local senders on a veth leave.
                self.veth.ethtool(self.veth.far, self.veth.wire, tx="off")
        else:
            self.switches.append(self.stack.enter_context(self._ours(paths, state, uplink)))
        self._await(paths)
        return [["--socket", path] for path in paths]

    def _await(self, paths):
        """Waits until the last back end has its sockets."""
        self.switches[-1].until("its sockets", lambda: all(map(os.path.exists, paths)))
        self.group.add("daemon", self.switches[-1].pid)
        self.run.remember(self.switches[-1])

    def _overlay(self, state):
        """Two hosts, joined by VXLAN over the veth; the guests' options, and where each of them runs."""
        self.veth = self.stack.enter_context(Veth())
        ends = ((self.veth.near, self.veth.nic), (self.veth.far, self.veth.wire))
        nics = []
        for number, (netns, interface) in enumerate(ends):
            path = os.path.join(state, f"vm{number}.sock")
            if self.kind == "ovs":
                self.stack.enter_context(Relay(path, f"{path}.ovs"))
                local, remote = VTEPS[number], VTEPS[1 - number]
                tunnel = ovs.Tunnel(interface, f"{local}/24", remote, VNI)
                switch = ovs.Switch(self.run, [f"{path}.ovs"], uplink=(interface, netns), tunnel=tunnel, directory=state)
                self.switches.append(self.stack.enter_context(switch).ready())
            else:
                taps = self._vxlan(netns, interface, number)
                if self.kind == "tap":
                    nics.append(["--netdev", f"transport=tap,ifname={taps[0]},depth=128,gro=1"])
                    continue
                underlay = f'underlay = "{interface}"\n' if self.kind == "underlay" else ""
                directory = self.stack.enter_context(Directory("vax-uml."))
                uplink = (VXLAN, netns)
                self.switches.append(
                    self.stack.enter_context(
                        ours.network(self.run, None, [path], directory, uplink, mode=None, first=number, keys=underlay, leased=False)
                    )
                )
            self._await([path])
            nics.append(["--socket", path])
        return nics, [netns if self.kind == "tap" else None for netns, _ in ends]

    def _vxlan(self, netns, interface, number):
        """A vxlan device on a bridge, whose tables have the other host and its guest; a tap for a guest, if it is to have one."""
        local, remote = VTEPS[number], VTEPS[1 - number]
        ip("-n", netns, "address", "add", f"{local}/24", "dev", interface)
        ip("-n", netns, "link", "add", VXLAN, "type", "vxlan", "id", VNI, "local", local, "dstport", "4789", "nolearning")
        ip("-n", netns, "link", "set", VXLAN, "mtu", MTU)
        taps = two_guests.make_bridge(netns, 1 if self.kind == "tap" else 0, VXLAN)
        for address in ("00:00:00:00:00:00", ours.mac(1 - number)):
            words = ["bridge", "-n", netns, "fdb", "append", address, "dev", VXLAN, "dst", remote]
            subprocess.run(words, check=True)
        return taps

    def _ours(self, paths, state, uplink):
        if self.kind == "cable":
            return ours.cable(self.run, None, paths, state)
        if self.kind == "alone":
            argv = [self.run.binary, "serve", "--socket-path", paths[0], "--ifname", uplink[0], *ours.XDP]
            return ours.start(self.run, [*argv, "--control", os.path.join(state, "control")], state, uplink[1], uplink[0])
        return ours.network(self.run, None, paths, state, uplink, mode="tap" if self.kind == "network-tap" else "xdp")

    def _at(self, part, cpu):
        return [*self.group.prefix(part), "taskset", "-c", str(cpu)]

    def client(self, command, seconds=20, check=True):
        """Runs a shell command where the clients are; returns what it printed."""
        if self.place != "lan":
            return self.guests[0].run(command if check else f"{command} || true", seconds)
        argv = [*self._at("peer", self.run.backend_cpu), "ip", "netns", "exec", self.veth.far, "sh", "-c", command]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if check and done.returncode != 0:
            raise Failed(f"{self.kind}: {command}: {done.stdout.strip()[-300:]}")
        return done.stdout

    def iperf(self, *argv):
        """Runs the client; returns the end of its report."""
        command = f"iperf3 -J -i 0 -c {IPS[self.place][-1]} -p {tcp.IPERF_PORT} {' '.join(argv)}"
        return tcp.iperf_report(
            self.kind,
            lambda: self.client(command, int(self.run.seconds) + 20, check=False),
            lambda: self.guests[-1].run("tail -n 3 /tmp/iperf3.log"),
        )

    def round_trips(self, streams, size):
        """What netcheck prints."""
        netcheck = self.run.netcheck if self.place == "lan" else "netcheck"
        words = (netcheck, "rr", "connect", IPS[self.place][-1], tcp.RR_PORT, self.run.seconds, size, streams)
        return self.client(" ".join(map(str, words)), int(self.run.seconds) + 20)

    def work(self):
        """It is its turn."""
        if self.kind == "ovs":
            for switch in self.switches:
                switch.go_on()
            time.sleep(0.2)

    def rest(self):
        """It is others' turn."""
        if self.kind == "ovs":
            for switch in self.switches:
                switch.pause()

    def cpu_ns(self):
        """CPU time so far, in nanoseconds, by name; `host` is all of it."""
        return self.group.cpu_ns()


def taken(run, place, contender, take):
    """What `take(world)` says, when it is that world's turn."""
    return two_guests.in_turn(run.worlds.get(run, ("uml", place, contender), lambda: World(run, place, contender)), take)


def times(run, reverse):
    """The options of iperf3 that say how long, and which way: the servers are in the last guest."""
    return ["-t", str(max(1, round(run.seconds))), *(["-R"] if reverse else [])]


def throughput(run, contender, place, reverse, streams):
    """One iperf3 run of TCP."""
    argv = [*times(run, reverse), "-P", str(streams), "-l", str(MESSAGE)]
    return taken(run, place, contender, lambda world: tcp.iperf_sample(world, *argv))


def request_response(run, contender, place, streams, size):
    """TCP_RR, by netcheck."""
    return taken(run, place, contender, lambda world: tcp.rr_sample(world, streams, size))


def datagrams(run, contender, place, reverse):
    """One iperf3 run of UDP."""

    def take(world):
        before = world.cpu_ns()["host"]
        said = world.iperf("-u", "-b", "0", "-l", str(DATAGRAM), *times(run, reverse))["sum"]
        arrived = said["packets"] - said["lost_packets"]
        if not arrived:
            raise Failed(f"{contender}: none of {said['packets']} datagrams arrived")
        return {
            "kpps": arrived / said["seconds"] / 1000,
            "cpu_us_each": (world.cpu_ns()["host"] - before) / 1000 / arrived,
            "lost_percent": said["lost_percent"],
        }

    return taken(run, place, contender, take)
