//! What busy polling does to a receiver on a NIC that has interrupts: rates and CPU time, side by side.
//!
//! ```text
//! kernel_rig --measure REPETITIONS SECONDS [--only WORDS] WIRE...
//! ```
//!
//! Theory of operation. Frames of 64 bytes come from the wire's far end (`bench txonly`), as fast as that can or with
//! pauses. Who receives is `bench rxdrop`, or `serve` with a guest that sleeps until it is called. Each repetition runs
//! every contender once, one after the other, so that a slow minute hits all of them; ratios are medians of the ratios
//! within a repetition. Where there are two CPUs, sender and guest are on CPU 0, the receiver and its NIC's interrupts
//! on CPU 1. A figure is of some seconds in which nothing is started or ended.
//!
//! Interrupts that are deferred wait for [`DEFERRED_NS`], ten times the 200 µs of docs/cli.md: interpreted, everything
//! takes that much longer.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use testkit::bench::start_bench;
use testkit::daemon::Placement;
use testkit::holdings::cpu_time;
use testkit::{Daemon, Driver, DriverConfig, NetNs, Pair, Running, Serve, VethPair, Wire, assert_soon};

use crate::busy_poll::frames_polled_for;

const DEFERRED_NS: u64 = 2_000_000;
/// Behind 64 frames, in microseconds; none: flat out.
const PAUSES: [Option<&str>; 2] = [None, Some("4000")];
/// From the start of a receiver to the figure.
const WARM_UP: Duration = Duration::from_millis(500);

/// What is asked for.
pub(crate) struct Plan {
    pub(crate) reps: u64,
    pub(crate) seconds: u64,
}

/// Options of a receiver, and of its NIC.
#[derive(Clone, Copy)]
struct Contender {
    name: &'static str,
    polls: bool,
    deferred: bool,
}

const CONTENDERS: [Contender; 4] = [
    contender("interrupts", false, false),
    contender("deferred", false, true),
    contender("busy-poll", true, false),
    contender("busy-poll, deferred", true, true),
];

const fn contender(name: &'static str, polls: bool, deferred: bool) -> Contender {
    Contender {
        name,
        polls,
        deferred,
    }
}

/// Who receives.
#[derive(Clone, Copy)]
enum Receiver {
    Rxdrop,
    Serve,
}

/// One figure.
#[derive(Clone, Copy)]
struct Sample {
    /// Frames a second that it received.
    rate: f64,
    /// CPU time of its process, in hundredths of a CPU.
    process: f64,
    /// What the CPU that it is on is busy with, itself included, in hundredths.
    cpu: f64,
    /// Frames of those that a system call polled for, in hundredths.
    polled: f64,
    /// Interrupts of the NIC a second.
    interrupts: f64,
}

/// Measures all, or those whose heads contain `only`, and prints a table for each receiver and sender; panics if
/// something does not run.
pub(crate) fn run(wire: &Wire, plan: &Plan, only: Option<&str>) {
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    println!(
        "{}: {cpus} CPUs, {} repetitions of {} s",
        wire.name(),
        plan.reps,
        plan.seconds
    );
    let scene = Scene::lay(wire, cpus);
    for receiver in [Receiver::Rxdrop, Receiver::Serve] {
        for pause in PAUSES {
            let head = head(receiver, pause);
            if only.is_some_and(|words| !head.contains(words)) {
                continue;
            }
            let _sender = scene.start_sender(pause);
            let mut taken = CONTENDERS.map(|_| Vec::new());
            for _ in 0..plan.reps {
                for (contender, taken) in CONTENDERS.iter().zip(&mut taken) {
                    taken.push(scene.take(receiver, *contender, plan.seconds));
                }
            }
            print_table(&head, &taken);
        }
    }
}

/// The wire, and how it is used.
struct Scene {
    veth: VethPair,
    /// CPU of the receiver.
    cpu: usize,
}

