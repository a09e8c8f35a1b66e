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
//! - SET_MEM_TABLE: the crate wants exactly the regions that are there. User-mode Linux sends room for two always
//!   (`vhost_user_set_mem_table`, arch/um/drivers/virtio_uml.c); other back ends ignore what follows the last region,
//!   and so does this one. All other messages have one length, and no front end is known that sends more.
//!
//! Each message is looked at without being taken (MSG_PEEK); what is not in this list, or has more bytes than it must
//! have, is left to the crate, which also refuses what is malformed. A message that is too short is refused here, by
//! name.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recv, recvmsg, send};
use vhost::vhost_user::message::{
    BackendReq, FrontendReq, MAX_ATTACHED_FD_ENTRIES, MAX_MSG_SIZE, VhostUserMemoryRegion,
    VhostUserProtocolFeatures as Protocol,
};

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

/// In the payload of SET_MEM_TABLE before its regions: their number, and padding.
const TABLE_HEAD: usize = 8;
/// A region there.
const REGION: usize = 32;

/// A message that was read.
struct Message {
    request: FrontendReq,
    flags: u32,
    payload: Vec<u8>,
    files: Vec<OwnedFd>,
}

/// What the header of the next message says.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Header {
    request: u32,
    payload: usize,
}

impl std::fmt::Display for Header {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match FrontendReq::try_from(self.request) {
            Ok(request) => write!(f, "{request:?} with {} bytes", self.payload),
            Err(_) => write!(f, "request {} with {} bytes", self.request, self.payload),
        }
    }
}

/// What became of a message.
pub(crate) enum Taken {
    /// It was taken, and answered.
    Here,
    /// It is left to the crate; its header, if it is there in one piece.
    Left(Option<Header>),
}

impl Message {
    fn value(&self) -> u64 {
        // As long as every message of those that have one.
        self.payload
            .first_chunk()
            .map_or(0, |bytes| u64::from_ne_bytes(*bytes))
    }
}

/// Waits for a message; takes it, and answers it, if it is one of those above.
pub(crate) fn take(stream: &UnixStream, connection: &Connection) -> io::Result<Taken> {
    let mut bytes = [0u8; HEADER];
    let (got, _) = recv(stream, &mut bytes[..], RecvFlags::PEEK)?;
    // A header in pieces, or the end of the stream: the crate's business.
    if got < HEADER {
        return Ok(Taken::Left(None));
    }
    let header = Header {
        request: word(&bytes, 0),
        payload: word(&bytes, 8) as usize,
    };
    if header.request == FrontendReq::IOTLB_MSG as u32 {
        return refuse_iotlb(stream, connection);
    }
    let Some(request) = ours(header, connection)? else {
        return Ok(Taken::Left(Some(header)));
    };
    let message = read(stream, request, header.payload)?;
    let needs_ack = message.flags & NEED_REPLY != 0 && connection.has(Protocol::REPLY_ACK);
    let result = act(message, connection);
    match &result {
        Ok(Some(value)) => reply(stream, request, *value)?,
        _ if needs_ack => reply(stream, request, u64::from(result.is_err()))?,
        _ => {}
    }
    match result {
        Ok(_) => Ok(Taken::Here),
        // The VMM asks whether this MTU will do, and is told; it decides what follows.
        Err(error @ SessionError::Mtu { .. }) => {
            connection.port.warn(error.to_string());
            Ok(Taken::Here)
        }
        Err(error) => Err(io::Error::other(with_sources(&error))),
    }
}

/// An IOTLB message, which is always answered, is of no use: the device would go on with addresses of nothing. What
/// follows its header is not looked at.
fn refuse_iotlb(stream: &UnixStream, connection: &Connection) -> io::Result<Taken> {
    let refused = connection.refuse::<()>(MessageError::Iotlb);
    reply(stream, FrontendReq::IOTLB_MSG, 1)?;
    match refused {
        Ok(()) => Ok(Taken::Here),
        Err(error) => Err(io::Error::other(with_sources(&error))),
    }
}

