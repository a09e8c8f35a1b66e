//! Interrupts: an eventfd that KVM has (irqfd), beside the call that sets an interrupt line (KVM_IRQ_LINE).
//!
//! The guest is a program in real mode (`guest/interrupts.S`): it sleeps, and its handler counts. Each interrupt is made
//! when the one before was seen.

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
/// Words of the guest's: interrupts seen, 1 once they are taken, 1 to end.
const SEEN_AT: u64 = 0x500;
const READY_AT: u64 = 0x504;
const STOP_AT: u64 = 0x508;

/// By what interrupts are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum InterruptBy {
    /// A write to an eventfd.
    Irqfd,
    /// Two calls of KVM's: up and down.
    IrqLine,
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
    /// From there until the handler has counted it: median, ns.
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
    irqfd: OwnedFd,
}

/// Makes so many interrupts each way.
///
/// # Errors
/// [`MachineError`]; [`VcpuError::TimeLimit`], if one is not seen for so long.
pub fn measure(count: u32, limit: Duration) -> Result<[InterruptCost; 2], MachineError> {
    let memory = Memory::new(RAM_BYTES)?;
    let vm = Vm::new(&memory)?;
    let vcpu = VcpuThread::new(vm.real_mode(PROGRAM)?, Arc::new(NoDevices))?;
    let irqfd = vm.interrupt(FIRST_LINE)?;
    let guest = Guest {
        memory,
        vm,
        vcpu,
        irqfd,
    };
    guest.vcpu.run();
    guest.await_word(READY_AT, 1, limit)?;
    let costs = [InterruptBy::Irqfd, InterruptBy::IrqLine].map(|by| guest.measure(by, count, limit));
    guest.memory.write(STOP_AT, &1_u32.to_le_bytes())?;
    guest.make(InterruptBy::Irqfd)?;
    guest.vcpu.await_end(limit)?;
    let [irqfd, irq_line] = costs;
    Ok([irqfd?, irq_line?])
}

impl Guest {
    fn measure(&self, by: InterruptBy, count: u32, limit: Duration) -> Result<InterruptCost, MachineError> {
        let before = self.word(SEEN_AT)?;
        let mut making = Duration::ZERO;
        let mut seen_after = Vec::with_capacity(count as usize);
        for number in 1..=count {
            let start = Instant::now();
            self.make(by)?;
            making += start.elapsed();
            self.await_word(SEEN_AT, before.wrapping_add(number), limit)?;
            seen_after.push(start.elapsed());
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
            InterruptBy::Irqfd => {
                let written = rustix::io::write(&self.irqfd, &1_u64.to_ne_bytes());
                written.map_err(|error| MachineError::Resources {
                    what: "an interrupt",
                    source: error.into(),
                })?;
            }
            InterruptBy::IrqLine => {
                self.vm.set_line(FIRST_LINE, true)?;
                self.vm.set_line(FIRST_LINE, false)?;
            }
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
        let deadline = Instant::now() + limit;
        let mut looks = 0_u32;
        while self.word(at)? != wanted {
            looks = looks.wrapping_add(1);
            if looks.is_multiple_of(256) {
                // There may be one CPU for both.
                std::thread::yield_now();
                if Instant::now() > deadline {
                    return Err(VcpuError::TimeLimit(limit).into());
                }
            }
            std::hint::spin_loop();
        }
        Ok(())
    }
}
