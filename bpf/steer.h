/* SPDX-License-Identifier: (Apache-2.0 OR BSD-3-Clause) */
/*
 * steer.h: what the XDP program and its loader share.
 *
 * Everything here has a twin in crates/steer/src/layout.rs, which asserts the same sizes and offsets at
 * compile time. Change both, in one commit.
 *
 * Only fixed-width types and host byte order: program and loader run on one machine.
 */
#ifndef VHOST_AF_XDP_STEER_H
#define VHOST_AF_XDP_STEER_H

#include <linux/types.h>

/* Entries of every map: one per NIC receive queue, keyed by xdp_md.rx_queue_index. */
#define STEER_MAX_QUEUES 256

/*
 * The configuration of a queue is one 64-bit word, so that the loader can change it with a single store
 * while frames arrive, and the program never sees half of a change.
 *
 *   bits  0..31   frame_limit: longest frame in bytes (Ethernet header included, virtio header not)
 *   bits 32..39   header_len: bytes of virtio-net header to write before the frame: 0, 12 or 20
 *   bit  40       the queue has a map of its own (STEER_OWN_MAP)
 *   bit  41       the queue's network is behind a tunnel (STEER_TUNNEL)
 *   bit  42       a tunnel of the queue drops packets of unknown senders (STEER_DROPS_UNKNOWN)
 *   bit  43       several networks in tunnels have the queue (STEER_SHARED)
 *   bits 48..63   flags: STEER_QUEUE_*
 *
 * A queue has two slots for a socket. The configuration names one of them. The next socket is put into the other
 * slot while frames go to the first, and takes over with one store.
 */
#define STEER_HEADER_LEN_SHIFT 32
#define STEER_FLAGS_SHIFT 48

/*
 * The queue's socket is in no slot, but in the one place of a map that is the queue's alone: whoever it is given to can
 * put a socket there, and into no other queue's place.
 */
#define STEER_OWN_MAP (1ULL << 40)
#define STEER_OWN_PLACE 0

/* The queue's network gets frames of a tunnel only, if it has one at the moment (struct steer_tunnel). */
#define STEER_TUNNEL (1ULL << 41)

/* Of the tunnels of the queue's networks at least one drops packets of unknown senders. */
#define STEER_DROPS_UNKNOWN (1ULL << 42)

/* Several networks in tunnels have the queue, or had it: the receiver finds the network of a frame only by the note. */
#define STEER_SHARED (1ULL << 43)

/* The queue is ours. While it is clear (the state of a fresh map) every frame goes to the host. */
#define STEER_QUEUE_ACTIVE 0x1
/* The socket is in the second slot, at key queue + STEER_MAX_QUEUES. */
#define STEER_QUEUE_SECOND 0x2
/* A socket waits in the other slot. The loader's own note: it must outlive the loader. The program ignores it. */
#define STEER_QUEUE_SUCCESSOR 0x4
/* Of unicast frames only those are ours whose destination is among the queue's entries. */
#define STEER_QUEUE_MACS 0x8
/* Only frames of VLANs that are among the queue's entries are ours. */
#define STEER_QUEUE_VLANS 0x10

/*
 * The queue is of a network: frames go to its socket whose (VLAN, destination) is among the stations of the network,
 * which has the number in bits 8 to 15 of the flags: that of its first queue. Other networks in tunnels may share the
 * queues of a network in a tunnel: they have a number of their own above that one, from STEER_SHARE_SHIFT on.
 */
#define STEER_QUEUE_NETWORK 0x20
#define STEER_NETWORK_SHIFT 8
#define STEER_SHARE_SHIFT 8

/*
 * The bound program leaves a structure of hints before each frame of the queue (steer_hints.h), unless a virtio header
 * stands there: what lies before that is other memory of the guest's. The plain program has none to leave.
 */
#define STEER_QUEUE_HINTS 0x40
/* Its holder wishes that, and may not have it now if STEER_QUEUE_HINTS is clear. Ignored by the program, as above. */
#define STEER_QUEUE_HINTS_WISHED 0x80

#define STEER_HEADER_NONE 0
/* VirtIO 1.3, section 5.1.6: struct virtio_net_hdr with num_buffers */
#define STEER_HEADER_LEN 12
/* the same with VIRTIO_NET_F_HASH_REPORT */
#define STEER_HEADER_HASH_LEN 20

/* Most entries of all queues together. */
#define STEER_MAX_ENTRIES 16384
/* In the place of a VLAN: the entry is one of an address. */
#define STEER_ENTRY_MAC 0xffff

