// SPDX-License-Identifier: (Apache-2.0 OR BSD-3-Clause)
/*
 * tap.bpf.c: moves frames between an interface, which is a network's uplink, and the network's tap devices.
 *
 * THEORY OF OPERATION
 *
 * The process that serves the network reads and writes the taps. A tap has no address. Its ingress redirects every frame,
 * so the host's stack receives none from it. The uplink is the host's own interface. One tap joins the network with the
 * host, over the uplink's addresses:
 *
 *   to_network    at egress of the uplink: redirects what the host sends to a station of the network to the tap, instead
 *                 of out of the NIC. Of frames to groups the tap gets a copy. All other frames leave as before.
 *   to_host_device  at egress of the tap: drops what did not come from to_network. Frames to groups must have the mark
 *                 COPY_FOR_TAP: a bridge that the tap is a port of sends such frames, too. Other frames must not have the
 *                 tap's own address as source.
 *   to_host       at ingress of the tap: the uplink receives what the network sends to the host, as if it came from
 *                 outside. So the host has one interface, one address, one neighbour table.
 *
 * If this tap and an uplink that is a tunnel are ports of a bridge, the bridge can answer questions of guests, ARP requests
 * and neighbour solicitations, out of its tables (neigh_suppress). It does so for those that it receives by the tap. So
 * to_host leaves them to the bridge, which sends those that it has no answer for by its other ports, to which the uplink
 * belongs. There to_network drops the same question from the tap to the wire.
 *
 * Where the uplink has no XDP program, another tap joins the network with the wire:
 *
 *   from_uplink   at ingress of the uplink: does for received frames what to_network does for the host's.
 *   to_uplink     at ingress of the tap: see send.bpf.c.
 *   to_device     at egress of the tap: drops what did not come by the uplink. Every process of the host can send by an
 *                 interface that is up, also without an address: to groups, by SO_BINDTODEVICE or IP_MULTICAST_IF.
 *
 * A guest that is alone on queues of an interface has such a tap, too. In the place of from_uplink it has
 *
 *   from_queues   at ingress of the uplink: the tap gets what the XDP program would put into the guest's socket, by the
 *                 same configuration (steer.h). A guest that takes certain addresses has their frames from all queues,
 *                 and copies of frames to groups.
 *
 * The stations are those of the XDP program's map, also where that program is loaded but not attached (tap mode). Frames
 * that to_host redirects pass the uplink's ingress. There from_uplink recognizes them by a mark. An XDP program in skb
 * mode receives them, too: it copies those to groups into the network's ring again, with the address of the station that
 * sent them. In native mode it does not receive them.
 */
#include "steer.h"

#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_helpers.h>

#include "steer_queues.h"
#include "steer_stations.h"

char _license[] SEC("license") = "Dual BSD/GPL";

/* Set before the programs are loaded. */
const volatile __u32 tap_network;
const volatile __u32 tap_uplink;
const volatile __u32 tap_device;
const volatile __u8 tap_mac[6];
/* Of from_queues: so many, from the one on that has the network's number. */
const volatile __u32 tap_queues;
/* from_uplink is attached to the uplink: to_host has to mark frames for it. */
const volatile __u32 tap_marks;

/* Index of the network's tap to the wire while a bridge gets its questions; 0: none does. One value for both programs that
 * look at it, so that a change neither loses a question nor sends one twice, but for one that is between the two taps.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} tap_wire SEC(".maps");

/* No verdict: the next program decides, then the stack goes on (TCX_NEXT has the same value). */
#define GO_ON TC_ACT_UNSPEC

/* Of an Ethernet header, and of one with an ARP packet. */
#define HEADER_LEN 14
#define ARP_END 42

/* The VLAN of a frame's outermost tag, by the frame's header; 0: none, or it is cut off. A service tag (802.1ad) is of
 * no VLAN here, as in steer_body.h.
 */
static __always_inline __u32 vlan_of(struct __sk_buff *skb, const __u8 *head)
{
	__u16 type = head[12] << 8 | head[13];
	__u8 tag[2];

	if (skb->vlan_present)
		return skb->vlan_proto == NETWORK16(0x8100) ? skb->vlan_tci & 0xfff : 0;
	if (type != 0x8100 || bpf_skb_load_bytes(skb, HEADER_LEN, tag, sizeof(tag)))
		return 0;
	return (tag[0] & 0x0f) << 8 | tag[1];
}

