"""DPDK's testpmd: as the guest (virtio-user), as the peer in the daemon's place, and as a frame generator.

It runs without its prompt (a newline on stdin, SIGINT or SIGTERM ends it) and is asked for its counters through its telemetry
socket, which does not disturb the forwarding core. Its main core only waits, so it can share
the CPU of the first that forwards: `--lcores (0,1)@CPU`. Guest memory must be one file a segment list (--single-file-segments), because a vhost-user
message carries at most eight descriptors. Each process has a --file-prefix of its own, whose run-time directory goes with it.
"""

import json
import os
import shutil
import signal
import socket

from . import caretaker, ours
from .process import Failed, Process

RUNTIME_DIR = "/var/run/dpdk"
MEMORY_MIB = 256
MBUFS = 32768
# Of two guests that send each other what they get: their four rings of 256, a core's cache and some bursts. With 80 MB of
# them frames of 1514 bytes are at most half as many, by whomever (docs/benchmarks.md): all seem to be used in turn, and then memory is
# measured, which is the same for all.
MBUFS_BETWEEN = 2048


class Testpmd(Process):
    """One testpmd that forwards from the start, on one CPU or each of several. `app_args` follow its `--`."""

    STOP_SIGNAL = signal.SIGINT

    def __init__(self, run, name, cpu, vdevs, app_args, netns=None, mbufs=MBUFS):
        self.left = None
        self.prefix = f"vax{os.getpid()}-{name}"
        first, *others = [cpu] if isinstance(cpu, int) else cpu
        cores = ",".join([f"(0,1)@{first}", *(f"{core}@{other}" for core, other in enumerate(others, 2))])
        argv = ["dpdk-testpmd", "--lcores", cores, "--no-pci", "--huge-dir", run.huge_dir]
        argv += ["--file-prefix", self.prefix, "-m", str(MEMORY_MIB), "--single-file-segments"]
        for vdev in vdevs:
            argv += ["--vdev", vdev]
        # It forwards on one core unless told.
        argv += ["--", f"--total-num-mbufs={mbufs}", f"--nb-cores={1 + len(others)}", "--auto-start"] + app_args
        super().__init__(name, argv, run.log_dir, netns)

    def __enter__(self):
        self.left = caretaker.later("rm", "-rf", os.path.join(RUNTIME_DIR, self.prefix))
        return super().__enter__()

    def stop(self, grace_s=10):
        super().stop(grace_s)
        shutil.rmtree(os.path.join(RUNTIME_DIR, self.prefix), ignore_errors=True)
        caretaker.done(self.left)

    def stats(self, port=0):
        """Counters of a port: ipackets, opackets, ibytes and so on."""
        return self.ask(f"/ethdev/stats,{port}")["/ethdev/stats"]

    def received(self):
        """Frames that came to all its ports."""
        ports = self.ask("/ethdev/list")["/ethdev/list"]
        return sum(answer["/ethdev/stats"]["ipackets"] for answer in self.ask_all(f"/ethdev/stats,{port}" for port in ports))

    def ask(self, question):
        """One question to the telemetry socket."""
        return self.ask_all([question])[0]

    def ask_all(self, questions):
        """Questions to the telemetry socket (SOCK_SEQPACKET, JSON answers)."""
        answers = []
        path = os.path.join(RUNTIME_DIR, self.prefix, "dpdk_telemetry.v2")
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                connection.settimeout(5)
                connection.connect(path)
                connection.recv(4096)  # its greeting
                for question in questions:
                    connection.send(question.encode())
                    answers.append(json.loads(connection.recv(1 << 16)))
                return answers
        except (OSError, ValueError) as error:
            self.check()
            raise Failed(f"{self.name}: no answer from {path}: {error}: {self.log_tail()}") from error

    def ready(self):
        """Waits until its ports are up and forwarding is about to begin."""
        path = os.path.join(RUNTIME_DIR, self.prefix, "dpdk_telemetry.v2")
        self.until("its telemetry socket", lambda: os.path.exists(path))
        self.until("its port", lambda: self.ask("/ethdev/list").get("/ethdev/list"))
        return self


def guest(run, cpu, socket_path, direction, size, queues=1, packed=False, server=False):
    """A guest: sends without a pause (`from-guest`), receives (`to-guest`), or sends back what it receives (`forward`), over split rings or
    packed ones. As `server` it listens, and takes one back end after the other."""
    vdev = f"net_virtio_user0,path={socket_path},queues={queues},packed_vq={int(packed)},server={int(server)}"
    return guest_of(run, cpu, [vdev], direction, size, queues)


def guest_of_devices(run, cpu, socket_paths, direction, size):
    """The same with a device of one queue pair for each path, which is a port of its own."""
    vdevs = [f"net_virtio_user{port},path={path}" for port, path in enumerate(socket_paths)]
    return guest_of(run, cpu, vdevs, direction, size)


