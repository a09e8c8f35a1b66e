// SPDX-License-Identifier: GPL-2.0-only
/*
 * xdp.c: XDP programs, and what they may ask of a frame. See rig_nic.h.
 *
 * A program comes and goes while the queues run: each frame is judged by the one that is there when it is received.
 * It sees frames that lie in one buffer as a whole. So the MTU is at most what has room in one beside what the kernel
 * wants before and behind a frame, and headers are not split off while there is a program.
 */
#include <linux/bpf_trace.h>
#include <linux/etherdevice.h>
#include <linux/filter.h>
#include <linux/if_vlan.h>

#include "rig_nic.h"

/* What a buffer has beside a frame, and the longest MTU that is left, with two tags. */
#define RIG_XDP_ROOM	(XDP_PACKET_HEADROOM + SKB_DATA_ALIGN(sizeof(struct skb_shared_info)))
#define RIG_XDP_MTU	((int)(PAGE_SIZE - RIG_XDP_ROOM - ETH_HLEN - 2 * VLAN_HLEN))

/* ---- setting up ---- */

static int rig_set_program(struct net_device *dev, struct bpf_prog *program, struct netlink_ext_ack *extack)
{
	struct rig_nic *nic = netdev_priv(dev);
	struct bpf_prog *before;

	if (program && dev->mtu > RIG_XDP_MTU) {
		NL_SET_ERR_MSG(extack, "the MTU is too large for an XDP program, which sees frames in one buffer");
		return -EINVAL;
	}
	before = xchg(&nic->program, program);
	if (before)
		bpf_prog_put(before);
	return 0;
}

int rig_bpf(struct net_device *dev, struct netdev_bpf *wanted)
{
	switch (wanted->command) {
	case XDP_SETUP_PROG:
		return rig_set_program(dev, wanted->prog, wanted->extack);
	case XDP_SETUP_XSK_POOL:
		return rig_set_pool(dev, wanted->xsk.pool, wanted->xsk.queue_id);
	default:
		return -EINVAL;
	}
}

int rig_change_mtu(struct net_device *dev, int mtu)
{
	struct rig_nic *nic = netdev_priv(dev);

	if (nic->program && mtu > RIG_XDP_MTU)
		return -EINVAL;
	WRITE_ONCE(dev->mtu, mtu);
	return 0;
}

/* ---- frames ---- */

/* Has a program judge a frame: true: the stack is to have it. Else its buffer is somebody else's now, or free again. */
bool rig_judge(struct rig_queue *queue, struct bpf_prog *program, struct xdp_buff *xdp)
{
	struct net_device *dev = queue->nic->dev;
	u32 verdict = bpf_prog_run_xdp(program, xdp);

	switch (verdict) {
	case XDP_PASS:
		queue->passed++;
		return true;
	case XDP_DROP:
		queue->dropped++;
		break;
	case XDP_TX:
		if (!rig_send_bytes(queue->nic, xdp->data, xdp->data_end - xdp->data))
			goto aborted;
		queue->sent_back++;
		break;
	case XDP_REDIRECT:
		if (xdp_do_redirect(dev, xdp, program))
			goto aborted;
		queue->has_redirected = true;
		queue->redirected++;
		return false;
	default:
		bpf_warn_invalid_xdp_action(dev, program, verdict);
		fallthrough;
	case XDP_ABORTED:
aborted:
		trace_xdp_exception(dev, program, verdict);
		queue->aborted++;
	}
	xdp_return_buff(xdp);
	return false;
}

/* A packet of the buffer that a frame is in. */
static struct sk_buff *rig_build(struct xdp_buff *xdp)
{
	struct sk_buff *skb = napi_build_skb(xdp->data_hard_start, xdp->frame_sz);

	if (!skb) {
		xdp_return_buff(xdp);
		return NULL;
	}
	skb_mark_for_recycle(skb);
	skb_reserve(skb, xdp->data - xdp->data_hard_start);
	__skb_put(skb, xdp->data_end - xdp->data);
	if (xdp->data > xdp->data_meta)
		skb_metadata_set(skb, xdp->data - xdp->data_meta);
	return skb;
}

/* Writes a frame into one of the ring's buffers, and has it judged there; NULL: the stack does not get it. */
struct sk_buff *rig_receive_judged(struct rig_queue *queue, struct bpf_prog *program, struct sk_buff *frame)
{
	struct rig_ring *ring = &queue->ring;
	struct rig_buff buff = { .frame = frame };
	netmem_ref buffer;
	void *memory;

	if (frame->len > ring->buffer_bytes - RIG_XDP_ROOM) {
		queue->too_long++;
		return NULL;
	}
	buffer = rig_take(ring);
	if (!buffer) {
		queue->no_buffer++;
		return NULL;
	}
	memory = phys_to_virt(page_pool_get_dma_addr_netmem(buffer));
	skb_copy_bits(frame, 0, memory + XDP_PACKET_HEADROOM, frame->len);
	page_pool_dma_sync_netmem_for_cpu(ring->pool, buffer, XDP_PACKET_HEADROOM, frame->len);
	xdp_init_buff(&buff.xdp, ring->buffer_bytes, &queue->info);
	xdp_prepare_buff(&buff.xdp, memory, XDP_PACKET_HEADROOM, frame->len, true);
	return rig_judge(queue, program, &buff.xdp) ? rig_build(&buff.xdp) : NULL;
}

/* Sends what a program of another interface has sent here. */
int rig_xdp_xmit(struct net_device *dev, int count, struct xdp_frame **frames, u32 flags)
{
	int sent;

	if (flags & ~XDP_XMIT_FLAGS_MASK)
		return -EINVAL;
	if (!netif_running(dev))
		return -ENETDOWN;
	for (sent = 0; sent < count; sent++) {
		struct xdp_frame *frame = frames[sent];

		if (xdp_frame_has_frags(frame) || !rig_send_bytes(netdev_priv(dev), frame->data, frame->len))
			break;
		xdp_return_frame_rx_napi(frame);
	}
	return sent;
}

/* ---- what programs may ask ---- */

static int rig_get_timestamp(const struct xdp_md *ctx, u64 *timestamp)
{
	const struct rig_buff *buff = (const void *)ctx;

	*timestamp = rig_frame(buff->frame)->time;
	return 0;
}

static int rig_get_hash(const struct xdp_md *ctx, u32 *hash, enum xdp_rss_hash_type *type)
{
	const struct rig_buff *buff = (const void *)ctx;
	const struct rig_frame *frame = rig_frame(buff->frame);

	if (!(buff->xdp.rxq->dev->features & NETIF_F_RXHASH) || !frame->hash_type)
		return -ENODATA;
	*hash = frame->hash;
	*type = frame->hash_type;
	return 0;
}

static int rig_get_tag(const struct xdp_md *ctx, __be16 *protocol, u16 *tag)
{
	const struct rig_buff *buff = (const void *)ctx;
	const struct rig_frame *frame = rig_frame(buff->frame);

	if (!frame->has_tag)
		return -ENODATA;
	*protocol = htons(ETH_P_8021Q);
	*tag = frame->tag;
	return 0;
}

const struct xdp_metadata_ops rig_metadata_ops = {
	.xmo_rx_timestamp = rig_get_timestamp,
	.xmo_rx_hash = rig_get_hash,
	.xmo_rx_vlan_tag = rig_get_tag,
};
