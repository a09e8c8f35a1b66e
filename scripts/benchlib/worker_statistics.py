"""What the statistics of workers cost: a worker's rounds with them, and without.

The example `round_cost` lets a whole worker move frames between two guests, all in one thread, and says what a frame
took of the worker's rounds: cycles of the time stamp counter, what it reads of the clock and publishes included. It is
built twice, the second time with the cargo feature `no-statistics`, with which nothing is counted or timed. Both run in
turn on the back end's CPU, a fraction of a second each, with the order changed each time (with, without, without,
with), so that what the machine does meanwhile meets both. A sample: `cost_percent`, the median of the pairs' ratios;
`ratios`, all of them; `kept_cycles` and `bare_cycles` a frame. *plain*: without filter rules; *rules*: with ten.
"""

import math
import os
import shutil
import statistics
from itertools import accumulate

from . import example

CONTENDERS = ("plain", "rules")
FRAMES = (1, 4, 16, 64)
PACKAGE = "dataplane"
PAIRS = 20
BUILDS = {"kept": "fuzzing", "bare": "fuzzing,no-statistics"}


def program(build):
    """Path of the example, built so; ROUND_COST_KEPT_BIN and ROUND_COST_BARE_BIN name some that are there already."""
    variable = f"ROUND_COST_{build.upper()}_BIN"
    if variable not in os.environ:
        built = example.build("round_cost", PACKAGE, variable, BUILDS[build])
        # The next build takes its place.
        os.environ[variable] = shutil.copy2(built, f"{built}-{build}")
    return os.environ[variable]


def cost(run, contender, frames):
    """A sample: pairs of runs with so many frames of each guest a round."""
    cycles = {build: [] for build in BUILDS}
    for pair in range(PAIRS):
        for build in list(BUILDS)[:: 1 if pair % 2 == 0 else -1]:
            cycles[build].append(once(run, build, contender, frames))
    ratios = [kept / bare for kept, bare in zip(cycles["kept"], cycles["bare"])]
    middle = {f"{build}_cycles": statistics.median(values) for build, values in cycles.items()}
    return {"cost_percent": percent(statistics.median(ratios)), "ratios": ratios, **middle}


def once(run, build, contender, frames):
    """Cycles a frame, of one process."""
    argv = [program(build), contender, str(frames)]
    return example.sample(run, build, argv, run.backend_cpu)["cycles"]


def percent(ratio):
    """How much more that is."""
    return (ratio - 1) * 100


def ratios_of(samples):
    """Those of all pairs."""
    return sorted(ratio for sample in samples if sample for ratio in sample["ratios"])


def pairs(samples):
    """How many there were."""
    return len(ratios_of(samples))


def interval(samples):
    """Between which percents the median of all pairs is, in 95 of 100 cases: by the ranks of a binomial distribution,
    whatever that of the ratios is. Of less than six pairs: the least and the most."""
    ratios = ratios_of(samples)
    count = len(ratios)
    chances = accumulate(math.comb(count, below) / 2**count for below in range(count // 2))
    low = max(sum(chance <= 0.025 for chance in chances) - 1, 0)
    return percent(ratios[low]), percent(ratios[count - 1 - low])
