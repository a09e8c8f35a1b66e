"""The whole system: what a frame costs driver, kernel and daemon, and others in its place.

Theory of operation. scripts/lib/whole-cost boots a guest of one CPU in which an instruction takes a nanosecond. There
each setup of SETUPS is made in turn, with a veth pair for the NIC, and cost_driver goes through its cases: frames in a
closed loop, in batches. The figure is the time a frame, less the time for which the CPU was idle. Where a setup cannot
be made, or a case does not end, its line has the reason.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

RUN = Path(__file__).parents[1] / "lib" / "whole-cost"
# The same for all: a NIC with a sender behind it, whose frames are each of their own on the wire.
VETH = """ip link add va type veth peer name vb; ip link set va up; ip link set vb up gso_max_segs 1
ip addr add 10.66.0.9/24 dev vb; ip neigh add 10.66.0.1 lladdr 52:54:00:00:09:01 dev vb nud permanent"""
NO_VETH = "ip link del va"
PREPARE = """mount -t bpf bpf /sys/fs/bpf; mkdir -p /run
for i in all default; do echo 1 > /proc/sys/net/ipv6/conf/$i/disable_ipv6; done"""
BRIDGE = """ip link add br0 type bridge mcast_snooping 0; ip link set br0 up; ip link set va master br0
ethtool -K va gro on >/dev/null
for t in t0 t1; do ip tuntap add $t mode tap vnet_hdr; ip link set $t master br0 up; done"""
NO_BRIDGE = "ip link del t0; ip link del t1; ip link del br0"
MACVTAP = """ip link set va promisc on; ethtool -K va gro on >/dev/null
for n in 0 1; do ip link add link va name m$n address 52:54:00:00:09:0$((n + 1)) type macvtap mode bridge
ip link set m$n up
ln -sf /dev/tap$(cat /sys/class/net/m$n/ifindex) /dev/m$n; done"""
NO_MACVTAP = "rm /dev/m0 /dev/m1; ip link del m0; ip link del m1"
SERVE = "vhost-af-xdp serve --moderation-us 0 --control /tmp/ctl"
STOP = "kill $(cat /tmp/pid); sleep 2; rm -f /tmp/pid"
# How many ports the network has.
PORTS = 64
FRAMES = (64, 1514)
BATCHES = (64, 8, 1)
# About so many frames are counted, and so many GSO packets.
COUNTED, COUNTED_GSO, GSO_BATCH, GSO_BYTES = 20000, 300, 8, 64000


@dataclass(frozen=True)
class Setup:
    """Something that serves guests: how it is made and unmade, and the ends that cost_driver connects to."""

    name: str
    make: str
    unmake: str
    ends: tuple

    def cases(self):
        for size in FRAMES:
            for batch in BATCHES:
                yield Case(self, "from-guest", batch, size)
                yield Case(self, "to-guest", batch, size)
                if len(self.ends) > 1:
                    yield Case(self, "guest-to-guest", batch, size)
        yield Case(self, "gso", GSO_BATCH, GSO_BYTES)


@dataclass(frozen=True)
class Case:
    setup: Setup
    way: str
    batch: int
    size: int

    @property
    def name(self):
        return f"whole/{self.setup.name}/{self.way}/{self.size} x{self.batch}"

    @property
    def command(self):
        rounds = COUNTED_GSO // self.batch if self.way == "gso" else COUNTED // (self.batch + 9)
        ends = self.setup.ends[: 2 if self.way == "guest-to-guest" else 1]
        return f"cost_driver {self.way} {self.batch} {self.size} {rounds} {' '.join(ends)}"


def _serve(options, before=""):
    """Makes a daemon with these options, which is ready when that is over."""
    return f"{before}({SERVE} {options} >/tmp/log 2>&1 & echo $! >/tmp/pid); sleep 8; cat /tmp/log"


def _network(idle):
    """A daemon with a network, and so many of its guests connected that do nothing."""
    make = f"""printf '[network.lan]\\nuplink="va"\\n' >/tmp/n.toml
for i in $(seq 1 {PORTS}); do
printf '[port.p%d]\\nnetwork="lan"\\nsocket-path="/tmp/p%d"\\nmac="52:54:00:00:09:%02x"\\n' $i $i $i; done >>/tmp/n.toml
"""
    make += _serve("--spin-us 0 --config /tmp/n.toml")
    unmake = STOP
    if idle:
        make += f"""
