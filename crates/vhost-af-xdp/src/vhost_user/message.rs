//! The vhost-user messages of a VMM: their numbers, sizes, descriptors and layout, and the answers to them.
//!
//! [`RULES`] has a row for each message that is supported (docs/interop/vhost-user.rst of QEMU, "Front-end message
//! types"); nothing else knows a number, a size or how many descriptors a message carries. [`Request::receive`] reads a
//! message of any kind from the connection, [`Request::decode`] checks it by its row and returns a [`Message`], which
//! `handler.rs` acts on. A new message is a row and a variant here, and an arm there.
//!
//! A VMM may be hostile: the length of a message is checked against its row before memory is allocated for it, and at
//! most [`MAX_FILES`] descriptors are kept, which are closed with the message if they are not used.
//!
//! Deviations from the specification, for VMMs that exist:
//!
//! - SET_VRING_ENABLE is accepted before SET_FEATURES. The specification ties the message to
//!   VHOST_USER_F_PROTOCOL_FEATURES being negotiated. QEMU counts it as negotiated when the back end offers it, and
//!   enables the rings of a net device when that is plugged, before any driver acknowledged anything
//!   (hw/net/virtio-net.c, `peer_attach`).
//! - Bytes after the last region of SET_MEM_TABLE are ignored: User-mode Linux always sends room for two
//!   (`vhost_user_set_mem_table`, arch/um/drivers/virtio_uml.c).
//! - The answer to SET_LOG_BASE repeats its payload; the specification leaves the payload open.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use anyhow::{Context, anyhow, bail};
use program::descriptors;
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recvmsg, send};
use virtqueue::{FileRange, GuestAddr, Region, RingAddresses};

use super::files::MAX_FILES;
use crate::port::memory::RegionKey;
use crate::port::session::InflightQueues;

/// Longest payload, bytes: a memory table of [`MAX_FILES`] regions, and any part of a config space, are shorter.
const MAX_PAYLOAD: usize = 4096;
/// Request, flags, size of the payload; each 32 bits in host order ("Header").
const HEADER: usize = 12;
/// Flags of the header: the version of the protocol, and the other bits that are defined.
const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
/// In SET_VRING_KICK, SET_VRING_CALL and SET_VRING_ERR: there is no descriptor.
const NO_DESCRIPTOR: u64 = 1 << 8;
/// Bytes of SET_MEM_TABLE before its regions, and of a region.
const TABLE_HEAD: usize = 8;
const REGION: usize = 32;
/// Bytes of GET_CONFIG and SET_CONFIG before those of the config space, and the highest end of a config space.
const CONFIG_HEAD: usize = 12;
const CONFIG_END: u32 = 4096;
/// VHOST_USER_BACKEND_CONFIG_CHANGE_MSG ("Back-end message types").
const CONFIG_CHANGE: u32 = 2;

/// A protocol feature, by its bit ("Protocol features"). All of these are offered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Feature {
    Mq = 0,
    LogShmfd = 1,
    Rarp = 2,
    ReplyAck = 3,
    Mtu = 4,
    BackendReq = 5,
    Config = 9,
    InflightShmfd = 12,
    Reset = 13,
    MemSlots = 15,
    Status = 16,
}

impl Feature {
    /// The bits that GET_PROTOCOL_FEATURES returns.
    pub(super) fn offered() -> u64 {
        let of_messages = RULES.iter().filter_map(|rule| rule.feature);
        of_messages.fold(Self::ReplyAck.bit(), |bits, feature| bits | feature.bit())
    }

    /// Whether its bit is set in `features`.
    pub(super) fn is_in(self, features: u64) -> bool {
        features & self.bit() != 0
    }

    fn bit(self) -> u64 {
        1 << (self as u32)
    }
}

