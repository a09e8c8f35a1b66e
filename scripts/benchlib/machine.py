"""The machine: what it is, and the huge pages that DPDK needs, given back at the end.

DPDK's virtio-user shares its memory with the back end through files in a hugetlbfs. The pages are added to those that
are there already and taken away from those that are there at the end, under the lock that tests take, too (testkit's huge_pages.rs): others may add and
take theirs meanwhile.
The file system is mounted in a directory of the run's own, so that /dev/hugepages need not exist.
"""

import os
import re
import subprocess
import tempfile
from contextlib import ExitStack

from . import caretaker

# As scripts/guest takes it.
QEMU = os.environ.get("GUEST_QEMU", "qemu-system-x86_64")
HUGEPAGES_FILE = "/proc/sys/vm/nr_hugepages"
# Guest 256 MiB, back end 256 MiB, generator 256 MiB, and 64 MiB for a UMEM of the daemon's: 2 MiB pages.
HUGEPAGES_NEEDED = 3 * 128 + 32
# Open vSwitch's, of which there is one among the former.
HUGEPAGES_OF_A_SWITCH = 256


def read(path):
    """The text of a file, without the newline at the end; empty if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def meminfo():
    """/proc/meminfo as bytes (page counts stay counts)."""
    result = {}
    for line in read("/proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        result[name] = int(words[0]) * (1024 if len(words) > 1 else 1)
    return result


def tsc_hz():
    """Cycles a second of the time stamp counter, which does not vary with the CPU's clock. 0 if unknown."""
    calibrated = re.findall(r"tsc: (?:Refined TSC clocksource calibration|Detected) *:? ([\d.]+) MHz", output(["dmesg"]))
    listed = re.findall(r"^cpu MHz\s*:\s*([\d.]+)", read("/proc/cpuinfo"), re.M)
    mhz = (calibrated[-1:] or listed[:1] or ["0"])[0]
    return int(float(mhz) * 1e6)


def output(argv):
    """What a command prints, or nothing if it fails: for versions and the like."""
    try:
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=20, check=False)
        return done.stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def describe(binary):
    """What the numbers were taken on and with; goes into the report."""
    model = re.search(r"^model name\s*:\s*(.*)$", read("/proc/cpuinfo"), re.M)
    here = os.path.dirname(os.path.abspath(__file__))
    return {
        "kernel": os.uname().release,
        "cpu": model.group(1) if model else os.uname().machine,
        "cpus": os.cpu_count(),
        "tsc_hz": tsc_hz(),
        "memory_bytes": meminfo().get("MemTotal", 0),
        "vhost_af_xdp": output([binary, "--version"]).partition("\n")[0],
        "commit": output(["git", "-C", here, "describe", "--always", "--dirty"]),
        "rustc": output(["rustc", "--version"]),
        "dpdk": output(["dpkg-query", "-W", "-f", "${Version}", "dpdk-dev"]),
        "qemu": output([QEMU, "--version"]).partition("\n")[0].removeprefix("QEMU emulator version "),
        "guest_kernel": os.environ.get("GUEST_KERNEL_DEB", "Debian's"),
        "load_before": read("/proc/loadavg").split(" ")[0],
    }


# More of them, or less: the number is that of the whole machine, and changed by tests, too, under this lock.
CHANGE_PAGES = f'exec 9<{HUGEPAGES_FILE}; flock 9; echo $(($(cat {HUGEPAGES_FILE}) + $1)) >{HUGEPAGES_FILE}'


def change_pages(count):
    """A command that adds so many huge pages to the machine's."""
    return ["sh", "-c", CHANGE_PAGES, "sh", str(count)]


class Hugepages:
    """Huge pages and a place to get them from, for as long as the `with` lasts; the value is the directory."""

    def __init__(self, switches):
        self.stack = ExitStack()
        self.needed = HUGEPAGES_NEEDED + (switches - 1) * HUGEPAGES_OF_A_SWITCH

    def __enter__(self):
        try:
            return self._make()
        except BaseException:
            self.stack.close()
            raise

    def __exit__(self, *_):
        self.stack.close()

    def _make(self):
        more = self.needed - meminfo().get("HugePages_Free", 0)
        if more > 0:
            self._make_and_take_back(change_pages(more), change_pages(-more))
        got = meminfo().get("HugePages_Free", 0)
        if got < self.needed:
            raise RuntimeError(
                f"only {got} of the {self.needed} huge pages (2 MiB) that DPDK needs are free; "
                "free some memory, or run: sysctl vm.compact_memory=1"
            )
        directory = os.path.join(tempfile.gettempdir(), f"vax-bench.{os.getpid()}")
        self._make_and_take_back(["mkdir", "-m", "700", directory], ["rmdir", directory])
        mount = ["mount", "-t", "hugetlbfs", "-o", "pagesize=2M", "vax-bench", directory]
        self._make_and_take_back(mount, ["umount", directory])
        return directory

    def _make_and_take_back(self, make, take_back):
        with caretaker.undisturbed():
            subprocess.run(make, check=True)
            self.stack.callback(self._take_back, take_back, caretaker.later(*take_back))

    @staticmethod
    def _take_back(command, left):
        # Neither not at all nor twice: a number of pages is taken from what there is.
        with caretaker.undisturbed():
            subprocess.run(command, check=False)
            caretaker.done(left)
