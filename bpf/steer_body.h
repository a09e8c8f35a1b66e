/* SPDX-License-Identifier: (Apache-2.0 OR BSD-3-Clause) */
/*
 * steer_body.h: which frames of a NIC go to our AF_XDP sockets, and what stands before them.
 *
 * THEORY OF OPERATION
 *
 * One program sits on the interface and sees every frame of every receive queue. It looks up the
 * configuration of the frame's queue and does one of three things:
 *
 *   pass      the queue is not ours, or nobody holds its socket, or the queue takes certain addresses and VLANs
 *             only, and the frame is of others. The host's stack gets the frame, untouched.
 *             So the host keeps its connectivity on the other queues. It loses nothing but performance
 *             between the moments when the program is attached and a queue is enabled.
 *   drop      the frame cannot be delivered whole: longer than the limit, or no room for the header. Counted.
 *   redirect  into the XSKMAP slot of the queue, or into the one place of a map of its own. If the queue asks for a
 *             virtio header, a zeroed one is first put directly before the frame as XDP metadata. The kernel copies
 *             metadata and frame together (net/xdp/xsk.c). So both land in the guest's buffer, header first, and nobody
 *             has to write it. num_buffers is 1: a frame that we let through fits one buffer. The limit is for that.
 *
 * A queue that takes certain addresses takes all multicast and broadcast frames, too: XDP cannot give one frame to
 * two receivers, and a guest without them has no ARP. A frame's VLAN is that of its outermost tag, as far as it is in
 * the frame: a tag that the driver took off (rx-vlan-offload) is seen by the bound program only.
 *
 * A queue of a *network* serves many receivers. (VLAN, destination) is looked up once, and what is found, the number of
 * the receiver's port, is written before the frame (steer_note), so that nobody parses it again. What no station of the
 * network is asked for with goes to the host. Frames to groups of stations go to both: a copy into the network's ring
 * buffer, and the frame itself to the host. Each network has a ring of its own: who reads it sees no other's frames.
 * How often is limited (GCRA, on each CPU): a flood costs the host's CPU no copies beyond that.
 *
 * A network in a *tunnel* (steer_tunnel.h) gets unicast frames of that tunnel only, decapsulated: they are steered as above,
 * by stations that are of this network alone. Other networks in tunnels may share its queues: their frames are told by the
 * tunnel, and to the receiver by the number of the port. A frame that is no station's, or to a group, gets its outer headers
 * back and goes to the host, whose tunnel device decapsulates it. A decapsulated frame that finds no socket is dropped.
 *
 * Invariants:
 *  - A frame that is passed leaves as it came: metadata that was added is taken away again, and outer headers are put
 *    back. That is possible while nothing is written before the frame.
 *  - The configuration is read once per frame, as one word (steer.h), so length, limit and state belong
 *    together even while the loader changes them.
 *  - No frame is lost without a counter, and no copy of one. What the socket then drops (no fill entry, ring full) is
 *    counted by the kernel in XDP_STATISTICS.
 *  - A queue that asks for hints gets no frame without: what stood in the place before would be taken for them.
 *
 * Two objects share the body: steer.bpf.c, the plain programs, for every interface and mode; and steer_bound.bpf.c,
 * which is loaded for one interface and asks its driver for what the NIC knows of a frame (STEER_BOUND, steer_hints.h).
 * A VLAN tag that the driver took off then counts as the outermost one, and is put back into copies for the ring.
 *
 * Each has two programs. One takes frames in one buffer only, and drivers refuse it when the MTU needs more (veth:
 * above 3,506 or so); the other (`_frags`) declares that it understands frames in several buffers.
 */
#ifndef VHOST_AF_XDP_STEER_BODY_H
#define VHOST_AF_XDP_STEER_BODY_H

#include "steer.h"

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "steer_queues.h"
#include "steer_stations.h"
#include "steer_tunnel.h"

#ifdef STEER_BOUND
#include "steer_hints.h"
#endif

char _license[] SEC("license") = "Dual BSD/GPL";

/* Filled by the loader; the kernel empties a slot when its socket is closed. */
struct {
	__uint(type, BPF_MAP_TYPE_XSKMAP);
	__uint(max_entries, 2 * STEER_MAX_QUEUES);
	__type(key, __u32);
	__type(value, __u32);
} steer_sockets SEC(".maps");

