//! A hostile driver at the registers: every offset, every width, odd values, in any order; the guest does not run.

use notifier::state::Event;
use testkit::soak;
use tiny_vmm::layout::{DEVICE_AT, Mailbox, RAM_BYTES};
use tiny_vmm::machine::{Machine, Notify};
use tiny_vmm::mailbox::Work;
use tiny_vmm::mmio::DEVICE_BYTES;
use tiny_vmm::sink::Sink;
use tiny_vmm::sink::null::Null;
use virtio_bindings::virtio_mmio::*;
use vm_device::DeviceMmio as _;
use vm_device::bus::MmioAddress;
use vm_memory::{Bytes as _, GuestAddress};

use crate::common::{begin, machine, read, set_up, task, write};

const PAIRS: u32 = 2;
const F_VERSION_1: u64 = 1 << 32;
const F_CTRL_VQ: u64 = 1 << 17;
const F_MQ: u64 = 1 << 22;
const NEEDS_RESET: u32 = 64;

/// A machine whose queues are served by exits.
fn rig_with(sink: Box<dyn Sink>) -> Machine {
    let task = Mailbox {
        pairs: PAIRS.into(),
        ..task(Work::Send, 1)
    };
    let machine = machine(Notify::Exit, &task, sink);
    machine.mmio.notifiers.event(Event::VmRun).expect("never refused");
    machine
}

fn rig() -> Machine {
    rig_with(Box::new(Null))
}

/// Notifies each queue, and one that does not exist.
fn notify_all(machine: &Machine) {
    for queue in 0..2 * PAIRS + 2 {
        write(machine, VIRTIO_MMIO_QUEUE_NOTIFY, queue);
    }
}

fn offered(machine: &Machine) -> u64 {
    let half = |select| {
        write(machine, VIRTIO_MMIO_DEVICE_FEATURES_SEL, select);
        u64::from(read(machine, VIRTIO_MMIO_DEVICE_FEATURES))
    };
    half(0) | half(1) << 32
}

/// A generator of numbers, the same each time (Marsaglia's xorshift).
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

#[test]
fn every_offset_and_width_is_answered() {
    testkit::require!(Kvm);
    let values = [0, 1, 2, 4, 15, 64, 128, 255, 0x7fff_ffff, 0x8000_0000, u64::MAX];
    let base = MmioAddress(DEVICE_AT);
    for start in [0, 1, 3, 11, 15] {
        let machine = rig();
        write(&machine, VIRTIO_MMIO_STATUS, start);
        for offset in (0..0x200).chain([DEVICE_BYTES - 1]) {
            for width in [0, 1, 2, 3, 4, 8, 16] {
                for value in values {
                    let bytes = [value.to_le_bytes(), value.to_le_bytes()].concat();
                    machine.mmio.mmio_write(base, offset, &bytes[..width]);
                    let mut back = vec![0xaa; width];
                    machine.mmio.mmio_read(base, offset, &mut back);
                    if offset < VIRTIO_MMIO_CONFIG.into() && (width != 4 || offset % 4 != 0) {
                        assert!(
                            back.iter().all(|&byte| byte == 0),
                            "{width} at {offset:#x}: {back:?}"
                        );
                    }
                }
            }
            notify_all(&machine);
        }
        assert_eq!(
            read(&machine, VIRTIO_MMIO_MAGIC_VALUE),
            u32::from_le_bytes(*b"virt")
        );
    }
}

