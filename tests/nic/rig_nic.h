/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * rig_nic.h: a NIC that is none, with queues that take memory of programs: io_uring's and AF_XDP's.
 *
 * Theory of operation. Loaded into the guest of the kernel rig, this module makes a platform device, and of it two
 * interfaces, rig0 and rig1, that a wire joins: what one sends, the other receives. No NIC that QEMU plays has a
 * driver whose queues take memory of others; this one has. It does what such NICs do, for the same calls of the kernel:
 *
 *	| what						| where		|
 *	|-----------------------------------------------|---------------|
 *	| the interfaces, sending, the module		| nic.c		|
 *	| queues: buffers, header/data split		| queue.c	|
 *	| XDP programs, and what they may ask		| xdp.c		|
 *	| AF_XDP sockets in zero-copy			| xsk.c		|
 *	| which queue: rules, RSS table and contexts	| steering.c	|
 *	| what ethtool(8) asks and says			| ethtool.c	|
 *
 * A sent frame stays what it is, a packet of the sender's, until the receiver's queue is polled. There it is copied as
 * a NIC would write it: headers into memory of the kernel, payload to the DMA addresses of buffers that were posted
 * before, which may be memory of a program that the kernel never maps. The device has no IOMMU, so that a DMA address
 * is where the memory is. A queue without a posted buffer drops the frame. A frame that is not to be split goes into
 * memory of the kernel as a whole.
 *
 * With an XDP program each frame is written as a whole into one posted buffer, and the program judges it there; where
 * an AF_XDP socket has bound a queue in zero-copy, the buffer is one of the socket's. What such a socket or a program
 * sends is copied when it is sent, by the DMA address that it has, and what it was in is given back. A frame that is
 * longer than its buffer is dropped. The kernel sees to it that an interface has either a program or queues with memory
 * of io_uring.
 *
 * A queue's interrupt comes once, with the next frame, and again only after its poll function has said that it is done:
 * so who polls by himself (busy polling) has no interrupts, as with a real NIC.
 *
 * Locks. The kernel holds the interface's own (netdev_lock) when it opens and closes it, restarts a queue, or has
 * ethtool change something, when a program comes or goes, and when a socket's memory does. `steering` protects rules
 * and tables against senders, `wire.lock` a queue's frames and its interrupt.
 */
#ifndef RIG_NIC_H
#define RIG_NIC_H

#include <linux/ethtool.h>
#include <linux/netdevice.h>
#include <net/flow_dissector.h>
#include <net/netdev_queues.h>
#include <net/page_pool/helpers.h>
#include <net/xdp_sock_drv.h>

#define RIG_QUEUES	8
/* Frames on the wire to one queue. */
#define RIG_WIRE	1024
#define RIG_RING_MAX	1024
/* Buffers of an AF_XDP socket that a queue has at most. */
#define RIG_LENT	256
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
	struct xdp_rxq_info info;
	/* The memory of an AF_XDP socket; NULL: none has bound the queue in zero-copy. Changed while the queue stands. */
	struct xsk_buff_pool *pool;
	/* Buffers of it that were posted, how many, and the place of the first one. */
	struct xdp_buff *lent[RIG_LENT];
	u32 lent_count, lent_first;
	struct sk_buff_head wire;
	/* Under wire.lock; is_armed: the next frame brings an interrupt. */
	bool is_open, is_armed;
	u64 lost;
	/* Of the poll function. */
	bool has_redirected;
	u64 frames, split_bytes, no_buffer, too_long, lent_frames, lent_sent;
	u64 passed, dropped, aborted, sent_back, redirected;
};

struct rig_rule {
	bool is_used;
	u32 context;
	struct ethtool_rx_flow_spec spec;
};

struct rig_nic {
	struct net_device *dev;
	struct rig_nic *peer;
	struct bpf_prog *program;
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
	/* When it was sent, nanoseconds of CLOCK_REALTIME. */
	u64 time;
	u32 hash;
	/* enum xdp_rss_hash_type; 0: nothing was hashed. */
	u16 hash_type;
	/* Bytes of its headers, if it is TCP; else 0. */
	u16 headers;
	/* What was taken off it, in the host's byte order. */
	u16 tag;
	bool has_tag;
};

static inline struct rig_frame *rig_frame(struct sk_buff *skb)
{
	BUILD_BUG_ON(sizeof(struct rig_frame) > sizeof(skb->cb));
	return (struct rig_frame *)skb->cb;
}

/* A frame as a program sees it, and the one on the wire. That of an AF_XDP socket's has room for the second. */
struct rig_buff {
	struct xdp_buff xdp;
	struct sk_buff *frame;
};

/* nic.c */
bool rig_send(struct rig_nic *nic, struct sk_buff *skb);
bool rig_send_bytes(struct rig_nic *nic, const void *bytes, u32 count);

/* xdp.c */
extern const struct xdp_metadata_ops rig_metadata_ops;
int rig_bpf(struct net_device *dev, struct netdev_bpf *wanted);
int rig_change_mtu(struct net_device *dev, int mtu);
int rig_xdp_xmit(struct net_device *dev, int count, struct xdp_frame **frames, u32 flags);
bool rig_judge(struct rig_queue *queue, struct bpf_prog *program, struct xdp_buff *xdp);
struct sk_buff *rig_receive_judged(struct rig_queue *queue, struct bpf_prog *program, struct sk_buff *frame);

/* xsk.c */
int rig_set_pool(struct net_device *dev, struct xsk_buff_pool *pool, u16 index);
int rig_wakeup(struct net_device *dev, u32 index, u32 flags);
void rig_post_lent(struct rig_queue *queue);
void rig_free_lent(struct rig_queue *queue);
struct sk_buff *rig_receive_lent(struct rig_queue *queue, struct bpf_prog *program, struct sk_buff *frame);
u32 rig_send_lent(struct rig_queue *queue, u32 most);

/* queue.c */
extern const struct netdev_queue_mgmt_ops rig_queue_ops;
void rig_add_queues(struct rig_nic *nic);
void rig_give(struct rig_queue *queue, struct sk_buff *skb);
netmem_ref rig_take(struct rig_ring *ring);
int rig_queue_start(struct net_device *dev, struct netdev_queue_config *config, void *memory, int index);
int rig_queue_stop(struct net_device *dev, void *memory, int index);
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
