//! What workers do, as a person reads it: in the order and, where they are the field's, the words of
//! `ovs-appctl dpif-netdev/pmd-perf-show` and `pmd-rxq-show`.

use std::fmt::{Display, Write as _};

use model::state::{LaneName, LaneShare, Share, Size, WorkerDocument, WorkersDocument};

use super::status_view::{or_dash, table};

/// Renders the workers of a daemon, ending with a newline.
pub(crate) fn render(document: &WorkersDocument) -> String {
    let mut text = String::new();
    for worker in &document.workers {
        let node = worker
            .node
            .map_or(String::new(), |node| format!(", NUMA node {node}"));
        let seconds = worker.interval_ns as f64 / 1e9;
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "process {}, worker {}{node}, in {seconds:.1} s:",
            document.pid, worker.worker
        );
        if let Some(hangs) = &worker.hangs {
            let _ = writeln!(text, "  {hangs}");
        }
        render_worker(&mut text, worker, seconds, document.cycles_per_us);
        render_lanes(&mut text, worker);
        text.push('\n');
    }
    text
}

fn line(text: &mut String, name: &str, value: impl Display, more: &str) {
    let more = if more.is_empty() {
        String::new()
    } else {
        format!("  ({more})")
    };
    // Writing to a String cannot fail.
    let _ = writeln!(text, "  {name:<18}{value:>14}{more}");
}

fn render_worker(text: &mut String, worker: &WorkerDocument, seconds: f64, rate: Option<f64>) {
    let (rounds, time) = (worker.iterations, worker.time);
    let used_ns = time.busy.ns + time.idle.ns;
    if let Some((busy, idle)) = time.busy.cycles.zip(time.idle.cycles) {
        let rate = rate.map_or(String::new(), |rate| format!("{:.2} GHz TSC", rate / 1e3));
        line(text, "Cycles:", busy + idle, &rate);
    }
    let all = rounds.busy + rounds.idle;
    let each = each(used_ns as f64 / 1e3, all, "us/it");
    line(text, "Iterations:", all, &each);
    line(text, "- busy:", rounds.busy, &of_time(time.busy));
    line(text, "- idle:", rounds.idle, &of_time(time.idle));
    line(text, "Sleeps:", rounds.sleeps, &of_time(time.asleep));
    line(text, "- pauses:", rounds.pauses, "frames of busy guests gather");
    let frames = worker.frames;
    let costs = [(frames.cycles_each, "cycles/frame"), (frames.ns_each, "ns/frame")];
    let costs = costs.map(|(cost, unit)| cost.map(|cost| format!(", {cost:.0} {unit}")));
    let costs = costs.map(Option::unwrap_or_default).concat();
    line(
        text,
        "Frames in:",
        frames.taken,
        &(rate_of(frames.taken, seconds) + &costs),
    );
    line(
        text,
        "Passes:",
        frames.passes,
        &each_of(frames.passes, frames.taken, "passes/frame"),
    );
    if let Some(cache) = worker.cache {
        let asked = cache.hits + cache.misses;
        let percent = |of: u64| format!("{:.1} %", of as f64 * 100.0 / asked.max(1) as f64);
        line(text, "- cache hits:", cache.hits, &percent(cache.hits));
        line(text, "- cache misses:", cache.misses, &percent(cache.misses));
        line(text, "- evictions:", cache.evictions, "");
    }
    line(text, "Frames out:", frames.out, &rate_of(frames.out, seconds));
    let each = each_of(frames.passes, worker.batches.count, "frames/batch");
    line(text, "Batches:", worker.batches.count, &each);
    for size in worker.batches.sizes.iter().filter(|size| size.count > 0) {
        let percent = size.count as f64 * 100.0 / worker.batches.count.max(1) as f64;
        let name = format!("- of {}:", range(size));
        line(text, &name, size.count, &format!("{percent:.1} %"));
    }
    let kernel = worker.kernel.iter().filter(|kernel| kernel.count > 0);
    let count: u64 = worker.kernel.iter().map(|kernel| kernel.count).sum();
    let percent: f64 = worker.kernel.iter().map(|kernel| kernel.time.percent).sum();
    line(text, "Kernel calls:", count, &format!("{percent:.1} % of time"));
    for kernel in kernel {
        let each = kernel.time.ns / kernel.count.max(1);
        let more = format!("{}, {each} ns/call", of_time(kernel.time));
        line(text, &format!("- {}:", kernel.call), kernel.count, &more);
    }
}

fn render_lanes(text: &mut String, worker: &WorkerDocument) {
    if worker.lanes.is_empty() {
        return;
    }
    let header = [
        "port or network",
        "lane",
        "queue",
        "frames",
        "% of frames",
        "usage",
    ];
    let mut lanes = table(header, |column| column >= 2);
    for share in &worker.lanes {
        lanes.add_row(row(share));
    }
    // Writing to a String cannot fail.
    let _ = writeln!(text, "{lanes}");
    let overhead = or_dash(worker.overhead().map(|percent| format!("{percent:.1} %")));
    line(text, "Overhead:", overhead, "of rounds that moved frames");
}

