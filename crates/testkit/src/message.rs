//! Single vhost-user messages, for what the `vhost` crate's front end cannot say.

use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use vhost::vhost_user::message::FrontendReq;

/// Version 1, an answer wanted (vhost-user, "Header").
const FLAGS: u32 = 1 | 1 << 3;
/// Request, flags, size of the payload.
const HEADER: usize = 12;

/// Sends a message, with a descriptor if there is one.
///
/// # Panics
/// If the socket does not take it.
pub fn send(socket: &UnixStream, request: FrontendReq, payload: &[u8], file: Option<BorrowedFd<'_>>) {
    send_saying(socket, request, payload, 0, file);
}

/// As [`send`], in a header that says `more` bytes of payload than there are.
///
/// # Panics
/// If the socket does not take it.
pub fn send_saying(
    socket: &UnixStream,
    request: FrontendReq,
    payload: &[u8],
    more: i32,
    file: Option<BorrowedFd<'_>>,
) {
    send_bytes(socket, request, payload, more, file.as_slice());
}

/// As [`send`], with any number of descriptors up to eight.
///
/// # Panics
/// If the socket does not take it.
pub fn send_files(socket: &UnixStream, request: FrontendReq, payload: &[u8], files: &[BorrowedFd<'_>]) {
    send_bytes(socket, request, payload, 0, files);
}

fn send_bytes(
    socket: &UnixStream,
    request: FrontendReq,
    payload: &[u8],
    more: i32,
    files: &[BorrowedFd<'_>],
) {
    let mut bytes = Vec::with_capacity(HEADER + payload.len());
    let size = u32::try_from(payload.len())
        .expect("short")
        .wrapping_add_signed(more);
    for word in [request as u32, FLAGS, size] {
        bytes.extend(word.to_ne_bytes());
    }
    bytes.extend(payload);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(files)));
    }
    sendmsg(
        socket,
        &[IoSlice::new(&bytes)],
        &mut ancillary,
        SendFlags::NOSIGNAL,
    )
    .expect("a message fits");
}

/// Receives an answer of one 64-bit value.
///
/// # Panics
/// If none comes, or another one.
#[must_use]
pub fn receive(mut socket: &UnixStream) -> u64 {
    let mut answer = [0; HEADER + 8];
    socket.read_exact(&mut answer).expect("an answer");
    u64::from_ne_bytes(answer[HEADER..].try_into().expect("eight bytes"))
}
