//! Messages that are taken in front of the `vhost` crate, because it does not dispatch them.
//!
//! - SET_VRING_ENABLE before SET_FEATURES. The specification ties the message to
//!   VHOST_USER_F_PROTOCOL_FEATURES being negotiated. QEMU counts it as negotiated when the backend
//!   offers it, and enables the rings of a net device when that is plugged, before any driver
//!   acknowledged anything (hw/net/virtio-net.c, `peer_attach`); the crate counts it only from
//!   SET_FEATURES on and fails the connection.
//! - SEND_RARP, NET_SET_MTU, SET_STATUS and GET_STATUS, which it does not know.
//! - IOTLB_MSG, to refuse it in words of its own.
//! - SET_BACKEND_REQ_FD: what the crate makes of the descriptor cannot send a config change.
//! - SET_VRING_KICK, SET_VRING_CALL and SET_VRING_ERR: if the kernel cannot give us a descriptor (EMFILE) the crate
//!   forgets the header that it has read, and takes what follows for one. That is shorter here, so it would wait for
//!   more, the VMM for its answer, and both for ever. (What follows the header of other messages with descriptors is no
//!   header.)
//!
//! Each message is looked at without being taken (MSG_PEEK); what is not in this list, or does not
//! have the size that it must have, is left to the crate, which also refuses what is malformed.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recv, recvmsg, send};
use vhost::vhost_user::message::{BackendReq, FrontendReq, VhostUserProtocolFeatures as Protocol};

use super::connection::Connection;
use super::error::MessageError;
use super::eventfd;
use crate::port::session::SessionError;
use steer::with_sources;

/// vhost-user header: request, flags, size of the payload; each 32 bits in host order.
const HEADER: usize = 12;
/// The largest payload of the messages here.
const LARGEST: usize = 8;
/// Version of the protocol, in the flags.
const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
/// In the payload of a message about a vring's eventfd: there is none.
const NO_DESCRIPTOR: u64 = 1 << 8;

/// A message that was read.
struct Message {
    request: FrontendReq,
    flags: u32,
    payload: [u8; LARGEST],
    file: Option<OwnedFd>,
}

impl Message {
    fn value(&self) -> u64 {
        u64::from_ne_bytes(self.payload)
    }
}

/// Waits for a message; takes it, and answers it, if it is one of those above.
pub(crate) fn take(stream: &UnixStream, connection: &Connection) -> io::Result<bool> {
    let mut header = [0u8; HEADER];
    let (got, _) = recv(stream, &mut header[..], RecvFlags::PEEK)?;
    // A header in pieces, or the end of the stream: the crate's business.
    if got < HEADER {
        return Ok(false);
    }
    let payload = word(&header, 8) as usize;
    if word(&header, 0) == FrontendReq::IOTLB_MSG as u32 {
        return refuse_iotlb(stream, connection);
    }
    let Some(request) = ours(word(&header, 0), payload) else {
        return Ok(false);
    };
    let message = read(stream, request, payload)?;
    let needs_ack = message.flags & NEED_REPLY != 0 && connection.has(Protocol::REPLY_ACK);
    let result = act(message, connection);
    match &result {
        Ok(Some(value)) => reply(stream, request, *value)?,
        _ if needs_ack => reply(stream, request, u64::from(result.is_err()))?,
        _ => {}
    }
    match result {
        Ok(_) => Ok(true),
        // The VMM asks whether this MTU will do, and is told; it decides what follows.
        Err(error @ SessionError::Mtu { .. }) => {
            connection.port.warn(error.to_string());
            Ok(true)
        }
        Err(error) => Err(io::Error::other(with_sources(&error))),
    }
}

/// An IOTLB message, which is always answered, is of no use: the device would go on with addresses of nothing. What
/// follows its header is not looked at.
fn refuse_iotlb(stream: &UnixStream, connection: &Connection) -> io::Result<bool> {
    let refused = connection.refuse::<()>(MessageError::Iotlb);
    reply(stream, FrontendReq::IOTLB_MSG, 1)?;
    match refused {
        Ok(()) => Ok(true),
        Err(error) => Err(io::Error::other(with_sources(&error))),
    }
}

/// The request, if it is one for this file and has a payload of as many bytes as it must.
fn ours(request: u32, payload: usize) -> Option<FrontendReq> {
    let request = FrontendReq::try_from(request).ok()?;
    let expected = match request {
        FrontendReq::SET_VRING_ENABLE
        | FrontendReq::SET_VRING_KICK
        | FrontendReq::SET_VRING_CALL
        | FrontendReq::SET_VRING_ERR
        | FrontendReq::SEND_RARP
        | FrontendReq::NET_SET_MTU
        | FrontendReq::SET_STATUS => LARGEST,
        FrontendReq::GET_STATUS | FrontendReq::SET_BACKEND_REQ_FD => 0,
        _ => return None,
    };
    (payload == expected).then_some(request)
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Reads a message with at most one descriptor; the kernel closes those beyond.
fn read(stream: &UnixStream, request: FrontendReq, payload: usize) -> io::Result<Message> {
    let mut bytes = [0u8; HEADER + LARGEST];
    let wanted = HEADER + payload;
    let (mut done, mut file) = (0, None);
    // In one piece, unless the VMM wrote it in several.
    while done < wanted {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let got = recvmsg(
            stream,
            &mut [IoSliceMut::new(&mut bytes[done..wanted])],
            &mut ancillary,
            RecvFlags::WAITALL | RecvFlags::CMSG_CLOEXEC,
        )?;
        if got.bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        done += got.bytes;
        let came = ancillary.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut files) => files.next(),
            _ => None,
        });
        file = file.or(came);
    }
    let mut message = Message {
        request,
        flags: word(&bytes, 4),
        payload: [0; LARGEST],
        file,
    };
    message.payload[..payload].copy_from_slice(&bytes[HEADER..wanted]);
    Ok(message)
}