for i in $(seq 3 {2 + idle}); do
(cost_driver idle 1 64 1 vhost-user:/tmp/p$i >/dev/null 2>&1 & echo $! >>/tmp/idle); done; sleep 8"""
        unmake = f"kill $(cat /tmp/idle); rm /tmp/idle; {STOP}"
    return make, unmake


TAPS = ("vhost-net:t0", "vhost-net:t1")
MACVTAPS = ("vhost-net:/dev/m0", "vhost-net:/dev/m1")
PORT = ("vhost-user:/tmp/s",)
NETWORK = ("vhost-user:/tmp/p1", "vhost-user:/tmp/p2")
ONE = "--ifname va --socket-path /tmp/s"
SETUPS = (
    Setup("vhost-net+bridge", BRIDGE, NO_BRIDGE, TAPS),
    Setup("one-guest/copy", _serve(f"--spin-us 0 {ONE}"), STOP, PORT),
    Setup("one-guest/copy/spin", _serve(ONE), STOP, PORT),
    Setup("network/copy", *_network(0), NETWORK),
    Setup("network/copy/62-idle", *_network(62), NETWORK),
    Setup("vhost-net+macvtap", MACVTAP, NO_MACVTAP, MACVTAPS),
)
# What is not measured, and why.
MISSING = {
    "openvswitch-kernel": "no setup for it yet",
    "dpdk-vhost+af_xdp": "it polls: on one CPU its idle rounds cannot be told from work",
    "ovs-dpdk": "as dpdk-vhost+af_xdp",
    "qemu-af-xdp": "QEMU's main loop serves it, which would have to run in the counting guest",
    "igb, virtio_net": "no setup for them yet",
}


class Guest:
    """The guest that counts."""

    def __init__(self, state):
        self.state = state

    def run(self, command):
        """What a command prints; raises if it fails."""
        done = subprocess.run([RUN, "--run", self.state, command], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError((done.stdout + done.stderr).strip()[-300:] or f"status {done.returncode}")
        return done.stdout


def measure(guest, case):
    """A row: the instructions of a frame, and the part of the time for which the CPU was idle."""
    row = {"name": case.name, "who": case.setup.name, "way": case.way, "size": case.size, "batch": case.batch}
    row["nic"] = "veth"
    try:
        told = json.loads(guest.run(case.command).splitlines()[-1])
    except (RuntimeError, ValueError, IndexError) as error:
        return row | {"reason": str(error)}
    return row | {"instructions": round(told["ns"] * (1 - told["idle"]), 1), "idle": told["idle"]}


def rows(guest, wanted):
    """Measures those cases; a row for each as it is there."""
    guest.run(PREPARE)
    for setup in SETUPS:
        cases = [case for case in setup.cases() if wanted(case.name)]
        if not cases:
            continue
        guest.run(VETH)
        try:
            guest.run(setup.make)
            yield from (measure(guest, case) for case in cases)
        except RuntimeError as error:
            yield {"name": f"whole/{setup.name}", "who": setup.name, "reason": str(error)}
        finally:
            guest.run(f"{setup.unmake}; {NO_VETH}; true")


def show(row):
    if "reason" in row:
        print(f"{row['name']:56} not measured: {row['reason']}", flush=True)
    else:
        print(f"{row['name']:56} {row['instructions']:12,.0f}  idle {row['idle']:.1%}", flush=True)


def main():
    parser = argparse.ArgumentParser(prog="scripts/lib/whole-cost", allow_abbrev=False)
    parser.add_argument("--only", metavar="WORDS", action="append", default=[])
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--state", help=argparse.SUPPRESS)
    options = parser.parse_args()
    wanted = lambda name: not options.only or any(part in name for part in options.only)  # noqa: E731
    names = [case.name for setup in SETUPS for case in setup.cases() if wanted(case.name)]
    if not names:
        sys.exit(f"no case's name contains {' or '.join(options.only)}: --list")
    if options.list:
        print("\n".join(names))
        return
    measured = []
    for row in rows(Guest(os.path.abspath(options.state)), wanted):
        show(row)
        measured.append(row)
    for who, reason in MISSING.items():
        row = {"name": f"whole/{who}", "who": who, "reason": reason}
        if not options.only:
            show(row)
            measured.append(row)
    if options.json:
        Path(options.json).write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
