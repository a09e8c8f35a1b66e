"""TCP of a real guest: what its user sees, beside `-netdev tap`.

    tcp/from-guest/STREAMS/BYTES    TCP_STREAM: 1 or 4 connections of iperf3's, writes of 1, 4, 16 or 64 KiB
    tcp/to-guest/STREAMS/BYTES      the other way
    tcp/rr/STREAMS/BYTES            TCP_RR: 1 or 4 connections, requests and responses of 1, 64, 1024 or 8192 bytes
    tcp/ping                        round trips with a pause between

At the end of a run two tables show these side by side (side_by_side.py): a contender a row, a size a column.

A contender is a back end with its options, and the form of the peer. Its world (network, back end, guest) is made when it is
first asked for and lives on to the end of the run, so that samples of all contenders alternate within seconds; idle guests cost little.

    tap             an iperf3 in the namespace of the tap interface; vnet_hdr on, as QEMU has it by itself; no vhost-net in this kernel
    tap-notso       tap without vnet_hdr: the guest's device has no offload, neither TSO nor checksums, as QEMU's af-xdp
                    and ours with -none
    tap-intx        tap, whose guest has a plain PCI interrupt, as that of ours has here: Debian 12's QEMU crashes with
                    vhost-user and MSI-X where there is no KVM (scripts/lib/guest.sh)
    tap-veth        tap, bridged to a veth pair whose far end has the iperf3: the same peer as ours
    copy, send-direct, direct    ours, all offloads;   copy-none, direct-none   ours without
    …-nospin        all offloads, and --spin-us 0: a worker that has no work sleeps at once. Where vCPU, worker, softirqs and iperf3 share two
                    CPUs, polling takes time from those that work
    …-gro           the peer's end of the veth with `gro on`, and the near end with `tso off`, which makes veth take frames through NAPI and
                    GRO (veth_skb_is_eligible_for_gro in drivers/net/veth.c). A tap has neither end, so there is no tap-gro
    network-host    ours, a network: the iperf3 is on the host of the uplink, which a tap device joins with the network
    af-xdp          QEMU's own in native mode, where QEMU has it: Debian's does not, so GUEST_QEMU has to name one built
                    with libxdp. It offers the guest nothing, and the peer finishes its checksums
    af-xdp-skb      the same in skb mode

The iperf3 client (and the pings) are on the host, the server in the guest: guest → peer is iperf3's -R. Bytes a host CPU-second: what
arrived, by the busy time of all CPUs in /proc/stat (user, nice, system, irq, softirq; neither idle, iowait nor steal) while iperf3
ran: QEMU with its vCPU, the back end, the kernel's softirqs and threads, and the iperf3 on the host. Busy time of an idle machine is not subtracted.

TCP_RR is netcheck's (scripts/lib/netcheck.c), with a process for each connection on both ends. The guest sends a
response when the request is whole, the host the next request when the response is, and compares its bytes.
Transactions a host CPU-second: by the same busy time, the start of netcheck included.
"""

import json
import os
import re
import subprocess
import time
from contextlib import ExitStack

from . import ours
from .guest import Guest, netcheck
from .machine import QEMU
from .net import Veth, ip
from .process import Directory, Failed, NotHere, threads_ns

PEER_IP, GUEST_IP = "10.78.0.1", "10.78.0.2"
IPERF_PORT, RR_PORT = 5201, 5202
PINGS = 300
CONTENDERS = (
    "tap", "tap-notso", "tap-veth", "tap-veth-gro", "copy", "copy-gro", "copy-nospin", "copy-none", "send-direct",
    "direct", "direct-gro", "direct-none", "af-xdp", "af-xdp-gro",
)  # fmt: skip
# Take part only if named.
FURTHER = ("network-host", "tap-intx", "send-direct-none", "send-direct-nospin", "direct-nospin", "af-xdp-skb")
STREAMS = (1, 4)
MESSAGES = (1024, 4096, 16384, 65536)
REQUESTS = (1, 64, 1024, 8192)


