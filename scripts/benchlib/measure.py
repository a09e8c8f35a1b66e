"""How one number is taken: each function runs one contender once and returns a sample.

A sample is a dictionary. Rates: `mpps` (million frames a second that arrived where they should), `ns` (nanoseconds of the back end's
CPU a frame: its CPU time over the frames, so for a back end that polls without a pause it is 1000/mpps), `cycles` (the
same by the time stamp counter), `cpu_percent` of the back end. Of our own worker also `batch`, frames moved in a round that moved any, and
`idle_rounds_percent`: a back end that waits for its guest has small batches and idle rounds. CPUs: the guest on run.guest_cpu, the back end on
run.backend_cpu, a generator beside the guest.
"""

import os
import time
from contextlib import ExitStack

from . import cpu_state, ours, ovs, testpmd
from .machine import meminfo
from .net import Veth
from .process import Failed, Process, cpu_ticks, wakeups

IDLE_SETTLE_S = 2
FIRST_FRAME_S = 15


def socket_path(run, end=""):
    """A fresh path for the vhost-user socket, or for one of several by its end."""
    path = os.path.join(run.log_dir, f"vhost.sock{end}")
    if os.path.exists(path):
        os.unlink(path)
    return path


def rate(run, count, backend):
    """Frames a second of `count()` once they flow, with the CPU time of `backend` beside it. `windows` are the rates of short parts of
    that time, each with what the CPUs were like before and behind it."""
    first = count()
    backend.until("the first frame", lambda: count() != first, FIRST_FRAME_S)
    time.sleep(run.warmup_s)
    rounds = ours.rounds(run) if backend.name == "daemon" else None
    windows = cpu_state.measure(run, lambda seconds: window(count, backend, seconds))
    frames, elapsed, cpu = (sum(each[i] for each, *_ in windows) for i in range(3))
    backend.check()
    if frames <= 0:
        raise Failed(f"{backend.name}: frames stopped: {backend.log_tail()}")
    result = sample(run, frames / elapsed, cpu / frames, cpu / elapsed / 1e7)
    result["windows"] = [(each[0] / each[1] / 1e6, *states) for each, *states in windows]
    if rounds:
        result.update(ours.rounds_since(run, rounds, frames))
    return result


def window(count, backend, seconds):
    """(frames, seconds, nanoseconds of the back end's CPU) of so long a time."""
    # The clock is read behind each count, which may take milliseconds.
    frames, start, cpu = count(), time.monotonic(), backend.cpu_ns()
    time.sleep(seconds)
    frames, elapsed = count() - frames, time.monotonic() - start
    return frames, elapsed, backend.cpu_ns() - cpu


def sample(run, per_second, ns, cpu_percent):
    """One sample of a rate."""
    return {"mpps": per_second / 1e6, "ns": ns, "cycles": ns * run.tsc_hz / 1e9, "cpu_percent": cpu_percent}


# Our worker sleeps 50 us after the last frame, which is between the generator's bursts; DPDK never does. With this
# it does not, either.
POLLING_SPIN_US = 1000


def backend_on_nic(run, contender, path, veth):
    """The back end over AF_XDP."""
    if contender == "dpdk":
        return testpmd.peer_on_nic(run, [run.backend_cpu], [path], veth.nic, veth.near)
    placement, spin_us = placement_and_spin(contender)
    return ours.daemon(run, run.backend_cpu, path, placement, veth.nic, veth.near, spin_us=spin_us)


def placement_and_spin(contender):
    """Where its frames are, and for how long its worker polls before it sleeps, if not as long as usual."""
    placement = contender.removesuffix("-polling")
    return placement, None if placement == contender else POLLING_SPIN_US


def backend_on_null(run, contender, path, direction, size):
    """The back end over a null NIC."""
    if contender.startswith("dpdk"):
        makes_frames = contender == "dpdk-duplex" or direction == "to-guest"
        return testpmd.peer_on_null(run, run.backend_cpu, path, size, makes_frames)
    return ours.daemon(run, run.backend_cpu, path, contender, size=size)


def light(run, contender, size, packed=False):
    """A guest that costs little and takes no frame, and a null NIC that makes none."""
    path = socket_path(run)
    with ExitStack() as stack:
        if contender == "dpdk":
            backend = testpmd.peer_on_null(run, run.backend_cpu, path, size, makes_frames=False)
        else:
            backend = ours.daemon(run, run.backend_cpu, path, contender, size=0)
        start_backend(run, stack, backend, path)
        guest = up(run, stack, testpmd.light_guest(run, run.guest_cpu, path, size, packed))
        return rate(run, lambda: guest.stats()["opackets"], backend)


# Further ports of a switch that has many, where nobody listens.
IDLE_PORTS = 62


