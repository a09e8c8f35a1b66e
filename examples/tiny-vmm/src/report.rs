//! Runs one piece of work, and the figures of it.

use std::fmt;
use std::fs;
use std::time::Duration;

use notifier::notifiers::QueueStatus;
use notifier::probe::Room;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_setaffinity};
use steer::with_sources;

use crate::interrupts::{self, InterruptCost};
use crate::kvm::KvmError;
use crate::machine::{Machine, MachineConfig, MachineError, Notify, ThreadIds};
use crate::mailbox::{Answer, Complaint, Task, Work};
use crate::options::{Options, OptionsError, SinkChoice, name};
use crate::sink::null::{Echo, Null};
use crate::sink::xdp::{Xdp, XdpError};
use crate::sink::{Sink, SinkCounts};

/// Why there are no figures.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// The command line.
    #[error(transparent)]
    Options(#[from] OptionsError),
    /// The machine.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// The network interface.
    #[error(transparent)]
    Xdp(#[from] XdpError),
    /// The guest.
    #[error(transparent)]
    Guest(#[from] Complaint),
    /// A CPU that is not there or not allowed.
    #[error("cannot run on CPU {cpu}: see `taskset -p $$`")]
    Cpu {
        /// Its number.
        cpu: usize,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// The guest's driver broke a rule.
    #[error("no frames move any more: {0}")]
    Port(String),
    /// The guest ended, and said nothing.
    #[error(
        "the guest ended without an answer, after {done} of its rounds: it shut down or was sent astray; try with \
         fewer --frames, and another --notify"
    )]
    NoAnswer {
        /// What it had done.
        done: u64,
    },
    /// Frames that were not as sent.
    #[error("{0} of the frames that the guest received were not whole, or not the next ones")]
    BadFrames(u64),
}

/// What a run came to.
#[derive(Clone, Debug, serde::Serialize)]
#[serde(untagged)]
pub enum Report {
    /// Of a guest with devices.
    Run(Box<RunReport>),
    /// Of the guest that takes interrupts.
    Interrupts(InterruptReport),
}

/// What interrupts cost, both ways.
#[derive(Clone, Debug, serde::Serialize)]
pub struct InterruptReport {
    /// [`Work::Interrupts`].
    pub work: Work,
    /// By line and by message, by eventfd and by calls of KVM's.
    pub interrupts: [InterruptCost; 4],
}

/// What a run came to; times of the guest's by its time stamp counter.
#[derive(Clone, Debug, serde::Serialize)]
pub struct RunReport {
    /// What was done.
    pub work: Work,
    /// How queues were served.
    pub notify: Notify,
    /// Frames, notifications, rounds or commands that were done.
    pub done: u64,
    /// What the work took.
    pub seconds: f64,
    /// `done` a second.
    pub per_second: f64,
    /// What one took, of all the time: ns.
    pub ns_each: f64,
    /// What single rounds took; none but of round trips and entropy.
    pub samples: Option<Samples>,
    /// Notifications of the guest's while it worked.
    pub kicks: u64,
    /// Exits of the vCPU, setting up included.
    pub exits: u64,
    /// Notifications that came by exits, setting up included.
    pub notified_by_exit: u64,
    /// Notifications that came by eventfds; several may come as one.
    pub notified_by_eventfd: u64,
    /// CPU time of the vCPU's thread, guest included, setting up included: ms.
    pub vcpu_cpu_ms: Option<f64>,
    /// CPU time of the worker and of the notifiers' thread: ms.
    pub worker_cpu_ms: Option<f64>,
    /// Frequency of the guest's time stamp counter, kHz.
    pub tsc_khz: u32,
    /// Frames that the sink took of the guest.
    pub sink_from_guest_frames: u64,
    /// Frames that the sink gave to it.
    pub sink_to_guest_frames: u64,
    /// Frames that the sink dropped.
    pub sink_dropped: u64,
    /// Frames for the guest whose queue pair is not set up, or off.
    pub dropped_no_pair: u64,
    /// How many ioeventfds KVM takes, by a probe: `none`, a number below seven, or `many`.
    pub ioeventfd_room: String,
    /// Why a queue that was to have an eventfd had none, at some time.
    pub unbound: Vec<String>,
}

/// Single rounds, ns.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct Samples {
    /// How many.
    pub count: usize,
    /// Of half of them.
    pub median_ns: f64,
    /// Of 99 in 100.
    pub p99_ns: f64,
}