/// A decoded message.
#[derive(Debug)]
pub(crate) enum Message {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    SetMemTable(Vec<Region>),
    SetLogBase(FileRange, OwnedFd),
    SetLogFd,
    SetVringNum(u32, u32),
    SetVringAddr(u32, RingAddresses),
    SetVringBase(u32, u32),
    GetVringBase(u32),
    SetVringKick(u32, Option<OwnedFd>),
    SetVringCall(u32, Option<OwnedFd>),
    SetVringErr(u32, Option<OwnedFd>),
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueNum,
    SetVringEnable(u32, bool),
    SendRarp([u8; 6]),
    NetSetMtu(u64),
    SetBackendReqFd(Option<OwnedFd>),
    Iotlb,
    GetConfig { offset: u32, len: u32, flags: u32 },
    SetConfig,
    GetInflightFd(InflightQueues),
    SetInflightFd(FileRange, InflightQueues, OwnedFd),
    ResetDevice,
    GetMaxMemSlots,
    AddMemReg(Region),
    RemMemReg(RegionKey),
    SetStatus(u64),
    GetStatus,
}

/// How a message is answered ("Communication", "VHOST_USER_PROTOCOL_F_REPLY_ACK").
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    /// By 0 or 1, if the VMM requests it and has negotiated REPLY_ACK.
    Ack,
    /// By 0 or 1, always.
    Always,
    /// By its own payload; not at all if it is rejected.
    Payload,
}

/// The rule for a supported message.
struct Rule {
    request: u32,
    name: &'static str,
    /// Bytes of payload, least and most.
    payload: (usize, usize),
    /// Descriptors, least and most.
    files: (usize, usize),
    answer: Answer,
    /// The protocol feature that must be negotiated for it.
    feature: Option<Feature>,
    decode: fn(&mut Fields) -> anyhow::Result<Message>,
}

use Answer::{Ack, Always, Payload};

