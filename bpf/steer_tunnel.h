/* SPDX-License-Identifier: (Apache-2.0 OR BSD-3-Clause) */
/*
 * steer_tunnel.h: decapsulates frames in the tunnel of a network: of VXLAN (RFC 7348), or of Geneve (RFC 8926), whose header
 * is as long without options, and has the VNI in the same place.
 *
 * A frame is of the tunnel if any receiver would decapsulate it: whole, in a packet with the plainest headers, from a host
 * that the tunnel device sends to, to the host's address, in the VLAN in which the host has it. All else is left to the
 * kernel, with its packet filter, and its tunnel device: other senders and VLANs, two tags, fragments, options, other VNIs,
 * flags, other contents than Ethernet, packets that a router marked for congestion (the mark has to be put into the inner
 * packet, RFC 6040). The checksum of UDP is not verified, as RFC 7348 allows: those of the inner packet are the receiver's.
 * Only the part of a frame that is in its first buffer is looked at. Packets without a whole Ethernet header in them are
 * dropped, and, if the tunnel says so, all from other senders, whatever their headers.
 */
#ifndef VHOST_AF_XDP_STEER_TUNNEL_H
#define VHOST_AF_XDP_STEER_TUNNEL_H

#include "steer.h"

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "steer_key.h"
#include "steer_stations.h"

/* The tunnels of networks; written by the loader. A reader sees a tunnel before a change or after it, and no mixture. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, STEER_MAX_TUNNELS);
	__type(key, struct steer_tunnel_key);
	__type(value, struct steer_tunnel);
} steer_vnis SEC(".maps");

/* Written by the loader: a set, of which only the keys count. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, STEER_MAX_VTEPS);
	__type(key, struct steer_vtep);
	__type(value, __u8);
} steer_vteps SEC(".maps");

/* Written by the loader: the stations of networks in tunnels. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, STEER_MAX_STATIONS);
	__type(key, struct steer_tunnel_station);
	__type(value, __u32);
} steer_inner SEC(".maps");

#define ETHERNET_LEN 14
#define TAG_LEN 4
#define IPV4_LEN 20
#define IPV6_LEN 40
#define UDP_LEN 8
#define TUNNEL_LEN 8
#define OUTER_IPV4_LEN (ETHERNET_LEN + IPV4_LEN + UDP_LEN + TUNNEL_LEN)
#define OUTER_IPV6_LEN (ETHERNET_LEN + IPV6_LEN + UDP_LEN + TUNNEL_LEN)
/* The first four bytes of the plainest header: a VNI is there; no options, no flags, and an Ethernet frame inside. */
#define VXLAN_START NETWORK32(0x08000000)
#define GENEVE_START NETWORK32(0x00006558)

/* Fields of a header. The verifier takes them for aligned: it assumes that a packet starts at NET_IP_ALIGN. */
#define FIELD16(header, at) (*(const __be16 *)((header) + (at)))
#define FIELD32(header, at) (*(const __be32 *)((header) + (at)))

/* Whether a header of 20 bytes has the right checksum (RFC 1071). */
static __always_inline int is_sum_right(const __u8 *ip)
{
	__u64 sum = (__u64)FIELD32(ip, 0) + FIELD32(ip, 4) + FIELD32(ip, 8) + FIELD32(ip, 12) + FIELD32(ip, 16);

	/* At most 2^32 + 4, then 0x1fffe, then 0xffff. */
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return sum == 0xffff;
}

/* A tunnel of the network of these queues, or of one that shares them; the key is a steer_tunnel_key, see steer_key.h. */
static __always_inline const struct steer_tunnel *tunnel_at(__be32 vni, __be16 port, __u32 queues)
{
	volatile __u64 key = (__u64)vni << SHIFT(0, 4) | (__u64)port << SHIFT(4, 2) | (__u64)queues << SHIFT(6, 2);

	return bpf_map_lookup_elem(&steer_vnis, (const void *)&key);
}

