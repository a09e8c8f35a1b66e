//! From a plan to a socket that is ready: program, memory, socket, queue.

use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use common::binding::{Binding, NoZeroCopy};
use common::options::{busy_poll, mode_request};
use host::links::Link;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::CpuSet;
use steer::{Mode, ModeRequest, Program, QueueConf, QueueCounters};
use xsk::{
    AttachMode, Backing, FramePool, OwnMemory, PreferNode, QueueId, RingSize, Socket, SocketConfig,
    Statistics, Umem, WakeError,
};

use super::args::{Plan, RING};
use super::classify::FlowClassifier;
use super::hints::HintReader;
use super::meter::{Meter, Tally};

/// Frames of a benchmark that receives, and the size of its fill ring, which therefore always has room for a frame.
/// Twice the rx ring, because a zero-copy driver keeps its own ring full of them.
const FRAMES: u32 = 2 * RING;
/// Longest frame that drivers receive into one buffer, in bytes: a page less headroom and the tail they need (veth).
pub(super) const LONGEST_IN_ONE_BUFFER: u32 = 3500;
const BIND_TIMEOUT: Duration = Duration::from_millis(200);
/// How long a NIC may be without its link after it was reset.
const LINK_TIMEOUT: Duration = Duration::from_secs(20);
const LINK_PAUSE: Duration = Duration::from_millis(20);

/// Rounds without a frame after which a loop that receives sleeps: a millisecond or so.
const SPIN_ROUNDS: u32 = 50_000;
/// Longest sleep, after which the flag to stop is checked.
pub(super) const SLEEP: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 20_000_000,
};

/// Everything that is attached, bound and mapped. Dropped in this order.
#[derive(Debug)]
pub(super) struct Rig {
    pub(super) program: Program,
    pub(super) socket: Socket,
    pub(super) umem: Umem,
    /// Frames that are in no ring.
    pub(super) pool: FramePool,
    pub(super) backing: Backing,
    /// Why zero-copy was not requested.
    pub(super) note: Option<NoZeroCopy>,
    pub(super) inspection: Option<Inspection>,
}

/// The inspection of received frames, if one was requested.
#[derive(Debug)]
pub(super) enum Inspection {
    /// Reads the hints before them.
    Hints(Box<HintReader>),
    /// Classifies their flows.
    Flows(Box<FlowClassifier>),
}

impl Inspection {
    fn new(plan: &Plan, program: &Program) -> Option<Self> {
        let (rules, batch) = (plan.args.rules, plan.args.batch);
        match plan.args.classify {
            true => Some(Self::Flows(Box::new(FlowClassifier::new(rules, program, batch)))),
            false => plan
                .args
                .hints
                .map(|_| Self::Hints(Box::new(HintReader::new(program, batch)))),
        }
    }
}

/// The kernel's counters.
#[derive(Debug, Clone, Copy)]
pub(super) struct Counted {
    pub(super) socket: Statistics,
    pub(super) program: QueueCounters,
}

impl Rig {
    /// Errors: whatever was refused, with the remedy; nothing stays behind.
    pub(super) fn set_up(plan: &Plan) -> anyhow::Result<Self> {
        let multi_buffer = plan.benchmark.receives() && plan.longest_received() > LONGEST_IN_ONE_BUFFER;
        let had_link = has_link(plan);
        let mode = match mode_request(plan.args.mode) {
            ModeRequest::Auto => ModeRequest::Xdp,
            mode => mode,
        };
        let program = Program::attach(plan.link.index, mode, multi_buffer)?;
        let hints = plan.hints(program.mode());
        program.set_hints(hints)?;
        let binding = plan.binding(program.mode())?;
        let _near = plan.link.node.and_then(PreferNode::begin);
        let (umem, backing) = memory(plan, binding.chunk_bytes)?;
        let socket = Socket::open(&umem, &config(plan, program.mode(), binding, multi_buffer))
            .with_context(|| format!("queue {} of {}", plan.args.queue, plan.link.name))?;
        let mut rig = Self {
            program,
            pool: umem.all_frames()?.collect(),
            socket,
            umem,
            backing,
            note: binding.note,
            inspection: None,
        };
        rig.inspection = Inspection::new(plan, &rig.program);
        if plan.benchmark.receives() {
            rig.socket.fill.refill(&mut rig.pool, FRAMES);
            let frame_limit = if rig.socket.multi_buffer() {
                u32::MAX
            } else {
                rig.umem.max_frame_bytes()
            };
            let conf = QueueConf {
                virtio_header: None,
                frame_limit,
                hints: !hints.is_empty(),
            };
            rig.program
                .enable_queue(plan.args.queue, rig.socket.as_fd(), conf)?;
        }
        if had_link {
            await_link(plan)?;
        }
        Ok(rig)
    }

    pub(super) fn counted(&self, queue: u32) -> anyhow::Result<Counted> {
        Ok(Counted {
            socket: self.socket.statistics().context("cannot read XDP_STATISTICS")?,
            program: self.program.counters(queue)?,
        })
    }
}

