// SPDX-License-Identifier: GPL-2.0-only
/*
 * ethtool.c: what ethtool(8) asks and says. See rig_nic.h.
 *
 * `ethtool -S` tells of each queue what came to it, what of that was split off, and what was dropped since no buffer
 * was posted, the wire was full, or the frame longer than its buffer; of AF_XDP in zero-copy what came into a socket's
 * buffers (lent_frames) and what was sent from them (lent_sent); and what programs made of frames.
 */
#include <linux/ethtool.h>
#include <linux/rtnetlink.h>

#include "rig_nic.h"

/* ---- rings and queues ---- */

static void rig_get_ringparam(struct net_device *dev, struct ethtool_ringparam *ring,
			      struct kernel_ethtool_ringparam *further, struct netlink_ext_ack *extack)
{
	struct rig_nic *nic = netdev_priv(dev);

	ring->rx_max_pending = RIG_RING_MAX;
	ring->rx_pending = nic->ring_size;
	ring->tx_max_pending = RIG_WIRE;
	ring->tx_pending = RIG_WIRE;
	further->tcp_data_split = nic->is_split ? ETHTOOL_TCP_DATA_SPLIT_ENABLED : ETHTOOL_TCP_DATA_SPLIT_DISABLED;
	further->hds_thresh = nic->split_above;
	further->hds_thresh_max = RIG_HDS_MAX;
}

/* With other rings, or another number of them, all are made anew. */
static int rig_remake(struct net_device *dev, u32 ring_size, u32 queues)
{
	struct rig_nic *nic = netdev_priv(dev);
	bool is_running = netif_running(dev);
	int err;

	if (is_running)
		rig_stop(dev);
	nic->ring_size = ring_size;
	err = netif_set_real_num_queues(dev, queues, queues);
	if (!err && is_running)
		err = rig_open(dev);
	return err;
}

static int rig_set_ringparam(struct net_device *dev, struct ethtool_ringparam *ring,
			     struct kernel_ethtool_ringparam *further, struct netlink_ext_ack *extack)
{
	struct rig_nic *nic = netdev_priv(dev);

	if (!ring->rx_pending || ring->tx_pending != RIG_WIRE)
		return -EINVAL;
	WRITE_ONCE(nic->is_split, further->tcp_data_split == ETHTOOL_TCP_DATA_SPLIT_ENABLED);
	WRITE_ONCE(nic->split_above, further->hds_thresh);
	if (ring->rx_pending == nic->ring_size)
		return 0;
	return rig_remake(dev, ring->rx_pending, dev->real_num_rx_queues);
}

static void rig_get_channels(struct net_device *dev, struct ethtool_channels *channels)
{
	channels->max_combined = RIG_QUEUES;
	channels->combined_count = dev->real_num_rx_queues;
}

static int rig_set_channels(struct net_device *dev, struct ethtool_channels *channels)
{
	struct rig_nic *nic = netdev_priv(dev);
	u32 location;
	int err;

	for (location = 0; location < RIG_RULES; location++) {
		const struct rig_rule *rule = &nic->rules[location];

		if (rule->is_used && !(rule->spec.flow_type & FLOW_RSS) &&
		    rule->spec.ring_cookie != RX_CLS_FLOW_DISC && rule->spec.ring_cookie >= channels->combined_count)
			return -EBUSY;
	}
	err = rig_remake(dev, nic->ring_size, channels->combined_count);
	if (!err && !netif_is_rxfh_configured(dev))
		rig_spread(nic, nic->tables[0]);
	return err;
}

/* ---- spreading ---- */

static u32 rig_get_ring_count(struct net_device *dev)
{
	return dev->real_num_rx_queues;
}

static u32 rig_get_key_size(struct net_device *dev)
{
	return RIG_KEY;
}

static u32 rig_get_table_size(struct net_device *dev)
{
	return RIG_TABLE;
}

