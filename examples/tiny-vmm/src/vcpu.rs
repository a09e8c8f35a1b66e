//! The thread that runs the vCPU.
//!
//! It stops at a gate. Who wants it to stop says so by a flag, which is looked at after each exit, and sends a signal,
//! which makes KVM_RUN return. It sends that again until the thread is there: one that comes between the look at the
//! flag and the guest is lost. Without the flag a guest whose exits last would hardly ever be hit inside KVM_RUN.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvm_ioctls::VcpuExit;
use rustix::process::Pid;
use rustix::thread::gettid;
use vmm_sys_util::signal::{Killable, SIGRTMIN, register_signal_handler, unblock_signal};

use crate::kvm::{KvmError, Vcpu};
use crate::layout::END_PORT;

/// How often a signal is sent to a thread that is to stop.
const SIGNAL_PAUSE: Duration = Duration::from_millis(1);
/// How often who waits for the guest's end looks whether there is something else that ends it.
const LOOK_PAUSE: Duration = Duration::from_millis(100);

/// Why the guest does not go on.
#[derive(Debug, thiserror::Error)]
pub enum VcpuError {
    /// KVM.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// An exit that no guest of ours makes.
    #[error("the guest did what this VMM does not know: {0}")]
    Unknown(String),
    /// The thread.
    #[error("cannot start the vCPU's thread")]
    Thread(#[source] std::io::Error),
    /// The time is over.
    #[error("the guest did not end within {0:?}: give it less to do, or more time")]
    TimeLimit(Duration),
    /// It panicked, and has said so.
    #[error("the vCPU's thread panicked")]
    Panicked,
}

/// What answers the guest's accesses.
pub trait Exits: Send + Sync + 'static {
    /// It reads memory-mapped registers.
    fn read(&self, address: u64, data: &mut [u8]);
    /// It writes them.
    fn write(&self, address: u64, data: &[u8]);
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wish {
    Run,
    Stop,
}

struct Gate {
    wish: Wish,
    /// The thread stands at the gate.
    stopped: bool,
    /// The guest has ended, and how.
    ended: Option<Result<(), VcpuError>>,
    /// The thread is to end, too. Until then it is there to be looked at.
    over: bool,
    exits: u64,
}

struct Shared {
    gate: Mutex<Gate>,
    changed: Condvar,
    /// The thread is to go to the gate. A hint: what is decided there is under the gate's lock.
    to_gate: AtomicBool,
    /// Where the thread leaves the vCPU when it stops, and finds it when it goes on.
    vcpu: Mutex<Vcpu>,
}

impl Shared {
    fn gate(&self) -> MutexGuard<'_, Gate> {
        self.gate.lock().expect("nobody panicked at the gate")
    }
}

/// The vCPU's thread.
pub struct VcpuThread {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    thread_id: Pid,
}

impl VcpuThread {
    /// With that vCPU; it waits at the gate for [`run`](Self::run).
    ///
    /// # Errors
    /// [`VcpuError::Thread`].
    pub fn new(vcpu: Vcpu, exits: Arc<impl Exits>) -> Result<Self, VcpuError> {
        // The handler need do nothing: that there is one makes KVM_RUN return.
        let registered = register_signal_handler(SIGRTMIN(), nothing);
        registered.map_err(|error| VcpuError::Thread(std::io::Error::from_raw_os_error(error.errno())))?;
        let shared = Arc::new(Shared {
            gate: Mutex::new(Gate {
                wish: Wish::Stop,
                stopped: false,
                ended: None,
                over: false,
                exits: 0,
            }),
            changed: Condvar::new(),
            to_gate: AtomicBool::new(false),
            vcpu: Mutex::new(vcpu),
        });
        let (tell, told) = std::sync::mpsc::channel();
        let builder = std::thread::Builder::new().name("vcpu".into());
        let thread = builder.spawn({
            let shared = Arc::clone(&shared);
            move || {
                // Whoever made this thread may have had all signals blocked. Fails for no signal that there is.
                let _ = unblock_signal(SIGRTMIN());
                // Who started it waits for this, unless it is gone.
                let _ = tell.send(gettid());
                go(&shared, &*exits);
            }
        });
        let thread = thread.map_err(VcpuError::Thread)?;
        let thread_id = told.recv().map_err(|_| VcpuError::Panicked)?;
        Ok(Self {
            shared,
            thread: Some(thread),
            thread_id,
        })
    }

    /// The kernel's id of the thread.
    #[must_use]
    pub fn thread_id(&self) -> Pid {
        self.thread_id
    }

    /// Exits so far.
    #[must_use]
    pub fn exits(&self) -> u64 {
        self.shared.gate().exits
    }