def cable(run, contender, size):
    """Two guests of one process, on one CPU, and the back end between them; every frame that arrives is counted."""
    paths = [socket_path(run, end) for end in ("", ".other")]
    idle = [socket_path(run, f".idle{port}") for port in range(IDLE_PORTS)] if contender.endswith("-64") else []
    kind, listen = contender.removesuffix("-64"), contender.startswith("ovs")
    with ExitStack() as stack:
        if listen:
            backend = up(run, stack, ovs.Switch(run, paths + idle))
        else:
            between = {"dpdk": testpmd.peer_between, "cable": ours.cable, "network": ours.network}[kind]
            backend = start_backend(run, stack, between(run, run.backend_cpu, paths + idle), (paths + idle)[-1])
        guests = up(run, stack, testpmd.two_guests(run, run.guest_cpu, paths, size, listen))
        return rate(run, lambda: sum(guests.stats(port)["ipackets"] for port in range(2)), backend)


def start_backend(run, stack, backend, path):
    """Starts it, remembers its command line, and waits for its socket."""
    stack.enter_context(backend)
    run.remember(backend)
    backend.until("its socket", lambda: os.path.exists(path))
    return backend


def start_guest(run, stack, path, direction, size, queues=1, packed=False):
    """Starts the guest and waits until it is up."""
    return up(run, stack, testpmd.guest(run, run.guest_cpu, path, direction, size, queues, packed))


def up(run, stack, process):
    """Starts this guest or switch, remembers its command line, and waits until it is up."""
    stack.enter_context(process)
    run.remember(process)
    return process.ready()


def seconds_of_bench(run):
    """For how long our own benchmarks run, which are ended when they are not needed any more."""
    return int(run.seconds + run.warmup_s + FIRST_FRAME_S + 10)


def start_generator(run, stack, veth, size, further=()):
    """Frames onto the wire, from the far end; `further` options are for ours."""
    if run.generator == "dpdk":
        generator = testpmd.generator(run, run.guest_cpu, veth.wire, size, veth.far)
    else:
        further = ["--pause-us", str(run.pause_us), *further]
        generator = ours.socket_bench(
            run, "generator", "txonly", run.guest_cpu, veth.wire, veth.far, size, seconds_of_bench(run), further
        )
    stack.enter_context(generator)
    run.remember(generator)
    return generator


def nic(run, contender, direction, size):
    """Guest and NIC with a back end between them, or the raw socket without a guest."""
    if contender == "raw":
        return raw_txonly(run, size) if direction == "from-guest" else raw_rxdrop(run, size)
    path = socket_path(run)
    with ExitStack() as stack:
        veth = stack.enter_context(Veth())
        backend = start_backend(run, stack, backend_on_nic(run, contender, path, veth), path)
        guest = start_guest(run, stack, path, direction, size)
        if direction == "from-guest":
            return rate(run, veth.arrived, backend)
        start_generator(run, stack, veth, size)
        return rate(run, lambda: guest.stats()["ipackets"], backend)


def busy_guest(run):
    """What a polling guest does to the machine, without one."""
    return Process("spin", ["python3", "-c", "while True: pass"], run.log_dir, cpu=run.guest_cpu)


def raw_txonly(run, size):
    """The raw socket sends; frames are counted where they arrive. A busy loop stands in for the guest, which polls."""
    with ExitStack() as stack:
        veth = stack.enter_context(Veth())
        stack.enter_context(busy_guest(run))
        bench = ours.socket_bench(run, "raw", "txonly", run.backend_cpu, veth.nic, veth.near, size, seconds_of_bench(run))
        stack.enter_context(bench)
        run.remember(bench)
        return rate(run, veth.arrived, bench)


def raw_rxdrop(run, size):
    """The raw socket receives and drops. A busy loop stands in for the guest, which would poll on the generator's CPU."""
    with ExitStack() as stack:
        veth = stack.enter_context(Veth())
        stack.enter_context(busy_guest(run))
        bench = ours.socket_bench(run, "raw", "rxdrop", run.backend_cpu, veth.nic, veth.near, size, int(run.seconds + 2))
        generator = start_generator(run, stack, veth, size)
        time.sleep(run.warmup_s)
        stack.enter_context(bench)
        run.remember(bench)
        cpu, elapsed = 0, 0
        start = time.monotonic()
        while bench.child.poll() is None:
            try:
                cpu, elapsed = bench.cpu_ns(), time.monotonic() - start
            except OSError:
                break  # it has just ended
            if elapsed > run.seconds + 20:
                raise Failed(f"raw: rxdrop did not end: {bench.log_tail()}")
            time.sleep(0.05)
        bench.wait(5)
        generator.check()
        per_second = ours.frames_per_second(bench)
        return sample(run, per_second, cpu / elapsed / per_second, cpu / elapsed / 1e7)


