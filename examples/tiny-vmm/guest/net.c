#include <linux/virtio_ids.h>
#include <linux/virtio_net.h>

#include "net.h"

#define HEADER_BYTES sizeof(struct virtio_net_hdr_v1)
#define FEATURE(name) (1ul << VIRTIO_##name)

/* Numbers lie where the frame has them, unaligned. */
typedef u64 __attribute__((aligned(1))) unaligned_u64;

struct queue queues[2 * MOST_PAIRS + 1];

static u8 pattern(u32 at)
{
	return (u8)(at * 7 + 1);
}

/* A broadcast frame from the device's address, with an EtherType for experiments. */
static void fill_frame(u8 *frame, const u8 *address)
{
	for (u32 at = 0; at < 6; at++) {
		frame[at] = 0xff;
		frame[6 + at] = address[at];
	}
	frame[12] = 0x88;
	frame[13] = 0xb5;
	for (u32 at = PATTERN_AT; at < mailbox->frame_bytes; at++)
		frame[at] = pattern(at);
}

void net_begin(void)
{
	u64 wanted = FEATURE(F_VERSION_1) | FEATURE(NET_F_MAC) | FEATURE(NET_F_CTRL_VQ) | FEATURE(NET_F_CTRL_RX) |
		     FEATURE(NET_F_CTRL_VLAN) | FEATURE(NET_F_CTRL_MAC_ADDR) |
		     (mailbox->pairs > 1 ? FEATURE(NET_F_MQ) : 0);
	u64 features = device_begin(VIRTIO_ID_NET, wanted);
	u8 address[6];

	require(features == wanted, wanted, features);
	for (u16 index = 0; index < 2 * mailbox->pairs + 1; index++)
		queue_set_up(&queues[index], index);
	for (u32 at = 0; at < 6; at++)
		address[at] = config_byte(at);
	for (u16 pair = 0; pair < mailbox->pairs; pair++)
		for (u16 at = 0; at < from_guest(pair)->size; at++)
			fill_frame(queue_buffer(from_guest(pair), at) + HEADER_BYTES, address);
	device_set_status(STATUS_READY);
	mailbox->ready = 1;
}

int net_send(u16 pair, u64 number)
{
	int next = queue_next(from_guest(pair));

	if (next < 0)
		return 0;
	*(unaligned_u64 *)(queue_buffer(from_guest(pair), next) + HEADER_BYTES + NUMBER_AT) = number;
	queue_add(from_guest(pair), HEADER_BYTES + mailbox->frame_bytes, 0);
	return 1;
}

u64 net_reclaim(u16 pair)
{
	u64 count = 0;
	u32 bytes;

	while (queue_take(from_guest(pair), &bytes) >= 0)
		count++;
	return count;
}

long net_receive(void)
{
	u32 bytes, at = PATTERN_AT;
	int chain = queue_take(to_guest(0), &bytes);
	u8 *frame;

	if (chain < 0)
		return -1;
	frame = queue_buffer(to_guest(0), chain) + HEADER_BYTES;
	if (bytes == HEADER_BYTES + mailbox->frame_bytes)
		while (at < mailbox->frame_bytes && frame[at] == pattern(at))
			at++;
	mailbox->bad_frames += at != mailbox->frame_bytes;
	return *(unaligned_u64 *)(frame + NUMBER_AT);
}
