"""The machine: what it is, and the huge pages that DPDK needs, given back at the end.

DPDK's virtio-user shares its memory with the back end through files in a hugetlbfs. The pages are added to those that
are there already, so that nobody else's are touched, and taken away again only if the number is still the one that was set here.
The file system is mounted in a directory of the run's own, so that /dev/hugepages need not exist.
"""

import os
import re
import subprocess
import tempfile

# As scripts/guest takes it.
QEMU = os.environ.get("GUEST_QEMU", "qemu-system-x86_64")
HUGEPAGES_FILE = "/proc/sys/vm/nr_hugepages"
# Guest 256 MiB, back end 256 MiB, generator 256 MiB, and 64 MiB for a UMEM of the daemon's: 2 MiB pages.
HUGEPAGES_NEEDED = 3 * 128 + 32


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


class Hugepages:
    """Huge pages and a place to get them from, for as long as the `with` lasts; the value is the directory."""

    def __enter__(self):
        self.found = int(read(HUGEPAGES_FILE) or 0)
        self.raised = self.found
        free = meminfo().get("HugePages_Free", 0)
        if free < HUGEPAGES_NEEDED:
            self.raised = self.found + HUGEPAGES_NEEDED - free
            self._set(self.raised)
        got = meminfo().get("HugePages_Free", 0)
        if got < HUGEPAGES_NEEDED:
            self._give_back()
            raise RuntimeError(
                f"only {got} of the {HUGEPAGES_NEEDED} huge pages (2 MiB) that DPDK needs are free; "
                "free some memory, or run: sysctl vm.compact_memory=1"
            )
        self.directory = tempfile.mkdtemp(prefix="vax-bench.")
        subprocess.run(["mount", "-t", "hugetlbfs", "-o", "pagesize=2M", "vax-bench", self.directory], check=True)
        return self.directory

    def __exit__(self, *_):
        subprocess.run(["umount", self.directory], check=False)
        os.rmdir(self.directory)
        self._give_back()

    def _give_back(self):
        if self.raised != self.found and int(read(HUGEPAGES_FILE)) == self.raised:
            self._set(self.found)

    @staticmethod
    def _set(count):
        with open(HUGEPAGES_FILE, "w", encoding="ascii") as file:
            file.write(str(count))