def guest_of(run, cpu, vdevs, direction, size, queues=1, name="guest"):
    """A guest that has these devices."""
    mode = {"from-guest": "txonly", "to-guest": "rxonly", "forward": "macswap"}[direction]
    app_args = [f"--forward-mode={mode}", f"--txpkts={size}", f"--rxq={queues}", f"--txq={queues}"]
    # Of several devices each gets its own back.
    app_args += ["--port-topology=loop"] if mode == "macswap" else []
    return Testpmd(run, name, cpu, vdevs, app_args)


def guests_of_network(run, cpu, socket_paths, direction, size):
    """Guests with the addresses of their ports' numbers, by which the paths go."""
    vdevs = [f"net_virtio_user{number},path={path},mac={ours.mac(number)}" for number, path in socket_paths.items()]
    return guest_of(run, cpu, vdevs, direction, size, name=f"guest{min(socket_paths)}")


def two_guests(run, cpu, socket_paths, size, server=False):
    """Two guests whose frames circulate: what one gets, it sends by the other. They begin with a burst of each, addressed to the other, for
    back ends that look at addresses. As `server` they listen."""
    macs = [ours.mac(number) for number in range(2)]
    vdevs = [
        f"net_virtio_user{port},path={path},mac={mac},server={int(server)}"
        for port, (path, mac) in enumerate(zip(socket_paths, macs))
    ]
    peers = [f"--eth-peer={port},{mac}" for port, mac in enumerate(reversed(macs))]
    app_args = ["--forward-mode=io", "--tx-first", f"--txpkts={size}", *peers]
    return Testpmd(run, "guests", cpu, vdevs, app_args, mbufs=MBUFS_BETWEEN)


# Its port, of those of `guests_with_frames`.
SECOND_GUEST = 2


def guests_with_frames(run, cpu, socket_paths, macs, frames, hello, server=False):
    """Two guests: the first one sends the frames of a file again and again, the second one takes what comes, after it sent those of `hello`
    once."""
    guests = [f"path={path},mac={mac},server={int(server)}" for path, mac in zip(socket_paths, macs)]
    # Ports are joined two by two, in the order of their devices.
    vdevs = [f"net_pcap0,rx_pcap={frames},infinite_rx=1", f"net_virtio_user0,{guests[0]}"]
    vdevs += [f"net_virtio_user1,{guests[1]}", f"net_pcap1,rx_pcap={hello}"]
    return Testpmd(run, "guests", cpu, vdevs, ["--forward-mode=io", "--port-topology=paired"])


def peer_between(run, cpu, socket_paths):
    """The peer in a cable's place: frames of one guest to the other."""
    vdevs = [f"net_vhost{port},iface={path},queues=1" for port, path in enumerate(socket_paths)]
    return Testpmd(run, "peer", cpu, vdevs, ["--forward-mode=io"])


def light_guest(run, cpu, socket_path, size, packed=False):
    """A guest that sends what a null device of its own gives it: it writes no frame, so sending costs it less."""
    vdevs = [f"net_virtio_user0,path={socket_path},packed_vq={int(packed)}", f"net_null0,size={size}"]
    return Testpmd(run, "guest", cpu, vdevs, ["--forward-mode=io"])


def peer_on_nic(run, cpus, socket_paths, interface, netns, client=False):
    """The peer in our place: vhost on one side, AF_XDP on the other, and as many queues of the NIC as there are paths. As `client` it
    connects to the guest.

    Its AF_XDP driver takes a veth to have one queue, as that tells no combined channels (`xdp_get_channels_info`, drivers/net/af_xdp, before
    DPDK 25.07). It looks at how many a port wants, not at which; so each queue is a port of its own. With that so is the vhost device it
    is joined with, since testpmd gives every port the same number of queues. The ports share one XDP program and its map, which libxdp sizes by
    the veth's receive channels.
    """
    vdevs = []
    for queue, path in enumerate(socket_paths):
        vdevs.append(f"net_vhost{queue},iface={path},queues=1,client={int(client)}")
        vdevs.append(f"net_af_xdp{queue},iface={interface},start_queue={queue}")
    return Testpmd(run, "peer", cpus, vdevs, ["--forward-mode=io"], netns)


def peer_on_null(run, cpu, socket_path, size, makes_frames):
    """The peer over a null NIC. With `makes_frames` off its receive side costs nothing (no-rx=1)."""
    null = f"net_null0,size={size}" + ("" if makes_frames else ",no-rx=1")
    return Testpmd(run, "peer", cpu, [f"net_vhost0,iface={socket_path},queues=1", null], ["--forward-mode=io"])


def generator(run, cpu, interface, size, netns):
    """Sends frames out of an interface, where our own `bench txonly` is not to be used."""
    app_args = ["--forward-mode=txonly", f"--txpkts={size}"]
    return Testpmd(run, "generator", cpu, [f"net_af_xdp0,iface={interface}"], app_args, netns)
