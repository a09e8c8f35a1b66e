//! Handles each vhost-user message by a call of [`Session`].

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use anyhow::{Context, bail};
use steer::with_sources;

use super::connection::Connection;
use super::eventfd::{self, ends_reading, is_stream};
use super::files;
use super::message::{Feature, Message, ReceiveError, Reply, Request, send_config_change};
use crate::config::FileKinds;
use crate::port::features;
use crate::port::reasons::Closed;
use crate::port::session::{Session, WrongMtu};

impl Connection {
    /// Waits for a message, handles it, and answers it.
    /// Errors: why the connection ends.
    pub(super) fn serve_message(&mut self, stream: &UnixStream) -> Result<(), Closed> {
        let mut request = match Request::receive(stream) {
            Ok(request) => request,
            Err(ReceiveError::Disconnected) => return Err(Closed::Disconnected),
            Err(ReceiveError::Protocol(error)) => return Err(protocol(error.as_ref())),
            Err(ReceiveError::Message(error)) => return Err(Closed::Refused(error.to_string())),
        };
        let decoded = request.decode(self.protocol);
        match decoded.and_then(|message| self.handle(message)) {
            Ok(reply) => match request.answer(stream, Some(reply), self.protocol) {
                Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Err(Closed::Disconnected),
                answered => answered.map_err(|error| protocol(&error)),
            },
            Err(error) => {
                // The VMM may have disconnected.
                let _ = request.answer(stream, None, self.protocol);
                // The VMM asks whether this MTU is possible, and gets the answer; it decides what to do then.
                if error.is::<WrongMtu>() {
                    self.port.warn(&error.to_string());
                    return Ok(());
                }
                Err(Closed::Refused(with_sources(error)))
            }
        }
    }

