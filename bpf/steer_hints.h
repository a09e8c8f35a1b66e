/* SPDX-License-Identifier: (Apache-2.0 OR BSD-3-Clause) */
/*
 * steer_hints.h: what the bound program learns of a frame beside its bytes, and how it tells the frame's receiver.
 *
 * A NIC knows a frame's hash, the VLAN tag that it took off, and the time of receipt. Its driver gives them to XDP
 * programs that are loaded for that one interface (BPF_F_XDP_DEV_BOUND_ONLY,
 * Documentation/networking/xdp-rx-metadata.rst). AF_XDP has no place for them but the metadata before the frame, so
 * they are left there: a structure, one for each set of hints, that BTF describes, and whose last four bytes, directly
 * before the frame, name it. So a receiver can read frames of several programs that follow each other on the interface,
 * and those of other people's programs.
 *
 * `id` is the structure's type in the program's BTF, below a generation that the loader makes of all structures: those
 * of another version of this file have other ids, and the same version's the same on each link, so that readers know
 * all of them (crates/steer/src/own_layouts.rs). The loader reads the offsets of the fields from that BTF
 * (crates/steer/src/btf.rs), and a receiver gets them from the loader (crates/xsk/src/metadata.rs). So nothing here has
 * a twin but the names of the fields, and the bits of `absent`, which are STEER_HINT_*.
 *
 * The set is constant in a loaded program: the verifier leaves out what is not asked for. It leaves the branches in
 * where the loader has no CAP_PERFMON; they are never taken.
 */
#ifndef VHOST_AF_XDP_STEER_HINTS_H
#define VHOST_AF_XDP_STEER_HINTS_H

#include "steer.h"

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

#include "steer_key.h"

/* What the bound program leaves before a frame: a set of these, decided when it is loaded. */
#define STEER_HINT_HASH 0x1
#define STEER_HINT_VLAN 0x2
#define STEER_HINT_TIMESTAMP 0x4
#define STEER_HINT_MARK 0x8
/* Beside those in `absent` only: the frame is of no network. */
#define STEER_HINT_PORT 0x10

/* Which hints; a set of STEER_HINT_*. Written by the loader. */
const volatile __u32 steer_asked = 0;
/*
 * The upper half of ids. Its highest bit is set: so an id is none of somebody else's BTF, whose types count up from 1,
 * and not the end of a header that a driver has left in the frame's place (virtio_net: a number of buffers).
 */
const volatile __u32 steer_generation = 0;

/* The kernel's, include/net/xdp.h. Without the enum's name libbpf refuses the prototype. */
enum xdp_rss_hash_type {
	RSS_L3_IPV4 = 1 << 0,
	RSS_L3_IPV6 = 1 << 1,
	RSS_L3_EXTENSIONS = 1 << 2,
	RSS_L4 = 1 << 3,
	RSS_L4_TCP = 1 << 4,
	RSS_L4_UDP = 1 << 5,
};

/* Weak: a kernel that lacks one is no matter while it is not asked for. Linux 6.3, 6.8 (the tag). */
extern int bpf_xdp_metadata_rx_timestamp(const struct xdp_md *ctx, __u64 *timestamp) __ksym __weak;
extern int bpf_xdp_metadata_rx_hash(const struct xdp_md *ctx, __u32 *hash, enum xdp_rss_hash_type *type) __ksym __weak;
extern int bpf_xdp_metadata_rx_vlan_tag(const struct xdp_md *ctx, __be16 *proto, __u16 *tci) __ksym __weak;

/* Which flows have a mark; written by the loader. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, STEER_MAX_MARKS);
	__type(key, struct steer_flow);
	__type(value, __u32);
} steer_marks SEC(".maps");

#define IF_0(...)
#define IF_1(...) __VA_ARGS__
#define UNLESS_0(...) __VA_ARGS__
#define UNLESS_1(...)

/*
 * The structures, largest fields first so that there are no holes. 32 bytes at most: kernels before 6.8 take no more
 * metadata (xdp_metalen_invalid, include/net/xdp.h). A field that `absent` names, with its companion, is 0.
 */