/* The tap may be gone, with the process that had it, and this program still be attached. A redirect would drop the frame
 * then, and no program behind this one would see it.
 */
static __always_inline int is_tap_there(struct __sk_buff *skb)
{
	__u32 mtu = 0;

	return bpf_check_mtu(skb, tap_device, &mtu, 0, 0) >= 0;
}

/* Whether a frame is longer than those of the interface, by the configuration of the first queue, if there is one; of GSO
 * packets each segment is a frame.
 */
static __always_inline int is_too_long(struct __sk_buff *skb, __u64 config)
{
	__u32 limit = config;

	return limit && !skb->gso_size && skb->len > limit;
}

/* Whether a frame asks for the MAC address of an IP address of another station. Not those that announce the sender's own
 * address, or check that no other has it: a bridge with neigh_suppress keeps these from other hosts
 * (net/bridge/br_arp_nd_proxy.c).
 */
static __always_inline int is_question(struct __sk_buff *skb)
{
	__u8 head[ARP_END], kind;
	__u32 sender, target;
	__u16 type;

	if (skb->vlan_present || bpf_skb_load_bytes(skb, 0, head, sizeof(head)) || !(head[0] & 1))
		return 0;
	type = head[12] << 8 | head[13];
	if (type == 0x0806) {
		__builtin_memcpy(&sender, head + 28, sizeof(sender));
		__builtin_memcpy(&target, head + 38, sizeof(target));
		/* Operation 1: a request. */
		return head[20] == 0 && head[21] == 1 && sender && sender != target;
	}
	/* Next header 58: ICMPv6; type 135: neighbour solicitation. Only the unspecified address, and others that no station
	 * has, start with 0.
	 */
	return type == 0x86dd && head[20] == 58 && head[22] && !bpf_skb_load_bytes(skb, 54, &kind, 1) && kind == 135;
}

static __always_inline __u32 wire(void)
{
	__u32 key = 0, *index = bpf_map_lookup_elem(&tap_wire, &key);

	return index ? *index : 0;
}

/* Redirects a frame to a station of the network to its tap, and a copy of one to a group. `limits`: of these no more than
 * the network's limit allows, as in the XDP program: all wait in one queue.
 */
static __always_inline int to_tap(struct __sk_buff *skb, int limits)
{
	struct steer_member *member;
	__u32 network = tap_network;
	struct steer_counters *counters;
	__u64 *config;
	volatile __u64 key;
	__u8 head[HEADER_LEN];
	__u16 mark;

	if (bpf_skb_load_bytes(skb, 0, head, sizeof(head)))
		return GO_ON;
	/* Bit 0 of the first byte: multicast or broadcast (IEEE 802). */
	config = bpf_map_lookup_elem(&steer_queues, &network);
	counters = bpf_map_lookup_elem(&steer_counts, &network);
	if (!config || !counters)
		return GO_ON;
	if (head[0] & 1) {
		if (limits && !is_due(network)) {
			COUNT(counters, group_limited);
			return GO_ON;
		}
		if (limits && is_too_long(skb, *config)) {
			COUNT(counters, group_lost);
			return GO_ON;
		}
		/* Without memory for a copy the network has lost a frame, as on any wire. */
		mark = skb->tc_index;
		skb->tc_index = COPY_FOR_TAP;
		bpf_clone_redirect(skb, tap_device, 0);
		skb->tc_index = mark;
		if (limits)
			COUNT(counters, group_copied);
		return GO_ON;
	}
	key = station_key(vlan_of(skb, head), head);
	member = bpf_map_lookup_elem(&steer_stations, (const void *)&key);
	if (!member || member->network != tap_network || !is_tap_there(skb))
		return GO_ON;
	if (limits && is_too_long(skb, *config)) {
		COUNT(counters, too_long);
		return TC_ACT_SHOT;
	}
	return bpf_redirect(tap_device, 0);
}