/* What a queue takes: the key of a set. An entry is either an address, or a VLAN with an address of zeros. */
struct steer_entry {
	__u16 queue;
	/* 0: untagged, or tagged with a priority only, or with a service tag; else 1 to 4094; STEER_ENTRY_MAC */
	__u16 vlan;
	__u8 mac[6];
	__u8 zero[2];
};
_Static_assert(sizeof(struct steer_entry) == 12, "twin in layout.rs");

/* Most stations of all networks together. */
#define STEER_MAX_STATIONS 16384

/* Who a frame is for: the key of a station. No interface has two networks with the same one, but for those in tunnels. */
struct steer_station {
	/* 0: untagged, or tagged with a priority only, or with a service tag; else 1 to 4094 */
	__u16 vlan;
	__u8 mac[6];
};
_Static_assert(sizeof(struct steer_station) == 8, "twin in network.rs");

/* What a station is a part of. */
struct steer_member {
	/* number of its port, given by the owner of the network */
	__u32 port;
	/* number of its network */
	__u32 network;
};
_Static_assert(sizeof(struct steer_member) == 8, "twin in network.rs");

/* Who a frame in a tunnel is for: a key whose value is the number of the port. Different tunnels may have the same station. */
struct steer_tunnel_station {
	struct steer_station station;
	__u32 network;
};
_Static_assert(sizeof(struct steer_tunnel_station) == 12, "twin in tunnel.rs");

/* Most tunnels of all networks of an interface. */
#define STEER_MAX_TUNNELS 1024

/* Which tunnel a packet is of: a key. */
struct steer_tunnel_key {
	/* the last four bytes of the header of VXLAN or Geneve: VNI, zero */
	__be32 vni;
	/* of UDP */
	__be16 port;
	/* number of the network of the packet's queue */
	__u16 queues;
};
_Static_assert(sizeof(struct steer_tunnel_key) == 8, "twin in tunnel.rs");

/* Bit of steer_tunnel.version: the tunnel is Geneve (RFC 8926); without it VXLAN (RFC 7348). */
#define STEER_GENEVE 0x80

/* The tunnel of a network. */
struct steer_tunnel {
	/* the host's address, as in a header; of IPv4 the first four bytes, then zeros */
	__be32 local[4];
	__u32 network;
	/* of IP: 4 or 6, with STEER_GENEVE for Geneve; 0: no frame is of this tunnel */
	__u8 version;
	/* 1: packets for the tunnel from hosts that the network takes none from are dropped, and not the kernel's */
	__u8 drops_unknown;
	/* 1 to 4094: its packets have a tag of this VLAN; 0: they have no tag, or one of VLAN 0, with a priority only */
	__u16 vlan;
	/* index of the tunnel device; the loader's own note, as above */
	__u32 device;
};
_Static_assert(sizeof(struct steer_tunnel) == 28, "twin in tunnel.rs");

/* Most hosts from which networks of an interface take packets of their tunnels, all networks together. */
#define STEER_MAX_VTEPS 65536

/* A host from which a network takes packets of its tunnel: the key of a set. */
struct steer_vtep {
	/* as in steer_tunnel */
	__be32 address[4];
	__u32 network;
	/* of IP: 4 or 6 */
	__u8 version;
	__u8 zero[3];
};
_Static_assert(sizeof(struct steer_vtep) == 24, "twin in tunnel.rs");

/* Most flows that have a mark. */
#define STEER_MAX_MARKS 16384

/*
 * A flow that has a mark: the key of a mark. Addresses and ports as in the frame, IPv4 as ::ffff:a.b.c.d; ports are 0
 * where the protocol has none, and in fragments but the first; `version` is that of IP, as an address of IPv6 may look
 * like one of IPv4. A key whose `from` and `from_port` are 0 is a service:
 * it marks all frames to it that have no mark of their flow.
 */
struct steer_flow {
	__u8 from[16];
	__u8 to[16];
	__u8 from_port[2];
	__u8 to_port[2];
	/* as in the header of IPv4, or the fixed one of IPv6: extension headers are not looked behind */
	__u8 protocol;
	/* 4 or 6 */
	__u8 version;
	__u8 zero[2];
};
_Static_assert(sizeof(struct steer_flow) == 40, "twin in marks.rs");

/*
 * Stands directly before a frame in a network's socket, where the driver leaves room for metadata. Who gives the
 * kernel a buffer zeroes `mark` in it first, and finds out by it whether there is a note.
 */