fn row(share: &LaneShare) -> [String; 6] {
    let LaneName {
        network,
        port,
        kind,
        pair,
        queue,
        worker,
    } = &share.lane;
    let lane = match (pair, worker) {
        (Some(pair), _) => format!("{kind} {pair}"),
        (_, Some(worker)) => format!("{kind}, worker {worker}"),
        _ => kind.clone(),
    };
    [
        or_dash(port.as_ref().or(network.as_ref())),
        lane,
        or_dash(*queue),
        share.frames.to_string(),
        format!("{:.1} %", share.frames_percent),
        or_dash(share.time.map(|time| format!("{:.1} %", time.percent))),
    ]
}

fn of_time(share: Share) -> String {
    format!("{:.1} % of time", share.percent)
}

fn rate_of(count: u64, seconds: f64) -> String {
    format!(
        "{:.1} Kpps",
        if seconds > 0.0 {
            count as f64 / seconds / 1e3
        } else {
            0.0
        }
    )
}

fn each(of: f64, by: u64, unit: &str) -> String {
    match by {
        0 => String::new(),
        by => format!("{:.2} {unit}", of / by as f64),
    }
}

fn each_of(of: u64, by: u64, unit: &str) -> String {
    each(of as f64, by, unit)
}

/// How many frames, in words.
fn range(size: &Size) -> String {
    match size.to {
        None => format!("{} or more", size.from),
        Some(to) if to == size.from => to.to_string(),
        Some(to) => format!("{} to {to}", size.from),
    }
}

#[cfg(test)]
mod tests {
    use model::state::{CacheReading, CallsReading, LaneReading, Reading};

    use super::*;

    /// A worker that was busy for a quarter of 10 s, in which it moved a million frames.
    fn reading() -> Reading {
        Reading {
            age_ns: 10_000_000_000,
            busy_rounds: 40_000,
            idle_rounds: 60_000,
            sleeps: 200,
            pauses: 50,
            busy_ns: 2_500_000_000,
            idle_ns: 500_000_000,
            asleep_ns: 7_000_000_000,
            frames_in: 900_000,
            passes: 1_000_000,
            frames_out: 990_000,
            batches: [10_000, 0, 0, 0, 0, 0, 15_000],
            calls: [
                CallsReading {
                    all: 31_000,
                    timed: 1000,
                    timed_ns: 20_000_000,
                },
                CallsReading::default(),
                CallsReading::default(),
                CallsReading {
                    all: 10,
                    timed: 10,
                    timed_ns: 15_000,
                },
            ],
            timed_rounds: 200,
            timed_ns: 10_000_000,
            cache: None,
        }
    }

    fn lane(port: &str, frames: u64, timed_ns: u64) -> LaneReading {
        let lane = LaneName {
            network: Some("lan".to_owned()),
            port: Some(port.to_owned()),
            kind: "pair".to_owned(),
            pair: Some(0),
            ..LaneName::default()
        };
        LaneReading {
            lane,
            frames,
            timed_ns,
        }
    }

    fn shown(cache: Option<CacheReading>) -> String {
        let lanes = [lane("vm1", 750_000, 6_000_000), lane("vm2", 250_000, 2_000_000)];
        let reading = Reading { cache, ..reading() };
        render(&WorkersDocument {
            pid: 7,
            cycles_per_us: Some(2000.0),
            workers: vec![WorkerDocument::of(&reading, &lanes, Some(2000.0))],
        })
    }

    #[test]
    fn worker_is_told_in_the_order_of_what_operators_know() {
        let text = shown(None);
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        for wanted in [
            "process 7, worker 0, in 10.0 s:",
            "Cycles: 6000000000 (2.00 GHz TSC)",
            "Iterations: 100000 (30.00 us/it)",
            "- busy: 40000 (25.0 % of time)",
            "- idle: 60000 (5.0 % of time)",
            "Sleeps: 200 (70.0 % of time)",
            "Frames in: 900000 (90.0 Kpps, 5000 cycles/frame, 2500 ns/frame)",
            "Passes: 1000000 (1.11 passes/frame)",
            "Frames out: 990000 (99.0 Kpps)",
            "Batches: 25000 (40.00 frames/batch)",
            "- of 1: 10000 (40.0 %)",
            "- of 64 or more: 15000 (60.0 %)",
            "Kernel calls: 31010 (6.2 % of time)",
            "- kick: 31000 (6.2 % of time, 20000 ns/call)",
            "vm1 pair 0 - 750000 75.0 % 15.0 %",
            "Overhead: 5.0 % (of rounds that moved frames)",
        ] {
            assert!(words.contains(wanted), "{wanted}: {text}");
        }
        assert!(!text.contains("cache") && !text.contains("wake"), "{text}");
        assert!(text.ends_with("\n\n"));
    }

    #[test]
    fn cache_is_told_where_there_is_one() {
        let text = shown(Some(CacheReading {
            hits: 3,
            misses: 1,
            evictions: 2,
        }));
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(
            words.contains("- cache hits: 3 (75.0 %) - cache misses: 1 (25.0 %) - evictions: 2 Frames out"),
            "{text}"
        );
    }
}