/// Does what the command line says.
///
/// # Errors
/// [`ReportError`].
pub fn run(options: &Options) -> Result<Report, ReportError> {
    options.check()?;
    let limit = Duration::from_secs(options.time_limit);
    if options.work == Work::Interrupts {
        let count = u32::try_from(options.frames()).unwrap_or(u32::MAX);
        let interrupts = interrupts::measure(count, limit)?;
        return Ok(Report::Interrupts(InterruptReport {
            work: options.work,
            interrupts,
        }));
    }
    let config = MachineConfig {
        pairs: options.pairs,
        most_ioeventfds: options.ioeventfds,
        ..MachineConfig::new(options.notify)
    };
    let task = task(options);
    let mut machine = Machine::new(config, &task, sink(options)?)?;
    let patience_ticks = patience_ticks(limit, machine.tsc_khz()?);
    let task = Task {
        patience_ticks,
        ..task
    };
    machine.mailbox().post(&task).map_err(MachineError::from)?;
    // Before the guest begins; the worker begins with it.
    place(&machine.thread_ids(), options)?;
    machine.run()?;
    let threads = machine.thread_ids();
    place(&threads, options)?;
    let answer = machine.await_answer(limit);
    if let Some(error) = machine.port_error() {
        return Err(ReportError::Port(error));
    }
    let answer = answer?;
    let cpu = CpuTimes::read(&threads);
    machine.stop()?;
    check(&answer)?;
    Ok(Report::Run(Box::new(figures(options, &machine, &answer, cpu)?)))
}

/// How long the guest waits for what does not come: less than we wait for its end, so that it can say where it waited.
fn patience_ticks(limit: Duration, tsc_khz: u32) -> u64 {
    let ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
    (ms / 10 * 9).saturating_mul(tsc_khz.into())
}

/// Whether the guest did all that it was to do.
fn check(answer: &Answer) -> Result<(), ReportError> {
    answer
        .outcome
        .ok_or(ReportError::NoAnswer { done: answer.done })??;
    match answer.bad_frames {
        0 => Ok(()),
        count => Err(ReportError::BadFrames(count)),
    }
}

fn task(options: &Options) -> Task {
    Task {
        frames_per_kick: options.frames_per_kick,
        frame_bytes: options.frame_bytes,
        packed: options.packed,
        event_idx: options.event_idx,
        echoed: options.sink == SinkChoice::Echo,
        always: options.notify != Notify::Poll,
        multiqueue: options.pairs > 1,
        hash_report: options.work == Work::Control && options.pairs == 1,
        ..Task::new(options.work, options.frames())
    }
}

fn sink(options: &Options) -> Result<Box<dyn Sink>, XdpError> {
    let generated = match options.work {
        Work::Receive | Work::Echo => options.frames(),
        _ => 0,
    };
    Ok(match &options.sink {
        SinkChoice::Null => Box::new(Null::new(generated, options.frame_bytes as usize)),
        SinkChoice::Echo => Box::new(Echo::default()),
        SinkChoice::Xdp(name) => Box::new(Xdp::open(name)?),
    })
}

fn place(threads: &ThreadIds, options: &Options) -> Result<(), ReportError> {
    let workers = [Some(threads.notify), threads.worker];
    let workers = workers.into_iter().flatten().map(|id| (id, options.worker_cpu));
    for (id, cpu) in workers.chain([(threads.vcpu, options.vcpu_cpu)]) {
        if let Some(cpu) = cpu {
            pin(id, cpu).map_err(|source| ReportError::Cpu { cpu, source })?;
        }
    }
    Ok(())
}

fn pin(thread: Pid, cpu: usize) -> std::io::Result<()> {
    if cpu >= CpuSet::MAX_CPU {
        return Err(std::io::ErrorKind::InvalidInput.into());
    }
    let mut only = CpuSet::new();
    only.set(cpu);
    Ok(sched_setaffinity(Some(thread), &only)?)
}

/// CPU time that threads used, ms.
#[derive(Clone, Copy, Default)]
struct CpuTimes {
    vcpu: Option<f64>,
    worker: Option<f64>,
}

impl CpuTimes {
    fn read(threads: &ThreadIds) -> Self {
        let worker = threads.worker.and_then(cpu_ms);
        Self {
            vcpu: cpu_ms(threads.vcpu),
            worker: cpu_ms(threads.notify).map(|notify| notify + worker.unwrap_or(0.0)),
        }
    }
}

/// Time on CPUs, the first number of schedstat, which is exact (Documentation/scheduler/sched-stats.rst). `None`: the
/// kernel was built without.
fn cpu_ms(thread: Pid) -> Option<f64> {
    let path = format!("/proc/self/task/{}/schedstat", thread.as_raw_nonzero());
    let text = fs::read_to_string(path).ok()?;
    let ns: u64 = text.split_whitespace().next()?.parse().ok()?;
    Some(ns as f64 / 1e6)
}