static int rig_get_rxfh(struct net_device *dev, struct ethtool_rxfh_param *said)
{
	struct rig_nic *nic = netdev_priv(dev);

	said->hfunc = ETH_RSS_HASH_TOP;
	if (said->indir)
		memcpy(said->indir, nic->tables[0], sizeof(nic->tables[0]));
	if (said->key)
		memcpy(said->key, nic->key, sizeof(nic->key));
	return 0;
}

static int rig_set_table(struct net_device *dev, u32 context, const struct ethtool_rxfh_param *wanted)
{
	struct rig_nic *nic = netdev_priv(dev);

	if (wanted->hfunc != ETH_RSS_HASH_NO_CHANGE && wanted->hfunc != ETH_RSS_HASH_TOP)
		return -EOPNOTSUPP;
	spin_lock_bh(&nic->steering);
	if (wanted->indir)
		memcpy(nic->tables[context], wanted->indir, sizeof(nic->tables[context]));
	/* All tables have one key. */
	if (wanted->key && !context)
		memcpy(nic->key, wanted->key, sizeof(nic->key));
	spin_unlock_bh(&nic->steering);
	return 0;
}

static int rig_set_rxfh(struct net_device *dev, struct ethtool_rxfh_param *wanted, struct netlink_ext_ack *extack)
{
	return rig_set_table(dev, 0, wanted);
}

static int rig_create_context(struct net_device *dev, struct ethtool_rxfh_context *context,
			      const struct ethtool_rxfh_param *wanted, struct netlink_ext_ack *extack)
{
	struct rig_nic *nic = netdev_priv(dev);

	rig_spread(nic, nic->tables[wanted->rss_context]);
	/* Who asks for none gets this one. */
	memcpy(ethtool_rxfh_context_indir(context), nic->tables[wanted->rss_context], sizeof(nic->tables[0]));
	memcpy(ethtool_rxfh_context_key(context), nic->key, sizeof(nic->key));
	context->hfunc = ETH_RSS_HASH_TOP;
	return rig_set_table(dev, wanted->rss_context, wanted);
}

static int rig_modify_context(struct net_device *dev, struct ethtool_rxfh_context *context,
			      const struct ethtool_rxfh_param *wanted, struct netlink_ext_ack *extack)
{
	return rig_set_table(dev, wanted->rss_context, wanted);
}

/* The kernel lets no context go that a rule names. */
static int rig_remove_context(struct net_device *dev, struct ethtool_rxfh_context *context, u32 number,
			      struct netlink_ext_ack *extack)
{
	struct rig_nic *nic = netdev_priv(dev);
	u32 location;

	for (location = 0; location < RIG_RULES; location++) {
		const struct rig_rule *rule = &nic->rules[location];

		if (rule->is_used && rule->context == number)
			return -EBUSY;
	}
	return 0;
}

/* ---- rules ---- */

static int rig_get_rxnfc(struct net_device *dev, struct ethtool_rxnfc *asked, u32 *locations)
{
	struct rig_nic *nic = netdev_priv(dev);
	const struct rig_rule *rule;
	u32 count = 0;

	switch (asked->cmd) {
	case ETHTOOL_GRXCLSRLCNT:
		asked->rule_cnt = rig_count_rules(nic);
		asked->data = RIG_RULES;
		return 0;
	case ETHTOOL_GRXCLSRULE:
		if (asked->fs.location >= RIG_RULES || !nic->rules[asked->fs.location].is_used)
			return -ENOENT;
		rule = &nic->rules[asked->fs.location];
		asked->fs = rule->spec;
		if (rule->spec.flow_type & FLOW_RSS)
			asked->rss_context = rule->context;
		return 0;
	case ETHTOOL_GRXCLSRLALL:
		asked->data = RIG_RULES;
		for (rule = nic->rules; rule < nic->rules + RIG_RULES; rule++) {
			if (!rule->is_used)
				continue;
			if (count == asked->rule_cnt)
				return -EMSGSIZE;
			locations[count++] = rule - nic->rules;
		}
		asked->rule_cnt = count;
		return 0;
	default:
		return -EOPNOTSUPP;
	}
}

