// SPDX-License-Identifier: GPL-2.0-only
/*
 * queue.c: receive queues. See rig_nic.h.
 *
 * A queue's memory (struct rig_ring) is made and let go apart from the queue, so that the kernel can make a new one,
 * with another's memory behind it, before it takes the old one away. Of which memory a page pool's buffers are it
 * learns from the number of its queue. Memory that an AF_XDP socket lends (xsk.c) is not in it: it comes and goes while
 * the queue stands, and takes the place of the ring's buffers meanwhile.
 */
#include <linux/dma-mapping.h>
#include <linux/etherdevice.h>
#include <linux/if_vlan.h>
#include <linux/log2.h>
#include <linux/sizes.h>

#include "rig_nic.h"

/* ---- buffers ---- */

/* Posts what there are of buffers. */
static void rig_post(struct rig_ring *ring)
{
	netmem_ref buffer;

	while (ring->count < ring->size) {
		buffer = page_pool_alloc_netmems(ring->pool, GFP_ATOMIC | __GFP_NOWARN);
		if (!buffer)
			break;
		ring->posted[(ring->first + ring->count++) % ring->size] = buffer;
	}
}

/* The first buffer of those that were posted; 0: there is none. */
netmem_ref rig_take(struct rig_ring *ring)
{
	netmem_ref buffer;

	if (!ring->count)
		return 0;
	buffer = ring->posted[ring->first];
	ring->first = (ring->first + 1) % ring->size;
	ring->count--;
	return buffer;
}

static int rig_mem_alloc(struct net_device *dev, struct netdev_queue_config *config, void *memory, int index)
{
	struct rig_nic *nic = netdev_priv(dev);
	struct rig_ring *ring = memory;
	struct page_pool_params params = {
		.order = ilog2(config->rx_page_size) - PAGE_SHIFT,
		.pool_size = nic->ring_size,
		.nid = NUMA_NO_NODE,
		.dev = dev->dev.parent,
		.dma_dir = DMA_FROM_DEVICE,
		.max_len = config->rx_page_size,
		.netdev = dev,
		.queue_idx = index,
		.flags = PP_FLAG_DMA_MAP | PP_FLAG_DMA_SYNC_DEV | PP_FLAG_ALLOW_UNREADABLE_NETMEM,
	};

	ring->posted = kvcalloc(nic->ring_size, sizeof(*ring->posted), GFP_KERNEL);
	if (!ring->posted)
		return -ENOMEM;
	ring->pool = page_pool_create(&params);
	if (IS_ERR(ring->pool)) {
		kvfree(ring->posted);
		return PTR_ERR(ring->pool);
	}
	ring->size = nic->ring_size;
	ring->buffer_bytes = config->rx_page_size;
	return 0;
}

static void rig_mem_free(struct net_device *dev, void *memory)
{
	struct rig_ring *ring = memory;
	netmem_ref buffer;

	while ((buffer = rig_take(ring)))
		page_pool_put_full_netmem(ring->pool, buffer, false);
	page_pool_destroy(ring->pool);
	kvfree(ring->posted);
}

/* ---- frames ---- */

void rig_give(struct rig_queue *queue, struct sk_buff *skb)
{
	bool is_taken, is_called;

	spin_lock_bh(&queue->wire.lock);
	is_taken = queue->is_open && skb_queue_len(&queue->wire) < RIG_WIRE;
	is_called = is_taken && queue->is_armed;
	if (is_taken)
		__skb_queue_tail(&queue->wire, skb);
	else
		queue->lost++;
	if (is_called)
		queue->is_armed = false;
	spin_unlock_bh(&queue->wire.lock);
	if (is_called)
		napi_schedule(&queue->napi);
	if (!is_taken)
		dev_kfree_skb_any(skb);
}

