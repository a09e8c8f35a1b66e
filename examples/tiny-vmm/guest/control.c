/* Commands of the control queue (VirtIO 1.3, 5.1.6.5), each answer checked; then a frame by each queue pair. */
#include <linux/virtio_net.h>

#include "net.h"

#define OK VIRTIO_NET_OK
#define ERR VIRTIO_NET_ERR

/* Sends a command and waits for its answer, which must be `want`. */
static void ask(u8 class, u8 number, const u8 *data, u32 bytes, u8 want)
{
	u64 since = ticks();
	u8 *command = queue_buffer(control, queue_next(control));
	volatile u8 *ack;
	u32 written;

	command[0] = class;
	command[1] = number;
	for (u32 at = 0; at < bytes; at++)
		command[2 + at] = data[at];
	queue_add(control, 2 + bytes, 1);
	ack = queue_buffer(control, control->descriptors[(command - control->buffers) / BUFFER_BYTES].next);
	*ack = 0x5a;
	queue_publish(control);
	queue_kick(control);
	while (queue_take(control, &written) < 0)
		wait_on(since);
	require(*ack == want, want, *ack);
	mailbox->done++;
}

#define ASK(class, number, want, ...) \
	ask(class, number, (const u8[]){ __VA_ARGS__ }, sizeof((const u8[]){ __VA_ARGS__ }), want)

static void all_commands(u8 pairs)
{
	/* Promiscuous and all-multicast mode, on and off. */
	for (u8 mode = 0; mode < 2; mode++) {
		ASK(VIRTIO_NET_CTRL_RX, mode, OK, 1);
		ASK(VIRTIO_NET_CTRL_RX, mode, OK, 0);
	}
	/* A MAC table of one address and one group, and one that is longer than its bytes. */
	ASK(VIRTIO_NET_CTRL_MAC, VIRTIO_NET_CTRL_MAC_TABLE_SET, OK,
	    1, 0, 0, 0, 2, 2, 2, 2, 2, 2, 1, 0, 0, 0, 3, 3, 3, 3, 3, 3);
	ASK(VIRTIO_NET_CTRL_MAC, VIRTIO_NET_CTRL_MAC_TABLE_SET, ERR,
	    9, 0, 0, 0, 2, 2, 2, 2, 2, 2, 1, 0, 0, 0, 3, 3, 3, 3, 3, 3);
	ASK(VIRTIO_NET_CTRL_MAC, VIRTIO_NET_CTRL_MAC_ADDR_SET, OK, 2, 3, 4, 5, 6, 7);
	require(config_byte(5) == 7, 7, config_byte(5));
	/* VLAN 7 is added and removed; VLAN 4096 does not exist. */
	ASK(VIRTIO_NET_CTRL_VLAN, VIRTIO_NET_CTRL_VLAN_ADD, OK, 7, 0);
	ASK(VIRTIO_NET_CTRL_VLAN, VIRTIO_NET_CTRL_VLAN_DEL, OK, 7, 0);
	ASK(VIRTIO_NET_CTRL_VLAN, VIRTIO_NET_CTRL_VLAN_ADD, ERR, 0, 16);
	if (pairs > 1) {
		ASK(VIRTIO_NET_CTRL_MQ, VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET, ERR, 0, 0);
		ASK(VIRTIO_NET_CTRL_MQ, VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET, ERR, pairs + 1, 0);
		ASK(VIRTIO_NET_CTRL_MQ, VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET, OK, pairs, 0);
	}
	/* An unknown class. */
	ASK(0x77, 0, ERR, 0);
}

void control_work(void)
{
	u64 start = ticks();

	for (u64 round = 0; round < mailbox->frames; round++)
		all_commands(mailbox->pairs);
	mailbox->ticks = ticks() - start;
	for (u16 pair = 0; pair < mailbox->pairs; pair++) {
		u64 since = ticks();

		net_send(pair, pair);
		queue_publish(from_guest(pair));
		queue_kick(from_guest(pair));
		while (!net_reclaim(pair))
			wait_on(since);
	}
}
