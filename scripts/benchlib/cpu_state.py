"""What the guest's CPU and the back end's are like at the moment: testkit's example `cpu_state`.

In a virtual machine that changes while one measures. The host moves its CPUs about, between cores that share a cache and cores
that do not, and gives the other thread of a core to somebody else; a virtqueue is several times as fast in one state as in another. So rates are
taken in short windows, each with the state before and behind it, and compared with those of other contenders in the same state.
"""

import contextlib
import math
import os
import statistics
import subprocess
import sys
from collections import namedtuple

from . import example
from .process import LIBC, PR_SET_PDEATHSIG, NotHere

REAL_TIME = 10
WINDOW_S = 0.1
# Up to here two CPUs are near: they share a cache (a round trip takes 60 ns, on large meshes up to 150); beyond, far
# (300).
FAR_NS = 180
# Speeds are alike that differ by less than this factor.
ALIKE = 1.3
# Windows that a contender must have in a state to be compared there.
ENOUGH = 3

# Nanoseconds: a cache line's round trip, and a piece of work on either CPU.
State = namedtuple("State", "round_trip guest_work backend_work")
# Million frames a second, and the states before and behind; None where they are not known.
Window = namedtuple("Window", "mpps before behind")


class CpuState:
    """Asks the example, which is built and started when the `with` begins, and runs as long as it lasts. Where it cannot be had, no state
    is known."""

    def __init__(self, run):
        self.cpus = (run.guest_cpu, run.backend_cpu)
        self.child = None

    def __enter__(self):
        try:
            self.child = self._start()
        except (NotHere, OSError, subprocess.SubprocessError) as reason:
            print(f"the state of the CPUs is not known: {reason}", file=sys.stderr)
        return self

    def __exit__(self, *_):
        if self.child:
            with contextlib.suppress(OSError):
                self.child.stdin.close()
            self.child.wait()

    def now(self):
        """The state; None if that cannot be found out."""
        if not self.child:
            return None
        try:
            self.child.stdin.write("\n")
            self.child.stdin.flush()
            return State(*map(int, self.child.stdout.readline().split()))
        except (OSError, TypeError, ValueError):
            return None

    def _start(self):
        def before_exec():
            LIBC.prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0)
            with contextlib.suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(REAL_TIME))

        argv = [example.program("cpu_state"), *map(str, self.cpus)]
        return subprocess.Popen(  # pylint: disable=consider-using-with
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=before_exec
        )


def measure(run, take):
    """Calls `take()` for windows that add up to the run's length. Returns what they gave, each with the states before and behind."""
    windows, before = [], run.cpu_state.now()
    count = max(1, round(run.seconds / WINDOW_S))
    for _ in range(count):
        what = take(run.seconds / count)
        behind = run.cpu_state.now()
        windows.append((what, before, behind))
        before = behind
    return windows


def windows_of(samples):
    """(contender, window) of all samples."""
    return [(name, Window(*window)) for name, rows in samples.items() for row in rows for window in row.get("windows", [])]


def by_state(samples):
    """Rates of the windows in which the distance did not change: {"near" or "far": {contender: {speeds: [mpps]}}}. `speeds` are classes of
    both CPUs' speeds, the slower one of before and behind."""
    known = [(name, window) for name, window in windows_of(samples) if window.before and window.behind]
    works = [work for _, window in known for state in (window.before, window.behind) for work in state[1:]]
    groups = {"near": {}, "far": {}}
    for name, window in known:
        far = [state[0] > FAR_NS for state in (window.before, window.behind)]
        if far[0] == far[1]:
            slower = [max(pair) for pair in zip(window.before[1:], window.behind[1:])]
            speeds = tuple(int(math.log(work / min(works), ALIKE)) for work in slower)
            group = groups["far" if far[0] else "near"]
            group.setdefault(name, {}).setdefault(speeds, []).append(window.mpps)
    return groups


def ratio(ours, theirs):
    """Our rate by theirs, like for like: the mean (geometric) of the ratios of medians at equal speeds, each as important as it has windows
    in the side that has fewer. And how many those are."""
    logs, weights = 0.0, 0
    for speeds in ours.keys() & theirs.keys():
        weight = min(len(ours[speeds]), len(theirs[speeds]))
        if weight >= ENOUGH:
            logs += weight * math.log(max(statistics.median(ours[speeds]), 1e-6) / max(statistics.median(theirs[speeds]), 1e-6))
            weights += weight
    return (math.exp(logs / weights), weights) if weights else None


def table(case, samples):
    """A case's rates by state, as lines of cells: a head, and a line a distance and contender."""
    references = [name for name in case.references if name in case.contenders]
    lines = [[f"{case.name}, CPUs", "contender", "windows", "Mpps", "p10 to p90", *(f"÷ {name} (windows)" for name in references)]]
    for distance, rates in by_state(samples).items():
        for name, group in rates.items():
            ranked = sorted(rate for alike in group.values() for rate in alike)
            low, high = (ranked[len(ranked) * share // 10] for share in (1, 9))
            cells = [distance, name, str(len(ranked)), f"{statistics.median(ranked):.2f}", f"{low:.2f} to {high:.2f}"]
            for reference in references:
                found = ratio(group, rates.get(reference, {})) if reference != name else None
                cells.append(f"{found[0]:.2f} ({found[1]})" if found else "-")
            lines.append(cells)
    return lines if len(lines) > 1 else []