/* The next frame brings an interrupt; if it has come meanwhile, now. */
static void rig_arm(struct rig_queue *queue)
{
	spin_lock_bh(&queue->wire.lock);
	queue->is_armed = skb_queue_empty(&queue->wire);
	if (!queue->is_armed)
		napi_schedule(&queue->napi);
	spin_unlock_bh(&queue->wire.lock);
}

/* How many bytes of a frame go into memory of the kernel. */
static u32 rig_kernel_bytes(const struct rig_nic *nic, struct sk_buff *frame)
{
	u32 headers = rig_frame(frame)->headers;

	if (!READ_ONCE(nic->is_split) || !headers || frame->len - headers <= READ_ONCE(nic->split_above))
		return frame->len;
	return headers;
}

/* A packet for the stack, as it would be if the frame had come by DMA; NULL: there was no room. */
static struct sk_buff *rig_write(struct rig_queue *queue, struct sk_buff *frame)
{
	struct rig_ring *ring = &queue->ring;
	u32 at = rig_kernel_bytes(queue->nic, frame), part;
	struct sk_buff *skb;
	netmem_ref buffer;
	void *memory;

	skb = napi_alloc_skb(&queue->napi, at);
	if (!skb) {
		queue->no_buffer++;
		return NULL;
	}
	skb_mark_for_recycle(skb);
	skb_copy_bits(frame, 0, skb_put(skb, at), at);
	for (; at < frame->len; at += part) {
		buffer = rig_take(ring);
		if (!buffer) {
			queue->no_buffer++;
			kfree_skb(skb);
			return NULL;
		}
		part = min(frame->len - at, ring->buffer_bytes);
		memory = phys_to_virt(page_pool_get_dma_addr_netmem(buffer));
		skb_copy_bits(frame, at, memory, part);
		page_pool_dma_sync_netmem_for_cpu(ring->pool, buffer, 0, part);
		skb_add_rx_frag_netmem(skb, skb_shinfo(skb)->nr_frags, buffer, 0, part, ring->buffer_bytes);
		queue->split_bytes += part;
	}
	return skb;
}

/* Takes a VLAN tag off a frame before it is written, where that is wanted. */
static void rig_take_tag(struct rig_queue *queue, struct sk_buff *frame)
{
	struct rig_frame *known = rig_frame(frame);
	struct vlan_ethhdr *headers;

	if (!(queue->nic->dev->features & NETIF_F_HW_VLAN_CTAG_RX) || skb_headlen(frame) < VLAN_ETH_HLEN)
		return;
	headers = (struct vlan_ethhdr *)frame->data;
	/* The sender may have it still. */
	if (headers->h_vlan_proto != htons(ETH_P_8021Q) || skb_ensure_writable(frame, VLAN_ETH_HLEN))
		return;
	headers = (struct vlan_ethhdr *)frame->data;
	known->tag = ntohs(headers->h_vlan_TCI);
	known->has_tag = true;
	if (known->headers)
		known->headers -= VLAN_HLEN;
	memmove(frame->data + VLAN_HLEN, frame->data, 2 * ETH_ALEN);
	__skb_pull(frame, VLAN_HLEN);
}

/* Into whose memory a frame is written, and what the stack gets of it; NULL: nothing. */
static struct sk_buff *rig_place(struct rig_queue *queue, struct sk_buff *frame)
{
	struct bpf_prog *program = READ_ONCE(queue->nic->program);
	struct sk_buff *skb;

	if (queue->pool)
		return rig_receive_lent(queue, program, frame);
	if (program)
		return rig_receive_judged(queue, program, frame);
	skb = rig_write(queue, frame);
	/* Nobody else can: the kernel does not see the payload. */
	if (skb && (queue->nic->dev->features & NETIF_F_RXCSUM)) {
		skb->csum = skb_checksum(frame, ETH_HLEN, frame->len - ETH_HLEN, 0);
		skb->ip_summed = CHECKSUM_COMPLETE;
	}
	return skb;
}