/*
 * The tunnel over this version of IP that headers of UDP and VXLAN or Geneve are of, if there is one; `len`: all bytes from
 * UDP's header on.
 */
static __always_inline const struct steer_tunnel *tunnel_of(const __u8 *udp, __u64 len, __u32 queues, __u8 version)
{
	const struct steer_tunnel *tunnel;
	__be32 start = FIELD32(udp, 8);

	if (NETWORK16(FIELD16(udp, 4)) != len || (start != VXLAN_START && start != GENEVE_START))
		return 0;
	tunnel = tunnel_at(FIELD32(udp, 12), FIELD16(udp, 2), queues);
	if (start == GENEVE_START)
		version |= STEER_GENEVE;
	return tunnel && tunnel->version == version ? tunnel : 0;
}

/* Whether the network takes packets from a host; the key is a steer_vtep, see steer_key.h. */
static __always_inline int has_vtep(__u32 network, __u64 version, __u64 first, __u64 second)
{
	volatile __u64 key[3];

	key[0] = first;
	key[1] = second;
	key[2] = (__u64)network << SHIFT(0, 4) | version << SHIFT(4, 1);
	return !!bpf_map_lookup_elem(&steer_vteps, (const void *)key);
}

/* Two words of a header, as they are there. */
#define WORDS(header, at) ((__u64)FIELD32(header, at) << SHIFT(0, 4) | (__u64)FIELD32(header, (at) + 4) << SHIFT(4, 4))

/*
 * Length of the headers around a frame of the tunnel of a network of this queue, and in `network` that network's number;
 * 0: there is none. The packet was received in this VLAN (0: in none), and has no tag any more. The caller has checked that
 * the outer headers over IPv4 and an inner Ethernet header are before `end`.
 */
static __always_inline int outer_len(struct xdp_md *ctx, const __u8 *frame, const void *end, __u16 vlan, __u32 *network)
{
	const __u8 *ip = frame + ETHERNET_LEN;
	const struct steer_tunnel *tunnel;
	/* An encapsulated frame is longer than Ethernet's shortest one, so there is no padding: lengths must match. */
	__u64 len = bpf_xdp_get_buff_len(ctx) - ETHERNET_LEN;

	/* The lowest bits of the traffic class are 3: congestion was experienced. */
	if (FIELD16(frame, 12) == NETWORK16(0x0800)) {
		/* All bits of the fragment's word but DF. */
		if (ip[0] != 0x45 || (ip[1] & 3) == 3 || NETWORK16(FIELD16(ip, 2)) != len ||
		    (FIELD16(ip, 6) & NETWORK16(0xbfff)) || ip[9] != 17)
			return 0;
		tunnel = tunnel_of(ip + IPV4_LEN, len - IPV4_LEN, *network, 4);
		if (!tunnel || tunnel->vlan != vlan || FIELD32(ip, 16) != tunnel->local[0] || !is_sum_right(ip))
			return 0;
		*network = tunnel->network;
		return has_vtep(*network, 4, (__u64)FIELD32(ip, 12) << SHIFT(0, 4), 0) ? OUTER_IPV4_LEN : 0;
	}
	if (FIELD16(frame, 12) == NETWORK16(0x86dd)) {
		if ((const void *)(frame + OUTER_IPV6_LEN + ETHERNET_LEN) > end)
			return 0;
		if (ip[0] >> 4 != 6 || (ip[1] & 0x30) == 0x30 || NETWORK16(FIELD16(ip, 4)) != len - IPV6_LEN || ip[6] != 17)
			return 0;
		tunnel = tunnel_of(ip + IPV6_LEN, len - IPV6_LEN, *network, 6);
		if (!tunnel || tunnel->vlan != vlan || FIELD32(ip, 24) != tunnel->local[0] ||
		    FIELD32(ip, 28) != tunnel->local[1] || FIELD32(ip, 32) != tunnel->local[2] ||
		    FIELD32(ip, 36) != tunnel->local[3])
			return 0;
		*network = tunnel->network;
		return has_vtep(*network, 6, WORDS(ip, 8), WORDS(ip, 16)) ? OUTER_IPV6_LEN : 0;
	}
	return 0;
}

