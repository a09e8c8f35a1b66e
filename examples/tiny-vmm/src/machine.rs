//! The machine: memory, vCPU, network and entropy device, worker; from the first instruction to the last.
//!
//! ```text
//!     vCPU thread ── exits ──▶ Board ──▶ registers, notifiers (exit: the queue is served there)
//!     notify thread ── eventfds ──▶ NetQueue, EntropyQueue ──▶ port, random bytes
//!     worker ── sink, leftovers, or polling ──▶ port
//! ```

use std::sync::Arc;
use std::time::Duration;

use device::control::RestoreError;
use kvm_ioctls::Cap;
use notifier::address::Bus;
use notifier::notifiers::{BindError, By, DeviceEvent, NotifierError, QueueStatus, Serve};
use notifier::probe::{self, Room};
use rustix::process::Pid;
use steer::with_sources;

use crate::board::{Board, BoardError, DeviceNotifiers, EventBus, Place, SavedPlace, Unbound};
use crate::entropy::{Entropy, EntropyQueue, EntropyShared};
use crate::kvm::{KvmError, SavedVcpu, Vcpu, Vm};
use crate::layout::{DEVICE_BYTES, DEVICE_PLACES, DEVICES_AT, FIRST_LINE, RAM_BYTES};
use crate::mailbox::{Answer, Mailbox, Task, TaskError};
use crate::memory::{Memory, MemoryError};
use crate::net::{Net, NetConfig, NetQueue, NetShared};
use crate::port::Port;
use crate::sink::{Sink, SinkCounts};
use crate::vcpu::{Exits, VcpuError, VcpuThread};
use crate::worker::Worker;

/// The guest program that `guest/main.c` is.
const PROGRAM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/guest.bin"));

/// How the guest's notifications reach who serves its queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Notify {
    /// The vCPU stops, and its thread serves the queue
    Exit,
    /// The vCPU goes on: an eventfd wakes a thread
    Eventfd,
    /// There are none: the worker polls
    Poll,
}

/// Most queue pairs. VirtIO has room for 0x8000 (1.3, 5.1.4.1); here queues, the control queue too, are counted with 16
/// bits.
pub const MOST_PAIRS: u16 = 0x7ffe;

/// What a machine is made of.
#[derive(Clone, Copy, Debug)]
pub struct MachineConfig {
    /// How queues are served.
    pub notify: Notify,
    /// Queue pairs of the network device: 1 to [`MOST_PAIRS`].
    pub pairs: u16,
    /// Address of the network device.
    pub mac: [u8; 6],
    /// Most eventfds that are bound, as if the kernel had room for so many; `None`: as many as it has.
    pub most_ioeventfds: Option<usize>,
}

impl MachineConfig {
    /// With one queue pair.
    #[must_use]
    pub fn new(notify: Notify) -> Self {
        Self {
            notify,
            pairs: 1,
            mac: [2, 0, 0, 0, 0, 1],
            most_ioeventfds: None,
        }
    }
}