def qemu_has_af_xdp():
    """Whether QEMU knows `-netdev af-xdp` (8.2 and later, if built with libxdp)."""
    done = subprocess.run([QEMU, "-machine", "none", "-netdev", "help"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    return "af-xdp" in done.stdout.split()


class World:
    """Network, back end and guest of one contender; a `with` block."""

    def __init__(self, run, kind):
        self.run, self.kind = run, kind
        self.stack = ExitStack()
        self.veth = self.guest = self.daemon = None
        self.server_ns, self.gro = None, False

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
        self.veth = self.stack.enter_context(Veth())
        near, far = self.veth.near, self.veth.far
        self.server_ns, peer = far, self.veth.wire
        state = self.stack.enter_context(Directory("vax-guest."))
        options, netns = [], None
        if self.kind.startswith("tap"):
            offloads = self.kind != "tap-notso"
            ip("-n", near, "tuntap", "add", "tap0", "mode", "tap", *(["vnet_hdr"] if offloads else []))
            ip("-n", near, "link", "set", "tap0", "up")
            if self.kind != "tap-veth":
                self.server_ns, peer = near, "tap0"
            else:
                ip("-n", near, "link", "add", "br0", "type", "bridge", "forward_delay", "0", "mcast_snooping", "0")
                for port in ("tap0", self.veth.nic):
                    ip("-n", near, "link", "set", port, "master", "br0")
                ip("-n", near, "link", "set", "br0", "up")
            header = "" if offloads else ",vnet_hdr=off"
            options, netns = ["--netdev", f"tap,ifname=tap0,script=no,downscript=no{header}"], near
            options += ["--intx"] if self.kind == "tap-intx" else []
        elif self.kind.startswith("af-xdp"):
            self.veth.ethtool(far, self.veth.wire, tx="off")
            mode = "skb" if self.kind == "af-xdp-skb" else "native"
            options, netns = ["--netdev", f"af-xdp,ifname={self.veth.nic},queues=1,mode={mode}"], near
        elif self.kind == "network-host":
            self.server_ns, peer = near, self.veth.nic
            options = ["--socket", self._start_network(state), "--mac", ours.mac(0)]
        else:
            options = ["--socket", self._start_daemon(state)]
        ip("-n", self.server_ns, "address", "add", f"{PEER_IP}/24", "dev", peer)
        options += ["--ip", f"{GUEST_IP}/24", "--mem", "512"]
        self.guest = self.stack.enter_context(Guest(os.path.join(state, "guest"), options, netns))
        self.run.remember(self.guest)
        self.guest.run("iperf3 -s -D --logfile /tmp/iperf3.log >/dev/null 2>&1")
        self.guest.run(f"netcheck rr listen 0.0.0.0 {RR_PORT} >/dev/null 2>&1 &")
        self._await_traffic()

    def _start_daemon(self, state):
        placement = self.kind.removesuffix("-none").removesuffix("-nospin")
        variant = self.kind.removeprefix(placement).removeprefix("-")
        path = os.path.join(state, "vm.sock")
        argv = [self.run.binary, "serve", "--socket-path", path, "--memory", placement, "--ifname", self.veth.nic, *ours.XDP]
        argv += ["--control", os.path.join(state, "control"), "--offload", "none" if variant == "none" else "all"]
        argv += ["--spin-us", "0"] if variant == "nospin" else []
        if variant == "none":
            # Nobody would finish the checksums that local senders on a veth leave.
            self.veth.ethtool(self.veth.far, self.veth.wire, tx="off")
        return self._keep(ours.start(self.run, argv, state, self.veth.near, self.veth.nic), path)

    def _start_network(self, state):
        path = os.path.join(state, "vm.sock")
        return self._keep(ours.network(self.run, None, [path], state, (self.veth.nic, self.veth.near)), path)

    def _keep(self, daemon, path):
        self.daemon = self.stack.enter_context(daemon)
        self.run.remember(self.daemon)
        self.daemon.until("its socket", lambda: os.path.exists(path))
        return path

    def _await_traffic(self):
        deadline = time.monotonic() + 15
        while self.peer("ping", "-c", "1", "-W", "1", GUEST_IP, check=False).returncode != 0:
            if time.monotonic() > deadline:
                raise Failed(f"{self.kind}: no answer to a ping: {self.daemon.log_tail() if self.daemon else ''}")
        # Warms up the interpreter's translations and TCP's memory of the route.
        for reverse in ((), ("-R",)):
            self.iperf("-t", "1", *reverse)

    def iperf(self, *argv):
        """Runs the client; returns the end of its report."""
        return iperf_report(
            f"{self.kind}: iperf3 {' '.join(argv)}",
            lambda: self.peer("iperf3", "-J", "-i", "0", "-c", GUEST_IP, "-p", str(IPERF_PORT), *argv, check=False).stdout,
            lambda: f"{self.guest.run('tail -n 3 /tmp/iperf3.log')} retransmitted: {self.retransmitted()}",
        )

    def round_trips(self, streams, size):
        """What netcheck prints."""
        return self.peer(self.run.netcheck, "rr", "connect", GUEST_IP, str(RR_PORT), str(self.run.seconds), str(size), str(streams)).stdout

    def retransmitted(self):
        """Segments that TCP sent again so far, the peer's and the guest's."""
        said = [text.splitlines() for text in (self.peer("cat", "/proc/net/snmp").stdout, self.guest.run("cat /proc/net/snmp"))]
        tcp = [[line.split() for line in lines if line.startswith("Tcp:")] for lines in said]
        return [values[names.index("RetransSegs")] for names, values in tcp]

    def set_gro(self, wanted):
        """How the peer's end of the veth takes frames."""
        if wanted != self.gro:
            self.veth.ethtool(self.veth.far, self.veth.wire, gro="on" if wanted else "off")
            self.veth.ethtool(self.veth.near, self.veth.nic, tso="off" if wanted else "on")
            self.gro = wanted

    def peer(self, *argv, check=True):
        """Runs a command on the peer's side."""
        argv = ["ip", "netns", "exec", self.server_ns, *argv]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if check and done.returncode != 0:
            raise Failed(f"{self.kind}: {' '.join(argv[4:])}: {done.stdout.strip()[-300:]}")
        return done

    def cpu_ns(self):
        """CPU time so far, in nanoseconds, by name; `host` is all of it."""
        result = {"host": busy_ns(), "guest": threads_ns(self.guest.pid)}
        if self.daemon:
            result["daemon"] = self.daemon.cpu_ns()
        return result


def iperf_report(what, client, server):
    """The end of the report of an iperf3 client, which is run until it is let in: after each run the server closes its listener and opens
    another. `server()`: what that one says."""
    for _ in range(20):
        said = client()
        try:
            report = json.loads(said)
        except ValueError:
            report = {"error": said.strip()[-300:]}
        if "error" not in report:
            return report["end"]
        if not any(word in report["error"] for word in ("refused", "busy", "reset by peer")):
            break
        time.sleep(0.05)
    raise Failed(f"{what}: {report['error']}; the server: {' / '.join(server().strip().splitlines())}")


def busy_ns():
    """Time that the CPUs of this machine were not idle."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _idle, _iowait, irq, softirq = map(int, file.readline().split()[1:8])
    return (user + nice + system + irq + softirq) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


class Worlds:
    """Those that a run has made, by kind; ended with the run."""

    def __init__(self):
        self.stack, self.made = ExitStack(), {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.made.clear()
        self.stack.close()

    def get(self, run, key, make):
        """The world of that key, by `make()` when it is first asked for."""
        run.netcheck = run.netcheck or netcheck()
        if key not in self.made:
            self.made[key] = self.stack.enter_context(make())
        return self.made[key]


def world_of(run, contender):
    """The world of a contender, in the form that it wants. Raises NotHere for what this machine cannot have."""
    kind = contender.removesuffix("-gro")
    if kind.startswith("af-xdp") and not qemu_has_af_xdp():
        raise NotHere("not in this QEMU; GUEST_QEMU may name one that has it")
    world = run.worlds.get(run, kind, lambda: World(run, kind))
    world.set_gro(contender.endswith("-gro"))
    return world


def throughput(run, contender, direction, streams, message):
    """One iperf3 run."""
    world = world_of(run, contender)
    argv = ["-t", str(max(1, round(run.seconds))), "-P", str(streams), "-l", str(message)]
    argv += ["-R"] if direction == "from-guest" else []
    return iperf_sample(world, *argv)


def iperf_sample(world, *argv):
    """What a run of iperf3 brought, and what it cost."""
    before, begun = world.cpu_ns(), time.monotonic()
    report = world.iperf(*argv)
    elapsed = time.monotonic() - begun
    spent = {name: (now - before[name]) / 1e9 for name, now in world.cpu_ns().items()}
    result = {
        "gbps": report["sum_received"]["bits_per_second"] / 1e9,
        "bytes_per_cpu_s": report["sum_received"]["bytes"] / spent["host"],
        "retransmits": report["sum_sent"].get("retransmits", 0),
    }
    return {**result, **{f"{name}_cpus": value / elapsed for name, value in spent.items()}}


def request_response(run, contender, streams, size):
    """TCP_RR: `size` bytes there and back on each of the connections, by netcheck."""
    return rr_sample(world_of(run, contender), streams, size)


def rr_sample(world, streams, size):
    """What a run of netcheck brought, and what it cost."""
    before, begun = world.cpu_ns(), time.monotonic()
    said = world.round_trips(streams, size)
    elapsed, spent = time.monotonic() - begun, (world.cpu_ns()["host"] - before["host"]) / 1e9
    per_second, median_us, p99_us = map(float, said.split())
    return {
        "per_second": per_second,
        "per_cpu_s": per_second * world.run.seconds / spent,
        "us": median_us,
        "p99_us": p99_us,
        "host_cpus": spent / elapsed,
    }


def ping(run, contender):
    """Round trips, 10 ms apart, so that a back end that sleeps does sleep."""
    world = world_of(run, contender)
    said = world.peer("ping", "-n", "-c", str(PINGS), "-i", "0.01", GUEST_IP).stdout
    times = sorted(float(value) * 1000 for value in re.findall(r"time=([\d.]+) ms", said))
    if len(times) < PINGS:
        raise Failed(f"{contender}: {PINGS - len(times)} of {PINGS} pings were lost")
    return {"us": times[PINGS // 2], "p99_us": times[PINGS * 99 // 100], "mean_us": sum(times) / PINGS}
