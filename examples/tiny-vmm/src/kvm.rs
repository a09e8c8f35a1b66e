//! KVM: a VM with its memory, and one vCPU, ready to run a program of ours.
//!
//! # The guest's world
//! In long mode at privilege level 3, with 4 GiB mapped as they are by pages of 2 MiB, I/O ports allowed (IOPL 3) and
//! interrupts off. There are no descriptor tables: a guest that faults shuts the vCPU down, which is an exit. Level 3
//! and not 0: a hypervisor that runs the host's kernel and the guest's in one ring (PVM) runs guest programs as they
//! are and interprets guest kernels; on others there is no difference.
//!
//! The other world is real mode, for the program that takes interrupts.
//!
//! Here and in `sink/copy.rs` there is unsafe code: KVM is told of memory.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::io;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::sync::Arc;

use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_IRQCHIP_PIC_MASTER, KVM_MAX_CPUID_ENTRIES,
    KvmIrqRouting, Msrs, kvm_irq_routing_entry, kvm_irq_routing_entry__bindgen_ty_1, kvm_irq_routing_irqchip,
    kvm_irq_routing_msi, kvm_msi, kvm_msr_entry, kvm_regs, kvm_segment, kvm_sregs,
    kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use vmm_sys_util::eventfd::EventFd;

use crate::layout::{INTERRUPTS_AT, PAGE_TABLES_AT, PROGRAM_AT};
use crate::memory::{Memory, MemoryError};

/// The same since Linux 2.6.22 (Documentation/virt/kvm/api.rst, 4.1).
const KVM_API_VERSION: i32 = kvm_bindings::KVM_API_VERSION as i32;

/// What KVM or its device file refuses.
#[derive(Debug, thiserror::Error)]
pub enum KvmError {
    /// /dev/kvm.
    #[error("cannot open /dev/kvm: is KVM there (`ls /dev/kvm`), and may this user open it (group kvm)?")]
    Open(#[source] io::Error),
    /// Another file is in its place.
    #[error(
        "/dev/kvm is no KVM (KVM_GET_API_VERSION: {version}, not {KVM_API_VERSION}): `ls -l /dev/kvm` shows 10, 232 \
         where it is one; in a container give it the host's (`--device /dev/kvm`)"
    )]
    NoKvm {
        /// Its answer; -1: it knows no such question.
        version: i32,
    },
    /// A call of KVM's.
    #[error("KVM refused {what}")]
    Refused {
        /// What was asked for.
        what: &'static str,
        /// Its answer.
        #[source]
        source: io::Error,
    },
    /// Page tables or programs do not fit.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// For [`Result::map_err`] on calls of KVM's.
