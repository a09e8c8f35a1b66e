"""The whole system: what a frame costs driver, kernel and daemon, and others in its place.

Theory of operation. scripts/lib/whole-cost boots a guest of one CPU in which an instruction takes a nanosecond. There
each setup of a NIC's (setups.py) is made in turn, and cost_driver goes through its cases: frames in a closed loop, in
batches. The figure is the time a frame, less the time for which the CPU was idle. Where a setup cannot be made, or a
case does not end, its line has the reason.

What polls is never idle. There the driver has real-time priority: it takes the CPU as soon as it is called, and the
other one polls only while the driver waits, when it has work. So its polls in vain are not in the figure, nor are
wake-ups, which it does not need; that it takes a whole CPU is not either.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from . import setups

RUN = Path(__file__).parents[1] / "lib" / "whole-cost"
# Bytes of a frame, and frames of a batch; the longest frame is that of the MTU of Ethernet.
HEADER, LONGEST = 14, 1514
FRAMES = ((64, 64), (64, 8), (64, 1), (LONGEST, 64), (LONGEST, 1))
# The same of each of many guests, and of the host's own.
FRAMES_OF_MANY = ((64, 64), (64, 1))
FRAMES_OF_HOST = ((64, 64),)
# So many frames, and GSO packets, or many times as many.
COUNTED, COUNTED_GSO, GSO_BYTES = 20000, 300, 64000
# GSO packets, from the guest and to it, and how many are of a batch: a guest has buffers for 4. Of the host's own: what
# one call writes.
WHOLE = {"gso": 8, "stream": 4, "stream-to-host": 1, "stream-from-host": 1}
TO_GUEST = ("to-guest", "stream")
# Such a part of the frames may be dropped, or be under way at the end.
LOST = 0.02
# Seconds of the guest's, only against those that hang.
LIMIT_S = 60


@dataclass(frozen=True)
class Case:
    wire: setups.Wire
    setup: setups.Setup
    way: str
    batch: int
    size: int

    @property
    def name(self):
        return f"{self.wire.name}/{self.setup.name}/{self.way}/{self.size} x{self.batch}"

    @property
    def command(self):
        rounds = COUNTED_GSO // self.batch if self.way in WHOLE else COUNTED // (self.batch + 9 * self.setup.busy)
        ends = self.setup.ends[: 2 if self.way == "guest-to-guest" else self.setup.busy]
        priority = "chrt -f 1 " if self.setup.polls else ""
        # The sender's NIC segments a stream.
        segments = 65535 if self.way in WHOLE else 1
        before = f"ip {self.wire.cutter} up gso_max_segs {segments}; " if self.way == "stream" else ""
        if self.way in setups.HOST_WAYS:
            before = f"for n in '-n far link set vb' 'link set va'; do ip $n gso_max_segs {segments}; done; "
        # While igb delays an interrupt, what polls would poll in vain, which would be counted.
        if self.wire.igb:
            before += f"ethtool -C {self.wire.igb} rx-usecs {0 if self.setup.polls and self.way in TO_GUEST else 3}; "
        # Over VXLAN each round of `gso` waits for igb, which is slower than the senders.
        carrier = self.wire.igb if self.way == "gso" and self.wire.igb != "va" else ""
        before += f"export COST_TICKS={self.setup.ticks} COST_UNDERLAY={self.setup.underlay} COST_MTU={self.wire.mtu} "
        before += f"COST_CARRIER={carrier}; "
        return f"{before}timeout {LIMIT_S} {priority}cost_driver {self.way} {self.batch} {self.size} {rounds} {' '.join(ends)}"


def cases(wire, setup):
    """All of a setup's."""
    for way in wire.ways:
        if way not in setup.ways or (way == "guest-to-guest" and len(setup.ends) < 2):
            continue
        if way in WHOLE:
            yield Case(wire, setup, way, WHOLE[way], GSO_BYTES)
            continue
        frames = FRAMES_OF_HOST if way in setups.HOST_WAYS else FRAMES if setup.busy == 1 else FRAMES_OF_MANY
        longest = wire.mtu + HEADER
        yield from (Case(wire, setup, way, batch, min(size, longest)) for size, batch in frames)