#[rustfmt::skip]
const RULES: [Rule; 32] = {
    type Decode = fn(&mut Fields) -> anyhow::Result<Message>;
    const fn rule(request: u32, name: &'static str, payload: (usize, usize), files: (usize, usize), answer: Answer,
                  feature: Option<Feature>, decode: Decode) -> Rule {
        Rule { request, name, payload, files, answer, feature, decode }
    }
    use Feature::{BackendReq, Config, InflightShmfd, LogShmfd, MemSlots, Mq, Mtu, Rarp, Reset, Status};
    const TABLE: (usize, usize) = (TABLE_HEAD, MAX_PAYLOAD);
    const CONFIG: (usize, usize) = (CONFIG_HEAD, MAX_PAYLOAD);
    [
        //    request                   payload    files   answer   feature
        rule( 1, "GET_FEATURES",          (0, 0),  (0, 0), Payload, None, |_| Ok(Message::GetFeatures)),
        rule( 2, "SET_FEATURES",          (8, 8),  (0, 0), Ack,     None, |it| it.number(Message::SetFeatures)),
        rule( 3, "SET_OWNER",             (0, 0),  (0, 0), Ack,     None, |_| Ok(Message::SetOwner)),
        rule( 4, "RESET_OWNER",           (0, 0),  (0, 0), Ack,     None, |_| Ok(Message::ResetOwner)),
        rule( 5, "SET_MEM_TABLE",         TABLE,   (0, MAX_FILES), Ack, None, Fields::mem_table),
        rule( 6, "SET_LOG_BASE",        (16, 16),  (1, 1), Payload, Some(LogShmfd), Fields::log_base),
        rule( 7, "SET_LOG_FD",            (0, 0),  (1, 1), Ack,     None, |_| Ok(Message::SetLogFd)),
        rule( 8, "SET_VRING_NUM",         (8, 8),  (0, 0), Ack,     None, |it| it.state(Message::SetVringNum)),
        rule( 9, "SET_VRING_ADDR",      (40, 40),  (0, 0), Ack,     None, Fields::vring_addr),
        rule(10, "SET_VRING_BASE",        (8, 8),  (0, 0), Ack,     None, |it| it.state(Message::SetVringBase)),
        rule(11, "GET_VRING_BASE",        (8, 8),  (0, 0), Payload, None, |it| Ok(Message::GetVringBase(it.u32()))),
        rule(12, "SET_VRING_KICK",        (8, 8),  (0, 1), Ack,     None, |it| it.event(Message::SetVringKick)),
        rule(13, "SET_VRING_CALL",        (8, 8),  (0, 1), Ack,     None, |it| it.event(Message::SetVringCall)),
        rule(14, "SET_VRING_ERR",         (8, 8),  (0, 1), Ack,     None, |it| it.event(Message::SetVringErr)),
        rule(15, "GET_PROTOCOL_FEATURES", (0, 0),  (0, 0), Payload, None, |_| Ok(Message::GetProtocolFeatures)),
        rule(16, "SET_PROTOCOL_FEATURES", (8, 8),  (0, 0), Ack,     None, |it| it.number(Message::SetProtocolFeatures)),
        rule(17, "GET_QUEUE_NUM",         (0, 0),  (0, 0), Payload, Some(Mq), |_| Ok(Message::GetQueueNum)),
        rule(18, "SET_VRING_ENABLE",      (8, 8),  (0, 0), Ack,     None, Fields::vring_enable),
        rule(19, "SEND_RARP",             (8, 8),  (0, 0), Ack,     Some(Rarp), |it| Ok(Message::SendRarp(it.take()))),
        rule(20, "NET_SET_MTU",           (8, 8),  (0, 0), Ack,     Some(Mtu), |it| it.number(Message::NetSetMtu)),
        rule(21, "SET_BACKEND_REQ_FD",    (0, 0),  (0, 1), Ack,     Some(BackendReq), Fields::channel),
        rule(22, "IOTLB_MSG",   (0, MAX_PAYLOAD),  (0, 0), Always,  None, |_| Ok(Message::Iotlb)),
        rule(24, "GET_CONFIG",            CONFIG,  (0, 0), Payload, Some(Config), |it| it.config("GET_CONFIG")),
        rule(25, "SET_CONFIG",            CONFIG,  (0, 0), Ack,     Some(Config), Fields::set_config),
        rule(31, "GET_INFLIGHT_FD",     (24, 24),  (0, 0), Payload, Some(InflightShmfd), Fields::get_inflight),
        rule(32, "SET_INFLIGHT_FD",     (24, 24),  (1, 1), Ack,     Some(InflightShmfd), Fields::set_inflight),
        rule(34, "RESET_DEVICE",          (0, 0),  (0, 0), Ack,     Some(Reset), |_| Ok(Message::ResetDevice)),
        rule(36, "GET_MAX_MEM_SLOTS",     (0, 0),  (0, 0), Payload, Some(MemSlots), |_| Ok(Message::GetMaxMemSlots)),
        rule(37, "ADD_MEM_REG",         (40, 40),  (1, 1), Ack,     Some(MemSlots), Fields::add_region),
        // Front ends that follow an earlier text of the specification send one descriptor, which is closed.
        rule(38, "REM_MEM_REG",         (40, 40),  (0, 1), Ack,     Some(MemSlots), Fields::remove_region),
        rule(39, "SET_STATUS",            (8, 8),  (0, 0), Ack,     Some(Status), |it| it.number(Message::SetStatus)),
        rule(40, "GET_STATUS",            (0, 0),  (0, 0), Payload, Some(Status), |_| Ok(Message::GetStatus)),
    ]
};

/// Messages that are not supported, by name: of protocol features that are not offered, and of other devices.
#[rustfmt::skip]
const UNSUPPORTED: [(u32, &str); 12] = [
    (23, "SET_VRING_ENDIAN"), (26, "CREATE_CRYPTO_SESSION"), (27, "CLOSE_CRYPTO_SESSION"),
    (28, "POSTCOPY_ADVISE"), (29, "POSTCOPY_LISTEN"), (30, "POSTCOPY_END"), (33, "GPU_SET_SOCKET"), (35, "VRING_KICK"),
    (41, "GET_SHARED_OBJECT"), (42, "SET_DEVICE_STATE_FD"), (43, "CHECK_DEVICE_STATE"), (44, "GET_SHMEM_CONFIG"),
];

/// A message that was received and not yet decoded.
pub(crate) struct Request {
    rule: &'static Rule,
    flags: u32,
    fields: Fields,
}

/// Why no message was received.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReceiveError {
    /// The connection was closed.
    #[error("the VMM disconnected")]
    Disconnected,
    /// Bytes that are not a vhost-user message.
    #[error(transparent)]
    Protocol(anyhow::Error),
    /// A message that is rejected.
    #[error(transparent)]
    Message(anyhow::Error),
}

