//! What host and guest share: addresses, numbers, and the mailbox. `build.rs` includes this file and writes a C header
//! from it, so that everything is defined once.

use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Constants, and a table of them by name.
macro_rules! numbers {
    ($($(#[$doc:meta])* $name:ident = $value:expr;)*) => {
        $($(#[$doc])* pub const $name: u64 = $value;)*
        /// The constants above, by name.
        pub const NUMBERS: &[(&str, u64)] = &[$((stringify!($name), $name)),*];
    };
}

numbers! {
    /// Address of the [`Mailbox`].
    MAILBOX_AT = 0x8000;
    /// Address of the samples: ticks of the time stamp counter, a `u32` each.
    SAMPLES_AT = 0x60_0000;
    /// Maximum number of samples.
    MOST_SAMPLES = 65_536;
    /// Rings and buffers of the guest begin here.
    HEAP_AT = 0x70_0000;
    /// Size of guest memory, bytes.
    RAM_BYTES = 32 << 20;
    /// Address of the network device's registers.
    DEVICE_AT = 0xd000_0000;
    /// A byte written to this I/O port ends the guest.
    END_PORT = 0xf4;

    /// Maximum number of queue pairs.
    MOST_PAIRS = 8;
    /// Size of the guest's buffers, bytes.
    BUFFER_BYTES = 2048;
    /// Offset of the frame's number in a frame, a `u64`.
    NUMBER_AT = 14;
    /// A pattern fills the frame from this offset on.
    PATTERN_AT = 22;

    /// [`Work::Notify`](crate::mailbox::Work::Notify).
    WORK_NOTIFY = 1;
    /// [`Work::Send`](crate::mailbox::Work::Send).
    WORK_SEND = 2;
    /// [`Work::RoundTrip`](crate::mailbox::Work::RoundTrip).
    WORK_ROUND_TRIP = 3;
    /// [`Work::Control`](crate::mailbox::Work::Control).
    WORK_CONTROL = 4;

    /// The guest has done its work.
    ANSWER_DONE = 1;
    /// The device did not work as VirtIO defines.
    ANSWER_WRONG = 2;
    /// The guest waited for longer than `patience_ticks`.
    ANSWER_TIMEOUT = 3;
}

/// A structure of `u64`, and the names of its fields.
macro_rules! mailbox {
    ($($(#[$doc:meta])* $field:ident,)*) => {
        /// A page at [`MAILBOX_AT`]: the guest's work, and its answer.
        #[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable)]
        #[repr(C)]
        pub struct Mailbox {
            $($(#[$doc])* pub $field: u64,)*
        }
        /// Its fields in order.
        pub const FIELDS: &[&str] = &[$(stringify!($field)),*];
    };
}

mailbox! {
    /// A `WORK_` number. The host writes the fields up to `patience_ticks` before the guest runs.
    work,
    /// Number of frames, notifications or rounds.
    frames,
    /// Number of frames for each kick.
    frames_per_kick,
    /// Length of a frame.
    frame_bytes,
    /// Number of queue pairs.
    pairs,
    /// 1: kick also if the device has suppressed kicks.
    always,
    /// Longest time that the guest waits for anything.
    patience_ticks,
    /// 1: the guest ends early. The host writes this field at any time.
    stop,
    /// An `ANSWER_` number; 0: the guest works. The guest writes the fields from here on.
    answer,
    /// Address of the name of the source file in which the guest gave up.
    file,
    /// The line in it.
    line,
    /// The value that the guest expected there.
    expected,
    /// The value that it found.
    found,
    /// 1: the driver has set DRIVER_OK.
    ready,
    /// Number of frames, notifications, rounds or commands that are done.
    done,
    /// Number of notifications.
    kicks,
    /// Duration of the work.
    ticks,
    /// Number of received frames that were not as they were sent.
    bad_frames,
    /// Number of samples.
    samples,
}
