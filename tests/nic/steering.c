// SPDX-License-Identifier: GPL-2.0-only
/*
 * steering.c: which queue gets a frame. See rig_nic.h.
 *
 * The first n-tuple rule that says of each bit that it asks for what the frame has decides: a queue, an RSS context,
 * or nobody. Else the main RSS table does. Tables are asked with Toeplitz hashes of addresses and ports, of addresses
 * alone where a frame has no ports (or might have them in another fragment), and with 0 where it has neither.
 */
#include <linux/etherdevice.h>
#include <linux/if_vlan.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>
#include <net/ip.h>
#include <net/ipv6.h>

#include "rig_nic.h"

/* What rules and hashes are of. */
struct rig_key {
	struct flow_keys keys;
	/* As a rule for TCP or UDP would say it, and its kind; 0: neither. */
	union ethtool_flow_union flow;
	u32 kind;
	/* What is hashed. */
	u8 input[36];
	u32 input_bytes;
};

static void rig_add_input(struct rig_key *key, const void *bytes, u32 count)
{
	memcpy(key->input + key->input_bytes, bytes, count);
	key->input_bytes += count;
}

static void rig_read_four(struct rig_key *key)
{
	struct ethtool_tcpip4_spec *spec = &key->flow.tcp_ip4_spec;

	spec->ip4src = key->keys.addrs.v4addrs.src;
	spec->ip4dst = key->keys.addrs.v4addrs.dst;
	rig_add_input(key, &spec->ip4src, sizeof(spec->ip4src));
	rig_add_input(key, &spec->ip4dst, sizeof(spec->ip4dst));
	if (!key->kind)
		return;
	spec->psrc = key->keys.ports.src;
	spec->pdst = key->keys.ports.dst;
}

static void rig_read_six(struct rig_key *key)
{
	struct ethtool_tcpip6_spec *spec = &key->flow.tcp_ip6_spec;

	memcpy(spec->ip6src, &key->keys.addrs.v6addrs.src, sizeof(spec->ip6src));
	memcpy(spec->ip6dst, &key->keys.addrs.v6addrs.dst, sizeof(spec->ip6dst));
	rig_add_input(key, spec->ip6src, sizeof(spec->ip6src));
	rig_add_input(key, spec->ip6dst, sizeof(spec->ip6dst));
	if (!key->kind)
		return;
	spec->psrc = key->keys.ports.src;
	spec->pdst = key->keys.ports.dst;
}

static void rig_read(struct rig_key *key, const struct sk_buff *skb)
{
	const struct ethhdr *ethernet = (const struct ethhdr *)skb->data;
	bool is_whole;
	u8 protocol;

	memset(key, 0, sizeof(*key));
	if (!__skb_flow_dissect(NULL, skb, &flow_keys_dissector, &key->keys, skb->data, ethernet->h_proto, ETH_HLEN,
				skb_headlen(skb), 0))
		return;
	is_whole = !(key->keys.control.flags & FLOW_DIS_IS_FRAGMENT);
	protocol = key->keys.basic.ip_proto;
	switch (key->keys.control.addr_type) {
	case FLOW_DISSECTOR_KEY_IPV4_ADDRS:
		if (is_whole && (protocol == IPPROTO_TCP || protocol == IPPROTO_UDP))
			key->kind = protocol == IPPROTO_TCP ? TCP_V4_FLOW : UDP_V4_FLOW;
		rig_read_four(key);
		break;
	case FLOW_DISSECTOR_KEY_IPV6_ADDRS:
		if (is_whole && (protocol == IPPROTO_TCP || protocol == IPPROTO_UDP))
			key->kind = protocol == IPPROTO_TCP ? TCP_V6_FLOW : UDP_V6_FLOW;
		rig_read_six(key);
		break;
	default:
		return;
	}
	if (key->kind)
		rig_add_input(key, &key->keys.ports.ports, sizeof(key->keys.ports.ports));
}

/* Bytes of the headers of a frame that is TCP and has payload; else 0. */
static u16 rig_headers(const struct rig_key *key, const struct sk_buff *skb)
{
	u32 at = key->keys.control.thoff, bytes;
	const struct tcphdr *tcp;
	struct tcphdr room;

	if (key->kind != TCP_V4_FLOW && key->kind != TCP_V6_FLOW)
		return 0;
	tcp = skb_header_pointer(skb, at, sizeof(room), &room);
	if (!tcp)
		return 0;
	bytes = at + tcp->doff * 4;
	return bytes < skb->len ? bytes : 0;
}

static u32 rig_hash(const struct rig_nic *nic, const struct rig_key *key)
{
	u64 window = get_unaligned_be64(nic->key);
	u32 hash = 0, byte, bit;

	for (byte = 0; byte < key->input_bytes; byte++) {
		/* Its upper half is what a bit adds; the lower one has the key's next bits. */
		for (bit = 0; bit < 8; bit++) {
			if (key->input[byte] & (0x80 >> bit))
				hash ^= window >> 32;
			window <<= 1;
		}
		if (byte + 8 < RIG_KEY)
			window |= nic->key[byte + 8];
	}
	return hash;
}

/* Of what a frame's hash is, in the words of enum xdp_rss_hash_type. */
static u16 rig_hash_type(const struct rig_key *key)
{
	switch (key->kind) {
	case TCP_V4_FLOW:
		return XDP_RSS_TYPE_L4_IPV4_TCP;
	case UDP_V4_FLOW:
		return XDP_RSS_TYPE_L4_IPV4_UDP;
	case TCP_V6_FLOW:
		return XDP_RSS_TYPE_L4_IPV6_TCP;
	case UDP_V6_FLOW:
		return XDP_RSS_TYPE_L4_IPV6_UDP;
	default:
		break;
	}
	if (!key->input_bytes)
		return XDP_RSS_TYPE_NONE;
	return key->keys.control.addr_type == FLOW_DISSECTOR_KEY_IPV4_ADDRS ? XDP_RSS_TYPE_L3_IPV4 :
									      XDP_RSS_TYPE_L3_IPV6;
}

