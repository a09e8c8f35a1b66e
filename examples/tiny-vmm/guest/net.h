/* The driver of virtio-net (VirtIO 1.3, 5.1): a pair of queues with a buffer for each entry, and the control queue. */
#ifndef NET_H
#define NET_H

#include "virtio.h"

#define NET_F_MAC (1ul << 5)
#define NET_F_CTRL_VQ (1ul << 17)
#define NET_F_CTRL_RX (1ul << 18)
#define NET_F_CTRL_VLAN (1ul << 19)
#define NET_F_CTRL_RX_EXTRA (1ul << 20)
#define NET_F_MQ (1ul << 22)
#define NET_F_CTRL_MAC_ADDR (1ul << 23)
#define NET_F_HASH_REPORT (1ul << 57)
#define NET_F_RSS (1ul << 60)

#define MOST_PAIRS 8
/* Of the key of RSS and of hash reports. */
#define KEY_BYTE 0x6d

struct net {
	struct device device;
	/* The first pair. */
	struct queue to_guest;
	struct queue from_guest;
	/* Those behind it, with multiqueue. */
	struct {
		struct queue to_guest;
		struct queue from_guest;
	} others[MOST_PAIRS - 1];
	struct queue control;
	u32 header_bytes;
	u16 most_pairs;
	u8 address[6];
	/* Buffers of both queues, by chain. */
	u8 *received[MOST_ENTRIES];
	u8 *sent[MOST_ENTRIES];
	u16 sent_free[MOST_ENTRIES];
	u16 sent_free_count;
	u64 kicks;
};

/* Finds the device and brings it up; `wanted` are features beside those that the driver always takes. */
void net_begin(struct net *net, u64 wanted);
/* Buffers for the device to receive into, in all entries. */
void net_post_all(struct net *net);
/* Notifies the device of a queue if it wants that. */
void net_kick(struct net *net, struct queue *queue);
/* Puts a frame with this number into the queue; 0 if there is no room. */
int net_send(struct net *net, u64 number);
/* Takes back what was sent; how many. */
u64 net_reclaim(struct net *net);
/* A frame that came: its buffer and length, 0 if there is none; give it back with net_repost. */
u8 *net_receive(struct net *net, int *chain, u32 *bytes);
void net_repost(struct net *net, u8 *buffer);
/* Whether a frame is one of ours, whole. */
int frame_is_whole(const u8 *frame, u32 bytes);
u64 frame_number(const u8 *frame);

void control_work(void);
/* Sets up the queues of all pairs that there are (5.1.6.5.5.1: before one is switched on). */
void pairs_set_up(struct net *net);
/* A frame by each pair; the control queue has switched them on. FLAG_ECHOED: each comes back where it should. */
void pairs_work(struct net *net);

#endif