impl Request {
    /// Waits for a message, and reads it.
    pub(crate) fn receive(stream: &UnixStream) -> Result<Self, ReceiveError> {
        use ReceiveError::{Message, Protocol};
        let cut = || Protocol(anyhow!("the VMM disconnected within a message"));
        let (mut header, mut files) = ([0; HEADER], Vec::new());
        match fill(stream, &mut header, &mut files).map_err(Protocol)? {
            0 => return Err(ReceiveError::Disconnected),
            HEADER => {}
            _ => return Err(cut()),
        }
        let words = [0, 4, 8].map(|at| u32::from_ne_bytes(std::array::from_fn(|byte| header[at + byte])));
        let ([request, flags, _], size) = (words, words[2] as usize);
        let name = name_of(request);
        if flags & !NEED_REPLY != VERSION {
            return Err(Protocol(anyhow!(
                "{name} with flags {flags:#x}: of a request they are 0x1 (version 1), or 0x9 to have it answered"
            )));
        }
        if size > MAX_PAYLOAD {
            return Err(Protocol(anyhow!(
                "{name} with {size} bytes: no message is that long"
            )));
        }
        let rule = RULES.iter().find(|rule| rule.request == request);
        let rule = rule.ok_or_else(|| Message(anyhow!("{name} is not supported")))?;
        let (least, most) = rule.payload;
        if size < least {
            return Err(Message(anyhow!("{name}: {size} bytes, at least {least} needed")));
        }
        if size > most {
            return Err(Message(anyhow!(
                "{name}: {size} bytes, at most {most} are possible"
            )));
        }
        let mut payload = vec![0; size];
        if fill(stream, &mut payload, &mut files).map_err(Protocol)? < size {
            return Err(cut());
        }
        Ok(Self::of(rule, flags, payload, files))
    }

    fn of(rule: &'static Rule, flags: u32, payload: Vec<u8>, files: Vec<OwnedFd>) -> Self {
        let fields = Fields {
            payload: payload.into_iter(),
            files: files.into_iter(),
        };
        Self { rule, flags, fields }
    }

    /// Decodes it; `features`: the negotiated protocol features.
    pub(crate) fn decode(&mut self, features: u64) -> anyhow::Result<Message> {
        let Rule { name, feature, .. } = *self.rule;
        if feature.is_some_and(|feature| !feature.is_in(features)) {
            bail!("{name} was sent, but the protocol feature that it belongs to was not negotiated");
        }
        let (least, most) = self.rule.files;
        let came = self.fields.files.len();
        if !(least..=most).contains(&came) {
            bail!(wrong_files(name, came, (least, most)));
        }
        (self.rule.decode)(&mut self.fields)
    }

    /// Sends the answer, if there is one. `done`: the payload; `None`: the message was rejected.
    pub(super) fn answer(&self, stream: &UnixStream, done: Option<Reply>, features: u64) -> io::Result<()> {
        let is_wanted = match self.rule.answer {
            Ack => self.flags & NEED_REPLY != 0 && Feature::ReplyAck.is_in(features),
            Always => true,
            Payload => done.is_some(),
        };
        if !is_wanted {
            return Ok(());
        }
        let status = u64::from(done.is_none()).into();
        let own = done.filter(|_| self.rule.answer == Payload);
        let Reply { payload, file } = own.unwrap_or(status);
        let bytes = message(self.rule.request, VERSION | REPLY, &payload);
        let file = file.as_ref().map(AsFd::as_fd);
        // The socket blocks, and a message is shorter than any socket's buffer: all of it is sent.
        descriptors::send(stream, &bytes, file.as_slice(), SendFlags::empty())
    }
}

/// The payload of an answer, and its descriptor.
#[derive(Debug, Default)]
pub(crate) struct Reply {
    pub(crate) payload: Vec<u8>,
    pub(super) file: Option<OwnedFd>,
}

impl From<Vec<u8>> for Reply {
    fn from(payload: Vec<u8>) -> Self {
        Self { payload, file: None }
    }
}

impl From<u64> for Reply {
    fn from(value: u64) -> Self {
        value.to_ne_bytes().to_vec().into()
    }
}

