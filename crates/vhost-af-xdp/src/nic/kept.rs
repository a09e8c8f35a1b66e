//! Lanes on queues whose sockets stay when guests go (`nic/endpoint.rs`): opened once, visited by guest after guest.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::external::ExternalError;
use super::interface::{Interface, InterfaceError, Interfaces, QueueRequest};
use crate::config::{NicConfig, Placement, PortConfig, Segments};
use crate::direct::registration::prepare;
use crate::nic::binding::LONGEST_ZERO_COPY;
use crate::nic::endpoint::{Chunks, NicQueue};
use crate::nic::interface::SEND_RING;
use crate::nic::queue::Sends;
use crate::nic::xdp::{QueueLease, XdpNic};
use crate::port::lanes::{Checksums, FarSide, LaneError, LaneFacts, LaneParts, wants_pieces};
use crate::switch::joined::CopyLane;
use crate::switch::lane::Lane;

/// Where such a queue is while no lane has it.
pub(crate) type Home = Arc<Mutex<Option<NicQueue<XdpNic>>>>;

/// What is in a home.
pub(crate) fn look(home: &Home) -> MutexGuard<'_, Option<NicQueue<XdpNic>>> {
    home.lock().unwrap_or_else(PoisonError::into_inner)
}

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
    let mut there = look(home);
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
    let mut chunks = Chunks::new(binding.chunk_bytes, SEND_RING)?;
    let (umem, socket) = prepare(interface, chunks.umem, (&request, true))?;
    let socket = interface.bind_queue(socket, &request, frame_limit)?;
    // The ring has room for whatever the kernel receives: of a frame in several pieces all are in it, or none.
    chunks.to_receive = chunks.to_receive.min(socket.rx.size() as usize);
    chunks.umem = umem;
    let nic = XdpNic::new(socket, QueueLease::new(()));
    *there = Some(NicQueue::new(nic, chunks, Sends::PLAIN));
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
    let mut there = look(home);
    let kept = there.as_mut().ok_or(LaneError::Away)?;
    let chunk = match kept.nic.is_zero_copy() {
        true => LONGEST_ZERO_COPY,
        false => kept.umem.max_frame_bytes(),
    };
    if parts.far.frame_limit() > chunk && !kept.nic.socket().multi_buffer() {
        let error = ExternalError::Mtu {
            name: interface.link.name.clone(),
            mtu: interface.mtu(),
            chunk,
        };
        return Err(InterfaceError::from(error).into());
    }
    let umem = &kept.umem;
    let mut facts = LaneFacts::new(umem, umem.len(), kept.backing.clone());
    facts.checksums = parts.csum().then_some(Checksums::Daemon);
    facts.note(interface.binding(Placement::Copy, is_forced(&parts.far), guest.frame_limit));
    let sends = facts.describe(interface, &kept.nic, &kept.umem)?;
    let refers = parts.segments.refer(sends.zero_copy);
    let sends = Sends { refers, ..sends };
    // They came while there was nobody to have them.
    parts.counters.to_guest_queue_stopped.add(kept.discard());
    let mut queue = there.take().ok_or(LaneError::Away)?;
    queue.sends = sends;
    let counters = Arc::clone(&parts.counters);
    Ok((Box::new(CopyLane::new(guest, queue, counters)), facts))
}

fn is_forced(far: &FarSide) -> bool {
    matches!(far, FarSide::Queue { force_copy: true, .. })
}
