//! Where things are in the guest's address space. `guest/mailbox.h` and `guest/guest.ld` have the same numbers.

/// Memory of the guest, bytes.
pub const RAM_BYTES: u64 = 32 << 20;
/// The mailbox: [`crate::mailbox`].
pub const MAILBOX_AT: u64 = 0x8000;
/// Page tables of the guest in long mode: seven pages.
pub const PAGE_TABLES_AT: u64 = 0x1000;
/// Where the guest program is loaded and begins.
pub const PROGRAM_AT: u64 = 0x1_0000;
/// Where the program that counts interrupts is loaded and begins.
pub const INTERRUPTS_AT: u64 = 0x1000;
/// Samples: ticks of the time stamp counter, a `u32` each.
pub const SAMPLES_AT: u64 = 0x60_0000;
/// How many samples there may be.
pub const MOST_SAMPLES: usize = 65_536;
/// Registers of the first device.
pub const DEVICES_AT: u64 = 0xd000_0000;
/// Bytes of address space for the registers of a device.
pub const DEVICE_BYTES: u64 = 0x1000;
/// A byte written to this port ends the guest.
pub const END_PORT: u16 = 0xf4;
/// Interrupt lines of devices: this one and those behind it.
pub const FIRST_LINE: u32 = 5;
