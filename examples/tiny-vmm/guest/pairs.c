/* All queue pairs at once: a frame by each, and where those go that come back, with which hash (1.3, 5.1.6.5.7). */
#include "net.h"

/* Frames of UDP over IPv4: the hash is of addresses and ports. */
#define FRAME_BYTES 60
#define IP_AT 14
#define HASHED_AT (IP_AT + 12)
#define HASHED_BYTES 12
/* VIRTIO_NET_HASH_REPORT_UDPv4 (5.1.6.4.4). */
#define REPORT_UDP_V4 3
/* Buffers that each pair receives into: more than there are frames. */
#define BUFFERS 16
#define FRAMES 8

struct hash_header {
	u8 plain[12];
	u32 hash;
	u16 report;
	u16 padding;
};

static struct queue *to_guest(struct net *net, u16 pair)
{
	return pair ? &net->others[pair - 1].to_guest : &net->to_guest;
}

static struct queue *from_guest(struct net *net, u16 pair)
{
	return pair ? &net->others[pair - 1].from_guest : &net->from_guest;
}

void pairs_set_up(struct net *net)
{
	require(net->most_pairs >= 1 && net->most_pairs <= MOST_PAIRS, ANSWER_WRONG, MOST_PAIRS, net->most_pairs);
	for (u16 pair = 0; pair < net->most_pairs; pair++) {
		queue_set_up(to_guest(net, pair), &net->device, 2 * pair);
		queue_set_up(from_guest(net, pair), &net->device, 2 * pair + 1);
	}
}

/* Toeplitz's hash with a key whose bytes are all the same: the key's bits repeat after eight. */
static u32 hash_of(const u8 *bytes)
{
	u32 window = KEY_BYTE * 0x01010101u, hash = 0;

	for (u32 bit = 0; bit < 8 * HASHED_BYTES; bit++) {
		if (bytes[bit / 8] >> (7 - bit % 8) & 1)
			hash ^= window;
		window = window << 1 | window >> 31;
	}
	return hash;
}

static u8 *new_frame(struct net *net, u8 number)
{
	static const u8 udp_from_10_0_0_1[] = { 0x08, 0x00, 0x45, 0, 0,  46, 0, 0, 0,	 0,    64, 17,
						0,    0,    10,	  0, 0,	 1,  10, 0, 0, 2, 0x10, 0, 0x20,
						1,    0,    26 };
	u8 *buffer = allocate(BUFFER_BYTES, 64), *frame = buffer + net->header_bytes;

	memset(frame, 0xff, 6);
	memcpy(frame + 6, net->address, 6);
	memcpy(frame + 12, udp_from_10_0_0_1, sizeof(udp_from_10_0_0_1));
	/* The port that it comes from tells them apart, and their hashes. */
	frame[HASHED_AT + 9] = number;
	return buffer;
}

/* One frame by that pair; its buffer, when the device has it no more. */
static u8 *send_by(struct net *net, u16 pair, u8 number)
{
	u8 *buffer = new_frame(net, number);
	struct part part = { buffer, net->header_bytes + FRAME_BYTES, 0 };
	struct wait wait = wait_begin();
	u32 written;

	require(queue_add(from_guest(net, pair), &part, 1) >= 0, ANSWER_WRONG, 0, 1);
	queue_publish(from_guest(net, pair));
	net_kick(net, from_guest(net, pair));
	while (queue_take(from_guest(net, pair), &written) < 0)
		wait_on(wait);
	return buffer;
}

/* The frame comes back by that pair and no other, as it was, and the device tells its hash. */
static void await_at(struct net *net, u16 pair, u8 *const *buffers, const u8 *sent, u32 hash)
{
	struct wait wait = wait_begin();
	struct hash_header *header;
	const u8 *frame;
	u32 written;
	int chain;

	while ((chain = queue_take(to_guest(net, pair), &written)) < 0)
		wait_on(wait);
	require(written == net->header_bytes + FRAME_BYTES, ANSWER_WRONG, net->header_bytes + FRAME_BYTES, written);
	header = (struct hash_header *)buffers[chain];
	frame = buffers[chain] + net->header_bytes;
	for (u32 at = 0; at < FRAME_BYTES; at++)
		require(frame[at] == sent[at], ANSWER_WRONG, sent[at], frame[at]);
	if (net->device.features & NET_F_HASH_REPORT) {
		require(header->report == REPORT_UDP_V4, ANSWER_WRONG, REPORT_UDP_V4, header->report);
		require(header->hash == hash, ANSWER_WRONG, hash, header->hash);
	}
	for (u16 other = 0; other < net->most_pairs; other++)
		require(queue_take(to_guest(net, other), &written) < 0, ANSWER_WRONG, pair, other);
}

void pairs_work(struct net *net)
{
	/* By pair, and by the chain that has it. */
	static u8 *buffers[MOST_PAIRS][MOST_ENTRIES];
	int comes_back = (mailbox->flags & FLAG_ECHOED) != 0;

	for (u16 pair = 0; comes_back && pair < net->most_pairs; pair++) {
		for (u32 at = 0; at < BUFFERS; at++) {
			u8 *buffer = allocate(BUFFER_BYTES, 64);
			struct part part = { buffer, BUFFER_BYTES, 1 };
			int chain = queue_add(to_guest(net, pair), &part, 1);

			require(chain >= 0, ANSWER_WRONG, 0, chain);
			buffers[pair][chain] = buffer;
		}
		queue_publish(to_guest(net, pair));
		net_kick(net, to_guest(net, pair));
	}
	for (u8 number = 0; number < FRAMES; number++) {
		u8 *sent = send_by(net, number % net->most_pairs, number) + net->header_bytes;
		u32 hash = hash_of(sent + HASHED_AT);
		/* The table that was said last has two entries. */
		u16 pair = net->device.features & NET_F_RSS && hash & 1 ? net->most_pairs - 1 : 0;

		if (comes_back)
			await_at(net, pair, buffers[pair], sent, hash);
	}
}