static bool rig_has(const void *frame, const void *wanted, const void *mask, u32 bytes)
{
	const u8 *a = frame, *b = wanted, *m = mask;

	while (bytes--) {
		if ((*a++ ^ *b++) & *m++)
			return false;
	}
	return true;
}

static bool rig_matches(const struct ethtool_rx_flow_spec *rule, const struct rig_key *key, const struct sk_buff *skb)
{
	u32 kind = rule->flow_type & ~(FLOW_EXT | FLOW_MAC_EXT | FLOW_RSS);
	const struct ethhdr *ethernet = (const struct ethhdr *)skb->data;
	__be16 vlan = htons(key->keys.vlan.vlan_id);

	if ((rule->flow_type & FLOW_EXT) && (vlan ^ rule->h_ext.vlan_tci) & rule->m_ext.vlan_tci)
		return false;
	if (kind == ETHER_FLOW)
		return rig_has(ethernet, &rule->h_u.ether_spec, &rule->m_u.ether_spec, sizeof(*ethernet));
	return kind == key->kind && rig_has(&key->flow, &rule->h_u, &rule->m_u, sizeof(key->flow));
}

/* The queue that is to get a frame, or RIG_DROP. */
int rig_steer(struct rig_nic *nic, struct sk_buff *skb)
{
	struct rig_frame *frame = rig_frame(skb);
	const struct rig_rule *rule;
	struct rig_key key;
	u32 context = 0;
	int queue = -1;

	if (skb_headlen(skb) < ETH_HLEN)
		return RIG_DROP;
	rig_read(&key, skb);
	frame->headers = rig_headers(&key, skb);
	frame->hash_type = rig_hash_type(&key);
	frame->has_tag = false;
	spin_lock_bh(&nic->steering);
	frame->hash = rig_hash(nic, &key);
	for (rule = nic->rules; rule < nic->rules + RIG_RULES; rule++) {
		if (!rule->is_used || !rig_matches(&rule->spec, &key, skb))
			continue;
		if (rule->spec.ring_cookie == RX_CLS_FLOW_DISC)
			context = RIG_CONTEXTS;
		else if (rule->spec.flow_type & FLOW_RSS)
			context = rule->context;
		else
			queue = rule->spec.ring_cookie;
		break;
	}
	if (queue < 0 && context < RIG_CONTEXTS)
		queue = nic->tables[context][frame->hash % RIG_TABLE];
	spin_unlock_bh(&nic->steering);
	return queue < 0 ? RIG_DROP : queue;
}

/* A table of all queues. */
void rig_spread(struct rig_nic *nic, u32 *table)
{
	int entry;

	spin_lock_bh(&nic->steering);
	for (entry = 0; entry < RIG_TABLE; entry++)
		table[entry] = ethtool_rxfh_indir_default(entry, nic->dev->real_num_rx_queues);
	spin_unlock_bh(&nic->steering);
}

/* ---- rules ---- */

u32 rig_count_rules(const struct rig_nic *nic)
{
	u32 location, count = 0;

	for (location = 0; location < RIG_RULES; location++)
		count += nic->rules[location].is_used;
	return count;
}

/* Whether a rule asks for nothing that is not looked at. */
static bool rig_is_known(const struct ethtool_rx_flow_spec *spec)
{
	if ((spec->flow_type & FLOW_MAC_EXT) ||
	    ((spec->flow_type & FLOW_EXT) &&
	     (spec->m_ext.vlan_etype || spec->m_ext.data[0] || spec->m_ext.data[1] ||
	      (spec->m_ext.vlan_tci & ~htons(VLAN_VID_MASK)))))
		return false;
	switch (spec->flow_type & ~(FLOW_EXT | FLOW_RSS)) {
	case TCP_V4_FLOW:
	case UDP_V4_FLOW:
		return !spec->m_u.tcp_ip4_spec.tos;
	case TCP_V6_FLOW:
	case UDP_V6_FLOW:
		return !spec->m_u.tcp_ip6_spec.tclass;
	case ETHER_FLOW:
		return true;
	default:
		return false;
	}
}

int rig_add_rule(struct rig_nic *nic, struct ethtool_rxnfc *wanted)
{
	struct ethtool_rx_flow_spec *spec = &wanted->fs;
	bool has_context = spec->flow_type & FLOW_RSS;
	struct rig_rule *rule;

	if (!(nic->dev->features & NETIF_F_NTUPLE) || !rig_is_known(spec))
		return -EOPNOTSUPP;
	if (has_context && (wanted->rss_context >= RIG_CONTEXTS || spec->ring_cookie))
		return -EINVAL;
	if (!has_context && spec->ring_cookie != RX_CLS_FLOW_DISC &&
	    spec->ring_cookie >= nic->dev->real_num_rx_queues)
		return -EINVAL;
	if (spec->location >= RIG_RULES)
		return -EINVAL;
	rule = &nic->rules[spec->location];
	spin_lock_bh(&nic->steering);
	rule->spec = *spec;
	rule->context = has_context ? wanted->rss_context : 0;
	rule->is_used = true;
	spin_unlock_bh(&nic->steering);
	return 0;
}

int rig_remove_rule(struct rig_nic *nic, u32 location)
{
	if (location >= RIG_RULES || !nic->rules[location].is_used)
		return -ENOENT;
	spin_lock_bh(&nic->steering);
	nic->rules[location].is_used = false;
	spin_unlock_bh(&nic->steering);
	return 0;
}