fn refused(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> KvmError {
    move |error| KvmError::Refused {
        what,
        source: io::Error::from_raw_os_error(error.errno()),
    }
}

fn open(path: &CStr) -> Result<Kvm, KvmError> {
    let kvm = Kvm::new_with_path(path)
        .map_err(|error| KvmError::Open(io::Error::from_raw_os_error(error.errno())))?;
    match kvm.get_api_version() {
        KVM_API_VERSION => Ok(kvm),
        version => Err(KvmError::NoKvm { version }),
    }
}

/// A VM: its descriptor lives as long as anybody has it, its memory at least as long.
pub struct Vm {
    kvm: Kvm,
    fd: Arc<VmFd>,
    /// KVM reaches it until `fd` and all vCPUs are closed: see [`Vm::new`].
    memory: Memory,
}

impl Vm {
    /// A VM with that memory at guest address 0, and the interrupt controllers of a PC in the kernel.
    ///
    /// # Errors
    /// [`KvmError`].
    pub fn new(memory: &Memory) -> Result<Self, KvmError> {
        let kvm = open(c"/dev/kvm")?;
        let fd = kvm.create_vm().map_err(refused("a VM (KVM_CREATE_VM)"))?;
        fd.create_irq_chip()
            .map_err(refused("interrupt controllers (KVM_CREATE_IRQCHIP)"))?;
        let map = memory.map();
        let region = kvm_userspace_memory_region {
            slot: 0,
            flags: 0,
            guest_phys_addr: 0,
            memory_size: map.len() as u64,
            userspace_addr: map.base().as_ptr() as u64,
        };
        // SAFETY: the map is `memory_size` bytes from `userspace_addr` on (Memory: one region, nothing private behind
        // it). Who has a vCPU has the memory, too (Vcpu), so it is mapped for as long as a guest can run; what a guest
        // writes is bytes, of which nobody here holds a reference (virtqueue, bytes.rs).
        unsafe { fd.set_user_memory_region(region) }
            .map_err(refused("the guest's memory (KVM_SET_USER_MEMORY_REGION)"))?;
        Ok(Self {
            kvm,
            fd: Arc::new(fd),
            memory: memory.clone(),
        })
    }

    /// For notifiers and interrupts.
    #[must_use]
    pub fn fd(&self) -> &Arc<VmFd> {
        &self.fd
    }

    /// An eventfd that makes an edge on interrupt line `line` of the guest when it is written to (irqfd).
    ///
    /// # Errors
    /// [`KvmError`].
    pub fn interrupt(&self, line: u32) -> Result<OwnedFd, KvmError> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|error| {
            KvmError::Refused {
                what: "an eventfd",
                source: error.into(),
            }
        })?;
        let copy = event.try_clone().map_err(|source| KvmError::Refused {
            what: "an eventfd",
            source,
        })?;
        // SAFETY: a descriptor of nobody else's, and of an eventfd.
        let copy = unsafe { EventFd::from_raw_fd(copy.into_raw_fd()) };
        // KVM has the file from now on, and not our copy of the descriptor.
        self.fd
            .register_irqfd(&copy, line)
            .map_err(refused("an interrupt by eventfd (KVM_IRQFD)"))?;
        Ok(event)
    }

    /// Sets interrupt line `line` of the guest (KVM_IRQ_LINE).
    ///
    /// # Errors
    /// [`KvmError`].
    pub fn set_line(&self, line: u32, active: bool) -> Result<(), KvmError> {
        self.fd
            .set_irq_line(line, active)
            .map_err(refused("to set an interrupt line (KVM_IRQ_LINE)"))
    }

    /// Makes interrupt line `line` a message with that vector to the vCPU's interrupt controller, and leaves `kept` as
    /// it was: a line of the first of the two old controllers.
    ///
    /// # Errors
    /// [`KvmError`].
    pub fn route_message(&self, line: u32, vector: u8, kept: u32) -> Result<(), KvmError> {
        let message = kvm_irq_routing_msi {
            address_lo: MESSAGE_ADDRESS,
            data: vector.into(),
            ..kvm_irq_routing_msi::default()
        };
        let pin = kvm_irq_routing_irqchip {
            irqchip: KVM_IRQCHIP_PIC_MASTER,
            pin: kept,
        };
        let entries = [
            kvm_irq_routing_entry {
                gsi: line,
                type_: KVM_IRQ_ROUTING_MSI,
                u: kvm_irq_routing_entry__bindgen_ty_1 { msi: message },
                ..kvm_irq_routing_entry::default()
            },
            kvm_irq_routing_entry {
                gsi: kept,
                type_: KVM_IRQ_ROUTING_IRQCHIP,
                u: kvm_irq_routing_entry__bindgen_ty_1 { irqchip: pin },
                ..kvm_irq_routing_entry::default()
            },
        ];
        let routing = KvmIrqRouting::from_entries(&entries).map_err(too_many)?;
        self.fd
            .set_gsi_routing(&routing)
            .map_err(refused("interrupts as messages (KVM_SET_GSI_ROUTING)"))
    }

    /// Sends the vCPU's interrupt controller a message with that vector (KVM_SIGNAL_MSI).
    ///
    /// # Errors
    /// [`KvmError`].
    pub fn send_message(&self, vector: u8) -> Result<(), KvmError> {
        let message = kvm_msi {
            address_lo: MESSAGE_ADDRESS,
            data: vector.into(),
            ..kvm_msi::default()
        };
        let sent = self.fd.signal_msi(message);
        sent.map(|_| ())
            .map_err(refused("to send an interrupt (KVM_SIGNAL_MSI)"))
    }

    /// The vCPU, about to begin the guest program, which is loaded.
    ///
    /// # Errors
    /// [`KvmError`].
    pub fn long_mode(&self, program: &[u8]) -> Result<Vcpu, KvmError> {
        self.memory.write(PROGRAM_AT, program)?;
        write_page_tables(&self.memory)?;
        let vcpu = self.vcpu()?;
        let mut sregs = vcpu
            .fd
            .get_sregs()
            .map_err(refused("its registers (KVM_GET_SREGS)"))?;
        enter_long_mode(&mut sregs);
        let regs = kvm_regs {
            rip: PROGRAM_AT,
            rflags: RFLAGS_ALWAYS | RFLAGS_IOPL_3,
            ..kvm_regs::default()
        };
        vcpu.set(&regs, &sregs)?;
        Ok(vcpu)
    }

    /// The vCPU, about to begin the program that takes interrupts, which is loaded.
    ///
    /// # Errors
    /// [`KvmError`].
    pub fn real_mode(&self, program: &[u8]) -> Result<Vcpu, KvmError> {
        self.memory.write(INTERRUPTS_AT, program)?;
        let vcpu = self.vcpu()?;
        let mut sregs = vcpu
            .fd
            .get_sregs()
            .map_err(refused("its registers (KVM_GET_SREGS)"))?;
        (sregs.cs.base, sregs.cs.selector) = (0, 0);
        let regs = kvm_regs {
            rip: INTERRUPTS_AT,
            rflags: RFLAGS_ALWAYS,
            ..kvm_regs::default()
        };
        vcpu.set(&regs, &sregs)?;
        Ok(vcpu)
    }

    /// The vCPU, about to go on where one of another VM stopped, whose memory this VM has.
    ///
    /// # Errors
    /// [`KvmError`].
    pub fn restored(&self, saved: &SavedVcpu) -> Result<Vcpu, KvmError> {
        let vcpu = self.vcpu()?;
        vcpu.set(&saved.regs, &saved.sregs)?;
        let msrs = Msrs::from_entries(&[time_stamp(saved.time_stamp)]).map_err(too_many)?;
        vcpu.fd
            .set_msrs(&msrs)
            .map_err(refused("the time stamp counter (KVM_SET_MSRS)"))?;
        Ok(vcpu)
    }

    fn vcpu(&self) -> Result<Vcpu, KvmError> {
        let fd = self
            .fd
            .create_vcpu(0)
            .map_err(refused("a vCPU (KVM_CREATE_VCPU)"))?;
        let cpuid = self.kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES);
        let cpuid = cpuid.map_err(refused("what CPUs have (KVM_GET_SUPPORTED_CPUID)"))?;
        fd.set_cpuid2(&cpuid).map_err(refused("CPUID (KVM_SET_CPUID2)"))?;
        Ok(Vcpu {
            fd,
            _memory: self.memory.clone(),
        })
    }
}

