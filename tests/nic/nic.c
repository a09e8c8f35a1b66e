// SPDX-License-Identifier: GPL-2.0-only
/*
 * nic.c: the two interfaces, what they send, and the module. See rig_nic.h.
 *
 * A sender's packet is not taken from its socket before it is received, as with a NIC that says late that it has sent:
 * that bounds what TCP sends ahead.
 */
#include <linux/dma-mapping.h>
#include <linux/etherdevice.h>
#include <linux/module.h>
#include <linux/platform_device.h>

#include "rig_nic.h"

static bool split;
module_param(split, bool, 0444);
MODULE_PARM_DESC(split, "header/data split is on from the start: ethtool(8) says so from 6.13 on only");

static struct platform_device *rig_device;
static struct rig_nic *rig_ends[2];

/* Puts a frame on the wire, which takes it; false: nobody is there, and it is the caller's. */
bool rig_send(struct rig_nic *nic, struct sk_buff *skb)
{
	struct rig_nic *peer = nic->peer;
	int queue = RIG_DROP;

	if (netif_running(peer->dev))
		queue = rig_steer(peer, skb);
	if (queue == RIG_DROP) {
		dev_core_stats_tx_dropped_inc(nic->dev);
		return false;
	}
	rig_frame(skb)->time = ktime_get_real_ns();
	dev_sw_netstats_tx_add(nic->dev, 1, skb->len);
	rig_give(&peer->queues[queue], skb);
	return true;
}

/* The same of bytes, which are copied. */
bool rig_send_bytes(struct rig_nic *nic, const void *bytes, u32 count)
{
	struct sk_buff *skb = netdev_alloc_skb(nic->dev, count);

	if (!skb) {
		dev_core_stats_tx_dropped_inc(nic->dev);
		return false;
	}
	skb_put_data(skb, bytes, count);
	if (rig_send(nic, skb))
		return true;
	dev_kfree_skb_any(skb);
	return false;
}

static netdev_tx_t rig_xmit(struct sk_buff *skb, struct net_device *dev)
{
	if (skb->ip_summed == CHECKSUM_PARTIAL && skb_checksum_help(skb)) {
		dev_core_stats_tx_dropped_inc(dev);
		goto drop;
	}
	skb_tx_timestamp(skb);
	if (rig_send(netdev_priv(dev), skb))
		return NETDEV_TX_OK;
drop:
	dev_kfree_skb_any(skb);
	return NETDEV_TX_OK;
}

static const struct net_device_ops rig_netdev_ops = {
	.ndo_open = rig_open,
	.ndo_stop = rig_stop,
	.ndo_start_xmit = rig_xmit,
	.ndo_set_mac_address = eth_mac_addr,
	.ndo_validate_addr = eth_validate_addr,
	.ndo_change_mtu = rig_change_mtu,
	.ndo_bpf = rig_bpf,
	.ndo_xdp_xmit = rig_xdp_xmit,
	.ndo_xsk_wakeup = rig_wakeup,
};

static struct rig_nic *rig_make(struct device *parent, unsigned int number)
{
	const u8 address[ETH_ALEN] = { 0x52, 0x54, 0x00, 0x00, 0x72, number };
	struct net_device *dev;
	struct rig_nic *nic;
	int context;

	dev = alloc_etherdev_mqs(sizeof(*nic), RIG_QUEUES, RIG_QUEUES);
	if (!dev)
		return NULL;
	nic = netdev_priv(dev);
	nic->dev = dev;
	nic->ring_size = 64;
	nic->is_split = split;
	dev->cfg->hds_config = split ? ETHTOOL_TCP_DATA_SPLIT_ENABLED : ETHTOOL_TCP_DATA_SPLIT_UNKNOWN;
	spin_lock_init(&nic->steering);
	get_random_bytes(nic->key, sizeof(nic->key));
	SET_NETDEV_DEV(dev, parent);
	snprintf(dev->name, sizeof(dev->name), "rig%u", number);
	eth_hw_addr_set(dev, address);
	dev->netdev_ops = &rig_netdev_ops;
	dev->ethtool_ops = &rig_ethtool_ops;
	dev->queue_mgmt_ops = &rig_queue_ops;
	dev->xdp_metadata_ops = &rig_metadata_ops;
	dev->xdp_features = NETDEV_XDP_ACT_BASIC | NETDEV_XDP_ACT_REDIRECT | NETDEV_XDP_ACT_NDO_XMIT |
			    NETDEV_XDP_ACT_XSK_ZEROCOPY;
	dev->pcpu_stat_type = NETDEV_PCPU_STAT_TSTATS;
	dev->hw_features = NETIF_F_SG | NETIF_F_HW_CSUM | NETIF_F_RXCSUM | NETIF_F_RXHASH | NETIF_F_NTUPLE |
			   NETIF_F_HW_VLAN_CTAG_RX;
	dev->features = dev->hw_features | NETIF_F_HIGHDMA;
	dev->vlan_features = NETIF_F_SG | NETIF_F_HW_CSUM | NETIF_F_HIGHDMA;
	dev->max_mtu = RIG_MTU_MAX;
	netif_set_real_num_queues(dev, 4, 4);
	for (context = 0; context < RIG_CONTEXTS; context++)
		rig_spread(nic, nic->tables[context]);
	rig_add_queues(nic);
	return nic;
}

static void rig_remove(struct platform_device *device)
{
	int end;

	/* Both are away before one's memory is. */
	for (end = 0; end < ARRAY_SIZE(rig_ends); end++) {
		if (rig_ends[end] && rig_ends[end]->dev->reg_state == NETREG_REGISTERED)
			unregister_netdev(rig_ends[end]->dev);
	}
	for (end = 0; end < ARRAY_SIZE(rig_ends); end++) {
		if (rig_ends[end])
			free_netdev(rig_ends[end]->dev);
	}
}

static int rig_probe(struct platform_device *device)
{
	int end, err;

	err = dma_coerce_mask_and_coherent(&device->dev, DMA_BIT_MASK(64));
	for (end = 0; !err && end < ARRAY_SIZE(rig_ends); end++) {
		rig_ends[end] = rig_make(&device->dev, end);
		if (!rig_ends[end])
			err = -ENOMEM;
	}
	if (err)
		goto remove;
	rig_ends[0]->peer = rig_ends[1];
	rig_ends[1]->peer = rig_ends[0];
	for (end = 0; !err && end < ARRAY_SIZE(rig_ends); end++)
		err = register_netdev(rig_ends[end]->dev);
	if (!err)
		return 0;
remove:
	rig_remove(device);
	return err;
}

/* There is one device, which stays as long as the module does. */
static struct platform_driver rig_driver = {
	.driver = { .name = "rig_nic", .suppress_bind_attrs = true },
	.probe = rig_probe,
	.remove = rig_remove,
};

static int __init rig_init(void)
{
	int err = platform_driver_register(&rig_driver);

	if (err)
		return err;
	rig_device = platform_device_register_simple("rig_nic", PLATFORM_DEVID_NONE, NULL, 0);
	if (IS_ERR(rig_device)) {
		platform_driver_unregister(&rig_driver);
		return PTR_ERR(rig_device);
	}
	return 0;
}

static void __exit rig_exit(void)
{
	platform_device_unregister(rig_device);
	platform_driver_unregister(&rig_driver);
}

module_init(rig_init);
module_exit(rig_exit);
MODULE_DESCRIPTION("A pair of interfaces whose queues take memory of programs, for tests");
MODULE_LICENSE("GPL");
