// SPDX-License-Identifier: GPL-2.0-only
/*
 * xsk.c: AF_XDP sockets that have bound a queue in zero-copy. See rig_nic.h.
 *
 * A socket lends its memory. As long as it does, the queue's frames are written to its buffers, which are taken from
 * the fill ring beforehand and are with the NIC until a frame comes; and what is in its TX ring is sent by the queue's
 * poll function. Only the one queue stands while that begins and ends; frames on the wire to it are lost then, as with
 * NICs that stop a queue. What the stack is to have of a frame is copied.
 *
 * Waking: the kernel is to be woken for what is to be sent, always, and for buffers if the queue has had fewer than it
 * has places for.
 */
#include <linux/dma-mapping.h>
#include <linux/etherdevice.h>

#include "rig_nic.h"

/* ---- memory ---- */

int rig_set_pool(struct net_device *dev, struct xsk_buff_pool *pool, u16 index)
{
	struct rig_nic *nic = netdev_priv(dev);
	struct xsk_buff_pool *before;
	struct rig_queue *queue;
	struct rig_ring ring;
	bool is_running;
	int err = 0;

	if (index >= RIG_QUEUES)
		return -EINVAL;
	queue = &nic->queues[index];
	before = queue->pool;
	if (!pool == !before)
		return pool ? -EBUSY : 0;
	if (pool)
		err = xsk_pool_dma_map(pool, dev->dev.parent, 0);
	if (err)
		return err;
	is_running = netif_running(dev) && index < dev->real_num_rx_queues;
	if (is_running)
		rig_queue_stop(dev, &ring, index);
	queue->pool = pool;
	if (is_running)
		err = rig_queue_start(dev, NULL, &ring, index);
	/* It ran without a socket's memory, and does so again. */
	if (err && pool) {
		queue->pool = NULL;
		WARN_ON(rig_queue_start(dev, NULL, &ring, index));
	}
	if (!queue->pool)
		xsk_pool_dma_unmap(pool ? pool : before, 0);
	return err;
}

/* Posts what there are of the socket's buffers. */
void rig_post_lent(struct rig_queue *queue)
{
	struct xdp_buff *buffer;

	while (queue->lent_count < RIG_LENT) {
		buffer = xsk_buff_alloc(queue->pool);
		if (!buffer)
			break;
		queue->lent[(queue->lent_first + queue->lent_count++) % RIG_LENT] = buffer;
	}
	if (!xsk_uses_need_wakeup(queue->pool))
		return;
	if (queue->lent_count < RIG_LENT)
		xsk_set_rx_need_wakeup(queue->pool);
	else
		xsk_clear_rx_need_wakeup(queue->pool);
}

static struct xdp_buff *rig_take_lent(struct rig_queue *queue)
{
	struct xdp_buff *buffer;

	if (!queue->lent_count)
		return NULL;
	buffer = queue->lent[queue->lent_first];
	queue->lent_first = (queue->lent_first + 1) % RIG_LENT;
	queue->lent_count--;
	return buffer;
}

void rig_free_lent(struct rig_queue *queue)
{
	struct xdp_buff *buffer;

	while ((buffer = rig_take_lent(queue)))
		xsk_buff_free(buffer);
}

/* ---- receiving ---- */

/* A packet with a frame's bytes, whose buffer is free again. */
static struct sk_buff *rig_copy(struct rig_queue *queue, struct xdp_buff *xdp)
{
	u32 meta = xdp->data - xdp->data_meta, count = xdp->data_end - xdp->data_meta;
	struct sk_buff *skb = napi_alloc_skb(&queue->napi, count);

	if (skb) {
		skb_put_data(skb, xdp->data_meta, count);
		if (meta) {
			__skb_pull(skb, meta);
			skb_metadata_set(skb, meta);
		}
	}
	xsk_buff_free(xdp);
	return skb;
}

/*
 * Writes a frame into one of the socket's buffers, and has it judged there; NULL: the stack does not get it. Of a frame
 * that is too long the NIC writes what there is room for, and the driver keeps the buffer.
 */
struct sk_buff *rig_receive_lent(struct rig_queue *queue, struct bpf_prog *program, struct sk_buff *frame)
{
	u32 room = xsk_pool_get_rx_frame_size(queue->pool);
	struct xdp_buff *xdp = rig_take_lent(queue);

	XSK_CHECK_PRIV_TYPE(struct rig_buff);
	if (!xdp) {
		queue->no_buffer++;
		return NULL;
	}
	skb_copy_bits(frame, 0, phys_to_virt(xsk_buff_xdp_get_dma(xdp)), min(frame->len, room));
	if (frame->len > room) {
		queue->too_long++;
		xsk_buff_free(xdp);
		return NULL;
	}
	queue->lent_frames++;
	xsk_buff_set_size(xdp, frame->len);
	xsk_buff_dma_sync_for_cpu(xdp);
	container_of(xdp, struct rig_buff, xdp)->frame = frame;
	if (program && !rig_judge(queue, program, xdp))
		return NULL;
	return rig_copy(queue, xdp);
}

/* ---- sending ---- */

/* Sends what the socket has in its TX ring, so many frames at most, and says of each at once that it is done. */
u32 rig_send_lent(struct rig_queue *queue, u32 most)
{
	struct xsk_buff_pool *pool = queue->pool;
	const struct xdp_desc *frame;
	dma_addr_t place;
	u32 count;

	/* Before it looks: what comes later is told of. */
	if (xsk_uses_need_wakeup(pool))
		xsk_set_tx_need_wakeup(pool);
	count = xsk_tx_peek_release_desc_batch(pool, most);
	for (frame = pool->tx_descs; frame < pool->tx_descs + count; frame++) {
		place = xsk_buff_raw_get_dma(pool, frame->addr);
		xsk_buff_raw_dma_sync_for_device(pool, place, frame->len);
		if (rig_send_bytes(queue->nic, phys_to_virt(place), frame->len))
			queue->lent_sent++;
	}
	if (count)
		xsk_tx_completed(pool, count);
	return count;
}

/* Has the poll function look at the socket's rings. */
int rig_wakeup(struct net_device *dev, u32 index, u32 flags)
{
	struct rig_nic *nic = netdev_priv(dev);
	struct rig_queue *queue;

	if (!netif_running(dev))
		return -ENETDOWN;
	if (index >= dev->real_num_rx_queues || !READ_ONCE(nic->queues[index].pool))
		return -EINVAL;
	queue = &nic->queues[index];
	if (!napi_if_scheduled_mark_missed(&queue->napi)) {
		local_bh_disable();
		napi_schedule(&queue->napi);
		local_bh_enable();
	}
	return 0;
}
