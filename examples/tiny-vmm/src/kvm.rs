//! KVM: a VM with its memory, interrupts, and one vCPU that is ready to run a program.
//!
//! The guest program runs in long mode at privilege level 3, with 4 GiB mapped one to one by pages of 2 MiB, I/O ports
//! allowed (IOPL 3) and interrupts off. There are no descriptor tables: a guest that faults shuts the vCPU down, which
//! is an exit. A hypervisor that runs the host's kernel and the guest's in one ring (PVM) runs level 3 natively and
//! interprets level 0; on others there is no difference.
//!
//! Only this file has unsafe code: it passes memory and descriptors to KVM.
#![allow(unsafe_code)]

use std::io::Cursor;
use std::os::fd::{FromRawFd as _, IntoRawFd as _, OwnedFd};
use std::sync::Arc;

use anyhow::{Context as _, Result};
use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_regs, kvm_segment, kvm_sregs, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use linux_loader::loader::{Elf, KernelLoader};
use rustix::event::{EventfdFlags, eventfd};
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryBackend as _};
use vmm_sys_util::eventfd::EventFd;

use crate::memory::Memory;

/// IOPL 3, and bit 1, which is always set.
const RFLAGS: u64 = 3 << 12 | 2;
const CR0_PROTECTION_PAGING: u64 = 1 << 31 | 1;
const CR4_PAE: u64 = 1 << 5;
const EFER_LONG_MODE: u64 = 1 << 8 | 1 << 10;
/// Page tables of long mode: seven pages from here on.
const TABLES_AT: u64 = 0x1000;
const TABLE_BYTES: u64 = 4096;
/// Present, writable, for level 3.
const PAGE: u64 = 7;
/// The same, 2 MiB large.
const LARGE_PAGE: u64 = PAGE | 1 << 7;

/// A VM.
pub struct Vm {
    kvm: Kvm,
    /// For notifiers and interrupts.
    pub fd: Arc<VmFd>,
    memory: Memory,
}

/// A vCPU, and the memory that it reaches.
pub struct Vcpu {
    /// For its thread.
    pub fd: VcpuFd,
    _memory: Memory,
}

impl Vm {
    /// A VM with this memory and the interrupt controllers of a PC.
    ///
    /// # Errors
    /// KVM is missing, or refuses something.
    pub fn new(memory: &Memory) -> Result<Self> {
        let kvm = Kvm::new().context("cannot open /dev/kvm: is it there, and is this user in group kvm?")?;
        let fd = kvm.create_vm().context("KVM_CREATE_VM")?;
        fd.create_irq_chip().context("KVM_CREATE_IRQCHIP")?;
        let region = kvm_userspace_memory_region {
            slot: 0,
            flags: 0,
            guest_phys_addr: 0,
            memory_size: memory.ram.last_addr().0 + 1,
            userspace_addr: memory.ram.get_host_address(GuestAddress(0))? as u64,
        };
        // SAFETY: the mapping has `memory_size` bytes (Memory: one region). Each vCPU keeps the memory (Vcpu), so it is
        // mapped for as long as a guest can run; this program makes no references to its bytes.
        unsafe { fd.set_user_memory_region(region) }.context("KVM_SET_USER_MEMORY_REGION")?;
        Ok(Self {
            kvm,
            fd: Arc::new(fd),
            memory: memory.clone(),
        })
    }

    /// An eventfd that raises this interrupt of the guest (irqfd).
    ///
    /// # Errors
    /// There is no descriptor left, or KVM refuses it.
    pub fn interrupt(&self, line: u32) -> Result<OwnedFd> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let copy = event.try_clone()?.into_raw_fd();
        // SAFETY: a descriptor of an eventfd, which nothing else owns.
        let copy = unsafe { EventFd::from_raw_fd(copy) };
        self.fd.register_irqfd(&copy, line).context("KVM_IRQFD")?;
        Ok(event)
    }

    /// A vCPU that is about to start this program, an ELF file, which is loaded.
    ///
    /// # Errors
    /// The program does not fit, or KVM refuses something.
    pub fn vcpu(&self, program: &[u8]) -> Result<Vcpu> {
        let loaded = Elf::load(&self.memory.ram, None, &mut Cursor::new(program), None)?;
        let fd = self.fd.create_vcpu(0).context("KVM_CREATE_VCPU")?;
        let cpuid = self.kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?;
        fd.set_cpuid2(&cpuid).context("KVM_SET_CPUID2")?;
        let mut sregs = fd.get_sregs().context("KVM_GET_SREGS")?;
        self.write_page_tables()?;
        enter_long_mode(&mut sregs);
        fd.set_sregs(&sregs).context("KVM_SET_SREGS")?;
        let regs = kvm_regs {
            rip: loaded.kernel_load.0,
            rflags: RFLAGS,
            ..kvm_regs::default()
        };
        fd.set_regs(&regs).context("KVM_SET_REGS")?;
        let _memory = self.memory.clone();
        Ok(Vcpu { fd, _memory })
    }

    /// One table of the fourth level, one of the third, and four of the second: 4 GiB.
    fn write_page_tables(&self) -> Result<()> {
        let write = |entry: u64, at| self.memory.ram.write_obj(entry.to_le(), GuestAddress(at));
        let third = TABLES_AT + TABLE_BYTES;
        write(third | PAGE, TABLES_AT)?;
        for gib in 0..4 {
            write((third + (gib + 1) * TABLE_BYTES) | PAGE, third + gib * 8)?;
        }
        for page in 0..4 * TABLE_BYTES / 8 {
            write((page << 21) | LARGE_PAGE, third + TABLE_BYTES + page * 8)?;
        }
        Ok(())
    }
}

fn enter_long_mode(sregs: &mut kvm_sregs) {
    let data = kvm_segment {
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
    sregs.cs = kvm_segment {
        selector: 0xb,
        type_: 11,
        db: 0,
        l: 1,
        ..data
    };
    (sregs.ds, sregs.es, sregs.ss, sregs.fs, sregs.gs) = (data, data, data, data, data);
    sregs.cr3 = TABLES_AT;
    sregs.cr4 |= CR4_PAE;
    sregs.cr0 |= CR0_PROTECTION_PAGING;
    sregs.efer |= EFER_LONG_MODE;
}
