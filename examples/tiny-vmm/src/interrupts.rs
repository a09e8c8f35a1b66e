//! Interrupts: an eventfd that KVM has (irqfd), beside the calls that make them (KVM_IRQ_LINE, KVM_SIGNAL_MSI); by a
//! line of a PC's old interrupt controllers, and by message, as PCI devices have them.
//!
//! A message by eventfd is delivered where the eventfd is written to. A line is not: its controllers' lock is not one
//! that can be taken there, and a kernel thread does the rest (`irqfd_wakeup`, virt/kvm/eventfd.c).
//!
//! The guest is a program in real mode (`guest/interrupts.S`): it sleeps, and its handler counts. Each interrupt is
//! made when the one before was seen.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::kvm::Vm;
use crate::layout::{FIRST_LINE, RAM_BYTES};
use crate::machine::MachineError;
use crate::memory::Memory;
use crate::vcpu::{Exits, VcpuError, VcpuThread};

/// The program that `guest/interrupts.S` is.
const PROGRAM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/interrupts.bin"));
/// A line that the old controllers do not have, and the vector of its message: `guest/interrupts.S`.
const MESSAGE_LINE: u32 = 24;
const VECTOR: u8 = 0x26;
/// Words of the guest's: interrupts seen, 1 once they are taken, 1 to end.
const SEEN_AT: u64 = 0x500;
const READY_AT: u64 = 0x504;
const STOP_AT: u64 = 0x508;
/// Interrupts whose times are kept: more than a median needs.
const MOST_TIMES: usize = 1_000_000;

/// By what interrupts are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum InterruptBy {
    /// A line: a write to an eventfd.
    LineIrqfd,
    /// A line: two calls of KVM's, up and down.
    LineCall,
    /// A message: a write to an eventfd.
    MessageIrqfd,
    /// A message: a call of KVM's.
    MessageCall,
}

impl InterruptBy {
    /// All of them.
    pub const ALL: [Self; 4] = [
        Self::LineIrqfd,
        Self::LineCall,
        Self::MessageIrqfd,
        Self::MessageCall,
    ];
}

/// What interrupts cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct InterruptCost {
    /// By what they were made.
    pub by: InterruptBy,
    /// How many were made.
    pub made: u32,
    /// How many the guest's handler counted.
    pub seen: u32,
    /// What making one takes the thread that does it: mean, ns.
    pub make_ns: u64,
    /// From there until the handler has counted it: median of the first million, ns.
    pub seen_after_ns: u64,
}

/// The guest of this program reads and writes no registers.
struct NoDevices;

impl Exits for NoDevices {
    fn read(&self, _address: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn write(&self, _address: u64, _data: &[u8]) {}
}

struct Guest {
    memory: Memory,
    vm: Vm,
    vcpu: VcpuThread,
    line_irqfd: OwnedFd,
    message_irqfd: OwnedFd,
}

/// Makes so many interrupts each way.
///
/// # Errors
/// [`MachineError`]; [`VcpuError::TimeLimit`], if one is not seen for so long.
pub fn measure(count: u32, limit: Duration) -> Result<[InterruptCost; 4], MachineError> {
    let guest = Guest::new()?;
    guest.vcpu.run();
    guest.await_word(READY_AT, 1, limit)?;
    let [line_irqfd, line_call, message_irqfd, message_call] =
        InterruptBy::ALL.map(|by| guest.measure(by, count, limit));
    let costs = [line_irqfd?, line_call?, message_irqfd?, message_call?];
    guest.memory.write(STOP_AT, &1_u32.to_le_bytes())?;
    guest.make(InterruptBy::LineIrqfd)?;
    guest.vcpu.await_end(limit, || false)?;
    Ok(costs)
}

impl Guest {
    fn new() -> Result<Self, MachineError> {
        let memory = Memory::new(RAM_BYTES)?;
        let vm = Vm::new(&memory)?;
        vm.route_message(MESSAGE_LINE, VECTOR, FIRST_LINE)?;
        Ok(Self {
            vcpu: VcpuThread::new(vm.real_mode(PROGRAM)?, Arc::new(NoDevices))?,
            line_irqfd: vm.interrupt(FIRST_LINE)?,
            message_irqfd: vm.interrupt(MESSAGE_LINE)?,
            memory,
            vm,
        })
    }

    fn measure(&self, by: InterruptBy, count: u32, limit: Duration) -> Result<InterruptCost, MachineError> {
        let before = self.word(SEEN_AT)?;
        let mut making = Duration::ZERO;
        let mut seen_after = Vec::with_capacity((count as usize).min(MOST_TIMES));
        for number in 1..=count {
            let start = Instant::now();
            self.make(by)?;
            making += start.elapsed();
            self.await_word(SEEN_AT, before.wrapping_add(number), limit)?;
            if seen_after.len() < MOST_TIMES {
                seen_after.push(start.elapsed());
            }
        }
        seen_after.sort_unstable();
        let median = seen_after.get(seen_after.len() / 2).copied().unwrap_or_default();
        let ns = |duration: Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        Ok(InterruptCost {
            by,
            made: count,
            seen: self.word(SEEN_AT)?.wrapping_sub(before),
            make_ns: ns(making / count.max(1)),
            seen_after_ns: ns(median),
        })
    }

    fn make(&self, by: InterruptBy) -> Result<(), MachineError> {
        match by {
            InterruptBy::LineIrqfd => signal(&self.line_irqfd)?,
            InterruptBy::LineCall => {
                self.vm.set_line(FIRST_LINE, true)?;
                self.vm.set_line(FIRST_LINE, false)?;
            }
            InterruptBy::MessageIrqfd => signal(&self.message_irqfd)?,
            InterruptBy::MessageCall => self.vm.send_message(VECTOR)?,
        }
        Ok(())
    }

    fn word(&self, at: u64) -> Result<u32, MachineError> {
        let mut bytes = [0; 4];
        self.memory.read(at, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    /// Looks again and again: to sleep would take longer than what is measured.
    fn await_word(&self, at: u64, wanted: u32, limit: Duration) -> Result<(), MachineError> {
        // `None`: so far away that there is none.
        let deadline = Instant::now().checked_add(limit);
        let mut looks = 0_u32;
        while self.word(at)? != wanted {
            looks = looks.wrapping_add(1);
            if looks.is_multiple_of(256) {
                // There may be one CPU for both.
                std::thread::yield_now();
                if deadline.is_some_and(|deadline| Instant::now() > deadline) {
                    return Err(VcpuError::TimeLimit(limit).into());
                }
            }
            std::hint::spin_loop();
        }
        Ok(())
    }
}

fn signal(irqfd: &OwnedFd) -> Result<(), MachineError> {
    let written = rustix::io::write(irqfd, &1_u64.to_ne_bytes());
    let written = written.map_err(|error| MachineError::Resources {
        what: "an interrupt",
        source: error.into(),
    });
    written.map(|_| ())
}
