#include "net.h"

/* Numbers lie where the frame has them, on no boundary. */
typedef u64 __attribute__((aligned(1))) unaligned_u64;

static u8 pattern(u32 at)
{
	return (u8)(at * 7 + 1);
}

int frame_is_whole(const u8 *frame, u32 bytes)
{
	if (bytes < PATTERN_AT || bytes != mailbox->frame_bytes)
		return 0;
	for (u32 at = PATTERN_AT; at < bytes; at++)
		if (frame[at] != pattern(at))
			return 0;
	return 1;
}

u64 frame_number(const u8 *frame)
{
	return *(const unaligned_u64 *)(frame + NUMBER_AT);
}

/* To everybody, from the device's own address, of an EtherType for experiments. */
static void fill_frame(struct net *net, u8 *frame, u32 bytes)
{
	memset(frame, 0xff, 6);
	memcpy(frame + 6, net->address, 6);
	frame[12] = 0x88;
	frame[13] = 0xb5;
	for (u32 at = PATTERN_AT; at < bytes; at++)
		frame[at] = pattern(at);
}

void net_begin(struct net *net, u64 wanted)
{
	u64 features = F_VERSION_1 | NET_F_MAC | wanted;
	int multiqueue;

	if (mailbox->flags & FLAG_PACKED)
		features |= F_RING_PACKED;
	if (mailbox->flags & FLAG_EVENT_IDX)
		features |= F_EVENT_IDX;
	net->device = device_find(VIRTIO_NET);
	device_begin(&net->device, features);
	require(!(features & F_EVENT_IDX & ~net->device.features), ANSWER_WRONG, F_EVENT_IDX, net->device.features);
	net->header_bytes = net->device.features & NET_F_HASH_REPORT ? 20 : 12;
	multiqueue = (net->device.features & (NET_F_MQ | NET_F_RSS)) != 0;
	net->most_pairs = multiqueue ? config_u16(&net->device, 8) : 1;
	pairs_set_up(net);
	if (net->device.features & NET_F_CTRL_VQ)
		queue_set_up(&net->control, &net->device, 2 * net->most_pairs);
	for (u32 at = 0; at < 6; at++)
		net->address[at] = config_byte(&net->device, at);
	for (u16 at = 0; at < net->from_guest.size; at++) {
		net->sent[at] = allocate(BUFFER_BYTES, 64);
		fill_frame(net, net->sent[at] + net->header_bytes, mailbox->frame_bytes);
		net->sent_free[at] = at;
	}
	net->sent_free_count = net->from_guest.size;
	device_ready(&net->device);
}

void net_kick(struct net *net, struct queue *queue)
{
	if (!queue_wants_kick(queue))
		return;
	queue_kick(queue);
	net->kicks++;
}

void net_repost(struct net *net, u8 *buffer)
{
	struct part part = { buffer, BUFFER_BYTES, 1 };
	int chain = queue_add(&net->to_guest, &part, 1);

	require(chain >= 0, ANSWER_WRONG, 0, chain);
	net->received[chain] = buffer;
}

void net_post_all(struct net *net)
{
	for (u16 at = 0; at < net->to_guest.size; at++)
		net_repost(net, allocate(BUFFER_BYTES, 64));
	queue_publish(&net->to_guest);
	net_kick(net, &net->to_guest);
}

/* Buffers go round by themselves, apart from descriptors: those of a chain are known when it was added. */
static u16 buffer_of_chain[MOST_ENTRIES];

int net_send(struct net *net, u64 number)
{
	u16 buffer;
	struct part part;
	int chain;

	if (net->sent_free_count == 0)
		return 0;
	buffer = net->sent_free[net->sent_free_count - 1];
	*(unaligned_u64 *)(net->sent[buffer] + net->header_bytes + NUMBER_AT) = number;
	part = (struct part){ net->sent[buffer], net->header_bytes + mailbox->frame_bytes, 0 };
	chain = queue_add(&net->from_guest, &part, 1);
	if (chain < 0)
		return 0;
	buffer_of_chain[chain] = buffer;
	net->sent_free_count--;
	return 1;
}

u64 net_reclaim(struct net *net)
{
	u64 count = 0;
	u32 bytes;
	int chain;

	while ((chain = queue_take(&net->from_guest, &bytes)) >= 0) {
		net->sent_free[net->sent_free_count++] = buffer_of_chain[chain];
		count++;
	}
	return count;
}

u8 *net_receive(struct net *net, int *chain, u32 *bytes)
{
	*chain = queue_take(&net->to_guest, bytes);
	if (*chain < 0)
		return 0;
	require(*bytes >= net->header_bytes, ANSWER_WRONG, net->header_bytes, *bytes);
	*bytes -= net->header_bytes;
	return net->received[*chain];
}