impl Reply {
    /// Answer to GET_VRING_BASE.
    pub(super) fn vring_state(index: u32, num: u32) -> Self {
        [index, num].map(u32::to_ne_bytes).concat().into()
    }

    /// Answer to SET_LOG_BASE.
    pub(super) fn log(range: FileRange) -> Self {
        [range.bytes, range.offset].map(u64::to_ne_bytes).concat().into()
    }

    /// Answer to GET_CONFIG; without bytes it reports a failure.
    pub(super) fn config(offset: u32, flags: u32, bytes: &[u8]) -> Self {
        let head = [offset, bytes.len() as u32, flags].map(u32::to_ne_bytes);
        [head.as_flattened(), bytes].concat().into()
    }

    /// Answer to GET_INFLIGHT_FD.
    pub(super) fn inflight(bytes: u64, queues: InflightQueues, file: OwnedFd) -> Self {
        let queues = [queues.queues, queues.size, 0, 0].map(u16::to_ne_bytes);
        let payload = [&bytes.to_ne_bytes()[..], &[0; 8], queues.as_flattened()].concat();
        let file = Some(file);
        Self { payload, file }
    }
}

/// The payload of a message, whose length was checked by its rule, and its descriptors.
struct Fields {
    payload: std::vec::IntoIter<u8>,
    files: std::vec::IntoIter<OwnedFd>,
}