/*
 * Decapsulates a frame of the tunnel of a network of this queue, which gets that network's number; the length of the outer
 * headers, or 0: it is none, and stays as it is. `tpid` and `tci`: the tag that the driver took off; 0: none.
 */
static __always_inline int decapsulate(struct xdp_md *ctx, __be16 tpid, __u16 tci, __u32 *network)
{
	const void *meta = (void *)(long)ctx->data_meta;
	const void *end = (void *)(long)ctx->data_end;
	const __u8 *frame = (void *)(long)ctx->data;
	int tag = 0, len;

	/* Metadata of another program would be moved over the tunnel's header, which could not be put back. */
	if (meta + 1 <= (const void *)frame)
		return 0;
	/* Bit 0 of the first byte: multicast or broadcast (IEEE 802). */
	if ((const void *)(frame + OUTER_IPV4_LEN + ETHERNET_LEN) > end || (frame[0] & 1))
		return 0;
	if (!tpid && FIELD16(frame, 12) == NETWORK16(0x8100)) {
		/* Skips the tag's length. The addresses are wrong then, but they are not read any more. */
		tpid = NETWORK16(0x8100);
		tci = NETWORK16(FIELD16(frame, 14));
		if (bpf_xdp_adjust_head(ctx, TAG_LEN))
			return 0;
		tag = TAG_LEN;
		frame = (void *)(long)ctx->data;
		end = (void *)(long)ctx->data_end;
		if ((const void *)(frame + OUTER_IPV4_LEN + ETHERNET_LEN) > end)
			goto put_back;
	}
	if (tpid && tpid != NETWORK16(0x8100))
		return 0;
	len = outer_len(ctx, frame, end, tci & 0x0fff, network);
	if (len && !bpf_xdp_adjust_head(ctx, len))
		return tag + len;
put_back:
	/* Cannot fail: the bytes were part of the frame before. */
	if (tag)
		bpf_xdp_adjust_head(ctx, -TAG_LEN);
	return 0;
}

/* Whether a type of Ethernet is that of a tag (IEEE 802.1Q). */
static __always_inline int is_tag(__be16 type)
{
	return type == NETWORK16(0x8100) || type == NETWORK16(0x88a8);
}

/* Headers of IPv6 that may be before that of UDP: hop-by-hop options, routing, fragment, destination options (RFC 8200). */
static __always_inline int is_extension(__u8 protocol)
{
	return protocol == 0 || protocol == 43 || protocol == 44 || protocol == 60;
}

/* Why a packet is dropped that is not decapsulated. */
#define UNKNOWN_SENDER 1
#define MALFORMED 2
/* A malformed packet that is longer is the kernel's, unless those of unknown senders are searched for. */
#define SHORT_LEN 128

/*
 * Why a packet is dropped; 0: it is not. The kernel's tunnel device takes packets to all addresses of the host, with tags,
 * options and extension headers, and in fragments: without the first one the others are lost. `drops`: a tunnel drops packets
 * of unknown senders, so those are dropped, too, that hide which tunnel they are for as no sender does: by three tags (of
 * VLAN 0, the kernel takes off any number), by many extension headers, or by a first fragment that ends before the VNI
 * (RFC 1858).
 */