/// Bit 1 of RFLAGS, which is always set.
const RFLAGS_ALWAYS: u64 = 0x2;
const RFLAGS_IOPL_3: u64 = 3 << 12;
const CR0_PROTECTION: u64 = 1;
const CR0_PAGING: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LONG_MODE: u64 = 1 << 8 | 1 << 10;
/// Present, writable, for level 3.
const PAGE: u64 = 7;
/// An entry of 2 MiB.
const LARGE_PAGE: u64 = PAGE | 1 << 7;
const TABLE_BYTES: u64 = 4096;
const GIB: u64 = 1 << 30;
const LARGE_PAGE_BYTES: u64 = 2 << 20;
/// Of the interrupt controller of the first vCPU.
const MESSAGE_ADDRESS: u32 = 0xfee0_0000;
const TIME_STAMP_MSR: u32 = 0x10;

/// One table of the fourth level, one of the third, and four of the second: 4 GiB.
fn write_page_tables(memory: &Memory) -> Result<(), KvmError> {
    let third = PAGE_TABLES_AT + TABLE_BYTES;
    memory.write(PAGE_TABLES_AT, &(third | PAGE).to_le_bytes())?;
    for gib in 0..4 {
        let second = third + (gib + 1) * TABLE_BYTES;
        memory.write(third + gib * 8, &(second | PAGE).to_le_bytes())?;
        for at in 0..TABLE_BYTES / 8 {
            let entry = (gib * GIB + at * LARGE_PAGE_BYTES) | LARGE_PAGE;
            memory.write(second + at * 8, &entry.to_le_bytes())?;
        }
    }
    Ok(())
}