impl Fields {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        // The payload is long enough: see `Rule::payload`.
        std::array::from_fn(|_| self.payload.next().unwrap_or_default())
    }

    fn u16(&mut self) -> u16 {
        u16::from_ne_bytes(self.take())
    }

    fn u32(&mut self) -> u32 {
        u32::from_ne_bytes(self.take())
    }

    fn u64(&mut self) -> u64 {
        u64::from_ne_bytes(self.take())
    }

    fn file(&mut self) -> Option<OwnedFd> {
        self.files.next()
    }

    /// The only descriptor of a message that must have one.
    fn only_file(&mut self, request: &'static str) -> anyhow::Result<OwnedFd> {
        self.file().with_context(|| wrong_files(request, 0, (1, 1)))
    }

    /// A region, without its file: guest address, size, user address, offset in the file.
    fn region(&mut self) -> [u64; 4] {
        [(); 4].map(|()| self.u64())
    }

    fn channel(&mut self) -> anyhow::Result<Message> {
        Ok(Message::SetBackendReqFd(self.file()))
    }

    fn mem_table(&mut self) -> anyhow::Result<Message> {
        let bytes = self.payload.len();
        let [count, _padding] = [(); 2].map(|()| self.u32() as usize);
        if !(1..=MAX_FILES).contains(&count) {
            bail!("SET_MEM_TABLE: {count} regions, 1 to {MAX_FILES} are possible");
        }
        let needed = TABLE_HEAD + count * REGION;
        if bytes < needed {
            let plural = if count == 1 { "" } else { "s" };
            bail!("SET_MEM_TABLE: {bytes} bytes for {count} region{plural}, at least {needed} needed");
        }
        let descriptors = self.files.len();
        if descriptors != count {
            bail!("SET_MEM_TABLE: {descriptors} descriptors for {count} regions: {MORE_FILES}");
        }
        let mut regions = Vec::with_capacity(count);
        while let Some(file) = self.file() {
            let region @ [guest, bytes, user, offset] = self.region();
            let fits = |start: u64| start.checked_add(bytes).is_some();
            if bytes == 0 || ![guest, user, offset].into_iter().all(fits) {
                let at = regions.len();
                bail!("SET_MEM_TABLE: region {at} (from 0) is empty, or its end does not fit into 64 bits");
            }
            regions.push(with_file(region, file));
        }
        Ok(Message::SetMemTable(regions))
    }

    fn add_region(&mut self) -> anyhow::Result<Message> {
        let _padding = self.u64();
        let file = self.only_file("ADD_MEM_REG")?;
        Ok(Message::AddMemReg(with_file(self.region(), file)))
    }

    fn remove_region(&mut self) -> anyhow::Result<Message> {
        let _padding = self.u64();
        let [guest, len, user_addr, _offset] = self.region();
        Ok(Message::RemMemReg(RegionKey {
            guest_addr: GuestAddr(guest),
            user_addr,
            len,
        }))
    }

    fn log_base(&mut self) -> anyhow::Result<Message> {
        let [bytes, offset] = [(); 2].map(|()| self.u64());
        if bytes == 0 || offset.checked_add(bytes).is_none() {
            bail!("SET_LOG_BASE: the log is empty, or its end does not fit into 64 bits");
        }
        let file = self.only_file("SET_LOG_BASE")?;
        Ok(Message::SetLogBase(FileRange { offset, bytes }, file))
    }

    fn vring_addr(&mut self) -> anyhow::Result<Message> {
        let [index, flags] = [(); 2].map(|()| self.u32());
        let [desc, used, avail] = [(); 3].map(|()| self.u64());
        // VHOST_VRING_F_LOG; alignment: VirtIO 1.3, 2.7.
        if flags > 1 || desc % 16 != 0 || used % 4 != 0 || avail % 2 != 0 {
            bail!(
                "SET_VRING_ADDR: vring {index} has flags {flags:#x}, of which 0x1 is defined, or descriptors, available \
                 or used ring are not aligned to 16, 2 and 4 bytes"
            );
        }
        Ok(Message::SetVringAddr(index, RingAddresses { desc, avail, used }))
    }

    /// A message with a vring's eventfd: the index in the low byte, and whether there is a descriptor.
    fn event(&mut self, message: fn(u32, Option<OwnedFd>) -> Message) -> anyhow::Result<Message> {
        let value = self.u64();
        let index = u32::from(value as u8);
        let (said, file) = (value & NO_DESCRIPTOR == 0, self.file());
        match (said, file) {
            (true, None) => bail!("vring {index}: its eventfd did not come with the message: {MORE_FILES}"),
            (false, Some(_)) => {
                bail!("vring {index}: a descriptor came with a message that says that there is none")
            }
            (_, file) => Ok(message(index, file)),
        }
    }

    fn number(&mut self, message: fn(u64) -> Message) -> anyhow::Result<Message> {
        Ok(message(self.u64()))
    }

    /// A message with a vring's index and a number.
    fn state(&mut self, message: fn(u32, u32) -> Message) -> anyhow::Result<Message> {
        Ok(message(self.u32(), self.u32()))
    }

    fn vring_enable(&mut self) -> anyhow::Result<Message> {
        match (self.u32(), self.u32()) {
            (index, state @ 0..=1) => Ok(Message::SetVringEnable(index, state == 1)),
            (_, state) => bail!("SET_VRING_ENABLE with state {state}: 0 and 1 are defined"),
        }
    }

    /// Offset, size and flags, and as many bytes as the size.
    fn config(&mut self, request: &'static str) -> anyhow::Result<Message> {
        let [offset, len, flags] = [(); 3].map(|()| self.u32());
        let ends = offset.checked_add(len).is_some_and(|end| end <= CONFIG_END);
        if len == 0 || !ends || flags > 3 || self.payload.len() != len as usize {
            let bytes = self.payload.len();
            bail!(
                "{request}: {len} bytes from {offset} on, flags {flags:#x}, in a message with {bytes}: both numbers must \
                 be equal, within the first 4096 bytes, and flags 0 to 3"
            );
        }
        Ok(Message::GetConfig { offset, len, flags })
    }

    fn set_config(&mut self) -> anyhow::Result<Message> {
        self.config("SET_CONFIG").map(|_| Message::SetConfig)
    }

    fn inflight(&mut self) -> anyhow::Result<(FileRange, InflightQueues)> {
        let [bytes, offset] = [(); 2].map(|()| self.u64());
        let [queues, size] = [(); 2].map(|()| self.u16());
        if queues == 0 || size == 0 {
            bail!("an inflight region for {queues} queues of {size} entries: it would have no entries");
        }
        Ok((FileRange { offset, bytes }, InflightQueues { queues, size }))
    }

    fn get_inflight(&mut self) -> anyhow::Result<Message> {
        self.inflight().map(|(_, queues)| Message::GetInflightFd(queues))
    }

    fn set_inflight(&mut self) -> anyhow::Result<Message> {
        let (range, queues) = self.inflight()?;
        let file = self.only_file("SET_INFLIGHT_FD")?;
        Ok(Message::SetInflightFd(range, queues, file))
    }
}