/// Does what the message says; a value, if the message is one that is answered with one.
fn act(message: Message, connection: &Connection) -> Result<Option<u64>, SessionError> {
    let port = &connection.port;
    let needs = |feature: Protocol, name| match connection.has(feature) {
        true => Ok(()),
        false => Err(SessionError::from(MessageError::NotNegotiated(name))),
    };
    match message.request {
        FrontendReq::SET_VRING_ENABLE => {
            let (index, state) = (word(&message.payload, 0), word(&message.payload, 4));
            if state > 1 {
                return connection.refuse(MessageError::EnableState(state));
            }
            port.with_session(move |session, context| session.set_vring_enable(index, state == 1, context))?;
        }
        FrontendReq::SET_VRING_KICK | FrontendReq::SET_VRING_CALL | FrontendReq::SET_VRING_ERR => {
            take_event(message, connection)?;
        }
        FrontendReq::SEND_RARP => {
            needs(Protocol::RARP, "SEND_RARP")?;
            let [mac @ .., _, _] = message.payload;
            port.with_session(move |session, context| {
                session.announce(mac, context);
                Ok(())
            })?;
        }
        FrontendReq::NET_SET_MTU => {
            needs(Protocol::MTU, "NET_SET_MTU")?;
            port.check_guest_mtu(message.value())?;
        }
        FrontendReq::SET_STATUS => {
            needs(Protocol::STATUS, "SET_STATUS")?;
            let status = message.value();
            port.with_session(move |session, context| session.set_status(status, context))?;
        }
        FrontendReq::GET_STATUS => {
            needs(Protocol::STATUS, "GET_STATUS")?;
            let status = port.with_session(|session, _| Ok(session.device.status()))?;
            return Ok(Some(status.into()));
        }
        _ => {
            needs(Protocol::BACKEND_REQ, "SET_BACKEND_REQ_FD")?;
            let file = message.file.ok_or(MessageError::NoChannel)?;
            // Judged, and closed if it is none, by this thread: see files.rs.
            let Some(channel) = channel(file) else {
                return connection.refuse(MessageError::NoChannel);
            };
            port.with_session(move |session, _| {
                session.set_channel(Box::new(move || tell_config_change(&channel)));
                Ok(())
            })?;
        }
    }
    Ok(None)
}

/// Takes the eventfd of a vring, which the low byte of the value names.
fn take_event(message: Message, connection: &Connection) -> Result<(), SessionError> {
    let value = message.value();
    let index = u32::from(value as u8);
    let said = value & NO_DESCRIPTOR == 0;
    if said != message.file.is_some() {
        return connection.refuse(MessageError::Descriptor { index, said });
    }
    set_event(message.request, index, message.file.map(File::from), connection)
}

/// Sets an eventfd of a vring, by SET_VRING_KICK, SET_VRING_CALL or SET_VRING_ERR.
pub(super) fn set_event(
    request: FrontendReq,
    index: u32,
    file: Option<File>,
    connection: &Connection,
) -> Result<(), SessionError> {
    let role = match request {
        FrontendReq::SET_VRING_KICK => "kick",
        FrontendReq::SET_VRING_CALL => "call",
        _ => "error",
    };
    // Judged, and closed if it is none, by this thread: see files.rs.
    let event = match eventfd::take(index, role, file) {
        Ok(event) => event,
        Err(error) => return connection.refuse(error.into()),
    };
    connection
        .port
        .with_session(move |session, context| match request {
            FrontendReq::SET_VRING_KICK => session.set_vring_kick(index, event, context),
            FrontendReq::SET_VRING_CALL => session.set_vring_call(index, event, context),
            _ => session.set_vring_err(index, event),
        })
}

/// A descriptor that requests of ours go to; `None`: it is no Unix stream socket.
fn channel(file: OwnedFd) -> Option<UnixStream> {
    use rustix::net::{AddressFamily, SocketType, sockopt};
    let stream = sockopt::socket_domain(&file) == Ok(AddressFamily::UNIX)
        && sockopt::socket_type(&file) == Ok(SocketType::STREAM);
    stream.then(|| file.into())
}

fn reply(stream: &UnixStream, request: FrontendReq, value: u64) -> io::Result<()> {
    let message = message(request as u32, VERSION | REPLY, &value.to_ne_bytes());
    send(stream, &message, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// VHOST_USER_BACKEND_CONFIG_CHANGE_MSG: the VMM is to read the config space again. It is not waited
/// for; a VMM that does not read what we send misses it.
fn tell_config_change(channel: &UnixStream) {
    let message = message(BackendReq::CONFIG_CHANGE_MSG as u32, VERSION, &[]);
    let _ = send(channel, &message, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
}

fn message(request: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let header = [request, flags, payload.len() as u32].map(u32::to_ne_bytes);
    [header.as_flattened(), payload].concat()
}
