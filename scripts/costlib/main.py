"""Counts what our own code costs, compares it with the budget, and shows both."""

import argparse
import json
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import own

BUDGET = Path(__file__).with_name("budget.json")
# A path may cost so much more than its budget, as a part.
TOLERANCE = 0.02
# What the budget was counted with, in its file.
TOOLS = "counted with"


def tools():
    """The compiler, the libc and the CPU's instructions, which are part of every figure."""
    try:
        said = subprocess.run(["rustc", "--version"], capture_output=True, text=True).stdout
    except FileNotFoundError:
        said = ""
    rustc = " ".join(said.split()[:2]) or "no rustc"
    # Checksums are computed with it.
    avx2 = ", AVX2" if "avx2" in Path("/proc/cpuinfo").read_text().split() else ""
    return f"{rustc}, {' '.join(platform.libc_ver())}, {platform.machine()}{avx2}"


def parse(arguments):
    parser = argparse.ArgumentParser(prog="scripts/cost", description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", metavar="PATH", action="append", default=[], help="only paths whose name contains this")
    parser.add_argument("--list", action="store_true", help="the names of all paths")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    parser.add_argument("--profile", action="store_true", help="the functions that take most, of each path")
    parser.add_argument("--write-budget", action="store_true", help="what was counted is the budget from now on")
    parser.add_argument("--program", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def verdict(counted, budget):
    """A word about a figure, and whether the path costs too much."""
    if budget is None:
        return "no budget", False
    change = counted / budget - 1
    if change > TOLERANCE:
        return f"{change:+.1%}: over its budget", True
    return (f"{change:+.1%}: lower its budget" if change < -TOLERANCE else ""), False


def table(rows, budget):
    """Prints a line a path; the names of those that cost too much."""
    over = []
    print(f"{'instructions a frame':40} {'counted':>9} {'budget':>9}")
    for name, counted in rows:
        allowed = budget.get(name)
        words, is_over = verdict(counted, allowed)
        over += [name] if is_over else []
        print(f"{name:40} {counted:9.1f} {'-' if allowed is None else format(allowed, '9.1f'):>9}  {words}".rstrip())
    return over


def main():
    options = parse(sys.argv[1:])
    paths = [path for path in own.PATHS if not options.only or any(part in path.name for part in options.only)]
    if options.list:
        print("\n".join(path.name for path in paths))
        return 0
    if not paths:
        print(f"cost: no path's name contains {' or '.join(options.only)}: scripts/cost --list", file=sys.stderr)
        return 2
    budget = json.loads(BUDGET.read_text()) if BUDGET.exists() else {}
    here, there = tools(), budget.pop(TOOLS, "unknown tools")
    if options.write_budget and options.only and here != there:
        print(f"cost: the budget was counted with {there}, and this is {here}: write all of it, without --only", file=sys.stderr)
        return 2
    # callgrind is one thread; what is counted does not depend on what runs beside.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        counted = list(pool.map(lambda path: own.instructions(options.program, path), paths))
    rows = [(path.name, figure) for path, figure in zip(paths, counted)]
    over = table(rows, budget)
    if options.profile:
        for path in paths:
            print(f"\n{path.name}: most instructions of {own.PROFILE_ROUNDS} rounds\n{own.profile(options.program, path)}")
    if options.json:
        Path(options.json).write_text(json.dumps(dict(rows), indent=1) + "\n")
    if options.write_budget:
        budget.update((name, round(figure, 1)) for name, figure in rows)
        BUDGET.write_text(json.dumps({TOOLS: here, **dict(sorted(budget.items()))}, indent=1) + "\n")
        return 0
    if over and here != there:
        print(f"\nSKIPPED: the budget was counted with {there}, and this with {here}: {', '.join(over)} cost more than it says")
        return 0
    if over:
        print(
            f"\ncost: {', '.join(over)}: over the budget by more than {TOLERANCE:.0%}. `scripts/cost --only PATH --profile`"
            " tells where it goes. If it has to cost that: `scripts/cost --write-budget`, and the reason in the commit",
            file=sys.stderr,
        )
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
