//! Lanes on queues whose sockets stay when guests go (`nic/resident.rs`): opened once, visited by guest after guest.

use std::sync::Arc;

use super::external::ExternalError;
use super::interface::{Interface, InterfaceError, Interfaces, QueueRequest};
use crate::config::{NicConfig, Placement, PortConfig, Segments};
use crate::direct::registration::prepare;
use crate::nic::binding::LONGEST_ZERO_COPY;
use crate::nic::queue::Sends;
use crate::nic::resident::{self, Home, Resident, Share};
use crate::nic::xdp::{QueueLease, XdpNic};
use crate::port::lanes::{Checksums, CopyMemory, FarSide, LaneError, LaneFacts, LaneParts, wants_pieces};
use crate::switch::copy::{CopyLane, References};
use crate::switch::lane::Lane;

/// Opens the sockets of a port's queues, if they are such.
///
/// # Errors
/// [`LaneError`].
pub(crate) fn settle_all(port: &PortConfig, interfaces: &Interfaces) -> Result<(), LaneError> {
    let (Some(wanted), NicConfig::Interface { force_copy, .. }) = (port.wanted(), &port.nic) else {
        return Ok(());
    };
    let Some(interface) = interfaces.open_brought(&wanted)? else {
        return Ok(());
    };
    for queue in wanted.range() {
        interface.check_queue(queue)?;
        let far = FarSide::Queue {
            interface: Arc::clone(&interface),
            queue,
            force_copy: *force_copy,
        };
        settle(&far, port.segments)?;
    }
    interfaces.keep(interface);
    Ok(())
}

/// Opens the socket of such a queue, if that is not done yet. False if it is another queue.
///
/// # Errors
/// [`LaneError`].
pub(crate) fn settle(far: &FarSide, segments: Segments) -> Result<bool, LaneError> {
    let FarSide::Queue {
        interface,
        queue,
        force_copy,
    } = far
    else {
        return Ok(false);
    };
    let Some(home) = interface.home(*queue) else {
        return Ok(false);
    };
    let mut there = resident::look(home);
    if there.is_some() {
        return Ok(true);
    }
    let frame_limit = interface.frame_limit();
    let binding = interface.binding(Placement::Copy, *force_copy, frame_limit);
    let request = QueueRequest {
        queue: *queue,
        force_copy: binding.force_copy,
        header_bytes: 0,
        // What guests will want is not known yet: room for metadata, too.
        multi_buffer: wants_pieces(interface, (segments, true)),
    };
    let memory = CopyMemory::new(binding.chunk_bytes)?;
    let (umem, socket) = prepare(interface, memory.umem, (&request, true))?;
    let socket = interface.bind_queue(socket, &request, frame_limit)?;
    // The ring has room for whatever the kernel receives: of a frame in several pieces all are in it, or none.
    let to_receive = memory.to_receive.min(socket.rx.size() as usize);
    *there = Some(Resident {
        nic: XdpNic::new(socket, QueueLease::new(())),
        references: References::new(&umem),
        umem,
        share: Share {
            backing: memory.backing,
            all: memory.pool.len(),
            to_receive,
        },
        pool: memory.pool,
    });
    Ok(true)
}

/// Builds the lane of a guest that comes to such a queue.
///
/// # Errors
/// [`LaneError`]; the queue stays where it was.
pub(crate) fn build(
    parts: &LaneParts<'_>,
    interface: &Interface,
    home: &Home,
) -> Result<(Box<dyn Lane>, LaneFacts), LaneError> {
    let guest = parts.guest_side()?;
    settle(&parts.far, parts.segments)?;
    let mut there = resident::look(home);
    let resident = there.as_mut().ok_or(LaneError::Away)?;
    let chunk = match resident.nic.is_zero_copy() {
        true => LONGEST_ZERO_COPY,
        false => resident.umem.max_frame_bytes(),
    };
    if parts.far.frame_limit() > chunk && !resident.nic.socket().multi_buffer() {
        let error = ExternalError::Mtu {
            name: interface.link.name.clone(),
            mtu: interface.mtu(),
            chunk,
        };
        return Err(InterfaceError::from(error).into());
    }
    let umem = &resident.umem;
    let mut facts = LaneFacts::new(umem, umem.len(), resident.share.backing.clone());
    facts.checksums = parts.csum().then_some(Checksums::Daemon);
    facts.note(interface.binding(Placement::Copy, is_forced(&parts.far), guest.frame_limit));
    let sends = facts.describe(interface, &resident.nic, &resident.umem)?;
    let refers = parts.segments.refer(sends.zero_copy);
    let sends = Sends { refers, ..sends };
    // They came while there was nobody to have them.
    parts.counters.to_guest_queue_stopped.add(resident.drain());
    let resident = there.take().ok_or(LaneError::Away)?;
    let counted = (sends, Arc::clone(&parts.counters));
    Ok((
        Box::new(CopyLane::visiting(guest, resident, home, counted).with_spill(parts.spill_end())),
        facts,
    ))
}

fn is_forced(far: &FarSide) -> bool {
    matches!(far, FarSide::Queue { force_copy: true, .. })
}