#define STEER_LAYOUT(name, hash, vlan, timestamp, mark)                     \
	struct steer_hints##name {                                          \
		IF_##timestamp(__u64 rx_timestamp;) /* ns, the NIC's clock */ \
		IF_##hash(__u32 rx_hash;)                                   \
		IF_##mark(__u32 flow_mark;)                                 \
		__u32 port; /* of the network's station */                  \
		IF_##hash(__u16 rx_hash_type;) /* enum xdp_rss_hash_type */ \
		UNLESS_##hash(__u16 zero;)                                  \
		IF_##vlan(__be16 vlan_proto; __u16 vlan_tci;)               \
		__u16 absent;                                               \
		__u32 id;                                                   \
	} __attribute__((packed, aligned(4)));                              \
	_Static_assert(sizeof(struct steer_hints##name) <= 32, "too much metadata");

#define STEER_LAYOUTS(each)                       \
	each(_hash, 1, 0, 0, 0)                   \
	each(_vlan, 0, 1, 0, 0)                   \
	each(_hash_vlan, 1, 1, 0, 0)              \
	each(_timestamp, 0, 0, 1, 0)              \
	each(_hash_timestamp, 1, 0, 1, 0)         \
	each(_vlan_timestamp, 0, 1, 1, 0)         \
	each(_hash_vlan_timestamp, 1, 1, 1, 0)    \
	each(_mark, 0, 0, 0, 1)                   \
	each(_hash_mark, 1, 0, 0, 1)              \
	each(_vlan_mark, 0, 1, 0, 1)              \
	each(_hash_vlan_mark, 1, 1, 0, 1)         \
	each(_timestamp_mark, 0, 0, 1, 1)         \
	each(_hash_timestamp_mark, 1, 0, 1, 1)    \
	each(_vlan_timestamp_mark, 0, 1, 1, 1)    \
	each(_hash_vlan_timestamp_mark, 1, 1, 1, 1)

STEER_LAYOUTS(STEER_LAYOUT)

/*
 * What is known of a frame from the beginning, as it tells who the frame is for: the tag that is not in it. Zeros where
 * there is none. All else is asked for last, in leave_hints.
 *
 * Little is kept in memory here and below: where the loader has no CAP_PERFMON the verifier puts a barrier against
 * speculation behind the first write to each place of the stack, some ten nanoseconds.
 */
struct hints {
	/* network order, as the kernel has it */
	__be16 vlan_proto;
	__u16 vlan_tci;
};

static __always_inline void ask_for_tag(struct xdp_md *ctx, struct hints *hints)
{
	union {
		__u32 word;
		struct hints tag;
	} off = { 0 };

	hints->vlan_proto = 0;
	hints->vlan_tci = 0;
	if (!(steer_asked & STEER_HINT_VLAN) ||
	    bpf_xdp_metadata_rx_vlan_tag(ctx, &off.tag.vlan_proto, &off.tag.vlan_tci))
		return;
	*hints = off.tag;
}

static __always_inline int has_tag(const struct hints *hints)
{
	return !!hints->vlan_proto;
}

/* Bytes that the frame had more on the wire. */
static __always_inline __u32 tag_len(const struct hints *hints)
{
	return has_tag(hints) ? 4 : 0;
}

/* Four bytes of `words` as they are, at a place of the word that is the key's. */
#define HALF(word, at) ((__u64)(word) << SHIFT(at, 4))

/* Key of the frame's flow in steer_marks; -1: it has none. The key is written in whole words, see steer_key.h. */
static __always_inline int flow_of(struct xdp_md *ctx, volatile __u64 *key)
{
	/* A header in words; its bytes are as in the frame. */
	__u32 head[10], ports = 0, at = 12, protocol, version;
	const __u8 *bytes = (const __u8 *)head;
	__u16 type;

	if (bpf_xdp_load_bytes(ctx, at, &type, sizeof(type)))
		return -1;
#pragma unroll
	for (int tags = 0; tags < 2; tags++) {
		if (type != NETWORK16(0x8100) && type != NETWORK16(0x88a8))
			break;
		at += 4;
		if (bpf_xdp_load_bytes(ctx, at, &type, sizeof(type)))
			return -1;
	}
	at += 2;
	if (type == NETWORK16(0x0800)) {
		if (bpf_xdp_load_bytes(ctx, at, head, 20))
			return -1;
		key[0] = 0;
		key[1] = (__u64)0xffff << SHIFT(2, 2) | HALF(head[3], 4);
		key[2] = 0;
		key[3] = (__u64)0xffff << SHIFT(2, 2) | HALF(head[4], 4);
		protocol = bytes[9];
		version = 4;
		at += (bytes[0] & 0x0f) * 4;
		/* Bits 0 to 12: offset of the fragment (RFC 791). */
		if ((bytes[6] & 0x1f) | bytes[7])
			goto no_ports;
	} else if (type == NETWORK16(0x86dd)) {
		if (bpf_xdp_load_bytes(ctx, at, head, 40))
			return -1;
		key[0] = HALF(head[2], 0) | HALF(head[3], 4);
		key[1] = HALF(head[4], 0) | HALF(head[5], 4);
		key[2] = HALF(head[6], 0) | HALF(head[7], 4);
		key[3] = HALF(head[8], 0) | HALF(head[9], 4);
		protocol = bytes[6];
		version = 6;
		at += 40;
	} else {
		return -1;
	}
	/* TCP, UDP, SCTP: the ports are what they begin with. */
	if (protocol == 6 || protocol == 17 || protocol == 132) {
		if (bpf_xdp_load_bytes(ctx, at, &ports, sizeof(ports)))
			return -1;
	}
no_ports:
	key[4] = HALF(ports, 0) | (__u64)protocol << SHIFT(4, 1) | (__u64)version << SHIFT(5, 1);
	return 0;
}

/* The mark of the frame's flow, and bit 32; 0: it has none. */
static __noinline __u64 mark_of(struct xdp_md *ctx)
{
	volatile __u64 key[5];
	__u32 *mark;

	if (flow_of(ctx, key))
		return 0;
	mark = bpf_map_lookup_elem(&steer_marks, (const void *)key);
	if (!mark) {
		/* As a service: without where it comes from. */
		key[0] = 0;
		key[1] = 0;
		key[4] &= ~((__u64)0xffff << SHIFT(0, 2));
		mark = bpf_map_lookup_elem(&steer_marks, (const void *)key);
	}
	return mark ? 1ull << 32 | *mark : 0;
}

/* A hash and its type, as the kernel writes them. */
union rss {
	__u64 word;
	struct {
		__u32 hash;
		enum xdp_rss_hash_type type;
	};
};

/*
 * Asks, then writes: some drivers keep what they know in the place of the metadata (igc). A clock that shows 0 is none:
 * so does veth, of a sender without one.
 */
#define LEAVE_AS(name, hash_, vlan_, timestamp_, mark_)                                                \
	case (hash_ * STEER_HINT_HASH | vlan_ * STEER_HINT_VLAN | timestamp_ * STEER_HINT_TIMESTAMP |  \
	      mark_ * STEER_HINT_MARK): {                                                              \
		struct steer_hints##name *to;                                                          \
		void *frame;                                                                           \
		IF_##timestamp_(__u64 timestamp = 0;)                                                  \
		IF_##hash_(union rss rss = { 0 };)                                                     \
		IF_##mark_(__u64 mark = mark_of(ctx);)                                                 \
                                                                                                       \
		absent |= UNLESS_##hash_(STEER_HINT_HASH |) UNLESS_##timestamp_(STEER_HINT_TIMESTAMP |)\
			UNLESS_##mark_(STEER_HINT_MARK |) (tag.vlan_proto ? 0 : STEER_HINT_VLAN);      \
		IF_##mark_(if (!mark) absent |= STEER_HINT_MARK;)                                      \
		IF_##hash_(if ((absent & STEER_HINT_HASH) ||                                           \
			       bpf_xdp_metadata_rx_hash(ctx, &rss.hash, &rss.type)) {                  \
			rss.word = 0;                                                                  \
			absent |= STEER_HINT_HASH;                                                     \
		})                                                                                     \
		IF_##timestamp_(if (bpf_xdp_metadata_rx_timestamp(ctx, &timestamp)) timestamp = 0;     \
				if (!timestamp) absent |= STEER_HINT_TIMESTAMP;)                       \
		if (bpf_xdp_adjust_meta(ctx, -(int)sizeof(*to)))                                       \
			return -1;                                                                     \
		to = (void *)(long)ctx->data_meta;                                                     \
		frame = (void *)(long)ctx->data;                                                       \
		/* for the verifier: adjust_meta just made this room */                                \
		if ((void *)(to + 1) > frame)                                                          \
			return -1;                                                                     \
		IF_##timestamp_(to->rx_timestamp = timestamp;)                                         \
		IF_##hash_(to->rx_hash = rss.hash; to->rx_hash_type = rss.type;)                       \
		UNLESS_##hash_(to->zero = 0;)                                                          \
		IF_##mark_(to->flow_mark = mark;)                                                      \
		IF_##vlan_(to->vlan_proto = tag.vlan_proto; to->vlan_tci = tag.vlan_tci;)              \
		to->port = port;                                                                       \
		to->absent = absent;                                                                   \
		to->id = steer_generation | bpf_core_type_id_local(struct steer_hints##name);          \
		return sizeof(*to);                                                                    \
	}

