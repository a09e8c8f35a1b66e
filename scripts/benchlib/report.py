"""From samples to tables: medians, spread, and ratios between contenders of the same repetition."""

import statistics

from . import cpu_state, worker_statistics


def median(samples, key):
    """The median of one figure, or None without samples."""
    values = [sample[key] for sample in samples if sample.get(key) is not None]
    return statistics.median(values) if values else None


def spread_percent(samples, key):
    """Half of the distance between the extremes, as percent of the median."""
    values = [sample[key] for sample in samples]
    middle = statistics.median(values)
    return (max(values) - min(values)) / 2 / middle * 100 if middle else 0.0


def ratio(samples, others, key):
    """The median of the ratios taken within each repetition, so that a slow minute hits both sides."""
    pairs = [a[key] / b[key] for a, b in zip(samples, others) if a and b and b[key]]
    return statistics.median(pairs) if pairs else None


def summarize(case, samples):
    """A case's figures by contender. `samples[contender]` has an entry a repetition, None where it failed."""
    rows = {}
    for contender in case.contenders:
        if isinstance(samples[contender], Exception):
            rows[contender] = {"not_here": str(samples[contender]), "repetitions": 0}
            continue
        good = [sample for sample in samples[contender] if sample]
        row = {"samples": samples[contender], "repetitions": len(good)}
        if good:
            row["median"] = {key: median(good, key) for key in good[0] if isinstance(good[0][key], (int, float))}
            row["spread_percent"] = spread_percent(good, case.unit)
            for reference in case.references:
                if reference in samples and reference != contender:
                    for key in (case.unit, *case.also_compared):
                        name = f"ratio_to_{reference}" if key == case.unit else f"{key}_ratio_to_{reference}"
                        row[name] = ratio(samples[contender], samples[reference], key)
        rows[contender] = row
    return rows


def number(value, digits=2):
    """A figure for a table cell."""
    return "-" if value is None else f"{value:.{digits}f}"


def ratios(case, key="", label=""):
    """Columns of the ratios to each peer that takes part."""
    return [
        (f"{label}÷ {reference}", lambda row, name=f"{key}ratio_to_{reference}": number(row.get(name)))
        for reference in case.references
        if reference in case.contenders
    ]