#[test]
fn no_order_of_accesses_panics_and_a_reset_always_helps() {
    testkit::require!(Kvm);
    let (machine, mut numbers) = (rig(), Numbers(0x9e37_79b9_7f4a_7c15));
    let (base, features) = (MmioAddress(DEVICE_AT), offered(&machine));
    let mut started = 0;
    for round in 0..soak::count(150, 4_000) {
        begin(&machine, features & (numbers.next() | F_VERSION_1));
        for queue in 0..=2 * PAIRS + 1 {
            let at = match numbers.below(4) {
                0 => numbers.next(),
                1 => RAM_BYTES - numbers.below(0x8000),
                _ => 0x10_0000 + u64::from(queue) * 0x10_0000,
            };
            let entries = [0, 1, 3, 16, 256, 257, u32::MAX][numbers.below(7) as usize];
            set_up(&machine, queue, entries, at);
        }
        // Nonsense in the rings, in every second round.
        if round % 2 == 0 {
            let mut bytes = vec![0; 0x60_0000];
            bytes.fill_with(|| numbers.next() as u8);
            machine
                .memory
                .ram
                .write_slice(&bytes, GuestAddress(0x10_0000))
                .expect("inside");
        }
        for _ in 0..20 {
            let (offset, bytes) = (numbers.below(0x140), numbers.next().to_le_bytes());
            let width = [1, 2, 4, 4, 4, 8][numbers.below(6) as usize];
            machine.mmio.mmio_write(base, offset, &bytes[..width]);
            machine.mmio.mmio_read(base, offset, &mut [0; 8][..width]);
        }
        write(&machine, VIRTIO_MMIO_STATUS, 15);
        started += u32::from(read(&machine, VIRTIO_MMIO_STATUS) & 4 != 0);
        notify_all(&machine);
        notify_all(&machine);
    }
    assert!(started > 20, "it never got so far");
    write(&machine, VIRTIO_MMIO_STATUS, 0);
    assert_eq!(
        (read(&machine, VIRTIO_MMIO_STATUS), offered(&machine)),
        (0, features)
    );
}

#[test]
fn features_that_were_not_offered_are_not_ok() {
    testkit::require!(Kvm);
    let machine = rig();
    let status = || read(&machine, VIRTIO_MMIO_STATUS);
    let all = offered(&machine);
    for features in [all | 1 << 63, all & !F_VERSION_1, 0, u64::MAX] {
        begin(&machine, features);
        // Without FEATURES_OK a driver is not ready either.
        write(&machine, VIRTIO_MMIO_STATUS, 15);
        assert_eq!(status(), 3, "{features:#x}");
    }
    begin(&machine, all);
    assert_eq!(status(), 11);
    // They are fixed now, and there are no others.
    for half in 0..4 {
        write(&machine, VIRTIO_MMIO_DRIVER_FEATURES_SEL, half);
        write(&machine, VIRTIO_MMIO_DRIVER_FEATURES, 0);
    }
    write(&machine, VIRTIO_MMIO_STATUS, 15);
    assert_eq!(status(), 15);
    assert_eq!(machine.net.lock().device.features(), all);
    for select in [2, 3, u32::MAX] {
        write(&machine, VIRTIO_MMIO_DEVICE_FEATURES_SEL, select);
        assert_eq!(read(&machine, VIRTIO_MMIO_DEVICE_FEATURES), 0);
    }
}

#[test]
fn queue_that_does_not_exist_has_no_entries() {
    testkit::require!(Kvm);
    let machine = rig();
    begin(&machine, F_VERSION_1);
    for queue in [2 * PAIRS + 1, 0xffff, 0x1_0000, u32::MAX] {
        set_up(&machine, queue, 16, 0x10_0000);
        let entries = read(&machine, VIRTIO_MMIO_QUEUE_NUM_MAX);
        assert_eq!((entries, read(&machine, VIRTIO_MMIO_QUEUE_READY)), (0, 0));
    }
}

#[test]
fn queue_that_is_ready_is_not_changed() {
    testkit::require!(Kvm);
    let machine = rig();
    begin(&machine, F_VERSION_1);
    set_up(&machine, 0, 16, 0x10_0000);
    // Rings outside of memory would need a reset.
    set_up(&machine, 0, 8, RAM_BYTES);
    set_up(&machine, 1, 16, 0x20_0000);
    write(&machine, VIRTIO_MMIO_STATUS, 15);
    assert_eq!(read(&machine, VIRTIO_MMIO_STATUS), 15);
    write(&machine, VIRTIO_MMIO_QUEUE_READY, 0);
    assert_eq!(read(&machine, VIRTIO_MMIO_QUEUE_READY), 0);
}

/// The device needs a reset, and says so by a configuration change (2.1.2).
fn assert_needs_reset(machine: &Machine, what: &str) {
    assert_eq!(read(machine, VIRTIO_MMIO_STATUS), 15 | NEEDS_RESET, "{what}");
    assert_eq!(read(machine, VIRTIO_MMIO_INTERRUPT_STATUS), 3);
    write(machine, VIRTIO_MMIO_INTERRUPT_ACK, 3);
    // Used buffers, always.
    assert_eq!(read(machine, VIRTIO_MMIO_INTERRUPT_STATUS), 1);
    notify_all(machine);
}