struct steer_note {
	__u32 port;
	/* STEER_NOTE_MARK */
	__u32 mark;
};
#define STEER_NOTE_LEN 8
#define STEER_NOTE_MARK 0x65746f6e
_Static_assert(sizeof(struct steer_note) == STEER_NOTE_LEN, "twin in network.rs");

/* How many frames to groups of stations a network gets on each CPU. */
struct steer_limit {
	/* time between two of them, ns; 0: no limit */
	__u64 each_ns;
	/* how far they may be ahead of that */
	__u64 burst_ns;
};
_Static_assert(sizeof(struct steer_limit) == 16, "twin in network.rs");

/*
 * A record of a network's ring: this head, then the frame; what follows up to the record's end means nothing.
 * Records have one of three lengths, as the verifier wants a constant.
 */
struct steer_group {
	/* bytes of the frame */
	__u32 len;
	__u16 queue;
	/* as in steer_station; the tag is in the frame */
	__u16 vlan;
};
#define STEER_GROUP_SHORT 256
#define STEER_GROUP_MIDDLE 2048
#define STEER_GROUP_LONG 16384
_Static_assert(sizeof(struct steer_group) == 8, "twin in ring.rs");

/* Counters of one queue on one CPU; frames. The program only adds; the loader sums over the CPUs. */
struct steer_counters {
	/* given to the AF_XDP socket of the queue; what happens then is in the socket's XDP_STATISTICS */
	__u64 redirected;
	/* passed to the host: the queue is not ours */
	__u64 passed;
	/* dropped: longer than frame_limit */
	__u64 too_long;
	/* dropped: the driver left no room before the frame for the virtio header, or for the hints */
	__u64 no_header_room;
	/* passed to the host: the queue is ours, but no socket is in the map (it was closed); dropped: the same, of a tunnel */
	__u64 no_socket;
	/* passed to the host: the queue is ours, the frame's address or VLAN is not */
	__u64 not_ours;
	/* of frames to groups in a network, which all go to the host: a copy is in the network's ring */
	__u64 group_copied;
	/* the same: no copy, there were more than the limit allows */
	__u64 group_limited;
	/* the same: no copy, the ring was full, or the frame longer than it takes or than frame_limit */
	__u64 group_lost;
	/* dropped: for a tunnel of drops_unknown, from an unknown host */
	__u64 unknown_sender;
	/* dropped: for a tunnel, without a whole Ethernet header in it */
	__u64 malformed;
};
_Static_assert(sizeof(struct steer_counters) == 88, "twin in layout.rs");

/* What a guest finds before its frame: VirtIO 1.3, section 5.1.6, little-endian whatever the host is. */
struct steer_virtio_header {
	__u8 flags;
	__u8 gso_type;
	__u8 hdr_len[2];
	__u8 gso_size[2];
	__u8 csum_start[2];
	__u8 csum_offset[2];
	__u8 num_buffers[2];
};
_Static_assert(sizeof(struct steer_virtio_header) == STEER_HEADER_LEN, "virtio_net_hdr");

struct steer_virtio_header_hash {
	struct steer_virtio_header base;
	__u8 hash_value[4];
	/* 0 = VIRTIO_NET_HASH_REPORT_NONE */
	__u8 hash_report[2];
	__u8 padding[2];
};
_Static_assert(sizeof(struct steer_virtio_header_hash) == STEER_HEADER_HASH_LEN, "virtio_net_hdr_hash");

/* Mark in skb->tc_index of a guest's packet: written to the tap with this index, to leave by that uplink (send.bpf.c). The
 * kernel keeps the field over veth pairs and bridges, so both indexes are in the mark: a program at another interface
 * must not take the packet for one of its own uplink. The kernel's own users of the field are gone with Linux 6.3.
 */
#define SENT_BY_TAP(tap, uplink) (0x8000 | (((tap) * 31 + (uplink)) & 0x7fff))
/* Mark in skb->tc_index of a packet from a guest of this network to the host: from to_host to from_uplink, which removes
 * it (tap.bpf.c). No mark of the other kind has this value.
 */
#define SENT_TO_HOST(network) (0x4000 | ((network) & 0x3fff))
/* Mark in skb->tc_index of a copy of a frame to a group: set by to_tap, checked by to_host_device (tap.bpf.c). It is none of
 * those above, which have bit 15 or 14.
 */
#define COPY_FOR_TAP 0x2000

#endif
