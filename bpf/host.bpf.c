// SPDX-License-Identifier: (Apache-2.0 OR BSD-3-Clause)
/*
 * host.bpf.c: the host as one more receiver of a network, over its own interface and addresses.
 *
 * THEORY OF OPERATION
 *
 * A device joins host and network, a tap that belongs to who serves the network: it has no address, and nobody looks at
 * it. Two programs move frames between it and the uplink, the host's own interface:
 *
 *   to_network   at egress of the uplink. What the host sends to a station of the network goes into the device instead of
 *                out of the NIC. Of frames to groups a copy goes there. Everything else leaves as ever.
 *   to_host      at ingress of the device. What the network sends to the host is received by the uplink, as if it had
 *                come from outside. So the host has one interface, one address, one neighbour table.
 *
 * Stations are those of the XDP program on the uplink: it is the same map. A frame that the host receives this way meets
 * that program again only in skb mode: there a frame to a group comes into the network's ring once more, with the address
 * of the station that sent it.
 */
#include "steer.h"

#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_helpers.h>

#include "steer_key.h"

char _license[] SEC("license") = "Dual BSD/GPL";

/* Set before the programs are loaded. */
const volatile __u32 host_network;
const volatile __u32 host_uplink;
const volatile __u32 host_device;

/* The one of steer_body.h. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, STEER_MAX_STATIONS);
	__type(key, struct steer_station);
	__type(value, struct steer_member);
} steer_stations SEC(".maps");

/* Says nothing about the frame: other programs have their say, then it goes on as ever (TCX_NEXT, too). */
#define GO_ON TC_ACT_UNSPEC

SEC("tc")
int to_network(struct __sk_buff *skb)
{
	struct steer_member *member;
	volatile __u64 key;
	__u32 vlan = 0;
	__u8 head[16];
	__u16 type;

	/* A guest's, not the host's: for others, as what sockets send. */
	if (skb->tc_index == SENT_BY_TAP)
		return GO_ON;
	if (bpf_skb_load_bytes(skb, 0, head, sizeof(head)))
		return GO_ON;
	/* Bit 0 of the first byte: multicast or broadcast (IEEE 802). */
	if (head[0] & 1) {
		/* Without memory for a copy the network has lost a frame, as on any wire. */
		bpf_clone_redirect(skb, host_device, 0);
		return GO_ON;
	}
	type = head[12] << 8 | head[13];
	/* A service tag (802.1ad) is of no VLAN here, as in steer_body.h. */
	if (skb->vlan_present)
		vlan = skb->vlan_proto == NETWORK16(0x8100) ? skb->vlan_tci & 0xfff : 0;
	else if (type == 0x8100)
		vlan = (head[14] & 0x0f) << 8 | head[15];
	key = station_key(vlan, head);
	member = bpf_map_lookup_elem(&steer_stations, (const void *)&key);
	if (!member || member->network != host_network)
		return GO_ON;
	return bpf_redirect(host_device, 0);
}

SEC("tc")
int to_host(struct __sk_buff *skb __attribute__((unused)))
{
	return bpf_redirect(host_uplink, BPF_F_INGRESS);
}