/// Why the machine does not work.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// Guest memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// [`MachineConfig::pairs`].
    #[error("a network device cannot have {pairs} queue pairs: give it 1 to {MOST_PAIRS}")]
    PairCount {
        /// What it was to have.
        pairs: u16,
    },
    /// What the driver said by the control queue.
    #[error("the saved network device cannot go on here")]
    Control(#[from] RestoreError),
    /// The guest's task.
    #[error(transparent)]
    Task(#[from] TaskError),
    /// KVM.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// The vCPU.
    #[error(transparent)]
    Vcpu(#[from] VcpuError),
    /// A device.
    #[error(transparent)]
    Board(#[from] BoardError),
    /// Its notifiers.
    #[error(transparent)]
    Notifiers(#[from] NotifierError),
    /// Threads or descriptors.
    #[error("cannot make {what}: are there enough descriptors and threads, see `ulimit -n -u`")]
    Resources {
        /// What was to be made.
        what: &'static str,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// The host's fault, for good. The guest runs on until the machine is stopped.
    #[error("no frames move any more: {0}")]
    Sink(String),
    /// The host's fault, until the guest resets the device. It runs on until the machine is stopped.
    #[error("a device does not work until its driver resets it: {0}")]
    Device(String),
    /// The guest has not ended.
    #[error(
        "the guest did not end within {limit:?}, with {done} done and {kicks} kicks by its last word: give it fewer \
         --frames, or a longer --time-limit"
    )]
    TimeLimit {
        /// How long it had.
        limit: Duration,
        /// What it had done, as far as it said so: of some work only at its end.
        done: u64,
        /// Its kicks, likewise.
        kicks: u64,
    },
    /// The VM was stopped under a backend.
    #[error("a backend has queue {queue}: stop it before the VM")]
    Backend {
        /// Index of the queue.
        queue: u16,
    },
}

/// What was to become something else, and could not: it is as it was, for another try.
#[derive(thiserror::Error)]
#[error("this could not become something else, and is as it was")]
pub struct GivenBack<T> {
    /// It.
    pub it: T,
    /// Why.
    #[source]
    pub error: MachineError,
}

impl<T> std::fmt::Debug for GivenBack<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut lines = f.debug_struct("GivenBack");
        lines.field("error", &self.error).finish_non_exhaustive()
    }
}

/// The devices, for the vCPU's thread.
pub type Devices = Board<Net, Entropy>;

impl Exits for Devices {
    fn read(&self, address: u64, data: &mut [u8]) {
        Self::read(self, address, data);
    }

    fn write(&self, address: u64, data: &[u8]) {
        Self::write(self, address, data);
    }
}

/// A VM that stands, for another process or another VM in this one. Memory goes with it as it is.
pub struct SavedMachine {
    config: MachineConfig,
    memory: Memory,
    vcpu: SavedVcpu,
    /// Commands of the network device's control queue.
    control: Vec<Vec<u8>>,
    net: SavedPlace,
    entropy: SavedPlace,
}

/// Threads of the machine, by the kernel's ids.
#[derive(Clone, Copy, Debug)]
pub struct ThreadIds {
    /// Runs the guest.
    pub vcpu: Pid,
    /// Serves the network device's queues that are notified by eventfds.
    pub notify: Pid,
    /// The worker; `None` while the VM stands.
    pub worker: Option<Pid>,
}

/// See the module's head. The guest stands at first, and when this is dropped.
pub struct Machine {
    vcpu: VcpuThread,
    worker: Option<Worker>,
    devices: Arc<Devices>,
    net: Arc<NetShared>,
    entropy: Arc<EntropyShared>,
    mailbox: Mailbox,
    memory: Memory,
    config: MachineConfig,
    vm: Vm,
}

impl Machine {
    /// A machine whose guest will do that task, with that sink for its frames.
    ///
    /// # Errors
    /// [`MachineError`].
    pub fn new(config: MachineConfig, task: &Task, sink: Box<dyn Sink>) -> Result<Self, MachineError> {
        if !(1..=MOST_PAIRS).contains(&config.pairs) {
            return Err(MachineError::PairCount { pairs: config.pairs });
        }
        let memory = Memory::new(RAM_BYTES)?;
        Mailbox::new(&memory).post(task)?;
        Self::with_guest(config, &memory, sink, |vm| vm.long_mode(PROGRAM))
    }

    /// With that memory, and a vCPU that is made so. Its devices are as after a reset.
    fn with_guest(
        config: MachineConfig,
        memory: &Memory,
        sink: Box<dyn Sink>,
        vcpu: impl FnOnce(&Vm) -> Result<Vcpu, KvmError>,
    ) -> Result<Self, MachineError> {
        let vm = Vm::new(memory)?;
        let vcpu = vcpu(&vm)?;
        let (devices, net, entropy) = attach(&vm, &config, memory, sink)?;
        Ok(Self {
            vcpu: VcpuThread::new(vcpu, Arc::clone(&devices))?,
            worker: None,
            devices,
            net,
            entropy,
            mailbox: Mailbox::new(memory),
            memory: memory.clone(),
            config,
            vm,
        })
    }

    /// Goes on with the guest of another machine, and asks it to announce itself to its network if its driver can.
    ///
    /// # Errors
    /// [`MachineError`], and the saved machine.
    pub fn restored(saved: SavedMachine, sink: Box<dyn Sink>) -> Result<Self, Box<GivenBack<SavedMachine>>> {
        Self::try_restored(&saved, sink).map_err(|error| Box::new(GivenBack { it: saved, error }))
    }

    fn try_restored(saved: &SavedMachine, sink: Box<dyn Sink>) -> Result<Self, MachineError> {
        let machine = Self::with_guest(saved.config, &saved.memory, sink, |vm| vm.restored(&saved.vcpu))?;
        let devices = &machine.devices;
        devices.net.restore(&saved.net)?;
        devices.entropy.restore(&saved.entropy)?;
        let mut transport = devices.net.transport();
        // Its features are acknowledged now, and nothing of the VM runs yet.
        let net = &mut transport.device_mut().device;
        net.restore_control(&saved.control)?;
        if transport.driver_ok() && transport.device_mut().device.announce() {
            transport.config_changed();
        }
        drop(transport);
        Ok(machine)
    }

    /// How many ioeventfds KVM takes for virtio-mmio, beside those that are bound; where a limit is configured, all that
    /// it allows. A queue for which there is none is notified by exits ([`Machine::unbound`]).
    ///
    /// # Errors
    /// [`probe::room`].
    pub fn ioeventfd_room(&self) -> std::io::Result<Room> {
        if !self.vm.fd().check_extension(Cap::Ioeventfd) {
            return Ok(Room::None);
        }
        let bus = EventBus::new(self.vm.fd(), self.config.most_ioeventfds);
        probe::room_on(&bus, Bus::Mmio, DEVICES_AT + DEVICE_PLACES * DEVICE_BYTES)
    }

    /// The guest runs from now on, and its queues are served.
    ///
    /// # Errors
    /// [`MachineError`].
    pub fn run(&mut self) -> Result<(), MachineError> {
        if self.worker.is_none() {
            let polls = self.config.notify == Notify::Poll;
            let worker = Worker::start(&self.net, polls).map_err(|source| MachineError::Resources {
                what: "the worker",
                source,
            })?;
            self.worker = Some(worker);
        }
        for (notifiers, unbound) in self.all_notifiers().into_iter().zip(self.all_unbound()) {
            unbound.note(&notifiers.event(DeviceEvent::VmRun)?);
        }
        self.vcpu.run();
        Ok(())
    }

    /// The guest stands when this returns, and nobody touches its memory.
    ///
    /// # Errors
    /// [`MachineError::Backend`], if one was not stopped before: it still touches the guest's memory.
    /// [`MachineError::Notifiers`].
    pub fn stop(&mut self) -> Result<(), MachineError> {
        self.vcpu.stop();
        let mut owned = Vec::new();
        for notifiers in self.all_notifiers() {
            owned.extend(notifiers.event(DeviceEvent::VmStop)?.stop_backends);
        }
        self.worker = None;
        owned
            .first()
            .map_or(Ok(()), |&queue| Err(MachineError::Backend { queue }))
    }

    /// Stops the guest for good, and saves it, with what its driver said to the devices.
    ///
    /// # Errors
    /// [`MachineError`], and the machine, which stands: [`Machine::run`] goes on with it.
    pub fn save(mut self) -> Result<SavedMachine, Box<GivenBack<Self>>> {
        match self.try_save() {
            Ok(saved) => Ok(saved),
            Err(error) => Err(Box::new(GivenBack { it: self, error })),
        }
    }

    /// What can fail comes before the devices leave their queues. The notifiers refuse nothing of a VM that stands.
    fn try_save(&mut self) -> Result<SavedMachine, MachineError> {
        self.stop()?;
        // Not in the expression below: its guard would last to the end of that.
        let control = self.devices.net.transport().device().device.control_commands();
        Ok(SavedMachine {
            config: self.config,
            vcpu: self.vcpu.with_vcpu(|vcpu| vcpu.save())?,
            control,
            net: self.devices.net.save()?,
            entropy: self.devices.entropy.save()?,
            memory: self.memory.clone(),
        })
    }

    /// Waits until the guest has done its task, and says what it says.
    ///
    /// # Errors
    /// [`VcpuError`]: it did not end, or not by itself. [`MachineError::Sink`], [`MachineError::Device`],
    /// [`MachineError::TimeLimit`].
    pub fn await_answer(&self, limit: Duration) -> Result<Answer, MachineError> {
        let ended = self.vcpu.await_end(limit, || self.failure().is_some());
        // First why, then what came of it.
        if let Some(failure) = self.failure() {
            return Err(failure);
        }
        let answer = self.mailbox.answer()?;
        match ended {
            Err(VcpuError::TimeLimit(limit)) => Err(MachineError::TimeLimit {
                limit,
                done: answer.done,
                kicks: answer.kicks,
            }),
            ended => Ok(ended.map(|_| answer)?),
        }
    }

    /// The host's fault.
    fn failure(&self) -> Option<MachineError> {
        let sink = self
            .net
            .port()
            .failure()
            .map(str::to_owned)
            .map(MachineError::Sink);
        let device = || self.net.hosts_fault().or_else(|| self.entropy.hosts_fault());
        sink.or_else(|| device().map(MachineError::Device))
    }

    /// Where the guest answers.
    #[must_use]
    pub fn mailbox(&self) -> &Mailbox {
        &self.mailbox
    }

    /// The network device, for backends.
    #[must_use]
    pub fn net(&self) -> &Arc<NetShared> {
        &self.net
    }

    /// The network device's notifiers.
    #[must_use]
    pub fn net_notifiers(&self) -> &Arc<DeviceNotifiers> {
        self.devices.net.notifiers()
    }

    fn all_notifiers(&self) -> [&Arc<DeviceNotifiers>; 2] {
        [self.devices.net.notifiers(), self.devices.entropy.notifiers()]
    }

    /// What holds of all queues: those of the network device, then the entropy device's.
    #[must_use]
    pub fn status(&self) -> Vec<QueueStatus> {
        let all = self.all_notifiers().into_iter();
        all.flat_map(|notifiers| notifiers.status()).collect()
    }

    fn all_unbound(&self) -> [&Unbound; 2] {
        [self.devices.net.unbound(), self.devices.entropy.unbound()]
    }

    /// Why queues were notified by exits that were to have an eventfd, in the order of [`status`](Self::status), also
    /// if they have one now.
    #[must_use]
    pub fn unbound(&self) -> Vec<Arc<BindError>> {
        let all = self.all_unbound().into_iter();
        all.flat_map(Unbound::reasons).collect()
    }

    /// What the sink has counted, once no backend has the port.
    #[must_use]
    pub fn counts(&self) -> SinkCounts {
        self.net.port().with(|port| port.counts())
    }

    /// Frames for the guest that came before its driver, or for the one before, once no backend has the port.
    #[must_use]
    pub fn discarded(&self) -> u64 {
        self.net.port().with(|port| port.discarded())
    }

    /// Frames that were dropped because the pair that they are for is not set up or off, once no backend has the port.
    #[must_use]
    pub fn no_pair(&self) -> u64 {
        self.net.port().with(|port| port.no_pair())
    }

    /// Interrupts that the network device has made for its queue pairs, once no backend has the port.
    #[must_use]
    pub fn net_interrupts(&self) -> u64 {
        self.net.port().with(|port| port.interrupts())
    }

    /// The devices, as the vCPU's thread has them.
    #[must_use]
    pub fn devices(&self) -> &Arc<Devices> {
        &self.devices
    }

    /// Why no frames move any more, once no backend has the port; `None`: they do.
    #[must_use]
    pub fn port_error(&self) -> Option<String> {
        let error = |port: &mut Port| port.error().map(|error| with_sources(error));
        self.net.port().with(error)
    }

    /// Exits of the vCPU until it stopped last.
    #[must_use]
    pub fn exits(&self) -> u64 {
        self.vcpu.exits()
    }

    /// Frequency of the guest's time stamp counter, kHz. The guest stands.
    ///
    /// # Errors
    /// [`MachineError::Kvm`].
    pub fn tsc_khz(&self) -> Result<u32, MachineError> {
        Ok(self.vcpu.with_vcpu(|vcpu| vcpu.tsc_khz())?)
    }

    /// Its threads.
    #[must_use]
    pub fn thread_ids(&self) -> ThreadIds {
        ThreadIds {
            vcpu: self.vcpu.thread_id(),
            notify: self.net_notifiers().thread_id(),
            worker: self.worker.as_ref().map(Worker::thread_id),
        }
    }

    /// The VM, for what tests bind to its bus.
    #[must_use]
    pub fn vm(&self) -> &Vm {
        &self.vm
    }
}

/// The devices, and what all threads share of each.
type Made = (Arc<Devices>, Arc<NetShared>, Arc<EntropyShared>);

/// Makes both devices and puts them on the board.
fn attach(
    vm: &Vm,
    config: &MachineConfig,
    memory: &Memory,
    sink: Box<dyn Sink>,
) -> Result<Made, MachineError> {
    let net_config = NetConfig {
        mac: config.mac,
        pairs: config.pairs,
        polled: config.notify == Notify::Poll,
        call: Some(vm.interrupt(FIRST_LINE)?),
    };
    let descriptor = |source| MachineError::Resources {
        what: "an eventfd",
        source,
    };
    let net = NetShared::new(net_config, memory, sink).map_err(descriptor)?;
    let entropy_call = vm.interrupt(FIRST_LINE + 1)?;
    let entropy = EntropyShared::new(memory, Some(entropy_call)).map_err(descriptor)?;
    let by = match config.notify {
        Notify::Exit => By::Exit,
        // While the worker polls the control queue is served as ever.
        Notify::Eventfd | Notify::Poll => By::Eventfd,
    };
    let queue = |queue| (by, Box::new(NetQueue::new(&net, queue)) as Box<dyn Serve>);
    let net_queues = (0..net.queues()).map(queue).collect();
    let entropy_queues = vec![(by, Box::new(EntropyQueue(Arc::clone(&entropy))) as Box<dyn Serve>)];
    let bus = EventBus::new(vm.fd(), config.most_ioeventfds);
    let devices = Board {
        net: Place::new(&bus, DEVICES_AT, Net(Arc::clone(&net)), net_queues)?,
        entropy: Place::new(
            &bus,
            DEVICES_AT + DEVICE_BYTES,
            Entropy::new(&entropy),
            entropy_queues,
        )?,
    };
    Ok((Arc::new(devices), net, entropy))
}