SEC("tc")
int to_network(struct __sk_buff *skb)
{
	/* A guest's question, which a bridge sends. */
	if (skb->ingress_ifindex == tap_device)
		return GO_ON;
	/* A guest's frame, by send.bpf.c of this uplink: it leaves by the NIC, as frames of AF_XDP sockets do. */
	if (skb->tc_index == SENT_BY_TAP(skb->ingress_ifindex, tap_uplink)) {
		if (skb->ingress_ifindex != wire() || !is_question(skb))
			return GO_ON;
		return is_tap_there(skb) ? TC_ACT_SHOT : GO_ON;
	}
	return to_tap(skb, 0);
}

SEC("tc")
int from_uplink(struct __sk_buff *skb)
{
	/* A frame of this network's guest for the host, by to_host: the host's stack receives it. Frames of other networks
	 * on this uplink keep their marks for their own programs, which may run before this one or after it.
	 */
	if (skb->tc_index == SENT_TO_HOST(tap_network)) {
		skb->tc_index = 0;
		return GO_ON;
	}
	return to_tap(skb, 1);
}

SEC("tc")
int to_device(struct __sk_buff *skb)
{
	return skb->ingress_ifindex == tap_uplink ? GO_ON : TC_ACT_SHOT;
}

SEC("tc")
int to_host_device(struct __sk_buff *skb)
{
	__u8 head[HEADER_LEN];
	int i;

	if (bpf_skb_load_bytes(skb, 0, head, sizeof(head)))
		return TC_ACT_SHOT;
	if (head[0] & 1)
		return skb->tc_index == COPY_FOR_TAP ? GO_ON : TC_ACT_SHOT;
	for (i = 0; i < 6; i++)
		if (head[6 + i] != tap_mac[i])
			return GO_ON;
	return TC_ACT_SHOT;
}

SEC("tc")
int from_queues(struct __sk_buff *skb)
{
	/* As generic XDP has it (netif_receive_generic_xdp, net/core/dev.c). */
	__u32 queue = skb->queue_mapping ? skb->queue_mapping - 1 : 0;
	__u32 first = tap_network, flags;
	struct steer_counters *counters;
	__u8 head[HEADER_LEN];
	__u64 *config;

	config = bpf_map_lookup_elem(&steer_queues, &first);
	counters = bpf_map_lookup_elem(&steer_counts, &first);
	if (!config || !counters)
		return GO_ON;
	flags = *config >> STEER_FLAGS_SHIFT;
	if (!(flags & STEER_QUEUE_MACS) && queue - first >= tap_queues)
		return GO_ON;
	if (!(flags & STEER_QUEUE_ACTIVE)) {
		COUNT(counters, passed);
		return GO_ON;
	}
	if (bpf_skb_load_bytes(skb, 0, head, sizeof(head)))
		goto not_ours;
	if ((flags & STEER_QUEUE_VLANS) && !has_entry(first, vlan_of(skb, head), 0))
		goto not_ours;
	if (flags & STEER_QUEUE_MACS) {
		/* Bit 0 of the first byte: multicast or broadcast (IEEE 802). */
		if (head[0] & 1) {
			if (!is_due(first))
				COUNT(counters, group_limited);
			else if (is_too_long(skb, *config) || bpf_clone_redirect(skb, tap_device, 0))
				COUNT(counters, group_lost);
			else
				COUNT(counters, group_copied);
			return GO_ON;
		}
		if (!has_entry(first, STEER_ENTRY_MAC, head))
			goto not_ours;
	}
	if (!is_tap_there(skb)) {
		COUNT(counters, no_socket);
		return GO_ON;
	}
	if (is_too_long(skb, *config)) {
		COUNT(counters, too_long);
		return TC_ACT_SHOT;
	}
	COUNT(counters, redirected);
	return bpf_redirect(tap_device, 0);

not_ours:
	COUNT(counters, not_ours);
	return GO_ON;
}

SEC("tc")
int to_host(struct __sk_buff *skb)
{
	if (wire() && is_question(skb))
		return GO_ON;
	if (tap_marks)
		skb->tc_index = SENT_TO_HOST(tap_network);
	return bpf_redirect(tap_uplink, BPF_F_INGRESS);
}