static void rig_receive(struct rig_queue *queue, struct sk_buff *frame)
{
	u64 unplaced = queue->no_buffer + queue->too_long;
	struct net_device *dev = queue->nic->dev;
	struct sk_buff *skb;
	u16 hash_type;

	queue->frames++;
	rig_take_tag(queue, frame);
	skb = rig_place(queue, frame);
	if (queue->no_buffer + queue->too_long != unplaced) {
		dev_core_stats_rx_dropped_inc(dev);
		return;
	}
	dev_sw_netstats_rx_add(dev, frame->len);
	if (!skb)
		return;
	hash_type = rig_frame(frame)->hash_type;
	if (hash_type && (dev->features & NETIF_F_RXHASH))
		skb_set_hash(skb, rig_frame(frame)->hash,
			     hash_type & XDP_RSS_L4 ? PKT_HASH_TYPE_L4 : PKT_HASH_TYPE_L3);
	if (rig_frame(frame)->has_tag)
		__vlan_hwaccel_put_tag(skb, htons(ETH_P_8021Q), rig_frame(frame)->tag);
	skb_record_rx_queue(skb, queue - queue->nic->queues);
	skb->protocol = eth_type_trans(skb, dev);
	napi_gro_receive(&queue->napi, skb);
}

static void rig_post_all(struct rig_queue *queue)
{
	rig_post(&queue->ring);
	if (queue->pool)
		rig_post_lent(queue);
}

static int rig_poll(struct napi_struct *napi, int budget)
{
	struct rig_queue *queue = container_of(napi, struct rig_queue, napi);
	struct sk_buff *frame;
	int received = 0, sent = 0;

	if (!budget)
		return 0;
	rig_post_all(queue);
	while (received < budget && (frame = skb_dequeue(&queue->wire))) {
		rig_receive(queue, frame);
		napi_consume_skb(frame, budget);
		received++;
	}
	if (queue->has_redirected)
		xdp_do_flush();
	queue->has_redirected = false;
	if (queue->pool)
		sent = rig_send_lent(queue, budget);
	rig_post_all(queue);
	if (received == budget || sent == budget)
		return budget;
	if (napi_complete_done(napi, received))
		rig_arm(queue);
	return received;
}

/* ---- starting and stopping ---- */

/* What programs and sockets are told of the queue's memory. */
static int rig_tell(struct rig_queue *queue)
{
	int index = queue - queue->nic->queues, err;

	err = xdp_rxq_info_reg(&queue->info, queue->nic->dev, index, queue->napi.napi_id);
	if (err)
		return err;
	if (queue->pool) {
		err = xdp_rxq_info_reg_mem_model(&queue->info, MEM_TYPE_XSK_BUFF_POOL, NULL);
		xsk_pool_set_rxq_info(queue->pool, &queue->info);
	} else {
		err = xdp_rxq_info_reg_mem_model(&queue->info, MEM_TYPE_PAGE_POOL, queue->ring.pool);
	}
	if (err)
		xdp_rxq_info_unreg(&queue->info);
	return err;
}

int rig_queue_start(struct net_device *dev, struct netdev_queue_config *config, void *memory, int index)
{
	struct rig_nic *nic = netdev_priv(dev);
	struct rig_queue *queue = &nic->queues[index];
	int err;

	queue->ring = *(struct rig_ring *)memory;
	err = rig_tell(queue);
	if (err) {
		memset(&queue->ring, 0, sizeof(queue->ring));
		return err;
	}
	local_bh_disable();
	rig_post_all(queue);
	local_bh_enable();
	napi_enable_locked(&queue->napi);
	spin_lock_bh(&queue->wire.lock);
	queue->is_open = true;
	queue->is_armed = true;
	/* What a socket gave to be sent while the queue stood. */
	if (queue->pool)
		napi_schedule(&queue->napi);
	spin_unlock_bh(&queue->wire.lock);
	return 0;
}