/* Maps of one place each, of queues that have one (STEER_OWN_MAP); filled by the loader. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, STEER_MAX_QUEUES);
	__type(key, __u32);
	__array(values, struct {
		__uint(type, BPF_MAP_TYPE_XSKMAP);
		__uint(max_entries, 1);
		__type(key, __u32);
		__type(value, __u32);
	});
} steer_own SEC(".maps");

/* Where frames to groups are copied, by the number of the network; filled by the loader. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, STEER_MAX_QUEUES);
	__type(key, __u32);
	__array(values, struct {
		__uint(type, BPF_MAP_TYPE_RINGBUF);
		__uint(max_entries, 4096);
	});
} steer_rings SEC(".maps");

#ifndef STEER_BOUND
/* The plain program knows nothing of a frame but its bytes; all this leaves no instruction. */
struct hints {};
#define ask_for_tag(ctx, hints) ((void)(hints))
#define has_tag(hints) ((void)(hints), 0)
#define tag_len(hints) ((void)(hints), 0)
#define hash_to_report(ctx) 0
#define report_hash(header, hash) ((void)(header), (void)(hash))
#define copy_tagged(ctx, hints, to, len) (-1)
#endif

/* Makes room of `len` (a constant after inlining) before the frame and writes the header there. */
static __always_inline int prepend_virtio_header(struct xdp_md *ctx, int len)
{
	__u64 hash = len == STEER_HEADER_HASH_LEN ? hash_to_report(ctx) : 0;
	struct steer_virtio_header *header;
	void *meta, *frame;

	if (bpf_xdp_adjust_meta(ctx, -len))
		return -1;
	meta = (void *)(long)ctx->data_meta;
	frame = (void *)(long)ctx->data;
	if (meta + len > frame) {
		/* for the verifier: adjust_meta just made this room */
		return -1;
	}
	__builtin_memset(meta, 0, len);
	header = meta;
	header->num_buffers[0] = 1;
	if (len == STEER_HEADER_HASH_LEN)
		report_hash(meta, hash);
	return 0;
}

static __always_inline int write_header(struct xdp_md *ctx, __u32 header_len)
{
	switch (header_len) {
	case STEER_HEADER_NONE:
		return 0;
	case STEER_HEADER_LEN:
		return prepend_virtio_header(ctx, STEER_HEADER_LEN);
	case STEER_HEADER_HASH_LEN:
		return prepend_virtio_header(ctx, STEER_HEADER_HASH_LEN);
	default:
		/* the loader writes no other length */
		return -1;
	}
}

/*
 * Number of the VLAN of the frame's outermost tag (IEEE 802.1Q); 0: no tag; -1: the tag is cut off. A service tag
 * (802.1ad) numbers others' VLANs: with it a frame is of none, as to any bridge that goes by 802.1Q's tags.
 */
static __always_inline int vlan_of(const struct hints *hints, const __u8 *frame, const void *end)
{
	__u16 type = frame[12] << 8 | frame[13];

#ifdef STEER_BOUND
	if (has_tag(hints))
		return hints->vlan_proto == NETWORK16(0x8100) ? hints->vlan_tci & 0x0fff : 0;
#else
	(void)hints;
#endif
	if (type != 0x8100)
		return 0;
	if ((const void *)(frame + 16) > end)
		return -1;
	return (frame[14] & 0x0f) << 8 | frame[15];
}

/* Whether the frame is one of those that the queue takes. */
static __always_inline int is_ours(struct xdp_md *ctx, __u32 queue, __u32 flags, const struct hints *hints)
{
	const __u8 *frame = (void *)(long)ctx->data;
	const void *end = (void *)(long)ctx->data_end;
	int vlan;

	if ((const void *)(frame + 14) > end)
		return 0;
	if (flags & STEER_QUEUE_VLANS) {
		vlan = vlan_of(hints, frame, end);
		if (vlan < 0 || !has_entry(queue, vlan, 0))
			return 0;
	}
	/* Bit 0 of the first byte: multicast or broadcast (IEEE 802). */
	if ((flags & STEER_QUEUE_MACS) && !(frame[0] & 1))
		return has_entry(queue, STEER_ENTRY_MAC, frame);
	return 1;
}

/* Copies the frame into a record of `record_len` bytes (a constant after inlining). */
static __always_inline int copy_group(struct xdp_md *ctx, void *ring, struct steer_group head, __u64 record_len,
				      const struct hints *hints)
{
	__u64 len = head.len;
	void *record = bpf_ringbuf_reserve(ring, record_len, 0);

	if (!record)
		return -1;
	*(struct steer_group *)record = head;
	/*
	 * Kept out of the compiler's sight: it would leave the comparisons out, of which it knows the outcome and the verifier
	 * does not, or make one of the two (less than the header no frame has), which kernels like 6.12 do not understand.
	 */
	asm volatile("" : "+r"(len));
	if (len < 14)
		goto discard;
	asm volatile("" : "+r"(len));
	if (len > record_len - sizeof(head))
		goto discard;
	if (has_tag(hints) ? copy_tagged(ctx, hints, record + sizeof(head), len) :
			     bpf_xdp_load_bytes(ctx, 0, record + sizeof(head), len))
		goto discard;
	bpf_ringbuf_submit(record, 0);
	return 0;

discard:
	bpf_ringbuf_discard(record, 0);
	return -1;
}