def columns(case):
    """Column heads, each with how its cell is made from a row."""
    part = lambda key: (key.replace("_", " "), lambda row: number(row["median"].get(key), 1))  # noqa: E731
    if case.unit == "mpps":
        heads = [
            ("Mpps", lambda row: number(row["median"]["mpps"], 3)),
            ("± %", lambda row: number(row["spread_percent"], 1)),
            ("ns/frame", lambda row: number(row["median"]["ns"], 1)),
            ("cycles", lambda row: number(row["median"]["cycles"], 0)),
            ("CPU %", lambda row: number(row["median"]["cpu_percent"], 0)),
            ("busy ns", lambda row: number(row["median"].get("busy_ns"), 0)),
            ("frames/round", lambda row: number(row["median"].get("batch"), 1)),
            ("idle rounds %", lambda row: number(row["median"].get("idle_rounds_percent"), 0)),
        ]
        heads += [(head, lambda row, key=key: number(row["median"].get(key), 0)) for head, key in case.shown]
        return heads + ratios(case)
    if case.unit == "gbps":
        mb = 1e6
        return [
            ("Gb/s", lambda row: number(row["median"]["gbps"])),
            ("± %", lambda row: number(row["spread_percent"], 1)),
            *ratios(case),
            ("MB/CPU s", lambda row: number(row["median"]["bytes_per_cpu_s"] / mb, 0)),
            *ratios(case, "bytes_per_cpu_s_", "MB/CPU s "),
            ("CPUs", lambda row: number(row["median"]["host_cpus"])),
            ("guest", lambda row: number(row["median"]["guest_cpus"])),
            ("daemon", lambda row: number(row["median"].get("daemon_cpus"))),
            ("peer", lambda row: number(row["median"].get("peer_cpus"))),
            ("retransmits", lambda row: number(row["median"]["retransmits"], 0)),
        ]
    if case.unit == "kqps":
        return [
            ("Kqps", lambda row: number(row["median"]["kqps"])),
            ("± %", lambda row: number(row["spread_percent"], 1)),
            *ratios(case),
            ("Gb/s", lambda row: number(row["median"]["gbps"])),
            ("CPU us each", lambda row: number(row["median"]["cpu_us"])),
            *ratios(case, "cpu_us_", "CPU us "),
            ("CPU %", lambda row: number(row["median"]["cpu_percent"], 0)),
            ("softirq %", lambda row: number(row["median"]["softirq_percent"], 0)),
            ("p50 us", lambda row: number(row["median"]["p50_us"], 0)),
            ("p99 us", lambda row: number(row["median"]["p99_us"], 0)),
        ]
    if case.unit in ("per_second", "us"):
        per_cpu_second = []
        if "per_cpu_s" in case.also_compared:
            per_cpu_second = [
                ("a CPU s", lambda row: number(row["median"]["per_cpu_s"], 0)),
                *ratios(case, "per_cpu_s_", "a CPU s "),
            ]
        return [
            *([("a second", lambda row: number(row["median"]["per_second"], 0))] if case.unit == "per_second" else []),
            ("median us", lambda row: number(row["median"]["us"], 1)),
            ("± %", lambda row: number(row["spread_percent"], 1)),
            *ratios(case),
            ("p99 us", lambda row: number(row["median"]["p99_us"], 1)),
            *map(part, case.parts),
            *per_cpu_second,
        ]
    if case.unit in ("ms", "kpps", "kib", "ns_each"):
        return [
            (case.unit.replace("_", " "), lambda row: number(row["median"][case.unit], 1)),
            ("± %", lambda row: number(row["spread_percent"], 1)),
            *ratios(case),
            *map(part, case.parts),
        ]
    if case.unit == "ns":
        return [
            ("ns each", lambda row: number(row["median"]["ns"], 1)),
            ("± %", lambda row: number(row["spread_percent"], 1)),
            ("GB/s", lambda row: number(row["median"]["gbytes_per_s"], 2)),
            *ratios(case),
        ]
    if case.unit == "judge_cycles":
        return [
            ("cycles a frame", lambda row: number(row["median"]["judge_cycles"], 1)),
            ("± %", lambda row: number(row["spread_percent"], 1)),
            *ratios(case),
            ("Mpps", lambda row: number(row["median"]["mpps"], 3)),
            ("hits %", lambda row: number(row["median"].get("hits_percent"), 1)),
            ("CPU ns/frame", lambda row: number(row["median"]["cpu_ns"], 0)),
        ]
    if case.unit == "cost_percent":
        interval = lambda row: " to ".join(number(end, 1) for end in worker_statistics.interval(row["samples"]))  # noqa: E731
        return [
            ("cost %", lambda row: number(row["median"]["cost_percent"], 1)),
            ("95 %", interval),
            ("cycles with", lambda row: number(row["median"]["kept_cycles"], 1)),
            ("without", lambda row: number(row["median"]["bare_cycles"], 1)),
            ("pairs", lambda row: number(worker_statistics.pairs(row["samples"]), 0)),
        ]
    if case.unit == "cpu_percent":
        return [
            ("CPU %", lambda row: number(row["median"]["cpu_percent"], 3)),
            ("by ticks", lambda row: number(row["median"]["cpu_percent_by_ticks"], 2)),
            ("wake-ups/s", lambda row: number(row["median"]["wakeups_per_s"], 1)),
        ]
    mib = 1 << 20
    return [
        ("MiB/queue", lambda row: number(row["median"]["process_bytes"] / mib)),
        ("kernel MiB/queue", lambda row: number(row["median"]["kernel_bytes"] / mib)),
        ("MiB, 1 queue", lambda row: number(row["median"]["process_bytes_whole"] / mib)),
        ("kernel MiB, 1 queue", lambda row: number(row["median"]["kernel_bytes_whole"] / mib)),
    ]


def table(case, rows):
    """A case as text, in Markdown's table form, so that it can go into the docs as it is."""
    heads = columns(case)
    lines = [[case.name] + [head for head, _ in heads] + ["n"]]
    for contender, row in rows.items():
        missing = [row.get("not_here", "failed")] + [""] * (len(heads) - 1)
        cells = [cell(row) for _, cell in heads] if row["repetitions"] else missing
        lines.append([contender] + cells + [str(row["repetitions"])])
    text = aligned(lines)
    samples = {name: [sample for sample in row.get("samples", []) if sample] for name, row in rows.items()}
    groups = cpu_state.table(case, samples)
    text += ["", *aligned(groups)] if groups else []
    return "\n".join(text)


def aligned(lines):
    """Lines of cells, the first one the head, as lines of a Markdown table."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |" for line in lines]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return text