static int rig_set_rxnfc(struct net_device *dev, struct ethtool_rxnfc *wanted)
{
	struct rig_nic *nic = netdev_priv(dev);

	switch (wanted->cmd) {
	case ETHTOOL_SRXCLSRLINS:
		return rig_add_rule(nic, wanted);
	case ETHTOOL_SRXCLSRLDEL:
		return rig_remove_rule(nic, wanted->fs.location);
	default:
		return -EOPNOTSUPP;
	}
}

/* ---- counters ---- */

struct rig_counter {
	const char *name;
	size_t place;
};

#define RIG_COUNTER(member) { #member, offsetof(struct rig_queue, member) }

static const struct rig_counter rig_counters[] = {
	RIG_COUNTER(frames), RIG_COUNTER(split_bytes), RIG_COUNTER(no_buffer), RIG_COUNTER(lost),
	RIG_COUNTER(too_long), RIG_COUNTER(lent_frames), RIG_COUNTER(lent_sent), RIG_COUNTER(passed),
	RIG_COUNTER(dropped), RIG_COUNTER(aborted), RIG_COUNTER(sent_back), RIG_COUNTER(redirected),
};

static int rig_get_sset_count(struct net_device *dev, int set)
{
	return set == ETH_SS_STATS ? RIG_QUEUES * ARRAY_SIZE(rig_counters) : -EOPNOTSUPP;
}

static void rig_get_strings(struct net_device *dev, u32 set, u8 *text)
{
	int queue, counter;

	for (queue = 0; set == ETH_SS_STATS && queue < RIG_QUEUES; queue++) {
		for (counter = 0; counter < ARRAY_SIZE(rig_counters); counter++)
			ethtool_sprintf(&text, "rx%d_%s", queue, rig_counters[counter].name);
	}
}

static void rig_get_ethtool_stats(struct net_device *dev, struct ethtool_stats *stats, u64 *values)
{
	struct rig_nic *nic = netdev_priv(dev);
	const struct rig_counter *counter;
	const struct rig_queue *queue;

	for (queue = nic->queues; queue < nic->queues + RIG_QUEUES; queue++) {
		for (counter = rig_counters; counter < rig_counters + ARRAY_SIZE(rig_counters); counter++)
			*values++ = *(const u64 *)((const char *)queue + counter->place);
	}
}

const struct ethtool_ops rig_ethtool_ops = {
	.supported_ring_params = ETHTOOL_RING_USE_TCP_DATA_SPLIT | ETHTOOL_RING_USE_HDS_THRS,
	.op_needs_rtnl = ETHTOOL_OP_NEEDS_RTNL_SRINGPARAM | ETHTOOL_OP_NEEDS_RTNL_SCHANNELS,
	.rxfh_max_num_contexts = RIG_CONTEXTS,
	.get_link = ethtool_op_get_link,
	.get_ringparam = rig_get_ringparam,
	.set_ringparam = rig_set_ringparam,
	.get_channels = rig_get_channels,
	.set_channels = rig_set_channels,
	.get_rx_ring_count = rig_get_ring_count,
	.get_rxfh_key_size = rig_get_key_size,
	.get_rxfh_indir_size = rig_get_table_size,
	.get_rxfh = rig_get_rxfh,
	.set_rxfh = rig_set_rxfh,
	.create_rxfh_context = rig_create_context,
	.modify_rxfh_context = rig_modify_context,
	.remove_rxfh_context = rig_remove_context,
	.get_rxnfc = rig_get_rxnfc,
	.set_rxnfc = rig_set_rxnfc,
	.get_sset_count = rig_get_sset_count,
	.get_strings = rig_get_strings,
	.get_ethtool_stats = rig_get_ethtool_stats,
};