/* A frame to a group, of a network: a copy for its ring. */
static __always_inline void take_group(struct xdp_md *ctx, struct steer_group head, __u32 network,
				       struct steer_counters *counters, const struct hints *hints)
{
	void *ring;
	int copied;

	if (!is_due(network)) {
		COUNT(counters, group_limited);
		return;
	}
	ring = bpf_map_lookup_elem(&steer_rings, &network);
	if (!ring)
		copied = -1;
	else if (head.len <= STEER_GROUP_SHORT - sizeof(head))
		copied = copy_group(ctx, ring, head, STEER_GROUP_SHORT, hints);
	else if (head.len <= STEER_GROUP_MIDDLE - sizeof(head))
		copied = copy_group(ctx, ring, head, STEER_GROUP_MIDDLE, hints);
	else
		copied = copy_group(ctx, ring, head, STEER_GROUP_LONG, hints);
	if (copied)
		COUNT(counters, group_lost);
	else
		COUNT(counters, group_copied);
}

/* Writes the note before the frame, where there is room; without it the frame is as good, only slower. */
static __always_inline int write_note(struct xdp_md *ctx, __u32 port)
{
	volatile struct steer_note *note;
	void *frame;

	if (bpf_xdp_adjust_meta(ctx, -STEER_NOTE_LEN))
		return 0;
	note = (void *)(long)ctx->data_meta;
	frame = (void *)(long)ctx->data;
	if ((void *)(note + 1) > frame) {
		/* for the verifier: adjust_meta just made this room */
		return 0;
	}
	note->port = port;
	note->mark = STEER_NOTE_MARK;
	return STEER_NOTE_LEN;
}

static __always_inline int to_socket(struct xdp_md *ctx, __u32 queue, __u64 config, int before,
				     struct steer_counters *counters)
{
	/* The lower bits of the flags are the verdict for an empty slot. */
	__u32 socket = queue;
	int verdict = XDP_PASS;
	void *own;

	if (config & STEER_OWN_MAP) {
		/* Eight bytes: kernels like 6.1 take a shorter store to where a pointer was for an attempt to change that. */
		volatile __u64 key = (__u64)queue << SHIFT(0, 4);

		own = bpf_map_lookup_elem(&steer_own, (const void *)&key);
		if (own)
			verdict = bpf_redirect_map(own, STEER_OWN_PLACE, XDP_PASS);
	} else {
		if ((config >> STEER_FLAGS_SHIFT) & STEER_QUEUE_SECOND)
			socket += STEER_MAX_QUEUES;
		verdict = bpf_redirect_map(&steer_sockets, socket, XDP_PASS);
	}
	if (verdict == XDP_REDIRECT) {
		COUNT(counters, redirected);
		return verdict;
	}
	COUNT(counters, no_socket);
	if (before)
		bpf_xdp_adjust_meta(ctx, before);
	return verdict;
}

static __always_inline int steer_in_network(struct xdp_md *ctx, __u32 queue, __u64 config,
					    struct steer_counters *counters, struct hints *hints)
{
	const __u8 *frame = (void *)(long)ctx->data;
	const void *end = (void *)(long)ctx->data_end;
	__u32 flags = config >> STEER_FLAGS_SHIFT;
	__u32 network = flags >> STEER_NETWORK_SHIFT & 0xff;
	struct steer_member *member;
	const __u32 *inner;
	volatile __u64 key;
	int vlan, before, why, outer = 0;
	__u32 len, port, verdict;