/// Asks the VMM to read the config space again. Does not wait for it; a VMM that does not read the channel misses the
/// message.
pub(super) fn send_config_change(channel: &UnixStream) {
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let _ = send(channel, &message(CONFIG_CHANGE, VERSION, &[]), flags);
}

fn message(request: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let header = [request, flags, payload.len() as u32].map(u32::to_ne_bytes);
    [header.as_flattened(), payload].concat()
}

/// Reads until `bytes` are full, or the connection is closed; returns the number of bytes read. Each byte may carry
/// descriptors; the kernel closes those for which there is no room.
fn fill(stream: &UnixStream, bytes: &mut [u8], files: &mut Vec<OwnedFd>) -> anyhow::Result<usize> {
    let mut done = 0;
    while done < bytes.len() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::WAITALL | RecvFlags::CMSG_CLOEXEC;
        let mut rest = [IoSliceMut::new(&mut bytes[done..])];
        match recvmsg(stream, &mut rest, &mut ancillary, flags) {
            Ok(got) if got.bytes == 0 => break,
            Ok(got) => done += got.bytes,
            Err(Errno::CONNRESET) => break,
            Err(Errno::INTR) => continue,
            Err(errno) => return Err(errno).context("cannot read the connection"),
        }
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(came) = message {
                files.extend(came);
            }
        }
        files.truncate(MAX_FILES);
    }
    Ok(done)
}

fn with_file([guest, len, user_addr, file_offset]: [u64; 4], file: OwnedFd) -> Region {
    Region {
        guest_addr: GuestAddr(guest),
        user_addr,
        len,
        file,
        file_offset,
    }
}

/// The remedy if a message lacks descriptors.
const MORE_FILES: &str =
    "if no more can be open here, raise the limit of open files (`ulimit -n`, systemd: LimitNOFILE=)";

/// The error of a message with too few or too many descriptors.
fn wrong_files(request: &str, came: usize, (least, most): (usize, usize)) -> String {
    let possible = match least == most {
        true => most.to_string(),
        false => format!("{least} or {most}"),
    };
    let remedy = if came < least {
        format!(": {MORE_FILES}")
    } else {
        String::new()
    };
    format!("{request}: {came} descriptors came with it, {possible} belong there{remedy}")
}