impl Scene {
    fn lay(wire: &Wire, cpus: usize) -> Self {
        let veth = wire.lay();
        let cpu = cpus.min(2) - 1;
        let settings = format!(
            "for irq in /proc/irq/[0-9]*; do echo 0 >$irq/smp_affinity_list || true; done 2>/dev/null
            for irq in $({INTERRUPTS}); do echo {cpu} >/proc/irq/$irq/smp_affinity_list; done"
        );
        let _ = veth.near.with_sysfs(&settings);
        Self { veth, cpu }
    }

    fn take(&self, receiver: Receiver, contender: Contender, seconds: u64) -> Sample {
        let timeout = if contender.deferred { DEFERRED_NS } else { 0 };
        let nic = format!("/sys/class/net/{}", VethPair::NIC);
        let settings = format!(
            "echo {} >{nic}/napi_defer_hard_irqs; echo {timeout} >{nic}/gro_flush_timeout",
            2 * u8::from(contender.deferred)
        );
        let _ = self.veth.near.with_sysfs(&settings);
        let polling: &[&str] = match contender.polls {
            true => &["--busy-poll-us", "20"],
            false => &[],
        };
        match receiver {
            Receiver::Rxdrop => self.rxdrop(polling, seconds),
            Receiver::Serve => self.serve(polling, seconds),
        }
    }

    fn rxdrop(&self, polling: &[&str], seconds: u64) -> Sample {
        let cpu = self.cpu.to_string();
        let mut args = vec!["rxdrop", "--duration", "0", "--cpu", &cpu];
        args.extend(polling);
        let mut bench = start_bench(&self.veth.near, VethPair::NIC, &args);
        bench.await_text(": 1 s");
        let pid = bench.pid();
        let sample = self.figure(pid, seconds, || received(&self.veth.near));
        bench.check();
        sample
    }

    fn serve(&self, polling: &[&str], seconds: u64) -> Sample {
        let mut serve = Serve::interface(VethPair::NIC)
            .placement(Placement::Copy)
            .with("--cpus", self.cpu.to_string())
            .by_root();
        for option in polling.chunks(2) {
            serve = serve.with(option[0], option[1]);
        }
        let mut daemon = Daemon::start(&self.veth.near, &serve);
        let mut guest = Driver::connect(&daemon.socket(), &DriverConfig::default()).expect("accepted");
        let pair = &mut guest.pairs[0];
        pair.post(256, &[2048]);
        let ended = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| receive_until(pair, &ended));
            assert_soon!(daemon.counter("to_guest_frames") > 0, "nothing arrives");
            let pid = daemon.process().pid();
            let sample = self.figure(pid, seconds, || daemon.counter("to_guest_frames"));
            // Only a flag.
            ended.store(true, Ordering::Relaxed);
            sample
        })
    }

    fn start_sender(&self, pause: Option<&str>) -> Running {
        let mut args = vec!["txonly", "--duration", "0", "--cpu", "0", "--size", "64"];
        args.extend(pause.into_iter().flat_map(|pause| ["--pause-us", pause]));
        let mut sender = start_bench(&self.veth.far, VethPair::WIRE, &args);
        sender.await_text(": 1 s");
        sender
    }

    /// Of a receiver that runs; `count` are its frames so far.
    fn figure(&self, pid: u32, seconds: u64, count: impl Fn() -> u64) -> Sample {
        sleep(WARM_UP);
        let near = &self.veth.near;
        let counts = || {
            [
                count(),
                cpu_time(pid).as_nanos() as u64,
                busy_ticks(self.cpu),
                frames_polled_for(near),
                interrupts(near),
            ]
            .map(|count| (count, Instant::now()))
        };
        let before = counts();
        sleep(Duration::from_secs(seconds));
        let after = counts();
        // Each by its own time: looking takes some.
        let [rate, process, cpu, polled, interrupts] = std::array::from_fn(|at| {
            let ((then, from), (now, to)) = (before[at], after[at]);
            (now - then) as f64 / (to - from).as_secs_f64()
        });
        assert!(rate > 0.0, "frames stopped");
        Sample {
            rate,
            process: process / 1e7,
            cpu,
            polled: polled / rate * 100.0,
            interrupts,
        }
    }
}