fn enter_long_mode(sregs: &mut kvm_sregs) {
    let data = kvm_segment {
        base: 0,
        limit: u32::MAX,
        selector: 0x13,
        type_: 3,
        present: 1,
        dpl: 3,
        db: 1,
        s: 1,
        g: 1,
        ..kvm_segment::default()
    };
    let code = kvm_segment {
        selector: 0xb,
        type_: 11,
        db: 0,
        l: 1,
        ..data
    };
    sregs.cs = code;
    (sregs.ds, sregs.es, sregs.ss, sregs.fs, sregs.gs) = (data, data, data, data, data);
    sregs.cr3 = PAGE_TABLES_AT;
    sregs.cr4 |= CR4_PAE;
    sregs.cr0 |= CR0_PROTECTION | CR0_PAGING;
    sregs.efer |= EFER_LONG_MODE;
}

fn time_stamp(value: u64) -> kvm_msr_entry {
    kvm_msr_entry {
        index: TIME_STAMP_MSR,
        data: value,
        ..kvm_msr_entry::default()
    }
}

fn too_many(_: vmm_sys_util::fam::Error) -> KvmError {
    KvmError::Refused {
        what: "one register more",
        source: io::ErrorKind::OutOfMemory.into(),
    }
}

/// Where a vCPU stands. The guest uses nothing else: no floating point, no interrupts.
#[derive(Clone, Debug)]
pub struct SavedVcpu {
    regs: kvm_regs,
    sregs: kvm_sregs,
    time_stamp: u64,
}

/// A vCPU; the thread that runs it has it.
pub struct Vcpu {
    fd: VcpuFd,
    /// Mapped for as long as the guest can run.
    _memory: Memory,
}

impl Vcpu {
    fn set(&self, regs: &kvm_regs, sregs: &kvm_sregs) -> Result<(), KvmError> {
        self.fd
            .set_sregs(sregs)
            .map_err(refused("its mode (KVM_SET_SREGS)"))?;
        self.fd
            .set_regs(regs)
            .map_err(refused("its registers (KVM_SET_REGS)"))
    }

    /// Runs until the next exit. `Ok(None)`: a signal came.
    ///
    /// # Errors
    /// [`KvmError::Refused`].
    pub fn run(&mut self) -> Result<Option<VcpuExit<'_>>, KvmError> {
        match self.fd.run() {
            Ok(exit) => Ok(Some(exit)),
            Err(error)
                if [Errno::INTR, Errno::AGAIN]
                    .map(Errno::raw_os_error)
                    .contains(&error.errno()) =>
            {
                Ok(None)
            }
            Err(error) => Err(refused("to run the vCPU (KVM_RUN)")(error)),
        }
    }

    /// Whether [`run`](Self::run) only finishes the exit that was handled last, and runs nothing more. That may be
    /// another exit: the next part of an access that KVM has split. Once it is `None`, the registers are those that the
    /// next instruction sees (Documentation/virt/kvm/api.rst, 5, "pending operations").
    pub fn set_immediate_exit(&mut self, on: bool) {
        self.fd.set_kvm_immediate_exit(on.into());
    }

    /// Where it stands, once [`run`](Self::run) was `None`.
    ///
    /// # Errors
    /// [`KvmError::Refused`].
    pub fn save(&self) -> Result<SavedVcpu, KvmError> {
        let mut msrs = Msrs::from_entries(&[time_stamp(0)]).map_err(too_many)?;
        self.fd
            .get_msrs(&mut msrs)
            .map_err(refused("the time stamp counter (KVM_GET_MSRS)"))?;
        let time_stamp = msrs.as_slice().first().map_or(0, |entry| entry.data);
        Ok(SavedVcpu {
            regs: self
                .fd
                .get_regs()
                .map_err(refused("its registers (KVM_GET_REGS)"))?,
            sregs: self.fd.get_sregs().map_err(refused("its mode (KVM_GET_SREGS)"))?,
            time_stamp,
        })
    }

    /// Frequency of the guest's time stamp counter, kHz.
    ///
    /// # Errors
    /// [`KvmError::Refused`].
    pub fn tsc_khz(&self) -> Result<u32, KvmError> {
        self.fd
            .get_tsc_khz()
            .map_err(refused("the time stamp counter's frequency (KVM_GET_TSC_KHZ)"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_that_is_no_kvm_is_said_to_be_none() {
        let refused = open(c"/dev/null").expect_err("it is no KVM");
        assert!(matches!(refused, KvmError::NoKvm { version: -1 }), "{refused}");
        assert!(matches!(open(c"/dev/null/kvm"), Err(KvmError::Open(_))));
    }
}