/*
 * Leaves the structure of the program's set before the frame; its length, or -1: no room. `absent`: those of
 * STEER_HINT_PORT and STEER_HINT_HASH that the frame has not.
 */
static __always_inline int leave_hints(struct xdp_md *ctx, __u32 proto, __u32 tci, __u32 port, __u32 absent)
{
	struct hints tag = { .vlan_proto = proto, .vlan_tci = tci };

	switch (steer_asked) {
	STEER_LAYOUTS(LEAVE_AS)
	default:
		/* the loader takes the plain program then */
		return -1;
	}
}

/* VirtIO 1.3, 5.1.6.4.3: VIRTIO_NET_HASH_REPORT_*, of a hash of this type; 0: the guest knows no such type. */
static __always_inline __u8 report_of(__u16 type)
{
	switch (type) {
	case RSS_L3_IPV4:
		return 1;
	case RSS_L3_IPV4 | RSS_L4 | RSS_L4_TCP:
		return 2;
	case RSS_L3_IPV4 | RSS_L4 | RSS_L4_UDP:
		return 3;
	case RSS_L3_IPV6:
		return 4;
	case RSS_L3_IPV6 | RSS_L4 | RSS_L4_TCP:
		return 5;
	case RSS_L3_IPV6 | RSS_L4 | RSS_L4_UDP:
		return 6;
	case RSS_L3_IPV6 | RSS_L3_EXTENSIONS:
		return 7;
	case RSS_L3_IPV6 | RSS_L3_EXTENSIONS | RSS_L4 | RSS_L4_TCP:
		return 8;
	case RSS_L3_IPV6 | RSS_L3_EXTENSIONS | RSS_L4 | RSS_L4_UDP:
		return 9;
	default:
		return 0;
	}
}