# Whose frames the guest sends back: nobody's at the far end, whose kernel would look at its own more closely.
FORWARDED_FROM = "02:00:00:00:00:02"


def forward(run, contender, size):
    """A guest that sends each frame back, its addresses swapped, with a back end between it and the NIC; or the raw socket that does the
    same without a guest. Frames are counted where they come back to."""
    path = socket_path(run)
    with ExitStack() as stack:
        veth = stack.enter_context(Veth())
        if contender == "raw":
            stack.enter_context(busy_guest(run))
            backend = ours.socket_bench(run, "raw", "l2fwd", run.backend_cpu, veth.nic, veth.near, size, seconds_of_bench(run))
            stack.enter_context(backend)
            run.remember(backend)
        else:
            backend = start_backend(run, stack, backend_on_nic(run, contender, path, veth), path)
            start_guest(run, stack, path, "forward", size)
        start_generator(run, stack, veth, size, ["--src-mac", FORWARDED_FROM])
        return rate(run, veth.arrived, backend)


def null(run, contender, direction, size, packed=False):
    """Guest and null NIC: the virtqueue path alone, over split rings or packed ones."""
    path = socket_path(run)
    with ExitStack() as stack:
        backend = start_backend(run, stack, backend_on_null(run, contender, path, direction, size), path)
        guest = start_guest(run, stack, path, direction, size, packed=packed)
        key = "opackets" if direction == "from-guest" else "ipackets"
        return rate(run, lambda: guest.stats()[key], backend)


def idle(run, contender):
    """CPU time of a back end whose guest is connected and silent: percent of a core."""
    path = socket_path(run)
    with ExitStack() as stack:
        veth = stack.enter_context(Veth())
        backend = start_backend(run, stack, backend_on_nic(run, contender, path, veth), path)
        start_guest(run, stack, path, "to-guest", 64)
        time.sleep(IDLE_SETTLE_S)
        start, cpu, ticks = time.monotonic(), backend.cpu_ns(), cpu_ticks(backend.pid)
        woken = wakeups(backend.pid)
        time.sleep(run.idle_s)
        elapsed = time.monotonic() - start
        backend.check()
        return {
            "cpu_percent": (backend.cpu_ns() - cpu) / elapsed / 1e7,
            "cpu_percent_by_ticks": (cpu_ticks(backend.pid) - ticks) / elapsed * 100,
            "wakeups_per_s": (wakeups(backend.pid) - woken) / elapsed,
        }


def memory(run, contender):
    """What a queue costs: the difference between a daemon with two queues and one with one, both under way."""
    one = memory_of(run, contender, 1)
    two = memory_of(run, contender, 2)
    result = {key: two[key] - one[key] for key in ("process_bytes", "kernel_bytes")}
    result["process_bytes_whole"] = one["process_bytes"]
    result["kernel_bytes_whole"] = one["kernel_bytes"]
    result["status"] = one["status"]
    return result


def memory_of(run, contender, queues):
    """Resident bytes of the daemon without the guest's, and kernel memory, with `queues` queue pairs."""
    path = socket_path(run)
    with ExitStack() as stack:
        veth = stack.enter_context(Veth(queues))
        if contender == "dpdk":
            backend = testpmd.peer_on_nic(run, [run.backend_cpu], [path], veth.nic, veth.near)
        else:
            backend = ours.daemon(run, run.backend_cpu, path, contender, veth.nic, veth.near, queues)
        before = kernel_bytes()
        start_backend(run, stack, backend, path)
        start_guest(run, stack, path, "to-guest", 64, queues)
        time.sleep(IDLE_SETTLE_S)
        backend.check()
        return {
            "process_bytes": resident_bytes(backend.pid, run.huge_dir),
            "kernel_bytes": kernel_bytes() - before,
            "status": ours.status(run),
        }


def kernel_bytes():
    """Memory that the kernel holds for itself and says so: slabs, vmalloc areas, page tables, percpu."""
    info = meminfo()
    return sum(info.get(name, 0) for name in ("Slab", "VmallocUsed", "PageTables", "Percpu", "KernelStack"))


def resident_bytes(pid, huge_dir):
    """Resident memory of a process, huge pages included, without what it maps of the guest (the files in `huge_dir`)."""
    total, ours_too = 0, True
    with open(f"/proc/{pid}/smaps", encoding="ascii", errors="replace") as file:
        for line in file:
            name, _, rest = line.partition(" ")
            if not name.endswith(":"):
                ours_too = huge_dir not in rest
            elif ours_too and name in ("Rss:", "Private_Hugetlb:", "Shared_Hugetlb:"):
                total += int(rest.split()[0]) * 1024
    return total