	if (config & STEER_TUNNEL) {
#ifdef STEER_BOUND
		outer = decapsulate(ctx, hints->vlan_proto, hints->vlan_tci, &network);
		/* The tag was an outer one. */
		*hints = (struct hints){ 0 };
#else
		outer = decapsulate(ctx, 0, 0, &network);
#endif
		if (!outer)
			goto not_ours;
		frame = (void *)(long)ctx->data;
		end = (void *)(long)ctx->data_end;
	}
	if ((const void *)(frame + 14) > end)
		goto not_ours;
	vlan = vlan_of(hints, frame, end);
	if (vlan < 0)
		goto not_ours;
	/* Bit 0 of the first byte: multicast or broadcast (IEEE 802). */
	if (frame[0] & 1) {
		if (outer)
			goto not_ours;
		len = bpf_xdp_get_buff_len(ctx) + tag_len(hints);
		if (len > (__u32)config) {
			COUNT(counters, group_lost);
		} else {
			struct steer_group head = { .len = len, .queue = queue, .vlan = vlan };

			take_group(ctx, head, network, counters, hints);
		}
		return XDP_PASS;
	}
	if (outer) {
		inner = inner_port(network, vlan, frame);
		if (!inner)
			goto not_ours;
		port = *inner;
	} else {
		key = station_key(vlan, frame);
		member = bpf_map_lookup_elem(&steer_stations, (const void *)&key);
		if (!member || member->network != network)
			goto not_ours;
		port = member->port;
	}
	if (bpf_xdp_get_buff_len(ctx) + tag_len(hints) > (__u32)config) {
		COUNT(counters, too_long);
		return XDP_DROP;
	}
#ifdef STEER_BOUND
	if (flags & STEER_QUEUE_HINTS) {
		/* The NIC's hash is that of the outer headers. */
		before = leave_hints(ctx, hints->vlan_proto, hints->vlan_tci, port, outer ? STEER_HINT_HASH : 0);
		if (before < 0) {
			COUNT(counters, no_header_room);
			return XDP_DROP;
		}
	} else
#endif
		before = write_note(ctx, port);
	if (!before && config & STEER_SHARED)
		goto not_ours;
	verdict = to_socket(ctx, queue, config, before, counters);
	return outer && verdict == XDP_PASS ? XDP_DROP : verdict;

not_ours:
	if (!outer && config & STEER_TUNNEL) {
		why = refusal(ctx, flags >> STEER_NETWORK_SHIFT & 0xff, !!(config & STEER_DROPS_UNKNOWN));
		if (why) {
			if (why == MALFORMED)
				COUNT(counters, malformed);
			else
				COUNT(counters, unknown_sender);
			return XDP_DROP;
		}
	}
	COUNT(counters, not_ours);
	if (outer && bpf_xdp_adjust_head(ctx, -outer))
		return XDP_DROP;
	return XDP_PASS;
}

static __always_inline int steer_frame(struct xdp_md *ctx)
{
	__u32 queue = ctx->rx_queue_index;
	struct steer_counters *counters;
	__u32 header_len, flags;
	volatile __u64 *slot;
	struct hints hints;
	__u64 config;

	slot = bpf_map_lookup_elem(&steer_queues, &queue);
	counters = bpf_map_lookup_elem(&steer_counts, &queue);
	if (!slot || !counters)
		return XDP_PASS; /* beyond STEER_MAX_QUEUES: cannot be ours */

	config = *slot;
	header_len = (config >> STEER_HEADER_LEN_SHIFT) & 0xff;
	flags = config >> STEER_FLAGS_SHIFT;

	if (!(flags & STEER_QUEUE_ACTIVE)) {
		COUNT(counters, passed);
		return XDP_PASS;
	}
	ask_for_tag(ctx, &hints);
	if (flags & (STEER_QUEUE_MACS | STEER_QUEUE_VLANS | STEER_QUEUE_NETWORK)) {
		if (flags & STEER_QUEUE_NETWORK)
			return steer_in_network(ctx, queue, config, counters, &hints);
		if (!is_ours(ctx, queue, flags, &hints)) {
			COUNT(counters, not_ours);
			return XDP_PASS;
		}
	}
	/* Also for a frame in one buffer: to subtract pointers takes CAP_PERFMON, this helper does not. */
	if (bpf_xdp_get_buff_len(ctx) + tag_len(&hints) > (__u32)config) {
		COUNT(counters, too_long);
		return XDP_DROP;
	}
#ifdef STEER_BOUND
	if (header_len == STEER_HEADER_NONE && flags & STEER_QUEUE_HINTS) {
		int before = leave_hints(ctx, hints.vlan_proto, hints.vlan_tci, 0, STEER_HINT_PORT);

		if (before < 0) {
			COUNT(counters, no_header_room);
			return XDP_DROP;
		}
		return to_socket(ctx, queue, config, before, counters);
	}
#endif
	if (write_header(ctx, header_len)) {
		COUNT(counters, no_header_room);
		return XDP_DROP;
	}
	return to_socket(ctx, queue, config, header_len, counters);
}


#endif