/* Of a frame that a virtio header is put before: the hash for it, and the type that the guest knows; 0: none. */
static __always_inline __u64 hash_to_report(struct xdp_md *ctx)
{
	union rss rss = { 0 };

	if (!(steer_asked & STEER_HINT_HASH) || bpf_xdp_metadata_rx_hash(ctx, &rss.hash, &rss.type))
		return 0;
	return (__u64)report_of(rss.type) << 32 | rss.hash;
}

static __always_inline void report_hash(struct steer_virtio_header_hash *header, __u64 hash)
{
	if (!(hash >> 32))
		return;
	header->hash_value[0] = hash;
	header->hash_value[1] = hash >> 8;
	header->hash_value[2] = hash >> 16;
	header->hash_value[3] = hash >> 24;
	header->hash_report[0] = hash >> 32;
}

/* Copies a frame to where there is room for `len` bytes, which it has with its tag put back. */
static __always_inline int copy_tagged(struct xdp_md *ctx, const struct hints *hints, void *to, __u64 len)
{
	/* For the verifier: no frame is shorter. Kept out of the compiler's sight as in copy_group. */
	asm volatile("" : "+r"(len));
	if (len < 18)
		return -1;
	if (bpf_xdp_load_bytes(ctx, 0, to, 12) || bpf_xdp_load_bytes(ctx, 12, to + 16, len - 16))
		return -1;
	*(__be16 *)(to + 12) = hints->vlan_proto;
	*(__be16 *)(to + 14) = NETWORK16(hints->vlan_tci);
	return 0;
}

#endif
