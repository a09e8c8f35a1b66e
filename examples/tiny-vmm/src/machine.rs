//! The machine: memory, vCPU, network device and worker.
//!
//! ```text
//!     vCPU thread ── exits ──▶ NetMmio: registers, notifiers (by exit: the queue is served there)
//!     notify thread ── eventfds ──▶ NetQueue ──▶ control queue, or port ──▶ sink
//!     worker ── sink, or polling ──▶ port
//! ```

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use anyhow::{Context as _, Result};
use notifier::notifiers::By;
use notifier::state::Event;
use rustix::process::Pid;
use vm_device::bus::{MmioAddress, MmioRange};
use vm_device::device_manager::{IoManager, MmioManager as _};

use crate::kvm::{Vcpu, Vm};
use crate::layout::{DEVICE_AT, Mailbox, RAM_BYTES};
use crate::mailbox;
use crate::memory::Memory;
use crate::mmio::{DEVICE_BYTES, NetMmio};
use crate::net::Net;
use crate::sink::Sink;
use crate::thread::{Thread, pin};
use crate::{vcpu, worker};

const PROGRAM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/guest.elf"));
/// The interrupt line of the network device.
const LINE: u32 = 5;

/// How the guest's notifications reach the thread that serves a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Notify {
    /// The vCPU stops, and its thread serves the queue
    Exit,
    /// The vCPU continues: an eventfd wakes a thread
    Eventfd,
    /// The guest sends none: the worker polls
    Poll,
}

/// How the machine runs.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Config {
    /// How the guest's notifications reach the thread that serves a queue
    #[arg(long, value_enum, default_value = "eventfd")]
    pub notify: Notify,
    /// CPU of the vCPU's thread [default: any]
    #[arg(long, value_name = "CPU")]
    pub vcpu_cpu: Option<usize>,
    /// CPU of the worker and of the notifiers' thread [default: any]
    #[arg(long, value_name = "CPU")]
    pub worker_cpu: Option<usize>,
}

/// Guest and host, from the first instruction to the last.
pub struct Machine {
    config: Config,
    /// Guest memory, with the mailbox.
    pub memory: Memory,
    /// The network device.
    pub net: Arc<Net>,
    /// Its registers and notifiers.
    pub mmio: Arc<NetMmio>,
    /// Frequency of the guest's time stamp counter, kHz.
    pub tsc_khz: u32,
    /// `None` once it runs.
    vcpu: Option<(Vcpu, Sender<Result<()>>)>,
    running: Option<Thread<u64>>,
    worker: Option<Thread<()>>,
    /// Receives the result of the guest's run, or an error of the host.
    ended: Receiver<Result<()>>,
}

impl Machine {
    /// A machine whose guest will do this task, with this sink for its frames.
    ///
    /// # Errors
    /// KVM, memory or descriptors are missing, or the task is invalid.
    pub fn new(config: Config, task: &Mailbox, sink: Box<dyn Sink>) -> Result<Self> {
        let memory = Memory::new(RAM_BYTES)?;
        mailbox::post(&memory, task)?;
        let vm = Vm::new(&memory)?;
        let vcpu = vm.vcpu(PROGRAM)?;
        let tsc_khz = vcpu.fd.get_tsc_khz().context("KVM_GET_TSC_KHZ")?;
        let (send, ended) = channel();
        let setup = (u16::try_from(task.pairs)?, config.notify == Notify::Poll);
        let net = Net::new(setup, &memory, sink, vm.interrupt(LINE)?, send.clone())?;
        // With `Poll`, too, the control queue is notified: by eventfds.
        let by = if config.notify == Notify::Exit {
            By::Exit
        } else {
            By::Eventfd
        };
        let mmio = Arc::new(NetMmio::new(&vm.fd, DEVICE_AT, &net, by)?);
        pin(mmio.notifiers.thread_id(), config.worker_cpu)?;
        Ok(Self {
            config,
            memory,
            net,
            mmio,
            tsc_khz,
            vcpu: Some((vcpu, send)),
            running: None,
            worker: None,
            ended,
        })
    }

    /// Starts the guest, once. Returns the kernel's ids of the threads: vCPU, notifiers, worker.
    ///
    /// # Errors
    /// There is no such CPU, or no thread is left.
    pub fn run(&mut self) -> Result<[Pid; 3]> {
        let (vcpu, ended) = self.vcpu.take().context("the guest was started before")?;
        let mut io = IoManager::new();
        let registers = MmioRange::new(MmioAddress(DEVICE_AT), DEVICE_BYTES)?;
        io.register_mmio(registers, Arc::clone(&self.mmio) as _)?;
        let polls = self.config.notify == Notify::Poll;
        let worker = self
            .worker
            .insert(worker::start(&self.net, polls, self.config.worker_cpu)?);
        self.mmio.notifiers.event(Event::VmRun)?;
        let vcpu = self
            .running
            .insert(vcpu::start(vcpu, io, self.config.vcpu_cpu, ended)?);
        Ok([vcpu.id, self.mmio.notifiers.thread_id(), worker.id])
    }

    /// Waits until the guest has done its task; returns its answer.
    ///
    /// # Errors
    /// It gave up, did not end in time, or the host has failed.
    pub fn await_answer(&self, limit: Duration) -> Result<Mailbox> {
        let ended = self.ended.recv_timeout(limit);
        let answer = mailbox::read(&self.memory)?;
        let (done, kicks) = (answer.done, answer.kicks);
        ended.with_context(|| {
            format!("the guest did not end within {limit:?}: {done} done, {kicks} kicks")
        })??;
        mailbox::check(&self.memory, &answer)?;
        Ok(answer)
    }

    /// Stops the guest for good; returns the number of its exits. Nothing accesses its memory any more.
    pub fn stop(&mut self) -> u64 {
        // `None` after a panic of the thread, which has printed it.
        let exits = self.running.take().and_then(Thread::stop);
        let stopped = self.mmio.notifiers.event(Event::VmStop);
        stopped.expect("a stop of the VM is never refused");
        self.worker.take().and_then(Thread::stop);
        exits.unwrap_or(0)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.stop();
    }
}