    /// The guest goes on.
    pub fn run(&self) {
        let mut gate = self.shared.gate();
        gate.wish = Wish::Run;
        self.shared.to_gate.store(false, Ordering::Relaxed);
        drop(gate);
        self.shared.changed.notify_all();
    }

    /// The guest stands when this returns, with its last exit finished; or it has ended.
    ///
    /// # Panics
    /// If a thread panicked that stood at the gate.
    pub fn stop(&self) {
        let mut gate = self.shared.gate();
        gate.wish = Wish::Stop;
        self.shared.to_gate.store(true, Ordering::Relaxed);
        while !gate.stopped && !self.has_panicked() {
            if let Some(thread) = &self.thread {
                // It is there until it is joined.
                let _ = thread.kill(SIGRTMIN());
            }
            let waited = self.shared.changed.wait_timeout(gate, SIGNAL_PAUSE);
            gate = waited.expect("nobody panicked at the gate").0;
        }
    }

    /// It ends when this is dropped, and not before.
    fn has_panicked(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Works with the vCPU while the guest stands.
    ///
    /// # Panics
    /// If a thread panicked that had it.
    pub fn with_vcpu<T>(&self, work: impl FnOnce(&mut Vcpu) -> T) -> T {
        work(&mut self.shared.vcpu.lock().expect("nobody panicked with the vCPU"))
    }

    /// Waits until the guest ends by itself, or somebody gives it up: that is `false`, and it runs on.
    ///
    /// # Errors
    /// What kept it from that; [`VcpuError::TimeLimit`]: it runs on.
    ///
    /// # Panics
    /// If a thread panicked that stood at the gate.
    pub fn await_end(&self, limit: Duration, is_given_up: impl Fn() -> bool) -> Result<bool, VcpuError> {
        // `None`: so far away that there is none.
        let deadline = Instant::now().checked_add(limit);
        let mut gate = self.shared.gate();
        loop {
            if let Some(ended) = gate.ended.take() {
                gate.ended = Some(Ok(()));
                return ended.map(|()| true);
            }
            if is_given_up() {
                return Ok(false);
            }
            if self.has_panicked() {
                return Err(VcpuError::Panicked);
            }
            let left = deadline.map_or(Duration::MAX, |deadline| {
                deadline.saturating_duration_since(Instant::now())
            });
            if left.is_zero() {
                return Err(VcpuError::TimeLimit(limit));
            }
            let waited = self.shared.changed.wait_timeout(gate, left.min(LOOK_PAUSE));
            gate = waited.expect("nobody panicked at the gate").0;
        }
    }
}

impl Drop for VcpuThread {
    fn drop(&mut self) {
        self.stop();
        self.shared.gate().over = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // It panicked, and has said so.
            let _ = thread.join();
        }
    }
}

extern "C" fn nothing(_: i32, _: *mut libc::siginfo_t, _: *mut std::ffi::c_void) {}

fn go(shared: &Shared, exits: &impl Exits) {
    while pass_gate(shared) {
        let mut vcpu = shared.vcpu.lock().expect("nobody panicked with the vCPU");
        let ended = run(&mut vcpu, shared, exits);
        drop(vcpu);
        if let Some(ended) = ended {
            shared.gate().ended = Some(ended);
            shared.changed.notify_all();
        }
    }
}

/// Waits at the gate while the guest is to stand; `false`: it is over.
fn pass_gate(shared: &Shared) -> bool {
    let mut gate = shared.gate();
    while !gate.over && (gate.wish == Wish::Stop || gate.ended.is_some()) {
        gate.stopped = true;
        shared.changed.notify_all();
        gate = shared.changed.wait(gate).expect("nobody panicked at the gate");
    }
    gate.stopped = false;
    !gate.over
}

/// Runs the guest until somebody wants it to stop (`None`), or it ends.
fn run(vcpu: &mut Vcpu, shared: &Shared, exits: &impl Exits) -> Option<Result<(), VcpuError>> {
    let mut count = 0;
    let ended = loop {
        // Then KVM_RUN finishes the exit that was handled last, and runs nothing more.
        vcpu.set_immediate_exit(shared.to_gate.load(Ordering::Relaxed));
        match vcpu.run() {
            Ok(Some(VcpuExit::MmioWrite(address, data))) => exits.write(address, data),
            Ok(Some(VcpuExit::MmioRead(address, data))) => exits.read(address, data),
            Ok(Some(VcpuExit::IoOut(END_PORT, _))) => break Some(Ok(())),
            Ok(Some(other)) => break Some(Err(VcpuError::Unknown(format!("{other:?}")))),
            // A signal, or the flag: what for is at the gate. No exit is left to be finished: KVM does that first.
            Ok(None) => break None,
            Err(error) => break Some(Err(error.into())),
        }
        count += 1;
    };
    shared.gate().exits += count;
    ended
}
