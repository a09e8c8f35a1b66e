"""The CPU time of some processes and of all that they start: a control group (cgroup v2), which the kernel counts for.

The machine may have other work, which /proc/stat would count, too. Softirqs are counted where they run, so what a veth or a tap
receives is its sender's; ksoftirqd's time, which belongs to no group, is the whole machine's.
"""

import itertools
import os
import re

from . import caretaker, machine

SERIAL = itertools.count()
# Joins a group, and becomes the command.
JOIN = 'echo $$ >"$0/cgroup.procs" && exec "$@"'


class CpuGroup:
    """One, with a part for each of `parts`, as long as the `with` lasts."""

    def __init__(self, parts):
        self.parts = parts
        self.path, self.left = None, None
        self.softirqd = []

    def __enter__(self):
        mounts = re.findall(r"^\S+ (\S+) cgroup2 ", machine.read("/proc/mounts"), re.M)
        if not mounts:
            raise RuntimeError("no cgroup2 is mounted, which counts CPU time: mount -t cgroup2 none /sys/fs/cgroup")
        self.path = os.path.join(mounts[0], f"vax-bench-{os.getpid()}-{next(SERIAL)}")
        directories = [os.path.join(self.path, part) for part in self.parts]
        self.left = caretaker.later("rmdir", *directories, self.path)
        for directory in (self.path, *directories):
            os.mkdir(directory)
        # Kernel threads have no children and no command line.
        names = {pid: machine.read(f"/proc/{pid}/comm") for pid in os.listdir("/proc") if pid.isdigit()}
        self.softirqd = [pid for pid, name in names.items() if name.startswith("ksoftirqd/")]
        return self

    def __exit__(self, *_):
        # It is busy until the last of its processes is gone.
        caretaker.take_back(["rmdir", *(os.path.join(self.path, part) for part in self.parts), self.path])
        caretaker.done(self.left)

    def prefix(self, part):
        """What a command begins with to be in that part."""
        return ["sh", "-c", JOIN, os.path.join(self.path, part)]

    def add(self, part, pid):
        """Puts a process that runs, with all its threads, into that part."""
        with open(os.path.join(self.path, part, "cgroup.procs"), "w", encoding="ascii") as file:
            file.write(str(pid))

    def cpu_ns(self):
        """CPU time so far, in nanoseconds, by part; `host` is all of it, with ksoftirqd's."""
        result = {part: used_ns(os.path.join(self.path, part)) for part in self.parts}
        kernel = sum(int(machine.read(f"/proc/{pid}/schedstat").split()[0]) for pid in self.softirqd)
        return {**result, "host": sum(result.values()) + kernel}


def used_ns(path):
    """CPU time of a group."""
    return int(re.search(r"^usage_usec (\d+)", machine.read(os.path.join(path, "cpu.stat"))).group(1)) * 1000
