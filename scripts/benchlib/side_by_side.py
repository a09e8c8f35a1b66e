"""Tables of several cases: a contender a row, a size a column, so that what a change does at each size is seen at once.

A case that has a `place` (table, row, column) stands there with its two figures: the rate, and what a host CPU-second
brought. The case's own table has the rest: spread, ratios within a repetition, latencies.
"""

from . import report

# Of a table: its rate, and that by CPU time. Head, key, divisor and digits of each.
FIGURES = {
    "TCP_STREAM": (("Gb/s", "gbps", 1, 2), ("MB/CPU s", "bytes_per_cpu_s", 1e6, 0)),
    "TCP_RR": (("a second", "per_second", 1, 0), ("a CPU s", "per_cpu_s", 1, 0)),
}


def tables(cases, results):
    """As text, those tables that have at least two of the cases. `results`: by name of the case, as in main.run_all."""
    made = []
    for name, figures in FIGURES.items():
        placed = [case for case in cases if case.place and case.place[0] == name]
        if len(placed) > 1:
            made.append(table(name, figures, placed, results))
    return made


def table(name, figures, cases, results):
    """A table of that name: for each number of streams a row for each contender."""
    streams = in_order(case.place[1] for case in cases)
    sizes = in_order(case.place[2] for case in cases)
    contenders = in_order(contender for case in cases for contender in case.contenders)
    at = {case.place[1:]: results[case.name]["contenders"] for case in cases}
    heads = [f"{head}, {size}" for head, *_ in figures for size in sizes]
    lines = [[f"{name}: streams", "contender", *heads]]
    for count in streams:
        for contender in contenders:
            by_size = [at.get((count, size), {}).get(contender) for size in sizes]
            cells = [cell(result, key, divisor, digits) for _, key, divisor, digits in figures for result in by_size]
            lines.append([count, contender, *cells])
    return "\n".join(report.aligned(lines))


def cell(result, key, divisor, digits):
    """A contender's figure in a case; `result` is None for a case that was not run."""
    if result is None:
        return ""
    if not result["repetitions"]:
        return "not here" if "not_here" in result else "failed"
    return report.number(result["median"][key] / divisor, digits)


def in_order(values):
    """Each once, as they come."""
    return list(dict.fromkeys(values))