/// A guest that sleeps when there is nothing, and posts its buffers again.
fn receive_until(pair: &mut Pair, ended: &AtomicBool) {
    while !ended.load(Ordering::Relaxed) {
        let _ = pair.receive(Duration::from_millis(100));
    }
}

/// Frames that the NIC has given away: those of sockets are among them.
fn received(near: &NetNs) -> u64 {
    number(&near.with_sysfs(&format!(
        "cat /sys/class/net/{}/statistics/rx_packets",
        VethPair::NIC
    )))
}

fn number(text: &str) -> u64 {
    text.trim()
        .parse()
        .unwrap_or_else(|error| panic!("{text:?}: {error}"))
}

/// Hundredths of a second in which a CPU was not idle (proc_stat(5)).
fn busy_ticks(cpu: usize) -> u64 {
    let text = fs::read_to_string("/proc/stat").expect("the kernel tells");
    let name = format!("cpu{cpu} ");
    let line = text.lines().find_map(|line| line.strip_prefix(&name));
    let values = line.expect("there is such a CPU").split_whitespace().map(number);
    let values: Vec<u64> = values.take(8).collect();
    // Neither idle time nor waiting for a disk nor what the host took.
    [0, 1, 2, 5, 6].iter().map(|&at| values[at]).sum()
}

/// Prints the numbers of a NIC's interrupts. Those of virtio_net are the PCI device's.
const INTERRUPTS: &str =
    "ls /sys/class/net/nic0/device/msi_irqs /sys/class/net/nic0/device/../msi_irqs 2>/dev/null |
    grep '^[0-9]' | sort -u";

/// How many interrupts a NIC has had so far.
fn interrupts(near: &NetNs) -> u64 {
    let numbers = near.with_sysfs(INTERRUPTS);
    let text = fs::read_to_string("/proc/interrupts").expect("the kernel tells");
    let of_irq = |irq: &str| {
        let head = format!("{irq}:");
        let line = text
            .lines()
            .find_map(|line| line.trim_start().strip_prefix(&head));
        let counts = line.into_iter().flat_map(str::split_whitespace);
        counts.map_while(|word| word.parse::<u64>().ok()).sum::<u64>()
    };
    numbers.split_whitespace().map(of_irq).sum()
}

/// What a table is about.
fn head(receiver: Receiver, pause: Option<&str>) -> String {
    let receiver = match receiver {
        Receiver::Rxdrop => "bench rxdrop",
        Receiver::Serve => "serve",
    };
    let sender = match pause {
        None => "flat out".to_owned(),
        Some(pause) => format!("64 frames, {pause} µs of pause"),
    };
    format!("{receiver}; sender: {sender}")
}

fn print_table(head: &str, taken: &[Vec<Sample>; CONTENDERS.len()]) {
    println!("\n{head}");
    println!(
        "| | frames/s | ÷ | process: CPU % | its CPU busy % | ÷ a frame | polled for % | interrupts/s |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for (contender, samples) in CONTENDERS.iter().zip(taken) {
        let of = |value: fn(&Sample) -> f64| median(samples.iter().map(value));
        // To the first one's of the same repetition.
        let ratio = |value: fn(&Sample) -> f64| {
            let pairs = samples.iter().zip(&taken[0]);
            median(pairs.map(|(mine, first)| value(mine) / value(first)))
        };
        println!(
            "| {} | {:.0} | {:.2} | {:.0} | {:.0} | {:.2} | {:.0} | {:.0} |",
            contender.name,
            of(|sample| sample.rate),
            ratio(|sample| sample.rate),
            of(|sample| sample.process),
            of(|sample| sample.cpu),
            ratio(|sample| sample.cpu / sample.rate),
            of(|sample| sample.polled),
            of(|sample| sample.interrupts),
        );
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<_> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