/// Waits for the link. Drivers reset the NIC when a program is attached or a socket bound, and its link is up some
/// seconds later: a measurement before that is useless.
pub(super) fn await_link(plan: &Plan) -> anyhow::Result<()> {
    let deadline = Instant::now() + LINK_TIMEOUT;
    while !has_link(plan) {
        ensure!(
            Instant::now() < deadline,
            "{} has no link after {} s: `ip link show {}`",
            plan.link.name,
            LINK_TIMEOUT.as_secs(),
            plan.link.name
        );
        std::thread::sleep(LINK_PAUSE);
    }
    Ok(())
}

/// Whether the interface has a link; true if the kernel does not report it.
fn has_link(plan: &Plan) -> bool {
    Link::has_carrier(plan.link.index).unwrap_or(true)
}

/// Pins the calling thread; returns the CPUs on which it was allowed before.
/// Errors: a CPU that is not there or not allowed.
pub(super) fn pin(cpu: Option<usize>) -> anyhow::Result<CpuSet> {
    let before = rustix::thread::sched_getaffinity(None).context("cannot ask for the CPUs of this thread")?;
    if let Some(cpu) = cpu {
        anyhow::ensure!(
            cpu < CpuSet::MAX_CPU && before.is_set(cpu),
            "--cpu {cpu}: not among the {} CPUs of this process, see `taskset -p $$`",
            before.count()
        );
        let mut only = CpuSet::new();
        only.set(cpu);
        rustix::thread::sched_setaffinity(None, &only).with_context(|| format!("--cpu {cpu}: cannot pin"))?;
    }
    Ok(before)
}

fn memory(plan: &Plan, chunk: u32) -> anyhow::Result<(Umem, Backing)> {
    let frames = if plan.benchmark.receives() { FRAMES } else { RING };
    let memory = OwnMemory::new(frames as usize * chunk as usize)?;
    let backing = memory.backing();
    let memory = Arc::new(memory);
    let umem = if plan.args.unaligned {
        Umem::unaligned(memory, chunk, 0)
    } else {
        Umem::aligned(memory, chunk, 0)
    }?;
    Ok((umem, backing))
}

fn config(plan: &Plan, mode: Mode, binding: Binding, multi_buffer: bool) -> SocketConfig {
    let ring = RingSize::at_least(RING);
    let mut config = SocketConfig::new(plan.link.index, QueueId(plan.args.queue));
    config.attach = match mode {
        Mode::Native => AttachMode::Native,
        Mode::Skb | Mode::Tap => AttachMode::Skb,
    };
    config.bind = binding.ask;
    // Room for all frames of the UMEM: the kernel puts all pieces of a frame into the ring, or none.
    let received = if multi_buffer {
        RingSize::at_least(FRAMES)
    } else {
        ring
    };
    config.rx = plan.benchmark.receives().then_some(received);
    config.tx = plan.benchmark.sends().then_some(ring);
    config.fill = RingSize::at_least(FRAMES);
    config.completion = ring;
    config.multi_buffer = multi_buffer;
    config.max_tx_skb_budget = plan.benchmark.sends().then_some(plan.args.tx_budget);
    config.busy_poll = busy_poll(&plan.args.busy_poll).unwrap_or_default();
    config.bind_timeout = BIND_TIMEOUT;
    config
}

/// What a measuring loop works with.
pub(super) struct Loop<'a> {
    pub(super) rig: &'a mut Rig,
    pub(super) plan: &'a Plan,
    pub(super) meter: &'a Meter,
    pub(super) tally: &'a mut Tally,
}

/// Counts rounds without frames, and sleeps after many of them.
#[derive(Debug, Default)]
pub(super) struct Idle {
    rounds: u32,
}

impl Idle {
    #[inline]
    pub(super) fn busy(&mut self) {
        self.rounds = 0;
    }

    /// Waits a little: spins at first, then sleeps until a frame comes, a signal, or 20 ms are over.
    /// Errors: [`WakeError`] if the interface is gone.
    #[inline]
    pub(super) fn wait(&mut self, socket: &Socket) -> Result<(), WakeError> {
        if socket.busy_polls() || socket.fill.needs_wakeup() {
            socket.wake_rx()?;
        }
        match self.spins() {
            true => Ok(()),
            false => sleep(socket),
        }
    }

    /// Spins a little; false if there was nothing for so long that it is time to sleep.
    #[inline]
    pub(super) fn spins(&mut self) -> bool {
        if self.rounds < SPIN_ROUNDS {
            self.rounds += 1;
            std::hint::spin_loop();
            return true;
        }
        false
    }
}

#[cold]
fn sleep(socket: &Socket) -> Result<(), WakeError> {
    let mut fds = [PollFd::new(socket, PollFlags::IN)];
    // Interrupted by a signal, timed out or woken: the caller checks everything again.
    let _ = poll(&mut fds, Some(&SLEEP));
    // poll(2) does not report an interface that is down or gone (xsk_poll in net/xdp/xsk.c); this does.
    socket.wake_rx().map(|_| ())
}