fn figures(
    options: &Options,
    machine: &Machine,
    answer: &Answer,
    cpu: CpuTimes,
) -> Result<RunReport, MachineError> {
    let tsc_khz = machine.tsc_khz()?;
    let ns = |ticks: f64| ticks * 1e6 / f64::from(tsc_khz.max(1));
    let took_ns = ns(answer.ticks as f64);
    let SinkCounts {
        from_guest_frames,
        to_guest_frames,
        dropped,
        ..
    } = machine.counts();
    let status = machine.status();
    let sum = |count: fn(&QueueStatus) -> u64| status.iter().map(count).sum();
    Ok(RunReport {
        work: options.work,
        notify: options.notify,
        done: answer.done,
        seconds: took_ns / 1e9,
        per_second: answer.done as f64 * 1e9 / took_ns.max(1.0),
        ns_each: took_ns / answer.done.max(1) as f64,
        samples: samples(machine, ns)?,
        kicks: answer.kicks,
        exits: machine.exits(),
        notified_by_exit: sum(|queue| queue.from_exits),
        notified_by_eventfd: sum(|queue| queue.from_eventfd),
        vcpu_cpu_ms: cpu.vcpu,
        worker_cpu_ms: cpu.worker,
        tsc_khz,
        sink_from_guest_frames: from_guest_frames,
        sink_to_guest_frames: to_guest_frames,
        sink_dropped: dropped,
        dropped_no_pair: machine.no_pair(),
        ioeventfd_room: room(machine)?,
        unbound: machine
            .unbound()
            .iter()
            .map(|error| with_sources(&**error))
            .collect(),
    })
}

fn room(machine: &Machine) -> Result<String, KvmError> {
    let room = machine.ioeventfd_room();
    let room = room.map_err(|source| KvmError::Refused {
        what: "ioeventfds",
        source,
    })?;
    Ok(match room {
        Room::None => "none".to_owned(),
        Room::Few(few) => few.to_string(),
        Room::Many => "many".to_owned(),
    })
}

fn samples(machine: &Machine, ns: impl Fn(f64) -> f64) -> Result<Option<Samples>, MachineError> {
    let mut samples = machine.mailbox().samples()?;
    samples.sort_unstable();
    let at = |percent: usize| samples.get(samples.len() * percent / 100).copied();
    let (Some(median), Some(p99)) = (at(50), at(99)) else {
        return Ok(None);
    };
    Ok(Some(Samples {
        count: samples.len(),
        median_ns: ns(median.into()),
        p99_ns: ns(p99.into()),
    }))
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Run(run) => run.fmt(f),
            Self::Interrupts(report) => {
                for cost in &report.interrupts {
                    let InterruptCost {
                        by,
                        made,
                        seen,
                        make_ns,
                        seen_after_ns,
                    } = cost;
                    writeln!(
                        f,
                        "{}: {seen} of {made} interrupts seen, {make_ns} ns to make one, seen {seen_after_ns} ns \
                         after that began",
                        name(by)
                    )?;
                }
                Ok(())
            }
        }
    }
}

impl fmt::Display for RunReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} by {}: {} in {:.3} s, {:.0} a second, {:.0} ns each",
            name(&self.work),
            name(&self.notify),
            self.done,
            self.seconds,
            self.per_second,
            self.ns_each
        )?;
        if let Some(samples) = self.samples {
            let Samples {
                count,
                median_ns,
                p99_ns,
            } = samples;
            writeln!(
                f,
                "{count} rounds: median {median_ns:.0} ns, 99 % within {p99_ns:.0} ns"
            )?;
        }
        writeln!(
            f,
            "{} kicks; {} exits, {} notifications by exit, {} by eventfd",
            self.kicks, self.exits, self.notified_by_exit, self.notified_by_eventfd
        )?;
        writeln!(
            f,
            "sink: {} frames from the guest, {} to it, {} dropped",
            self.sink_from_guest_frames, self.sink_to_guest_frames, self.sink_dropped
        )?;
        if let (Some(vcpu), Some(worker)) = (self.vcpu_cpu_ms, self.worker_cpu_ms) {
            writeln!(f, "CPU: vCPU {vcpu:.1} ms, worker and notifiers {worker:.1} ms")?;
        }
        writeln!(f, "KVM takes further ioeventfds: {}", self.ioeventfd_room)?;
        self.unbound.iter().try_for_each(|reason| writeln!(f, "{reason}"))
    }
}

/// So that callers need not know where a refusal of KVM's came from.
impl From<KvmError> for ReportError {
    fn from(error: KvmError) -> Self {
        Self::Machine(error.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DONE: Answer = Answer {
        outcome: Some(Ok(())),
        ready: true,
        done: 7,
        kicks: 7,
        ticks: 1,
        bad_frames: 0,
        samples: 0,
        commands: [[0; 8]; 8],
        random: [0; 3],
    };

    #[test]
    fn guest_that_ends_without_an_answer_has_not_done_its_work() {
        assert!(check(&DONE).is_ok());
        let silent = check(&Answer {
            outcome: None,
            ..DONE
        });
        assert!(matches!(silent, Err(ReportError::NoAnswer { done: 7 })));
        let bad_frames = check(&Answer {
            bad_frames: 3,
            ..DONE
        });
        assert!(matches!(bad_frames, Err(ReportError::BadFrames(3))));
    }

    #[test]
    fn guest_gives_up_before_it_is_given_up() {
        // 2 GHz.
        assert_eq!(patience_ticks(Duration::from_secs(1), 2_000_000), 1_800_000_000);
        assert_eq!(patience_ticks(Duration::MAX, u32::MAX), u64::MAX);
    }
}
