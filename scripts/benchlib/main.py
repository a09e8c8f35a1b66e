"""A run of the benchmarks.

Theory of operation. A case has contenders (ours in copy and in direct placement, DPDK in our place, the raw socket). Each
repetition runs every contender of the case once, one after the other, each time from nothing: new namespaces, new
processes, new memory. So a slow minute of the machine hits all of them, and nothing one leaves behind favours the next; the ratios are
medians of the ratios within a repetition. A contender that fails is reported with what it said, and the rest goes on; the exit
status is then 1. Everything is undone at the end, however that comes (caretaker.py).
"""

import argparse
import json
import os
import shlex
import sys
import time
from contextlib import ExitStack

from . import caretaker, cases, cpu_state, machine, report, side_by_side, tcp
from .process import Directory, Failed, NotHere


class Run:
    """What a run was asked for, and what it remembers for the report."""

    def __init__(self, options, log_dir, config_dir, huge_dir):
        self.seconds = options.seconds
        self.warmup_s = min(1.0, options.seconds)
        self.idle_s = options.idle_seconds
        self.binary, self.steward = options.binary, options.steward
        self.generator = options.generator
        self.pause_us = options.generator_pause_us
        self.guest_cpu, self.backend_cpu = options.guest_cpu, options.backend_cpu
        self.log_dir, self.config_dir = log_dir, config_dir
        self.huge_dir = huge_dir
        self.tsc_hz = machine.tsc_hz()
        self.commands = {}
        self.worlds = None
        self.netcheck = None
        self.cpu_state = None
        self._label = ""

    def label(self, case, contender):
        """Sets what the processes from here on belong to."""
        self._label = f"{case}: {contender}"
        self.commands[self._label] = {}

    def remember(self, process):
        """Keeps a command line for the report."""
        self.commands[self._label][process.name] = shlex.join(process.argv)


def parse(arguments):
    """The command line."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Measures vhost-af-xdp beside its peers.")
    parser.add_argument("--only", action="append", metavar="CASE", help="a case or the beginning of its name; repeatable")
    parser.add_argument("--contenders", metavar="LIST", help="only these, e.g. copy,dpdk")
    parser.add_argument("--reps", type=int, default=5, help="repetitions of each case (default 5)")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a measurement of a rate (default 3)")
    parser.add_argument("--idle-seconds", type=float, default=10.0, help="length of the idle measurement (default 10)")
    parser.add_argument("--json", metavar="FILE", help="write everything, samples and command lines included, to FILE")
    parser.add_argument("--generator", choices=("ours", "dpdk"), default="ours", help="who sends towards the guest")
    parser.add_argument(
        "--generator-pause-us",
        type=int,
        default=50,
        help="how long our generator sleeps after each 64 frames, so that the guest on its CPU gets to poll (default 50)",
    )
    parser.add_argument("--guest-cpu", type=int, default=0, help="CPU of the guest and of the generator (default 0)")
    parser.add_argument("--backend-cpu", type=int, default=1, help="CPU of the back end (default 1)")
    parser.add_argument("--binary", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--steward", help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true", help="list the cases and end")
    options = parser.parse_args(arguments)
    for name in ("reps", "seconds", "idle_seconds"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above zero")
    cpus = os.sched_getaffinity(0)
    for name in ("guest_cpu", "backend_cpu"):
        if getattr(options, name) not in cpus:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)} is not one of the CPUs here: {sorted(cpus)}")
    return options


def say(text):
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def run_case(run, case, contenders, reps):
    """All repetitions of a case, contenders interleaved; returns the samples by contender, or why it cannot be had here."""
    samples = {contender: [] for contender in contenders}
    for repetition in range(reps):
        for contender in contenders:
            if isinstance(samples[contender], NotHere):
                continue
            run.label(case.name, contender)
            start = time.monotonic()
            try:
                sample = case.run_once(run, contender)
                shown = f"{sample[case.unit]:.4g} {case.unit}"
            except NotHere as reason:
                samples[contender] = reason
                continue
            except (Failed, RuntimeError, OSError) as error:
                sample, shown = None, f"FAILED: {error}"
            samples[contender].append(sample)
            say(f"{case.name:22} {repetition + 1}/{reps} {contender:12} {shown}  ({time.monotonic() - start:.1f} s)")
    return samples


def run_all(run, options, what):
    """Every case; returns the results by case name, and whether any contender failed."""
    results, failed = {}, False
    for case in what:
        if options.contenders:
            case.contenders = [name for name in (*case.contenders, *case.further) if name in options.contenders.split(",")]
        rows = report.summarize(case, run_case(run, case, case.contenders, options.reps))
        failed = failed or any("not_here" not in row and row["repetitions"] < options.reps for row in rows.values())
        results[case.name] = {"unit": case.unit, "contenders": rows}
        print(f"\n{report.table(case, rows)}\n", flush=True)
    for table in side_by_side.tables(what, results):
        print(f"{table}\n", flush=True)
    return results, failed


def print_conditions(about, run, options):
    """What the tables cannot say."""
    print(f"{about['cpu']}, {about['cpus']} CPUs, TSC {about['tsc_hz'] / 1e9:.3f} GHz, Linux {about['kernel']}")
    print(f"vhost-af-xdp {about['commit']} ({about['vhost_af_xdp']}, {about['rustc']}), DPDK {about['dpdk']}")
    print(f"QEMU {about['qemu']}, guest kernel: {os.path.basename(about['guest_kernel'])}")
    print("daemons on an interface: " + ("as nobody, queues leased from a steward" if options.steward else "by root"))
    print(f"guest and generator on CPU {options.guest_cpu}, back end on CPU {options.backend_cpu}, load before {about['load_before']}")
    print(f"{options.reps} repetitions of {options.seconds} s; ÷: median of the ratios within a repetition; ±: half of max - min\n")
    print("Command lines (of the last repetition):")
    for label, commands in run.commands.items():
        print(f"  {label}")
        for name, command in commands.items():
            print(f"    {name}: {command}")


def main(arguments):
    """The program; returns its exit status."""
    options = parse(arguments)
    what = cases.chosen(options.only)
    if options.list:
        print("\n".join(f"{case.name:22} {', '.join(case.contenders)}" for case in what))
        return 0
    caretaker.end_at_signals()
    about = machine.describe(options.binary)
    with ExitStack() as stack:
        stack.enter_context(caretaker.Caretaker())
        log_dir = stack.enter_context(Directory("vax-bench-log."))
        # Root's, whoever log_dir is handed over to: a daemon reads no configuration that others could replace.
        config_dir = stack.enter_context(Directory("vax-bench-config."))
        os.chmod(config_dir, 0o755)
        switches = [case.switches for case in what if case.needs_huge_pages]
        huge_dir = stack.enter_context(machine.Hugepages(max(switches))) if switches else None
        run = Run(options, log_dir, config_dir, huge_dir)
        run.worlds = stack.enter_context(tcp.Worlds())
        if any(case.unit == "mpps" for case in what):
            run.cpu_state = stack.enter_context(cpu_state.CpuState(run))
        results, failed = run_all(run, options, what)
        print_conditions(about, run, options)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            options_kept = {key: value for key, value in vars(options).items() if key != "json"}
            json.dump(
                {"machine": about, "options": options_kept, "results": results, "commands": run.commands}, file, indent=1
            )
            file.write("\n")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except RuntimeError as problem:
        sys.exit(f"bench: {problem}")