    /// Handles a message; returns the payload of the answer, if it has one.
    /// Errors: why it is rejected.
    pub(crate) fn handle(&mut self, message: Message) -> anyhow::Result<Reply> {
        let port = &self.port;
        let act = |act: fn(&mut Session)| {
            port.with_session(move |session, _| {
                act(session);
                Ok(())
            })
        };
        match message {
            Message::GetFeatures => {
                act(|session| (session.reached.asked, session.reached.counted) = (true, false))?;
                return Ok(features::offered(&port.config).into());
            }
            Message::SetFeatures(features) => {
                port.with_session(move |session, context| session.set_features(features, context))?;
            }
            Message::SetOwner => act(|session| session.reached.counted = false)?,
            Message::GetProtocolFeatures => return Ok(Feature::offered().into()),
            Message::SetProtocolFeatures(features) => self.protocol = features,
            Message::GetQueueNum => {
                act(|session| session.reached.counted = true)?;
                // For a net device: queue pairs (vhost-user, "Multiple queue support").
                return Ok(u64::from(port.config.queues).into());
            }
            Message::SetMemTable(regions) => {
                self.judge(regions.iter().map(|region| &region.file))?;
                port.with_session(move |session, context| session.set_memory(regions, context))?;
            }
            // QEMU itself allows 32 memory slots or more.
            Message::GetMaxMemSlots => return Ok((virtqueue::MAX_REGIONS as u64).into()),
            Message::AddMemReg(region) => {
                self.judge([&region.file])?;
                port.with_session(move |session, context| session.add_memory(region, context))?;
            }
            Message::RemMemReg(key) => {
                port.with_session(move |session, context| session.remove_memory(key, context))?;
            }
            Message::SetVringNum(index, size) => port.with_session(move |session, context| {
                Ok(session.idle_vring(index, context)?.set_size(index, size)?)
            })?,
            Message::SetVringAddr(index, addresses) => {
                port.with_session(move |session, context| session.set_vring_addr(index, addresses, context))?;
            }
            Message::SetVringBase(index, base) => port.with_session(move |session, context| {
                Ok(session.idle_vring(index, context)?.set_base(index, base)?)
            })?,
            Message::GetVringBase(index) => {
                let base = port.with_session(move |session, context| session.stop_vring(index, context))?;
                return Ok(Reply::vring_state(index, base));
            }
            Message::SetVringKick(index, file) => {
                let event = self.take_event(index, "kick", file)?;
                let kick = port.with_session(move |session, context| {
                    session.set_vring_kick(index, event, context)?;
                    session.control_kick(index)
                })?;
                if let Some(kick) = kick {
                    self.watch(&kick)?;
                }
            }
            Message::SetVringCall(index, file) => {
                let event = self.take_event(index, "call", file)?;
                port.with_session(move |session, context| session.set_vring_call(index, event, context))?;
            }
            Message::SetVringErr(index, file) => {
                let event = self.take_event(index, "error", file)?;
                port.with_session(move |session, _| session.set_vring_err(index, event))?;
            }
            Message::SetVringEnable(index, enable) => {
                port.with_session(move |session, context| session.set_vring_enable(index, enable, context))?;
            }
            Message::SendRarp(mac) => port.with_session(move |session, context| {
                session.announce(mac, context);
                Ok(())
            })?,
            Message::NetSetMtu(mtu) => port.check_guest_mtu(mtu)?,
            Message::SetBackendReqFd(file) => {
                // Checked, and closed if it is rejected, by this thread: see files.rs.
                let channel = file.filter(|file| is_stream(file) && ends_reading(file));
                let channel = channel.map(UnixStream::from).context(
                    "SET_BACKEND_REQ_FD came without a Unix stream socket, or with one that holds bytes",
                )?;
                port.with_session(move |session, _| {
                    session.set_channel(Box::new(move || send_config_change(&channel)));
                    Ok(())
                })?;
            }
            // There is no IOTLB: the device would access wrong addresses.
            Message::Iotlb => {
                bail!(
                    "IOTLB_MSG: the VMM has an IOMMU in front of this device, and there is no IOTLB here: leave the IOMMU \
                     device out, or iommu_platform=on (QEMU) of this device, or leave access-platform out of what is \
                     offered (offer)"
                );
            }
            Message::GetConfig { offset, len, flags } => {
                let bytes = port.config_space().read(offset, len).or_else(|error| {
                    // Recorded for the closing message; the session continues.
                    let _ = port.with_session(move |_, _| Err::<(), _>(error.into()));
                    anyhow::Ok(Vec::new())
                })?;
                return Ok(Reply::config(offset, flags, &bytes));
            }
            // RESET_OWNER is deprecated: the specification asks for nothing. Every field of the config space is
            // read-only for a driver of VIRTIO 1.0; a legacy one may write its MAC address, which means nothing to a
            // port that does not filter.
            // VMMs poll the log: nothing is signalled when a page is logged.
            Message::ResetOwner | Message::SetConfig | Message::SetLogFd => {}
            Message::ResetDevice => port.with_session(|session, context| {
                session.reset(context.workers);
                Ok(())
            })?,
            Message::GetInflightFd(queues) => {
                let made = port.with_session(move |session, _| session.make_inflight(queues))?;
                return Ok(Reply::inflight(made.bytes, queues, made.file));
            }
            Message::SetInflightFd(range, queues, file) => {
                self.judge([&file])?;
                port.with_session(move |session, context| {
                    session.set_inflight(range, queues, &file, context)
                })?;
            }
            Message::SetLogBase(range, file) => {
                self.judge([&file])?;
                port.with_session(move |session, context| session.set_log(range, &file, context))?;
                return Ok(Reply::log(range));
            }
            Message::SetStatus(status) => {
                port.with_session(move |session, context| session.set_status(status, context))?;
            }
            Message::GetStatus => {
                let status = port.with_session(|session, _| Ok(session.device.status()))?;
                return Ok(u64::from(status).into());
            }
        }
        Ok(Reply::default())
    }

    /// Checks files that the VMM passes as memory. This thread also closes those that are rejected (`files.rs`).
    fn judge<'a>(&self, files: impl IntoIterator<Item = &'a OwnedFd>) -> anyhow::Result<()> {
        if self.port.config.memory.files == FileKinds::Any {
            return Ok(());
        }
        files.into_iter().map(AsFd::as_fd).try_for_each(files::check)
    }

    /// Takes over an eventfd of a vring. Checked, and closed if it is rejected, by this thread: see files.rs.
    fn take_event(
        &self,
        index: u32,
        role: &'static str,
        file: Option<OwnedFd>,
    ) -> anyhow::Result<Option<OwnedFd>> {
        eventfd::take(index, role, file, self.port.config.memory.files)
    }
}

fn protocol(error: &(dyn std::error::Error + 'static)) -> Closed {
    Closed::Protocol(format!("vhost-user: {}", with_sources(error)))
}