static __always_inline int why_refused(struct xdp_md *ctx, __u32 queues, __u32 drops)
{
	const struct steer_tunnel *tunnel;
	__u64 words[5];
	const __u8 *head = (const __u8 *)words;
	__u32 at = ETHERNET_LEN, end, version, i;
	__u64 first, second = 0;
	__u8 protocol;
	int is_first = 0, is_later = 0, is_geneve, is_short;
	__be16 type, port;

	for (i = 0; i < 3; i++, at += 4) {
		if (bpf_xdp_load_bytes(ctx, at - 2, words, 2))
			return 0;
		type = FIELD16(head, 0);
		if (!is_tag(type))
			break;
	}
	if (type == NETWORK16(0x0800)) {
		if (bpf_xdp_load_bytes(ctx, at, words, IPV4_LEN))
			return 0;
		version = 4;
		protocol = head[9];
		is_first = FIELD16(head, 6) & NETWORK16(0x2000);
		is_later = FIELD16(head, 6) & NETWORK16(0x1fff);
		first = (__u64)FIELD32(head, 12) << SHIFT(0, 4);
		end = at + NETWORK16(FIELD16(head, 2));
		at += (head[0] & 15) * 4;
	} else if (type == NETWORK16(0x86dd)) {
		if (bpf_xdp_load_bytes(ctx, at, words, IPV6_LEN))
			return 0;
		version = 6;
		protocol = head[6];
		first = WORDS(head, 8);
		second = WORDS(head, 16);
		at += IPV6_LEN;
		end = at + NETWORK16(FIELD16(head, 4));
		for (i = 0; i < 4 && is_extension(protocol); i++) {
			if (bpf_xdp_load_bytes(ctx, at, words, 8))
				return 0;
			if (protocol == 44) {
				is_first |= FIELD16(head, 2) & NETWORK16(1);
				is_later |= FIELD16(head, 2) & NETWORK16(0xfff8);
			}
			at += protocol == 44 ? 8 : (head[1] + 1) * 8;
			protocol = head[0];
		}
		if (is_extension(protocol))
			return drops && !is_later ? MALFORMED : 0;
	} else {
		return drops && is_tag(type) ? MALFORMED : 0;
	}
	if (is_later || protocol != 17 || bpf_xdp_load_bytes(ctx, at, words, UDP_LEN))
		return 0;
	port = FIELD16(head, 2);
	/* No frame has a shorter header. */
	is_short = NETWORK16(FIELD16(head, 4)) < UDP_LEN + TUNNEL_LEN + ETHERNET_LEN;
	/* What is beyond the packet in a frame is padding. */
	if (is_first && at + UDP_LEN + TUNNEL_LEN > end)
		return drops ? MALFORMED : 0;
	if (bpf_xdp_load_bytes(ctx, at + UDP_LEN, words, TUNNEL_LEN))
		return 0;
	tunnel = tunnel_at(FIELD32(head, 4) & NETWORK32(0xffffff00), port, queues);
	if (!tunnel || (tunnel->version & ~STEER_GENEVE) != version)
		return 0;
	if (tunnel->drops_unknown && !has_vtep(tunnel->network, version, first, second))
		return UNKNOWN_SENDER;
	/* Geneve packets with options or another protocol type may contain no Ethernet frame. */
	is_geneve = tunnel->version & STEER_GENEVE;
	return is_short && (!is_geneve || FIELD32(head, 0) == GENEVE_START) ? MALFORMED : 0;
}

/*
 * Why a packet is dropped that is not decapsulated; 0: it is not. A global function: the verifier checks it once, and not
 * again for each way to it.
 */
__noinline int refusal(struct xdp_md *ctx, __u32 queues, __u32 drops)
{
	if (!drops && bpf_xdp_get_buff_len(ctx) > SHORT_LEN)
		return 0;
	return why_refused(ctx, queues, drops);
}

/* The port of a station of a network in a tunnel, if there is one. */
static __always_inline const __u32 *inner_port(__u32 network, __u32 vlan, const __u8 *mac)
{
	volatile __u64 key[2];

	key[0] = station_key(vlan, mac);
	key[1] = (__u64)network << SHIFT(0, 4);
	return bpf_map_lookup_elem(&steer_inner, (const void *)key);
}

#endif
