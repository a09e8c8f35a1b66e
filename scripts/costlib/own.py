"""Our own code alone: instructions of a worker's rounds, by callgrind.

Theory of operation. The example path_cost moves frames along a path in one thread: guests' drivers, a worker's round, and
so on. Only what runs in `Rounds::round` is counted; the kernel is not, nor what the drivers do. The program runs twice, the
second time with more rounds, and the difference is that of the rounds alone. Nothing in it depends on time, addresses are
the same in each run (setarch -R), and libc does not choose its functions by the CPU (GLIBC_TUNABLES): so the figure is the
same wherever it is counted, as long as compiler, libc and AVX2 are. What the null NIC receives, and the hints before it,
are written into its memory between the rounds, and so are not counted.
"""

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass

COUNTED = "*Rounds*round*"
# Whole numbers of the 61 rounds of which the worker does something more in one.
ROUNDS, MORE_ROUNDS, PROFILE_ROUNDS = 61, 61 * 6, 61 * 5
# Lines of a profile.
TOP = 25
# Of frames of 60 bytes, 64 a round: the checks that they pass, the memory that the NIC reads or writes, its hints.
VARIANTS = {
    "from-guest": ("rules", "guard", "limits", "send-direct", "direct", "network", "encapsulated"),
    "to-guest": ("rules", "limits", "send-direct", "direct", "hints", "tag", "csum", "network", "network/csum", "tap"),
    "guest-to-guest": ("rules", "guard", "limits", "vlan", "two-workers"),
}
# Of TCP, and frames a round: GSO packets that we cut or pass whole, and segments that we merge.
TCP = (
    ("from-guest/64000/split/tap/gso", 1),
    ("to-guest/64000/split/tap/gso", 1),
    ("from-guest/64000/split/gso", 1),
    ("from-guest/64000/split/direct/gso", 1),
    ("guest-to-guest/64000/split/gso", 1),
    ("to-guest/1514/split/gro", 64),
    ("to-guest/1514/split/network/gro", 64),
)
ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX_Fast_Unaligned_Load,-ERMS,-FSRM,-RTM"}


@dataclass(frozen=True)
class Path:
    """A path as path_cost knows it, and how many frames a guest sends or gets at once; 64 take a round."""

    path: str
    at_once: int

    @property
    def name(self):
        return f"{self.path} x{self.at_once}"

    @property
    def frames(self):
        """What is moved at once: between guests, each sends so many."""
        return self.at_once * (2 if self.path.startswith("guest-to-guest") else 1)


def _paths():
    for way in ("from-guest", "to-guest", "guest-to-guest"):
        for at_once in (1, 8, 64, 256):
            yield Path(f"{way}/60/split", at_once)
        yield Path(f"{way}/60/packed", 64)
        yield Path(f"{way}/1514/split", 64)
        for variant in VARIANTS[way]:
            yield Path(f"{way}/60/split/{variant}", 64)
    for path, at_once in TCP:
        yield Path(path, at_once)


PATHS = tuple(_paths())


def _callgrind(program, path, rounds, out):
    command = ["setarch", "-R", "valgrind", "-q", "--tool=callgrind", f"--toggle-collect={COUNTED}"]
    command += [f"--callgrind-out-file={out}", program, path.path, str(path.at_once), str(rounds)]
    ended = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"cost: {' '.join(command)}: {ended.stderr.strip() or ended.returncode}")


def _counted(program, path, rounds):
    with tempfile.NamedTemporaryFile(prefix="vax-cost-") as out:
        _callgrind(program, path, rounds, out.name)
        total = re.search(r"^(?:summary|totals): (\d+)", open(out.name).read(), re.M)
    count = int(total[1]) if total else 0
    if not count:
        raise SystemExit(f"cost: callgrind counted nothing: no function of {program} is called {COUNTED}")
    return count


def instructions(program, path):
    """Instructions a frame."""
    fewer, more = (_counted(program, path, rounds) for rounds in (ROUNDS, MORE_ROUNDS))
    return (more - fewer) / (MORE_ROUNDS - ROUNDS) / path.frames


def profile(program, path):
    """The functions in which most instructions are, as callgrind_annotate says."""
    with tempfile.NamedTemporaryFile(prefix="vax-cost-") as out:
        _callgrind(program, path, PROFILE_ROUNDS, out.name)
        said = subprocess.run(["callgrind_annotate", "--auto=no", out.name], capture_output=True, text=True, check=True).stdout
    lines = said.splitlines()
    begins = next(at for at, line in enumerate(lines) if "file:function" in line)
    return "\n".join(line[:160] for line in lines[begins + 2 :][:TOP])
