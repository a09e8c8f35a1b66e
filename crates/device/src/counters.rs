//! Counters of a lane: frames carried, and frames lost by reason.
//!
//! One writer (the worker that owns the lane), any number of readers (status). The writer adds
//! with a plain load and store, both relaxed: there is no second writer that could be overwritten,
//! and a reader needs no order between two counters. Nothing else is published through them.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use packet::segment::Malformed;

/// A number that one thread adds to and others read.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`; only one thread at a time may call this: the worker of the lane, or the one that has locked the
    /// queue whose frames are counted.
    #[inline]
    pub fn add(&self, n: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(n), Relaxed);
    }

    /// Adds `n` to a counter of both directions: each has a lock of its own, so two threads may call this at once.
    #[inline]
    pub fn add_shared(&self, n: u64) {
        self.0.fetch_add(n, Relaxed);
    }

    /// The value now.
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// Whether a counter counts work or loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Something was done.
    Work,
    /// A frame was lost for the reason that the counter's name gives.
    Drop,
}

/// One counter as status shows it.
#[derive(Debug, Clone)]
pub struct Reading {
    /// Name: that of the field.
    pub name: &'static str,
    /// Work or drop.
    pub kind: Kind,
    /// Value.
    pub value: u64,
    /// What is counted: the field's doc comment.
    pub help: &'static str,
}

/// The reason for a loss, for a counter of several reasons: the first one since the last [`take`](Self::take).
#[derive(Debug, Default)]
pub struct FirstReason(Mutex<Option<Malformed>>);

impl FirstReason {
    /// Keeps a reason, if there is none yet. Never waits: a reason that arrives during [`take`](Self::take) is ignored.
    pub fn note(&self, why: Malformed) {
        if let Ok(mut first) = self.0.try_lock() {
            first.get_or_insert(why);
        }
    }

