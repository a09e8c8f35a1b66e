//! The decoder of vhost-user messages: any bytes, with any number of descriptors.
//!
//! Invariants: no panic; what is read does not depend on how the bytes are cut into pieces; every descriptor is closed.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use vhost_af_xdp::fuzzing::messages;

#[derive(arbitrary::Arbitrary, Debug)]
struct Input {
    features: u32,
    messages: Vec<Message>,
    /// Lengths of the pieces, over and over.
    pieces: Vec<u8>,
}

#[derive(arbitrary::Arbitrary, Debug)]
struct Message {
    request: u8,
    /// Flags that are none.
    flags: Option<u8>,
    /// What the size says that is not so.
    more: Option<i8>,
    payload: Vec<u8>,
    files: u8,
}

impl Message {
    fn bytes(&self) -> Vec<u8> {
        let flags = self.flags.map_or(0b1001, u32::from);
        let size = self.payload.len() as u32;
        let size = size.wrapping_add_signed(self.more.unwrap_or_default().into());
        let header = [u32::from(self.request % 50), flags, size].map(u32::to_ne_bytes);
        [header.as_flattened(), &self.payload].concat()
    }
}

/// Runs one input.
///
/// # Panics
/// When an invariant is broken.
pub fn run(data: &[u8]) {
    let Some(input) = crate::decode::<Input>(data) else {
        return;
    };
    let before = descriptors();
    let whole = read(&input, &[]);
    assert_eq!(
        read(&input, &input.pieces),
        whole,
        "in pieces it is another message"
    );
    assert_eq!(descriptors(), before, "a descriptor is left over");
}

/// What is read of the messages if they are sent in such pieces.
fn read(input: &Input, pieces: &[u8]) -> Vec<String> {
    let (vmm, daemon) = UnixStream::pair().expect("sockets");
    let mut lengths = pieces.iter().cycle();
    for message in input.messages.iter().take(16) {
        let bytes = message.bytes();
        let mut rest = &bytes[..];
        let mut files = usize::from(message.files % 40);
        while !rest.is_empty() {
            let length = lengths
                .next()
                .map_or(rest.len(), |&length| usize::from(length) + 1);
            let (piece, after) = rest.split_at(length.min(rest.len()));
            send(&vmm, piece, &vec![daemon.as_fd(); std::mem::take(&mut files)]);
            rest = after;
        }
    }
    drop(vmm);
    messages(&daemon, input.features.into())
}

fn send(vmm: &UnixStream, bytes: &[u8], files: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(40))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        assert!(
            control.push(SendAncillaryMessage::ScmRights(files)),
            "room for 40"
        );
    }
    sendmsg(vmm, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL).expect("room");
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}