class Guest:
    """The guest that counts."""

    def __init__(self, state):
        self.state = state

    def run(self, command):
        """What a command prints; raises if it fails."""
        done = subprocess.run([RUN, "--run", self.state, command], capture_output=True, text=True)
        if done.returncode == 143:
            raise RuntimeError(f"not over after {LIMIT_S} s")
        if done.returncode:
            raise RuntimeError(" ".join((done.stdout + done.stderr).split())[-300:] or f"status {done.returncode}")
        return done.stdout


def measure(guest, case):
    """A row: the instructions of a frame, and the part of the time for which the CPU was idle."""
    row = {"name": case.name, "nic": case.wire.name, "who": case.setup.name}
    row |= {"way": case.way, "size": case.size, "batch": case.batch}
    try:
        told = json.loads(guest.run(case.command).splitlines()[-1])
    except (RuntimeError, ValueError, IndexError) as error:
        return row | {"reason": str(error)}
    # virtio_net does not count what AF_XDP sends in zero-copy.
    counts = case.wire.name != "virtio_net" or case.setup.name.startswith("vhost-net/")
    if case.way == "from-guest" and counts and told["sent"] < 1 - LOST:
        return row | {"reason": f"{1 - told['sent']:.0%} of the frames are dropped"}
    if case.way != "gso" and told["by_kernel"] > LOST:
        return row | {"reason": f"the kernel encapsulates {told['by_kernel']:.0%} of the frames"}
    return row | {"instructions": round(told["ns"] * (1 - told["idle"]), 1), "idle": told["idle"]}


def rows(guest, wire, wanted):
    """Measures those cases of a NIC; a row for each as it is there."""
    guest.run(setups.PREPARE)
    for setup in wire.setups:
        chosen = [case for case in cases(wire, setup) if wanted(case.name)]
        if not chosen:
            continue
        guest.run(wire.make)
        try:
            guest.run(setup.make)
            yield from (measure(guest, case) for case in chosen)
        except RuntimeError as error:
            yield {"name": f"{wire.name}/{setup.name}", "nic": wire.name, "who": setup.name, "reason": str(error)}
        finally:
            guest.run(f"{setup.unmake}; {wire.unmake}; true")


def show(row):
    if "reason" in row:
        print(f"{row['name']:56} not measured: {row['reason']}", flush=True)
    else:
        print(f"{row['name']:56} {row['instructions']:12,.0f}  idle {row['idle']:.1%}", flush=True)


def keep(file, measured):
    """Writes rows into a file, beside those of other cases that it has. That a setup could not be made is no longer so."""
    of = lambda row: (row.get("nic"), row["who"])  # noqa: E731
    made = {of(row) for row in measured}
    before = json.loads(file.read_text()) if file.exists() else []
    before = [row for row in before if "way" in row or of(row) not in made]
    kept = {row["name"]: row for row in before} | {row["name"]: row for row in measured}
    file.write_text("[\n" + ",\n".join(json.dumps(row) for row in kept.values()) + "\n]\n")


def main():
    parser = argparse.ArgumentParser(prog="scripts/lib/whole-cost", allow_abbrev=False)
    parser.add_argument("--only", metavar="WORDS", action="append", default=[])
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--json", metavar="FILE", type=Path)
    parser.add_argument("--wire", help=argparse.SUPPRESS)
    parser.add_argument("--state", help=argparse.SUPPRESS)
    options = parser.parse_args()
    wanted = lambda name: not options.only or any(part in name for part in options.only)  # noqa: E731
    wires = [wire for wire in setups.WIRES if options.wire in (None, wire.name)]
    names = [case.name for wire in wires for setup in wire.setups for case in cases(wire, setup) if wanted(case.name)]
    if options.list:
        print("\n".join(names))
        sys.exit(0 if names else f"no case's name contains {' or '.join(options.only)}: --list")
    measured = []
    for wire in wires:
        for row in rows(Guest(os.path.abspath(options.state)), wire, wanted):
            show(row)
            measured.append(row)
            if options.json:
                keep(options.json, measured)
    for who, reason in setups.MISSING.items():
        row = {"name": who, "who": who, "reason": reason}
        if not options.only:
            show(row)
            measured.append(row)
    if options.json:
        keep(options.json, measured)


if __name__ == "__main__":
    main()