#[test]
fn rings_outside_of_memory_need_a_reset() {
    testkit::require!(Kvm);
    let machine = rig();
    for (at, entries) in [
        (RAM_BYTES, 16),
        (u64::MAX, 16),
        (u64::MAX - 0xfff, 256),
        (1, 16),
        (0x10_0000, 3),
    ] {
        begin(&machine, F_VERSION_1);
        set_up(&machine, 0, entries, at);
        set_up(&machine, 1, entries, at);
        write(&machine, VIRTIO_MMIO_STATUS, 15);
        assert_needs_reset(&machine, &format!("{entries} at {at:#x}"));
    }
    // 0, or FAILED, ends it.
    write(&machine, VIRTIO_MMIO_STATUS, 15 | 128);
    assert_eq!(read(&machine, VIRTIO_MMIO_STATUS), 11 | 128);
    write(&machine, VIRTIO_MMIO_STATUS, 0);
    let interrupt = read(&machine, VIRTIO_MMIO_INTERRUPT_STATUS);
    assert_eq!((read(&machine, VIRTIO_MMIO_STATUS), interrupt), (0, 0));
}

#[test]
fn fault_in_a_ring_needs_a_reset_and_the_next_driver_is_served() {
    testkit::require!(Kvm);
    let machine = rig();
    for _ in 0..3 {
        begin(&machine, F_VERSION_1);
        set_up(&machine, 0, 16, 0x10_0000);
        set_up(&machine, 1, 16, 0x20_0000);
        write(&machine, VIRTIO_MMIO_STATUS, 15);
        assert_eq!(read(&machine, VIRTIO_MMIO_STATUS), 15);
        // The available index of the transmit queue jumps by more than there are entries.
        let index = |value: u16| machine.memory.ram.write_obj(value, GuestAddress(0x20_2002));
        index(1000).expect("inside");
        write(&machine, VIRTIO_MMIO_QUEUE_NOTIFY, 1);
        assert_needs_reset(&machine, "index");
        index(0).expect("inside");
    }
}

#[test]
fn config_space_is_read_only_and_ends() {
    testkit::require!(Kvm);
    let (machine, base) = (rig(), MmioAddress(DEVICE_AT));
    let config = |at: u64, bytes: usize| {
        let mut read = vec![0xaa; bytes];
        machine
            .mmio
            .mmio_read(base, u64::from(VIRTIO_MMIO_CONFIG) + at, &mut read);
        read
    };
    machine.mmio.mmio_write(base, VIRTIO_MMIO_CONFIG.into(), &[9; 6]);
    let whole = config(0, 0x100);
    assert_eq!(whole[..6], [2, 0, 0, 0, 0, 1]);
    assert_eq!(whole[8..10], (PAIRS as u16).to_le_bytes());
    assert_eq!(config(0xfe, 4), [0; 4]);
    assert_eq!(read(&machine, VIRTIO_MMIO_CONFIG_GENERATION), 0);
}

/// A sink with frames for the guest.
struct Full(u32);

impl Sink for Full {
    fn put(&mut self, _frame: &[u8]) -> bool {
        true
    }

    fn take(&mut self, frame: &mut Vec<u8>) -> anyhow::Result<bool> {
        *frame = vec![0xff; 64];
        let left = self.0.checked_sub(1);
        self.0 = left.unwrap_or(0);
        Ok(left.is_some())
    }
}

#[test]
fn frames_wait_for_buffers_of_their_pair_until_it_is_disabled() {
    testkit::require!(Kvm);
    let machine = rig_with(Box::new(Full(10)));
    let dropped = || machine.net.lock().port.counts.dropped;
    begin(&machine, F_VERSION_1 | F_CTRL_VQ | F_MQ);
    for queue in 0..4 {
        set_up(&machine, queue, 16, 0x10_0000 * (1 + u64::from(queue)));
    }
    write(&machine, VIRTIO_MMIO_STATUS, 15);
    notify_all(&machine);
    assert_eq!(dropped(), 0, "they wait");
    write(&machine, VIRTIO_MMIO_QUEUE_SEL, 0);
    write(&machine, VIRTIO_MMIO_QUEUE_READY, 0);
    assert_eq!(dropped(), 10);
}
