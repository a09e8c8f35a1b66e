//! A guest under KVM: real-mode code of x86 that counts, notifies, and waits for the answer if it is to.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU32, Ordering};

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use notifier::address::{Bus, NotifyAddress, PciNotify};
use notifier::bus::Ioeventfds;
use notifier::notifiers::Notifiers;
use virtqueue::GuestAddr;
use virtqueue::driver::GuestRam;

use super::device::Counters;

const RAM_BYTES: u64 = 0x1_0000;
const CODE: u64 = 0x1000;
/// Guest-physical addresses of words that guest and test share; the code has them, too.
const KICKED: u64 = 0x2000;
const SEEN: u64 = 0x2004;
const STOP: u64 = 0x2008;
const ANSWERED: u64 = 0x200c;
/// Where MMIO is: real mode has no addresses above one MiB.
const MMIO_BASE: u64 = 0x8_0000;
const PORT: u64 = 0x510;
/// A write to it ends the guest.
const END_PORT: u16 = 0x10;

/// Words of guest RAM.
pub(crate) struct SharedWords(GuestRam);

impl SharedWords {
    fn word(&self, at: u64) -> &AtomicU32 {
        let pointer = self.0.user_addr(GuestAddr(at)) as *mut u32;
        // SAFETY: `user_addr` gives where a byte of the mapping is; words are aligned and lie within its first page,
        // which lives as long as the RAM that is borrowed. Guest and test access them as words only.
        unsafe { AtomicU32::from_ptr(pointer) }
    }

    /// Whether the guest waits until each notification is seen.
    pub(crate) fn set_answered(&self, answered: bool) {
        self.word(ANSWERED).store(answered.into(), Ordering::SeqCst);
    }

    pub(crate) fn stop(&self) {
        self.word(STOP).store(1, Ordering::SeqCst);
    }
}

// Sequentially consistent, as in `ThreadCounters`.
impl Counters for SharedWords {
    fn kicked(&self) -> u32 {
        self.word(KICKED).load(Ordering::SeqCst)
    }

    fn seen(&self) -> u32 {
        self.word(SEEN).load(Ordering::SeqCst)
    }

    fn see(&self, kicks: u32) {
        self.word(SEEN).store(kicks, Ordering::SeqCst);
    }
}

/// A VM with the program in its memory.
pub(crate) fn vm(bus: Bus) -> (VmFd, SharedWords) {
    let vm = Kvm::new().unwrap().create_vm().unwrap();
    let ram = GuestRam::new(&[(GuestAddr(0), RAM_BYTES)]).unwrap();
    ram.write(GuestAddr(CODE), &program(bus));
    let region = kvm_userspace_memory_region {
        slot: 0,
        flags: 0,
        guest_phys_addr: 0,
        memory_size: RAM_BYTES,
        userspace_addr: ram.user_addr(GuestAddr(0)),
    };
    // SAFETY: the region is one mapping of `RAM_BYTES`, which `ram` keeps. Callers keep the words at least as long as
    // vCPUs run: those have them by the device.
    unsafe { vm.set_user_memory_region(region).unwrap() };
    (vm, SharedWords(ram))
}

/// Where the program notifies queue 0.
pub(crate) fn address(bus: Bus) -> NotifyAddress {
    match bus {
        Bus::Mmio => NotifyAddress::mmio(MMIO_BASE, 0).unwrap(),
        Bus::Pio => {
            let ports = PciNotify {
                bus,
                base: PORT,
                length: 4,
                off_multiplier: 0,
            };
            ports.address(0, 0, true).unwrap()
        }
    }
}

/// A vCPU at the program's first instruction.
pub(crate) fn vcpu(vm: &VmFd) -> VcpuFd {
    let vcpu = vm.create_vcpu(0).unwrap();
    let mut special = vcpu.get_sregs().unwrap();
    (special.cs.base, special.cs.selector) = (0, 0);
    (special.es.base, special.es.selector) = (MMIO_BASE, 0x8000);
    vcpu.set_sregs(&special).unwrap();
    let mut registers = vcpu.get_regs().unwrap();
    (registers.rip, registers.rflags) = (CODE, 2);
    vcpu.set_regs(&registers).unwrap();
    vcpu
}

/// Runs the guest until it ends; how many notifications came by exits.
pub(crate) fn run<B: Ioeventfds>(mut vcpu: VcpuFd, notifiers: &Notifiers<B>) -> u64 {
    let mut exits = 0;
    loop {
        let hit = match vcpu.run() {
            Ok(VcpuExit::IoOut(END_PORT, _)) => return exits,
            Ok(VcpuExit::IoOut(port, data)) => notifiers.exit(Bus::Pio, port.into(), data),
            Ok(VcpuExit::MmioWrite(address, data)) => notifiers.exit(Bus::Mmio, address, data),
            Err(error) if error.errno() == rustix::io::Errno::INTR.raw_os_error() => continue,
            other => panic!("the guest is not to do that: {other:?}"),
        };
        assert_eq!(hit, Some(0));
        exits += 1;
    }
}

/// ```text
/// next:  inc dword [KICKED]
///        xor eax, eax
///        mov es:[0x50], eax        or: mov dx, PORT; out dx, ax
/// check: cmp byte [STOP], 0
///        jne end
///        cmp byte [ANSWERED], 0
///        je next
///        mov eax, [KICKED]
///        cmp eax, [SEEN]
///        jne check
///        jmp next
/// end:   out END_PORT, al
/// ```
fn program(bus: Bus) -> Vec<u8> {
    let mut code = vec![0x66, 0xff, 0x06, 0x00, 0x20, 0x66, 0x31, 0xc0];
    match bus {
        Bus::Mmio => code.extend([0x26, 0x66, 0xa3, 0x50, 0x00]),
        Bus::Pio => code.extend([0xba, 0x10, 0x05, 0xef]),
    }
    let check = code.len();
    code.extend([0x80, 0x3e, 0x08, 0x20, 0x00, 0x75]);
    let to_end = code.len();
    code.extend([0, 0x80, 0x3e, 0x0c, 0x20, 0x00]);
    jump(&mut code, 0x74, 0);
    code.extend([0x66, 0xa1, 0x00, 0x20, 0x66, 0x3b, 0x06, 0x04, 0x20]);
    jump(&mut code, 0x75, check);
    jump(&mut code, 0xeb, 0);
    code[to_end] = u8::try_from(code.len() - to_end - 1).unwrap();
    code.extend([0xe6, END_PORT.to_le_bytes()[0]]);
    code
}

/// A short jump back.
fn jump(code: &mut Vec<u8>, opcode: u8, to: usize) {
    let distance = i8::try_from(to as isize - (code.len() as isize + 2)).unwrap();
    code.extend([opcode, distance.to_le_bytes()[0]]);
}