int rig_queue_stop(struct net_device *dev, void *memory, int index)
{
	struct rig_nic *nic = netdev_priv(dev);
	struct rig_queue *queue = &nic->queues[index];

	spin_lock_bh(&queue->wire.lock);
	queue->is_open = false;
	spin_unlock_bh(&queue->wire.lock);
	napi_disable_locked(&queue->napi);
	skb_queue_purge(&queue->wire);
	rig_free_lent(queue);
	xdp_rxq_info_unreg(&queue->info);
	*(struct rig_ring *)memory = queue->ring;
	memset(&queue->ring, 0, sizeof(queue->ring));
	return 0;
}

static void rig_close_queues(struct net_device *dev, int count)
{
	struct rig_ring ring;

	while (count--) {
		netif_queue_set_napi(dev, count, NETDEV_QUEUE_TYPE_RX, NULL);
		netif_queue_set_napi(dev, count, NETDEV_QUEUE_TYPE_TX, NULL);
		rig_queue_stop(dev, &ring, count);
		rig_mem_free(dev, &ring);
	}
}

int rig_open(struct net_device *dev)
{
	struct rig_nic *nic = netdev_priv(dev);
	struct netdev_queue_config config;
	struct rig_ring ring;
	int index, err;

	for (index = 0; index < dev->real_num_rx_queues; index++) {
		memset(&ring, 0, sizeof(ring));
		netdev_queue_config(dev, index, &config);
		err = rig_mem_alloc(dev, &config, &ring, index);
		if (err) {
			rig_close_queues(dev, index);
			return err;
		}
		err = rig_queue_start(dev, &config, &ring, index);
		if (err) {
			rig_mem_free(dev, &ring);
			rig_close_queues(dev, index);
			return err;
		}
		netif_queue_set_napi(dev, index, NETDEV_QUEUE_TYPE_RX, &nic->queues[index].napi);
		netif_queue_set_napi(dev, index, NETDEV_QUEUE_TYPE_TX, &nic->queues[index].napi);
	}
	netif_tx_start_all_queues(dev);
	return 0;
}

int rig_stop(struct net_device *dev)
{
	netif_tx_disable(dev);
	rig_close_queues(dev, dev->real_num_rx_queues);
	return 0;
}

void rig_add_queues(struct rig_nic *nic)
{
	struct rig_queue *queue;

	for (queue = nic->queues; queue < nic->queues + RIG_QUEUES; queue++) {
		queue->nic = nic;
		skb_queue_head_init(&queue->wire);
		netif_napi_add_config(nic->dev, &queue->napi, rig_poll, queue - nic->queues);
	}
}

static void rig_default_config(struct net_device *dev, struct netdev_queue_config *config)
{
	config->rx_page_size = PAGE_SIZE;
}

static int rig_validate_config(struct net_device *dev, struct netdev_queue_config *config,
			       struct netlink_ext_ack *extack)
{
	if (is_power_of_2(config->rx_page_size) && config->rx_page_size >= PAGE_SIZE && config->rx_page_size <= SZ_64K)
		return 0;
	NL_SET_ERR_MSG(extack, "buffers have a power of two of bytes, from a page to 64 KiB");
	return -EINVAL;
}

static struct device *rig_dma_device(struct net_device *dev, int index)
{
	return dev->dev.parent;
}

const struct netdev_queue_mgmt_ops rig_queue_ops = {
	.ndo_queue_mem_size = sizeof(struct rig_ring),
	.ndo_queue_mem_alloc = rig_mem_alloc,
	.ndo_queue_mem_free = rig_mem_free,
	.ndo_queue_start = rig_queue_start,
	.ndo_queue_stop = rig_queue_stop,
	.ndo_default_qcfg = rig_default_config,
	.ndo_validate_qcfg = rig_validate_config,
	.ndo_queue_get_dma_dev = rig_dma_device,
	.supported_params = QCFG_RX_PAGE_SIZE,
};