    /// Takes the reason out. For control threads.
    pub fn take(&self) -> Option<Malformed> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

macro_rules! counters {
    ($(#[doc = $all:literal])+ $set:ident $(with $extra:ident: $type:ty)?: $($(#[doc = $doc:literal])+ $kind:ident $name:ident,)+) => {
        $(#[doc = $all])+
        #[derive(Debug, Default)]
        pub struct $set {
            $($(#[doc = $doc])+ pub $name: Counter,)+
            $(/// Kept with the counters.
            pub $extra: $type,)?
        }

        impl $set {
            /// All values, in the order of their declaration.
            pub fn read(&self) -> Vec<Reading> {
                vec![$(Reading {
                    name: stringify!($name),
                    kind: Kind::$kind,
                    value: self.$name.get(),
                    help: concat!($($doc),+).trim_ascii_start(),
                },)+]
            }
        }
    };
}

counters! {
    /// Counters of frames before they reach a pair, if the device serves its control queue.
    ReceiveCounters:
    /// Frames with a hash computed by the NIC that is the one that the driver wants.
    Work hashes_of_nic,
    /// Frames whose hash was computed here.
    Work hashes_computed,
    /// Frames for which the driver has enabled no hash type.
    Work hashes_none,
    /// Frame that the guest's own filter by address or VLAN rejects.
    Drop to_guest_filtered,
}

counters! {
    /// Everything that a lane counts.
    PairCounters with why_malformed: FirstReason:
    /// Frames handed to the NIC for the guest.
    Work from_guest_frames,
    /// Bytes of these frames, without the virtio-net header.
    Work from_guest_bytes,
    /// Network: broadcast and multicast frames of the guest, each copied to all other ports that receive it.
    Work from_guest_multicast_frames,
    /// Network: frames of the guest that were sent by the underlay, in VXLAN or Geneve.
    Work from_guest_encapsulated,
    /// GSO packets taken from the guest to be sent; each segment is counted in `from_guest_frames`.
    Work from_guest_super_frames,
    /// GSO packets taken from the guest that were handed to the kernel unsegmented.
    Work from_guest_super_frames_unsegmented,
    /// Segments whose payload was not copied per segment: it was sent from the guest's buffer (direct
    /// placement), or from one copy of the GSO packet's payload (copy).
    Work from_guest_referred_segments,
    /// Frames of the guest, segments included, whose checksum the daemon completed.
    Work from_guest_checksums,
    /// Frames of the guest, segments included, whose checksum was left to the kernel or the NIC: by XDP TX
    /// metadata, or in the virtio-net header written to a tap.
    Work from_guest_checksums_left,
    /// Frames checked by filter rules whose flow was in the flow cache.
    Work filter_hits,
    /// Frames checked by filter rules whose flow was not in the cache: it was looked up in the rules.
    Work filter_misses,
    /// Misses after which the flow is found by the NIC's hash.
    Work filter_nic_hashes,
    /// Flows evicted from the cache for others.
    Work filter_evictions,
    /// Frames delivered into the guest's buffers.
    Work to_guest_frames,
    /// Bytes of these frames, without the virtio-net header.
    Work to_guest_bytes,
    /// GSO packets delivered to the guest: several received frames of a flow, coalesced by the daemon or, in tap mode,
    /// by the kernel.
    Work to_guest_super_frames,
    /// Received frames that went to the guest as parts of GSO packets.
    Work to_guest_coalesced_frames,
    /// Received frames with a partial checksum that was completed here, because the guest did not accept
    /// partial ones, or because the packet is inside VXLAN or Geneve.
    Work to_guest_checksums_completed,
    /// Frames of direct placement that were copied through the bounce area, in either direction.
    Work bounced_frames,
    /// Frames received on a queue whose pair the guest has disabled or not set up, and delivered by its first pair.
    Work spilled_frames,
    /// Network: multicast and broadcast frames received on the uplink with the source address of a local
    /// port: they are that guest's own, which the kernel passes to the XDP program again in skb mode, or a
    /// switch sends back. The other ports have them already.
    Work returned_frames,
    /// Times the driver was notified (call eventfd written).
    Work calls,
    /// Times the NIC's transmit side was kicked.
    Work nic_kicks,
    /// Times the NIC's driver completed a buffer that it did not have. A bug of the driver; the completion was ignored.
    Work from_guest_strays,
    /// Times the guest had more to send than the NIC had room for; the frames waited.
    Work from_guest_waits,
    /// Times the guest had more to send than the port's limit allows; the frames waited.
    Work from_guest_limit_waits,
    /// Times a frame waited because the guest had posted no buffer for it.
    Work to_guest_waits,
    /// Frames with unknown metadata before them, if hints are read: they are treated as frames without hints.
    Work to_guest_hints_unknown,
    /// VLAN tags that the NIC had stripped and that were inserted again.
    Work to_guest_tags_put_back,
    /// Frame shorter than an Ethernet header (14 bytes).
    Drop from_guest_runt,
    /// Frame longer than the interface's MTU plus Ethernet and VLAN header.
    Drop from_guest_too_long,
    /// virtio-net header that requests a checksum or segmentation that was not negotiated.
    Drop from_guest_offload_not_negotiated,
    /// virtio-net header that contradicts itself or its frame: segments of 0 or 65,535 bytes, an unknown kind,
    /// segmentation without a checksum, a checksum that is not in the frame, headers of another protocol or length.
    Drop from_guest_offload_malformed,
    /// GSO packet whose segments would be longer than the interface's MTU plus Ethernet and VLAN header.
    Drop from_guest_segment_too_long,
    /// GSO packet that would become more than 2,048 frames.
    Drop from_guest_too_many_segments,
    /// Frame in more pieces than a multi-buffer frame may have and too long for the bounce area.
    Drop from_guest_too_many_pieces,
    /// An earlier daemon had passed it to the NIC and died before it knew whether it was sent (direct
    /// placement); not sent again.
    Drop from_guest_fate_unknown,
    /// The interface is down.
    Drop from_guest_interface_down,
    /// The interface is gone.
    Drop from_guest_interface_gone,
    /// The queue pair was stopped, or the interface removed or changed so that they do not fit any more, while segments
    /// of a GSO packet waited to be sent; counted once per GSO packet.
    Drop from_guest_rest_of_super_frame,
    /// The queue pair was stopped before the NIC had sent the frame, or, where a queue of copy placement is closed, the
    /// piece of one.
    Drop from_guest_queue_stopped,
    /// The other end of the cable, or the port of the network, has no guest that receives.
    Drop from_guest_no_peer,
    /// Network: no port has the frame's destination, and there is no uplink.
    Drop from_guest_no_station,
    /// Network: the frame's source address is not the port's.
    Drop from_guest_source_address,
    /// Network: the port learns addresses, but has reached its maximum, or may not use the frame's source address.
    Drop from_guest_not_learned,
    /// Network: sending and receiving port are both isolated.
    Drop from_guest_isolated,
    /// Network: the frame is for an address of the port that sends it, which has no `hairpin`.
    Drop from_guest_to_itself,
    /// Network: the frame has a VLAN tag that the port does not allow.
    Drop from_guest_vlan,
    /// Network: the frame is one that no bridge forwards: MAC control (type 0x8808, or to 01:80:c2:00:00:01), or,
    /// unless the port may send them, to one of 01:80:c2:00:00:00 to 0f (spanning tree, LACP, 802.1X, LLDP).
    Drop from_guest_link_control,
    /// Addresses given by `ips`: the frame is neither IPv4, IPv6 nor ARP.
    Drop from_guest_protocol,
    /// Addresses given by `ips`: an ARP message with other addresses than the port's, or neither request nor reply.
    Drop from_guest_arp,
    /// Addresses given by `ips`: the frame's IPv4 or IPv6 source address is not the port's.
    Drop from_guest_ip_source,
    /// Addresses given by `ips`: IPv6 neighbour discovery that claims other addresses than the port's.
    Drop from_guest_neighbour,
    /// Addresses given by `ips`: a router advertisement or redirect, and the port is not a router.
    Drop from_guest_router,
    /// Addresses given by `ips`: a DHCP or DHCPv6 server message, and the port is not a server.
    Drop from_guest_dhcp_server,
    /// Addresses given by `ips`, or filter rules: headers that contradict themselves, or that are not all in the
    /// frame's first 256 bytes.
    Drop from_guest_headers,
    /// Filter rules of the port do not allow the guest to send the frame.
    Drop from_guest_filter,
    /// The guest requests a checksum inside the headers that the filter or source guard has checked.
    Drop from_guest_checksum_in_headers,
    /// Network: no port with a guest has the destination address of a frame from the uplink.
    Drop to_guest_no_port,
    /// The frame's metadata is unknown, and the NIC strips VLAN tags into it: the frame may be of any VLAN.
    Drop to_guest_tag_unknown,
    /// Network: the guest had no buffer for the frame, and has had none for some time, or the frame is multicast.
    Drop to_guest_no_buffer,
    /// Network, and tap mode: the kernel did not accept the frame from the tap to host or wire, which is down
    /// or removed, or it does not support such a request for a checksum or segmentation.
    Drop to_guest_host_refused,
    /// Frame beyond the port's receive limit. A GSO packet of another guest counts as the frames that a wire
    /// would carry.
    Drop to_guest_limit,
    /// Filter rules of the port do not allow the guest to receive the frame.
    Drop to_guest_filter,
    /// Frame whose headers contradict themselves, or are longer than the bytes that are checked, for a guest
    /// with filter rules for received frames.
    Drop to_guest_filter_headers,
    /// Tap mode, without a network: frame from the tap whose virtio-net header contradicts itself or its
    /// frame, or requests an offload that the guest did not accept.
    Drop to_guest_offload_malformed,
    /// Frame longer than the guest's buffer (or than all its buffers, where they may be merged).
    Drop to_guest_buffer_too_small,
    /// Frame in several pieces that is longer than the interface's maximum, so that a piece is missing or of
    /// another frame (copy), or that should have been in one piece (direct).
    Drop to_guest_in_pieces,
    /// The queue pair was stopped before the frame was delivered.
    Drop to_guest_queue_stopped,
    /// Frame, or a piece of one, that the NIC's driver wrote to a buffer that it had returned already or
    /// never got. A bug of the driver.
    Drop to_guest_stray,
}

impl PairCounters {
    /// Counts a frame of the guest with an impossible request in its virtio-net header, and keeps the reason.
    #[cold]
    pub fn drop_malformed(&self, why: Malformed) {
        self.from_guest_offload_malformed.add(1);
        self.why_malformed.note(why);
    }

    /// Bytes of frames from the guest and to it.
    #[must_use]
    pub fn carried(&self) -> u64 {
        self.from_guest_bytes
            .get()
            .wrapping_add(self.to_guest_bytes.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reading_keeps_name_kind_and_value() {
        let counters = PairCounters::default();
        counters.from_guest_runt.add(2);
        counters.from_guest_runt.add(1);
        let readings = counters.read();
        let runt = readings
            .iter()
            .find(|r| r.name == "from_guest_runt")
            .expect("declared");
        assert_eq!((runt.kind, runt.value), (Kind::Drop, 3));
        assert_eq!(runt.help, "Frame shorter than an Ethernet header (14 bytes).");
    }

    #[test]
    fn first_reason_is_kept_until_it_is_taken() {
        let counters = PairCounters::default();
        counters.drop_malformed(Malformed::SegmentSize(0));
        counters.drop_malformed(Malformed::GsoWithoutChecksum);
        assert_eq!(counters.from_guest_offload_malformed.get(), 2);
        assert_eq!(counters.why_malformed.take(), Some(Malformed::SegmentSize(0)));
        assert_eq!(counters.why_malformed.take(), None);
        counters.drop_malformed(Malformed::GsoWithoutChecksum);
        assert_eq!(counters.why_malformed.take(), Some(Malformed::GsoWithoutChecksum));
    }

    #[test]
    fn documents_tell_of_each_counter() {
        let document = include_str!("../../../docs/counters.md");
        for reading in PairCounters::default().read() {
            let kind = if reading.kind == Kind::Drop {
                "drop"
            } else {
                "work"
            };
            let row = format!("| {} | {kind} |", reading.name);
            assert!(document.contains(&row), "docs/counters.md has no row {row}");
        }
    }
}