/// The request with that number, as the specification calls it.
fn name_of(request: u32) -> String {
    let names = RULES.iter().map(|rule| (rule.request, rule.name));
    let found = names.chain(UNSUPPORTED).find(|(known, _)| *known == request);
    found.map_or_else(|| format!("request {request}"), |(_, name)| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule_of(name: &str) -> &'static Rule {
        RULES
            .iter()
            .find(|rule| rule.name == name)
            .expect("it is supported")
    }

    /// Decodes a message with so many descriptors, from a VMM that negotiated all protocol features.
    fn decoded(name: &str, payload: &[u8], files: usize) -> Result<Message, String> {
        let file = || std::fs::File::open("/dev/null").expect("there is one").into();
        let files = (0..files).map(|_| file()).collect();
        let mut request = Request::of(rule_of(name), VERSION, payload.to_vec(), files);
        request
            .decode(Feature::offered())
            .map_err(|error| error.to_string())
    }

    fn longs<const N: usize>(longs: [u64; N]) -> Vec<u8> {
        longs.map(u64::to_ne_bytes).concat()
    }

    fn words<const N: usize>(words: [u32; N]) -> Vec<u8> {
        words.map(u32::to_ne_bytes).concat()
    }

    #[test]
    fn each_number_up_to_the_last_has_one_name() {
        let mut numbers: Vec<_> = RULES.iter().map(|rule| rule.request).collect();
        numbers.extend(UNSUPPORTED.map(|(request, _)| request));
        numbers.sort_unstable();
        assert_eq!(numbers, (1..=44).collect::<Vec<_>>());
        assert_eq!(name_of(99), "request 99");
    }

    #[test]
    fn message_of_any_length_and_with_any_descriptors_is_read_or_refused() {
        for rule in &RULES {
            for bytes in rule.payload.0..=rule.payload.1.min(200) {
                for files in 0..4 {
                    let done = decoded(rule.name, &vec![0x5a; bytes], files);
                    let fits = (rule.files.0..=rule.files.1).contains(&files);
                    assert!(fits || done.is_err(), "{} with {files} descriptors", rule.name);
                }
            }
            let mut request = Request::of(rule, VERSION, vec![0; rule.payload.0], Vec::new());
            let refused = request
                .decode(0)
                .is_err_and(|error| error.to_string().contains("not negotiated"));
            assert_eq!(refused, rule.feature.is_some(), "{}", rule.name);
        }
    }

    #[test]
    fn wrong_values_are_refused_by_name() {
        let table = |count: u32, bytes| [words([count, 0]), longs([0, bytes, 0, 0])].concat();
        let cases = [
            ("SET_VRING_ENABLE", words([0, 2]), 0, "state 2"),
            ("SET_VRING_KICK", longs([0]), 0, "raise the limit of open files"),
            ("SET_VRING_KICK", longs([0x100]), 1, "says that there is none"),
            (
                "SET_VRING_NUM",
                words([0, 1]),
                1,
                "1 descriptors came with it, 0 belong there",
            ),
            (
                "SET_LOG_BASE",
                longs([1, 0]),
                0,
                "1 belong there: if no more can be open here",
            ),
            ("SET_LOG_BASE", longs([2, u64::MAX]), 1, "SET_LOG_BASE"),
            (
                "SET_VRING_ADDR",
                [words([0, 0]), longs([8, 0, 0, 0])].concat(),
                0,
                "aligned",
            ),
            (
                "SET_VRING_ADDR",
                [words([0, 2]), longs([0, 0, 0, 0])].concat(),
                0,
                "flags 0x2",
            ),
            ("SET_MEM_TABLE", table(0, 1), 0, "0 regions"),
            (
                "SET_MEM_TABLE",
                table(2, 1),
                2,
                "40 bytes for 2 regions, at least 72 needed",
            ),
            ("SET_MEM_TABLE", table(1, 1), 2, "2 descriptors for 1 regions"),
            ("SET_MEM_TABLE", table(1, 0), 1, "region 0 (from 0) is empty"),
            (
                "GET_CONFIG",
                words([0, 5, 0, 0]),
                0,
                "GET_CONFIG: 5 bytes from 0 on",
            ),
            (
                "SET_CONFIG",
                words([4096, 4, 0, 0]),
                0,
                "SET_CONFIG: 4 bytes from 4096 on",
            ),
            ("GET_INFLIGHT_FD", longs([0, 0, 0]), 0, "0 queues of 0 entries"),
        ];
        for (name, payload, files, words) in cases {
            let said = decoded(name, &payload, files).expect_err("it is wrong");
            assert!(said.contains(words), "{said}");
        }
    }

    #[test]
    fn headers_that_are_none_are_refused() {
        let cases = [
            (words([1, 2, 0]), "GET_FEATURES with flags 0x2"),
            (words([1, 5, 0]), "flags 0x5"),
            (words([1, 0x11, 0]), "flags 0x11"),
            (words([5, 1, 4097]), "SET_MEM_TABLE with 4097 bytes"),
            (words([1, 1, 1]), "GET_FEATURES: 1 bytes, at most 0"),
            (words([8, 1, 7]), "SET_VRING_NUM: 7 bytes, at least 8 needed"),
            (words([33, 1, 0]), "GPU_SET_SOCKET is not supported"),
            (words([99, 1, 8]), "request 99 is not supported"),
            (words([8, 1]), "within a message"),
            (words([8, 1, 8, 0]), "within a message"),
        ];
        for (bytes, words) in cases {
            let (vmm, ours) = UnixStream::pair().expect("sockets");
            rustix::io::write(&vmm, &bytes).expect("written");
            drop(vmm);
            let said = Request::receive(&ours).map(|_| ()).expect_err("none").to_string();
            assert!(said.contains(words), "{said}");
        }
    }
}
