"""What a guest's notification costs, by the VMM in examples/tiny-vmm: real KVM, a guest program of our own, virtio-net in
the VMM's process.

How the guest's notifications reach who serves its queues:

    exit            the vCPU's thread exits and serves the queue itself
    eventfd         an ioeventfd; a thread on the back end's CPU waits for it
    poll            a worker on the back end's CPU polls, and the guest is asked not to notify
    …-same          the thread, or the worker, on the vCPU's CPU
    …-crowded       beside two busy loops on each of the two CPUs: more threads than cores
    line-irqfd, line-call         an interrupt by eventfd, or by KVM_IRQ_LINE, of a guest that waits for it
                                  (crates/notifier/examples/interrupts.rs; interrupt controllers in the kernel)
    message-irqfd, message-call   the same of a message (MSI), by eventfd or by KVM_SIGNAL_MSI
    raw             the raw socket without a guest (measure.py)

Times are the guest's own, by its time stamp counter; those of the CPU have the setting up in them, too. A sample is a
run of as much work as fits run.seconds, which a short run before it tells. Cases: *cost*, a notification of a queue in
which nothing is; *send/K*, frames of 64 bytes to nobody, K of them for each notification; *round-trip*, one frame that
comes back; *interrupt*, until the guest has seen it; *af-xdp/BYTES*, frames over an AF_XDP socket on veth (copy mode),
64 for each notification, counted where they arrive.
"""

import os
from contextlib import ExitStack

from . import example, measure
from .net import Veth
from .process import Failed, NotHere, Process

MODES = ("exit", "eventfd", "poll")
COST = ("exit", "eventfd", "poll", "eventfd-same", "exit-crowded", "eventfd-crowded")
SEND = (*COST, "poll-crowded")
INTERRUPTS = ("line-irqfd", "line-call", "message-irqfd", "message-call")
XDP = (*MODES, "raw")
FRAMES_PER_KICK = (1, 8, 64)
TRY = 2000
# Catches a guest that hangs.
TIME_LIMIT_S = 120
MOST = 200_000_000
PACKAGE = "tiny-vmm"


def require_kvm():
    """Leaves the case out without KVM."""
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        raise NotHere("no /dev/kvm")


def argv(run, mode, *words):
    """A command line; `mode` is a contender's name."""
    require_kvm()
    notify, _, where = mode.partition("-")
    worker_cpu = run.guest_cpu if where == "same" else run.backend_cpu
    placed = ["--vcpu-cpu", str(run.guest_cpu), "--worker-cpu", str(worker_cpu)]
    return [example.package_program(PACKAGE), "--notify", notify, *placed, "--time-limit", str(TIME_LIMIT_S), "--json", *words]


def crowd(run, stack, mode):
    """More threads than cores, if the contender is one of those."""
    if mode.endswith("-crowded"):
        for number in range(2):
            for cpu in (run.guest_cpu, run.backend_cpu):
                loop = Process(f"busy{number}-{cpu}", ["python3", "-c", "while True: pass"], run.log_dir, cpu=cpu)
                stack.enter_context(loop)


def figures(run, mode, *words):
    """What as much work as fits the time came to."""
    with ExitStack() as stack:
        crowd(run, stack, mode)
        tried = example.sample(run, "tiny-vmm", argv(run, mode, *words, "--frames", str(TRY)))
        frames = min(MOST, max(TRY, int(tried["per_second"] * run.seconds)))
        done = example.sample(run, "tiny-vmm", argv(run, mode, *words, "--frames", str(frames)), seconds=TIME_LIMIT_S + 10)
    if done["done"] != frames:
        raise Failed(f"{mode}: {done['done']} of {frames} were done")
    for who in ("vcpu", "worker"):
        used = done[f"{who}_cpu_ms"]
        # A kernel without scheduler statistics does not tell.
        done[f"{who}_cpu_percent"] = None if used is None else used / done["seconds"] / 10
    return done


def shares(done):
    """What all samples have beside their figure."""
    kept = {key: done[key] for key in ("vcpu_cpu_percent", "worker_cpu_percent")}
    return {**kept, "kicks_percent": done["kicks"] / done["done"] * 100}


def cost(run, mode):
    """A notification, as the guest sees it."""
    done = figures(run, mode, "--work", "notify")
    return {"ns_each": done["ns_each"], **shares(done)}


def send(run, mode, frames_per_kick):
    """Frames a second that the guest gives to nobody."""
    done = figures(run, mode, "--work", "send", "--frames-per-kick", str(frames_per_kick))
    return {"kpps": done["per_second"] / 1e3, **shares(done)}


def round_trip(run, mode):
    """One frame there and back."""
    done = figures(run, mode, "--work", "round-trip", "--sink", "echo")
    samples = done["samples"]
    return {"us": samples["median_ns"] / 1e3, "p99_us": samples["p99_ns"] / 1e3, **shares(done)}


def interrupt(run, by):
    """From making an interrupt until the guest has seen it, and until the call that makes it returns."""
    require_kvm()
    done = example.sample(run, "interrupts", [example.program("interrupts", package="notifier"), str(TRY)])
    for each in done["interrupts"]:
        if each["by"] == by:
            return {"ns_each": each["seen_after_ns"], "make_ns": each["make_ns"]}
    raise Failed(f"no interrupts by {by}: {done}")


def over_af_xdp(run, mode, size):
    """Frames a second over an AF_XDP socket, with a guest or without one."""
    if mode == "raw":
        return measure.raw_txonly(run, size)
    with ExitStack() as stack:
        veth = stack.enter_context(Veth())
        words = ["--work", "send", "--frames-per-kick", "64", "--frame-bytes", str(size), "--frames", str(MOST), "--sink", f"af-xdp:{veth.nic}"]
        vmm = Process("tiny-vmm", argv(run, mode, *words), run.log_dir, netns=veth.near)
        stack.enter_context(vmm)
        run.remember(vmm)
        return measure.rate(run, veth.arrived, vmm)
