//! Single vhost-user messages, for what the `vhost` crate's front end cannot say.

use std::io::{self, IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use vhost::vhost_user::message::FrontendReq;

/// An answer is wanted (vhost-user, "Header").
const NEED_REPLY: u32 = 1 << 3;
/// Version 1, an answer wanted.
const FLAGS: u32 = 1 | NEED_REPLY;
/// Request, flags, size of the payload.
const HEADER: usize = 12;
/// Most descriptors that the kernel takes with one message (SCM_MAX_FD, include/net/scm.h).
pub const MOST_FILES: usize = 253;

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
    let header = header(request, FLAGS, payload.len(), more);
    send_bytes(socket, header, payload, file.as_slice()).expect("a message fits");
}

/// As [`send`], with any number of descriptors up to [`MOST_FILES`].
///
/// # Panics
/// If the socket does not take it.
pub fn send_files(socket: &UnixStream, request: FrontendReq, payload: &[u8], files: &[BorrowedFd<'_>]) {
    try_send(socket, request, payload, files).expect("a message fits");
}

/// As [`send_files`], to somebody who may have gone.
///
/// # Errors
/// The socket's.
pub fn try_send(
    socket: &UnixStream,
    request: FrontendReq,
    payload: &[u8],
    files: &[BorrowedFd<'_>],
) -> io::Result<()> {
    send_bytes(socket, header(request, FLAGS, payload.len(), 0), payload, files)
}

/// As [`try_send`], with no answer asked for.
///
/// # Errors
/// The socket's.
pub fn try_tell(socket: &UnixStream, request: FrontendReq, payload: &[u8]) -> io::Result<()> {
    let header = header(request, FLAGS & !NEED_REPLY, payload.len(), 0);
    send_bytes(socket, header, payload, &[])
}

/// The header of a message that says `more` bytes of payload than its `len`.
fn header(request: FrontendReq, flags: u32, len: usize, more: i32) -> [u8; HEADER] {
    let size = u32::try_from(len).expect("short").wrapping_add_signed(more);
    let mut header = [0; HEADER];
    for (field, word) in header.chunks_exact_mut(4).zip([request as u32, flags, size]) {
        field.copy_from_slice(&word.to_ne_bytes());
    }
    header
}

fn send_bytes(
    socket: &UnixStream,
    header: [u8; HEADER],
    payload: &[u8],
    files: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FILES))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(files)));
    }
    sendmsg(
        socket,
        &[IoSlice::new(&header), IoSlice::new(payload)],
        &mut ancillary,
        SendFlags::NOSIGNAL,
    )?;
    Ok(())
}

/// Receives an answer, whatever it is: its payload.
///
/// # Errors
/// The socket's, or that it is at its end.
pub fn try_receive(mut socket: &UnixStream) -> io::Result<Vec<u8>> {
    let mut header = [0; HEADER];
    socket.read_exact(&mut header)?;
    let [.., a, b, c, d] = header;
    let mut payload = vec![0; u32::from_ne_bytes([a, b, c, d]) as usize];
    socket.read_exact(&mut payload)?;
    Ok(payload)
}

/// Receives an answer of one 64-bit value.
///
/// # Panics
/// If none comes, or another one.
pub fn receive(mut socket: &UnixStream) -> u64 {
    let mut answer = [0; HEADER + 8];
    socket.read_exact(&mut answer).expect("an answer");
    u64::from_ne_bytes(answer[HEADER..].try_into().expect("eight bytes"))
}
