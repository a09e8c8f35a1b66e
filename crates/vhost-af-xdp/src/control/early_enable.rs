//! SET_VRING_ENABLE before SET_FEATURES, which QEMU sends and the `vhost` crate refuses.
//!
//! The specification ties the message to VHOST_USER_F_PROTOCOL_FEATURES being negotiated. QEMU
//! counts it as negotiated when the backend offers it, and enables the rings of a net device when
//! that is plugged, before any driver acknowledged anything (hw/net/virtio-net.c, `peer_attach`);
//! the crate counts it only from SET_FEATURES on and fails the connection. So this message, and
//! only this one, is looked for ahead of the crate and taken by us.

use std::io;
use std::os::unix::net::UnixStream;

use rustix::net::{RecvFlags, SendFlags, recv, send};
use vhost::vhost_user::message::FrontendReq;

use super::port::Port;
use super::session::SessionError;

/// vhost-user header: request, flags, size of the payload; each 32 bits in host order.
const HEADER: usize = 12;
/// Payload: vring index and state, 32 bits each.
const PAYLOAD: usize = 8;
/// Version of the protocol, in the flags.
const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;

/// Waits for a message; takes it, and answers it, if it is a SET_VRING_ENABLE.
///
/// # Errors
/// The socket's, or that of the message: false payload, no such vring.
pub(crate) fn take(stream: &UnixStream, port: &Port) -> io::Result<bool> {
    let mut header = [0u8; HEADER];
    let (got, _) = recv(stream, &mut header[..], RecvFlags::PEEK)?;
    let word = |bytes: &[u8], at: usize| {
        u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
    };
    // A header in pieces, or the end of the stream: the crate's business.
    if got < HEADER
        || word(&header, 0) != FrontendReq::SET_VRING_ENABLE as u32
        || word(&header, 8) != PAYLOAD as u32
    {
        return Ok(false);
    }
    let mut message = [0u8; HEADER + PAYLOAD];
    let (got, _) = recv(stream, &mut message[..], RecvFlags::WAITALL)?;
    if got < message.len() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let (index, state) = (word(&message, HEADER), word(&message, HEADER + 4));
    let done = port.with_session(|session, ground| match state {
        0 | 1 => session.set_vring_enable(index, state == 1, ground),
        _ => Err(SessionError::EnableState(state)),
    });
    if word(&message, 4) & NEED_REPLY != 0
        && port
            .with_session(|session, _| Ok(session.reply_ack))
            .unwrap_or(false)
    {
        reply(stream, done.is_err())?;
    }
    done.map(|()| true)
        .map_err(|error| io::Error::other(error.to_string()))
}

fn reply(stream: &UnixStream, failed: bool) -> io::Result<()> {
    let mut message = Vec::with_capacity(HEADER + 8);
    for word in [FrontendReq::SET_VRING_ENABLE as u32, VERSION | REPLY, 8] {
        message.extend(word.to_ne_bytes());
    }
    message.extend(u64::from(failed).to_ne_bytes());
    send(stream, &message, SendFlags::NOSIGNAL)?;
    Ok(())
}
