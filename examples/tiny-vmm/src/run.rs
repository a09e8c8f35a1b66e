//! The command line, and the figures of a run.

use std::time::Duration;

use anyhow::{Result, bail};
use clap::Parser;
use serde_json::{Value, json};
use tiny_vmm::layout::Mailbox;
use tiny_vmm::machine::{Config, Machine, Notify};
use tiny_vmm::mailbox::{self, Work};
use tiny_vmm::sink::Sink;
use tiny_vmm::sink::null::{Echo, Null};
use tiny_vmm::sink::xdp::Xdp;
use tiny_vmm::thread;

/// A VMM with one guest program, which embeds the virtio-net device: runs one piece of work and measures it
#[derive(Parser)]
#[command(after_help = "Examples:
  tiny-vmm --work notify --notify exit
  tiny-vmm --work send --notify poll --sink af-xdp:veth0 --frames-per-kick 64 --vcpu-cpu 0 --worker-cpu 1 --json
  tiny-vmm --work round-trip --sink echo --frames 10000
  tiny-vmm --work control --pairs 4

Needs /dev/kvm; with af-xdp also CAP_NET_ADMIN, CAP_NET_RAW and CAP_BPF.")]
struct Options {
    #[command(flatten)]
    config: Config,
    /// Where frames go and come from: null (discards them), echo (returns them), af-xdp:IFACE (attaches an XDP program
    /// that takes all frames of IFACE's first queue away from the host: use one end of a veth pair, or a spare
    /// interface)
    #[arg(long, default_value = "null", value_name = "SINK")]
    sink: String,
    /// What the guest does
    #[arg(long, value_enum, default_value = "send")]
    work: Work,
    /// Number of frames, notifications or rounds [default: 100000, for control 1000]
    #[arg(long, value_name = "N")]
    frames: Option<u64>,
    /// Frames that the guest adds to the ring for each kick
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=256))]
    frames_per_kick: u64,
    /// Length of a frame, from its Ethernet header on
    #[arg(long, default_value_t = 64, value_name = "BYTES", value_parser = clap::value_parser!(u64).range(22..=1514))]
    frame_bytes: u64,
    /// Queue pairs of the network device; the guest sends and receives on the first
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=8))]
    pairs: u64,
    /// Time after which a guest that does not end is stopped
    #[arg(long, default_value_t = 60, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    time_limit: u64,
    /// Print the figures as one JSON object
    #[arg(long)]
    json: bool,
}

/// Does what the command line says, and prints what it cost.
pub(crate) fn run() -> Result<()> {
    let options = Options::parse();
    let figures = measure(&options)?;
    // All on one line, or a line for each.
    let text = if options.json {
        figures.to_string()
    } else {
        format!("{figures:#}")
    };
    println!("{text}");
    Ok(())
}

fn sink(options: &Options) -> Result<Box<dyn Sink>> {
    Ok(match (options.sink.as_str(), options.sink.split_once(':')) {
        ("null", _) if options.work == Work::RoundTrip => {
            bail!("--work round-trip needs frames that come back: --sink echo or --sink af-xdp:IFACE")
        }
        ("null", _) => Box::new(Null),
        ("echo", _) => Box::new(Echo::default()),
        (_, Some(("af-xdp", name))) => Box::new(Xdp::open(name)?),
        (other, _) => bail!("--sink {other}: give null, echo, or af-xdp:IFACE such as af-xdp:veth0"),
    })
}

/// Runs the guest. Its times are by its time stamp counter.
fn measure(options: &Options) -> Result<Value> {
    let &Options { config, work, .. } = options;
    let frames = options
        .frames
        .unwrap_or(if work == Work::Control { 1_000 } else { 100_000 });
    let mut task = Mailbox {
        frames_per_kick: options.frames_per_kick,
        frame_bytes: options.frame_bytes,
        pairs: options.pairs,
        always: (work == Work::Notify && config.notify != Notify::Poll).into(),
        ..mailbox::task(work, frames)
    };
    let mut machine = Machine::new(config, &task, sink(options)?)?;
    let khz = f64::from(machine.tsc_khz);
    // Less than the limit, so that the guest can tell where it waited.
    task.patience_ticks = (options.time_limit as f64 * 900.0 * khz) as u64;
    mailbox::post(&machine.memory, &task)?;
    let [vcpu, notifiers, worker] = machine.run()?;
    let answer = machine.await_answer(Duration::from_secs(options.time_limit))?;
    let cpu_ms = [vcpu, notifiers, worker].map(thread::cpu_ms);
    let exits = machine.stop();
    let ns = |ticks: f64| ticks * 1e6 / khz;
    let took_ns = ns(answer.ticks as f64);
    let mut samples = mailbox::samples(&machine.memory)?;
    samples.sort_unstable();
    let percentile = |percent| {
        samples
            .get(samples.len() * percent / 100)
            .map(|&ticks| ns(f64::from(ticks)))
    };
    let queues = machine.mmio.notifiers.status();
    Ok(json!({
        "done": answer.done,
        "seconds": took_ns / 1e9,
        "per_second": answer.done as f64 * 1e9 / took_ns.max(1.0),
        "ns_each": took_ns / answer.done.max(1) as f64,
        "samples": { "median_ns": percentile(50), "p99_ns": percentile(99) },
        "kicks": answer.kicks,
        "exits": exits,
        "notified_by_exit": queues.iter().map(|queue| queue.from_exits).sum::<u64>(),
        "notified_by_eventfd": queues.iter().map(|queue| queue.from_eventfd).sum::<u64>(),
        // Queues that were notified by exits because no eventfd could be bound.
        "unbound": queues.iter().filter(|queue| queue.unbound.is_some()).count(),
        "vcpu_cpu_ms": cpu_ms[0],
        "worker_cpu_ms": cpu_ms[1].zip(cpu_ms[2]).map(|(notifiers, worker)| notifiers + worker),
        "frames": machine.net.lock().port.counts,
    }))
}
