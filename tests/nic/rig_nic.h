/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * rig_nic.h: a NIC that is none, with the queues that io_uring zero-copy receive needs.
 *
 * Theory of operation. Loaded into the guest of the kernel rig, this module makes a platform device, and of it two
 * interfaces, rig0 and rig1, that a wire joins: what one sends, the other receives. No NIC that QEMU plays has a
 * driver whose queues take memory of others; this one has. It does what such NICs do, for the same calls of the kernel:
 *
 *	| what						| where		|
 *	|-----------------------------------------------|---------------|
 *	| the interfaces, sending, the module		| nic.c		|
 *	| receive queues: buffers, header/data split	| queue.c	|
 *	| which queue: rules, RSS table and contexts	| steering.c	|
 *	| what ethtool(8) asks and says			| ethtool.c	|
 *
 * A sent frame stays what it is, a packet of the sender's, until the receiver's queue is polled. There it is copied as
 * a NIC would write it: headers into memory of the kernel, payload to the DMA addresses of buffers that were posted
 * before, which may be memory of a program that the kernel never maps. The device has no IOMMU, so that a DMA address
 * is where the memory is. A queue without a posted buffer drops the frame. A frame that is not to be split goes into
 * memory of the kernel as a whole.
 *
 * Locks. The kernel holds the interface's own (netdev_lock) when it opens and closes it, restarts a queue, or has
 * ethtool change something. `steering` protects rules and tables against senders, `wire.lock` a queue's frames.
 */
#ifndef RIG_NIC_H
#define RIG_NIC_H

#include <linux/ethtool.h>
#include <linux/netdevice.h>
#include <net/flow_dissector.h>
#include <net/netdev_queues.h>
#include <net/page_pool/helpers.h>

#define RIG_QUEUES	8
/* Frames on the wire to one queue. */
#define RIG_WIRE	1024
#define RIG_RING_MAX	1024
#define RIG_RULES	32
/* Entries of an RSS table; contexts, of which 0 is the main table. */
#define RIG_TABLE	64
#define RIG_CONTEXTS	8
#define RIG_KEY		40
#define RIG_HDS_MAX	1024
#define RIG_MTU_MAX	9000
/* What a steering function says of a frame that no queue gets. */
#define RIG_DROP	(-1)

/* A queue's memory, which the kernel exchanges as a whole. */
struct rig_ring {
	struct page_pool *pool;
	netmem_ref *posted;
	u32 buffer_bytes;
	/* Places, buffers in them, and the place of the first one. */
	u32 size, count, first;
};

struct rig_queue {
	struct rig_nic *nic;
	struct napi_struct napi;
	struct rig_ring ring;
	struct sk_buff_head wire;
	/* Under wire.lock. */
	bool is_open;
	u64 lost;
	/* Of the poll function. */
	u64 frames, split_bytes, no_buffer;
};

struct rig_rule {
	bool is_used;
	u32 context;
	struct ethtool_rx_flow_spec spec;
};

struct rig_nic {
	struct net_device *dev;
	struct rig_nic *peer;
	struct rig_queue queues[RIG_QUEUES];
	u32 ring_size;
	/* How long a payload must be to be split off, and whether it is at all. */
	u32 split_above;
	bool is_split;
	spinlock_t steering;
	struct rig_rule rules[RIG_RULES];
	u32 tables[RIG_CONTEXTS][RIG_TABLE];
	u8 key[RIG_KEY];
};

/* What is found out of a frame when it is sent, and is with it on the wire. */
struct rig_frame {
	u32 hash;
	/* Bytes of its headers, if it is TCP; else 0. */
	u16 headers;
	bool has_ports;
};

static inline struct rig_frame *rig_frame(struct sk_buff *skb)
{
	BUILD_BUG_ON(sizeof(struct rig_frame) > sizeof(skb->cb));
	return (struct rig_frame *)skb->cb;
}

/* queue.c */
extern const struct netdev_queue_mgmt_ops rig_queue_ops;
void rig_add_queues(struct rig_nic *nic);
void rig_give(struct rig_queue *queue, struct sk_buff *skb);
int rig_open(struct net_device *dev);
int rig_stop(struct net_device *dev);

/* steering.c */
int rig_steer(struct rig_nic *nic, struct sk_buff *skb);
void rig_spread(struct rig_nic *nic, u32 *table);
u32 rig_count_rules(const struct rig_nic *nic);
int rig_add_rule(struct rig_nic *nic, struct ethtool_rxnfc *wanted);
int rig_remove_rule(struct rig_nic *nic, u32 location);

/* ethtool.c */
extern const struct ethtool_ops rig_ethtool_ops;

#endif
