//! Counters of a lane: what moved, what was lost and why.
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
    /// Adds `n`; only the owning worker calls this.
    #[inline]
    pub fn add(&self, n: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(n), Relaxed);
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
    /// Name, the field's.
    pub name: &'static str,
    /// Work or drop.
    pub kind: Kind,
    /// Value.
    pub value: u64,
    /// What is counted, in words.
    pub help: &'static str,
}

/// Why frames were lost that one counter counts for several reasons: the first reason since one was last taken.
#[derive(Debug, Default)]
pub struct FirstReason(Mutex<Option<Malformed>>);

impl FirstReason {
    /// Keeps a reason, if there is none yet. Never waits: one that comes while another is taken is left out.
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
            $(/// Beside them.
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
    /// What is counted of frames before they come to a pair, where the device has its control queue itself.
    ReceiveCounters:
    /// Frames whose hash was computed by the NIC, and is what the driver wants.
    Work hashes_of_nic,
    /// Frames whose hash was computed here.
    Work hashes_computed,
    /// Frames that no hash type which the driver enabled is for.
    Work hashes_none,
    /// Frame that the guest does not want: it asked for filters by address or VLAN.
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
    /// GSO packets of the guest that were taken to be sent; each segment is counted in `from_guest_frames`.
    Work from_guest_super_frames,
    /// Those of them that were handed to the kernel unsegmented.
    Work from_guest_super_frames_unsegmented,
    /// Segments among them that refer to their payload: where the guest has it (direct placement), or in one copy of
    /// the GSO packet's (copy).
    Work from_guest_referred_segments,
    /// Frames of the guest, segments included, whose checksum was completed by us.
    Work from_guest_checksums,
    /// Frames of the guest, segments included, whose checksum was left to the kernel or the NIC: by XDP TX
    /// metadata, or in what was written to a tap.
    Work from_guest_checksums_left,
    /// Frames that filter rules were asked about whose flow was known.
    Work filter_hits,
    /// The same of a flow that was not known: it was looked up in the rules.
    Work filter_misses,
    /// Of these, flows that are known by the NIC's hash from then on.
    Work filter_nic_hashes,
    /// Known flows that made room for others.
    Work filter_evictions,
    /// Frames delivered into the guest's buffers.
    Work to_guest_frames,
    /// Bytes of these frames, without the virtio-net header.
    Work to_guest_bytes,
    /// GSO packets among them: several received frames of a flow, coalesced, here or, in tap mode, before.
    Work to_guest_super_frames,
    /// Received frames that went to the guest as parts of GSO packets.
    Work to_guest_coalesced_frames,
    /// Received frames with a partial checksum that was completed here, because the guest did not accept partial ones,
    /// or because it is that of a packet inside VXLAN or Geneve.
    Work to_guest_checksums_completed,
    /// Frames of direct placement that took the way through the bounce area, either direction.
    Work bounced_frames,
    /// Frames that came in at a queue whose pair the guest has switched off or not set up, and went by its first pair.
    Work spilled_frames,
    /// Network: frames to groups that came to the uplink with the source of a port whose guest is here: they are that
    /// guest's own, which the kernel gives the XDP program once more in skb mode, or a switch sends back. The other
    /// ports have them already.
    Work returned_frames,
    /// Times the driver was notified (call eventfd written).
    Work calls,
    /// Times the NIC's transmit side was kicked.
    Work nic_kicks,
    /// Times the NIC gave a buffer back as sent that it did not have. It is the driver's fault, and was ignored.
    Work from_guest_strays,
    /// Times the guest had more to send than the NIC had room for; the frames waited.
    Work from_guest_waits,
    /// Times the guest had more to send than the port's limit allows; the frames waited.
    Work from_guest_limit_waits,
    /// Times a frame waited because the guest had posted no buffer for it.
    Work to_guest_waits,
    /// Frames before which something stood that nobody knows, where hints are to be read: they are as if they had none.
    Work to_guest_hints_unknown,
    /// VLAN tags that the NIC had taken off, and that were put back.
    Work to_guest_tags_put_back,
    /// Frame shorter than an Ethernet header (14 bytes).
    Drop from_guest_runt,
    /// Frame longer than the interface's MTU plus Ethernet and VLAN header.
    Drop from_guest_too_long,
    /// virtio-net header that asks for a checksum or segmentation that was not negotiated.
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
    /// An earlier daemon had given it to the NIC and died before it learned what became of it (direct
    /// placement); not sent again.
    Drop from_guest_fate_unknown,
    /// The interface is down.
    Drop from_guest_interface_down,
    /// The interface is gone.
    Drop from_guest_interface_gone,
    /// The queue pair was stopped, or the interface went, while segments of a GSO packet waited to be sent; counted
    /// once a GSO packet.
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
    /// Network: the port learns addresses, and has as many as it can, or may not have the frame's source.
    Drop from_guest_not_learned,
    /// Network: the frame is for a port that is isolated, as the one is that sends it; or it came from another worker,
    /// and the port that sent it is not known any more.
    Drop from_guest_isolated,
    /// Network: the frame is for an address of the port that sends it, which has no `hairpin`.
    Drop from_guest_to_itself,
    /// Network: the frame has a VLAN tag that the port is not for.
    Drop from_guest_vlan,
    /// Network: the frame is of those that no bridge passes on: MAC control (type 0x8808, or to 01:80:c2:00:00:01), or,
    /// unless the port may, to one of 01:80:c2:00:00:00 to 0f (spanning tree, LACP, 802.1X, LLDP).
    Drop from_guest_link_control,
    /// Addresses given by `ips`: the frame is neither IPv4, IPv6 nor ARP.
    Drop from_guest_protocol,
    /// Addresses given by `ips`: an ARP message that is not of the port's addresses, or no request or reply.
    Drop from_guest_arp,
    /// Addresses given by `ips`: the frame's IPv4 or IPv6 source address is not the port's.
    Drop from_guest_ip_source,
    /// Addresses given by `ips`: IPv6 neighbour discovery that tells of others' addresses.
    Drop from_guest_neighbour,
    /// Addresses given by `ips`: a router advertisement or redirect, and the port is not a router.
    Drop from_guest_router,
    /// Addresses given by `ips`: DHCP or DHCPv6 as from a server, and the port is not one.
    Drop from_guest_dhcp_server,
    /// Addresses given by `ips`, or filter rules: headers that contradict themselves, or that are not all in the
    /// frame's first 256 bytes.
    Drop from_guest_headers,
    /// Filter rules of the port do not let the guest send the frame.
    Drop from_guest_filter,
    /// The guest asks for a checksum to be stored in the headers by which it was decided that it may send the frame.
    Drop from_guest_checksum_in_headers,
    /// Network: no port that has a guest has the destination of a frame of the uplink's.
    Drop to_guest_no_port,
    /// What stood before the frame nobody knows, and a VLAN tag that the NIC took off is told there: it may be of any
    /// VLAN.
    Drop to_guest_tag_unknown,
    /// Network: the guest had no buffer for the frame, and not for some time, or the frame is to a group.
    Drop to_guest_no_buffer,
    /// Network, and tap mode: the kernel did not take the frame from the tap to host or wire, which is down or gone, or it
    /// knows no such request for a checksum or segmentation.
    Drop to_guest_host_refused,
    /// Frame beyond the port's limit of what its guest gets. A GSO packet of another guest counts as the frames that a
    /// wire would carry.
    Drop to_guest_limit,
    /// Filter rules of the port do not let the guest get the frame.
    Drop to_guest_filter,
    /// Frame whose headers contradict themselves, or go on behind the bytes that are looked at, for a guest with filter
    /// rules for what it gets.
    Drop to_guest_filter_headers,
    /// Tap mode, without a network: frame from the tap whose virtio-net header contradicts itself or its frame, or asks
    /// for what the guest did not accept.
    Drop to_guest_offload_malformed,
    /// Frame longer than the guest's buffer (or than all its buffers, where they may be merged).
    Drop to_guest_buffer_too_small,
    /// Frame in several pieces that is longer than the interface's frames are, so that a piece or an end of another is
    /// missing (copy), or that should have been in one (direct).
    Drop to_guest_in_pieces,
    /// The queue pair was stopped while the frame was in our hands.
    Drop to_guest_queue_stopped,
    /// Frame, or a piece of one, that the NIC put where it has no buffer: into one that it had given back already, or
    /// was never given. It is the driver's fault.
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
