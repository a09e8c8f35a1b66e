//! Where things are in the guest's address space, and the numbers that host and guest know each other by.
//!
//! `build.rs` has this file, too, and writes `layout.h` of it for the guest programs. So nothing is said twice; what
//! the guest has beside, the mailbox's structure, the compiler checks against [`crate::page`].

/// Constants, and a table of them by name.
macro_rules! numbers {
    ($(#[$about:meta])* $table:ident: $($(#[$doc:meta])* $name:ident: $type:ty = $value:expr;)*) => {
        $($(#[$doc])* pub const $name: $type = $value;)*
        $(#[$about])*
        pub const $table: &[(&str, u64)] = &[$((stringify!($name), $name as u64)),*];
    };
}

numbers! {
    /// What the guest has to know, too, by name.
    OF_THE_GUEST:
    /// The mailbox: [`crate::mailbox`].
    MAILBOX_AT: u64 = 0x8000;
    /// Where the guest program is loaded and begins.
    PROGRAM_AT: u64 = 0x1_0000;
    /// Samples: ticks of the time stamp counter, a `u32` each.
    SAMPLES_AT: u64 = 0x60_0000;
    /// How many samples there may be.
    MOST_SAMPLES: usize = 65_536;
    /// What the guest takes for rings and buffers, up to the end of its memory.
    HEAP_AT: u64 = 0x70_0000;
    /// Memory of the guest, bytes.
    RAM_BYTES: u64 = 32 << 20;
    /// Registers of the first device.
    DEVICES_AT: u64 = 0xd000_0000;
    /// Bytes of address space for the registers of a device.
    DEVICE_BYTES: u64 = 0x1000;
    /// Places for devices, one behind another; some of them are empty.
    DEVICE_PLACES: u64 = 8;
    /// A byte written to this port ends the guest.
    END_PORT: u16 = 0xf4;

    /// Where a frame of the guest's has its number, a `u64`.
    NUMBER_AT: usize = 14;
    /// Bytes of a frame from here on are a pattern.
    PATTERN_AT: usize = 22;
    /// The guest's buffers, bytes.
    BUFFER_BYTES: u32 = 2048;
    /// Longest virtio-net header, bytes: with a hash.
    MOST_HEADER_BYTES: u32 = 20;

    /// [`crate::mailbox::Work::Notify`].
    WORK_NOTIFY: u32 = 1;
    /// [`crate::mailbox::Work::Send`].
    WORK_SEND: u32 = 2;
    /// [`crate::mailbox::Work::Receive`].
    WORK_RECEIVE: u32 = 3;
    /// [`crate::mailbox::Work::RoundTrip`].
    WORK_ROUND_TRIP: u32 = 4;
    /// [`crate::mailbox::Work::Echo`].
    WORK_ECHO: u32 = 5;
    /// [`crate::mailbox::Work::Control`].
    WORK_CONTROL: u32 = 6;
    /// [`crate::mailbox::Work::Entropy`].
    WORK_ENTROPY: u32 = 7;
    /// [`crate::mailbox::Work::Kick`].
    WORK_KICK: u32 = 8;

    /// Packed rings.
    FLAG_PACKED: u32 = 1;
    /// WORK_NOTIFY: also while the device says that it needs none.
    FLAG_ALWAYS: u32 = 2;
    /// Multiqueue is negotiated, and with it RSS and the hash report where they are offered.
    FLAG_MULTIQUEUE: u32 = 4;
    /// The hash report is, without multiqueue and RSS.
    FLAG_HASH_REPORT: u32 = 8;
    /// The guest wants interrupts, and looks at InterruptStatus for each chain; it takes none.
    FLAG_INTERRUPTS: u32 = 16;
    /// VIRTIO_F_EVENT_IDX is negotiated: kicks by the index that the device says; with FLAG_INTERRUPTS, which goes with
    /// it, an interrupt for each INTERRUPT_STRIDE chains.
    FLAG_EVENT_IDX: u32 = 32;
    /// WORK_CONTROL: what is sent comes back.
    FLAG_ECHOED: u32 = 64;
    /// See FLAG_EVENT_IDX.
    INTERRUPT_STRIDE: u16 = 16;

    /// Bits of a line's number, below that of its file, where the guest says at which place it gave up.
    SOURCE_SHIFT: u32 = 16;

    /// The guest works.
    ANSWER_WORKING: u32 = 0;
    /// All went well.
    ANSWER_DONE: u32 = 1;
    /// There is no device of the type that the work needs.
    ANSWER_NO_DEVICE: u32 = 2;
    /// A device did not do as VirtIO says; `place` is where that was seen.
    ANSWER_WRONG: u32 = 3;
    /// Nothing came for `patience_ticks`.
    ANSWER_TIMEOUT: u32 = 4;
    /// A control command was answered otherwise than it should be.
    ANSWER_REFUSED: u32 = 5;
    /// The guest has no memory left.
    ANSWER_MEMORY: u32 = 6;
}

/// Files of the guest program under `guest/`, by the numbers that it knows them by.
pub const GUEST_SOURCES: [&str; 7] = [
    "start.S",
    "machine.c",
    "virtio.c",
    "net.c",
    "pairs.c",
    "control.c",
    "main.c",
];
/// Page tables of the guest in long mode: seven pages.
pub const PAGE_TABLES_AT: u64 = 0x1000;
/// Where the program that counts interrupts is loaded and begins.
pub const INTERRUPTS_AT: u64 = 0x1000;
/// Interrupt lines of devices: this one and those behind it.
pub const FIRST_LINE: u32 = 5;