/// The request, if it is one for this file.
/// Errors: it is too short for what it has to say.
fn ours(header: Header, connection: &Connection) -> io::Result<Option<FrontendReq>> {
    let Ok(request) = FrontendReq::try_from(header.request) else {
        return Ok(None);
    };
    let needed = match request {
        FrontendReq::SET_MEM_TABLE => TABLE_HEAD,
        FrontendReq::SET_VRING_ENABLE
        | FrontendReq::SET_VRING_KICK
        | FrontendReq::SET_VRING_CALL
        | FrontendReq::SET_VRING_ERR
        | FrontendReq::SEND_RARP
        | FrontendReq::NET_SET_MTU
        | FrontendReq::SET_STATUS => LARGEST,
        FrontendReq::GET_STATUS | FrontendReq::SET_BACKEND_REQ_FD => 0,
        _ => return Ok(None),
    };
    if header.payload < needed {
        let error = MessageError::Short {
            request,
            bytes: header.payload,
            of: String::new(),
            needed,
        };
        let refused = connection.refuse::<()>(error);
        return refused
            .map(|()| None)
            .map_err(|error| io::Error::other(with_sources(&error)));
    }
    let fits = match request {
        FrontendReq::SET_MEM_TABLE => header.payload <= MAX_MSG_SIZE,
        _ => header.payload == needed,
    };
    Ok(fits.then_some(request))
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Reads a message with at most as many descriptors as there can be regions; the kernel closes those beyond.
fn read(stream: &UnixStream, request: FrontendReq, payload: usize) -> io::Result<Message> {
    let mut bytes = vec![0u8; HEADER + payload];
    let (mut done, mut files) = (0, Vec::new());
    // In one piece, unless the VMM wrote it in several.
    while done < bytes.len() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_ATTACHED_FD_ENTRIES))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let got = recvmsg(
            stream,
            &mut [IoSliceMut::new(&mut bytes[done..])],
            &mut ancillary,
            RecvFlags::WAITALL | RecvFlags::CMSG_CLOEXEC,
        )?;
        if got.bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        done += got.bytes;
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(came) = message {
                files.extend(came);
            }
        }
        // They may come with every byte.
        files.truncate(MAX_ATTACHED_FD_ENTRIES);
    }
    let flags = word(&bytes, 4);
    let payload = bytes.split_off(HEADER);
    Ok(Message {
        request,
        flags,
        payload,
        files,
    })
}

/// Does what the message says; a value, if the message is one that is answered with one.
fn act(message: Message, connection: &Connection) -> Result<Option<u64>, SessionError> {
    let port = &connection.port;
    let needs = |feature: Protocol, name| match connection.has(feature) {
        true => Ok(()),
        false => Err(SessionError::from(MessageError::NotNegotiated(name))),
    };
    match message.request {
        FrontendReq::SET_MEM_TABLE => set_mem_table(message, connection)?,
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
            let [mac @ .., _, _] = message.value().to_ne_bytes();
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
            // Judged, and closed if it is none, by this thread: see files.rs.
            let file = message.files.into_iter().next();
            let is_channel = |file: &OwnedFd| eventfd::is_stream(file) && eventfd::ends_reading(file);
            let Some(channel) = file.filter(is_channel).map(UnixStream::from) else {
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

/// SET_MEM_TABLE, whatever follows its regions.
fn set_mem_table(message: Message, connection: &Connection) -> Result<(), SessionError> {
    let count = word(&message.payload, 0) as usize;
    if !(1..=MAX_ATTACHED_FD_ENTRIES).contains(&count) {
        return connection.refuse(MessageError::Regions(count));
    }
    let needed = TABLE_HEAD + count * REGION;
    let Some(entries) = message.payload.get(TABLE_HEAD..needed) else {
        return connection.refuse(MessageError::Short {
            request: message.request,
            bytes: message.payload.len(),
            of: format!(" for {count} region{}", if count == 1 { "" } else { "s" }),
            needed,
        });
    };
    if message.files.len() != count {
        let descriptors = message.files.len();
        return connection.refuse(MessageError::Files { descriptors, count });
    }
    let (entries, _) = entries.as_chunks::<REGION>();
    let regions = entries.iter().map(|entry| {
        let [guest, bytes, user, offset] =
            [0, 8, 16, 24].map(|at| u64::from_ne_bytes(std::array::from_fn(|byte| entry[at + byte])));
        VhostUserMemoryRegion::new(guest, bytes, user, offset)
    });
    connection.set_table(
        &regions.collect::<Vec<_>>(),
        message.files.into_iter().map(File::from).collect(),
    )
}

/// Takes the eventfd of a vring, which the low byte of the value names.
fn take_event(message: Message, connection: &Connection) -> Result<(), SessionError> {
    let value = message.value();
    let index = u32::from(value as u8);
    let (said, file) = (value & NO_DESCRIPTOR == 0, message.files.into_iter().next());
    if said != file.is_some() {
        return connection.refuse(MessageError::Descriptor { index, said });
    }
    set_event(message.request, index, file.map(File::from), connection)
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
    let event = match eventfd::take(index, role, file, connection.port.config.memory.files) {
        Ok(event) => event,
        Err(error) => return connection.refuse(error.into()),
    };
    let kick = connection.port.with_session(move |session, context| {
        match request {
            FrontendReq::SET_VRING_KICK => {
                session.set_vring_kick(index, event, context)?;
                return session.control_kick(index);
            }
            FrontendReq::SET_VRING_CALL => session.set_vring_call(index, event, context)?,
            _ => session.set_vring_err(index, event)?,
        }
        Ok(None)
    })?;
    kick.map_or(Ok(()), |kick| connection.watch(&kick))
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
