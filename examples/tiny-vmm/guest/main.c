/* The guest: does the one piece of work that the mailbox names, and ends. */
#include "net.h"

/* That one asks the entropy device for. */
#define RANDOM_BYTES 64

static struct net net;

static void sample(u64 took)
{
	volatile u32 *samples = (volatile u32 *)SAMPLES_AT;

	if (mailbox->samples < MOST_SAMPLES)
		samples[mailbox->samples++] = took > 0xffffffff ? 0xffffffff : (u32)took;
}

/* Waits until all that was sent came back. */
static void await_sent(u64 sent, u64 *back)
{
	struct wait wait = wait_begin();

	while (*back < sent) {
		u64 count = net_reclaim(&net);

		*back += count;
		if (count)
			wait = wait_begin();
		else
			wait_on(wait);
	}
	require(*back == sent, ANSWER_WRONG, sent, *back);
}

static void notify_work(void)
{
	int always = (mailbox->flags & FLAG_ALWAYS) != 0;
	u64 start, kicks = 0;

	net_begin(&net, 0);
	mailbox->ready = 1;
	start = ticks();
	for (u64 at = 0; at < mailbox->frames; at++) {
		if (!always && !queue_wants_kick(&net.from_guest))
			continue;
		queue_kick(&net.from_guest);
		kicks++;
	}
	mailbox->ticks = ticks() - start;
	mailbox->kicks = kicks;
	mailbox->done = mailbox->frames;
}

static void send_work(void)
{
	u64 frames = mailbox->frames, sent = 0, back = 0, start;

	net_begin(&net, 0);
	mailbox->ready = 1;
	start = ticks();
	while (sent < frames && !mailbox->stop) {
		u32 batch = mailbox->frames_per_kick, added = 0;
		struct wait wait = wait_begin();

		while (added < batch && sent < frames) {
			if (net_send(&net, sent)) {
				sent++;
				added++;
				continue;
			}
			/* The ring is full: what is in it is to be seen before anything comes back. */
			queue_publish(&net.from_guest);
			net_kick(&net, &net.from_guest);
			for (u64 count = 0; !count; back += count) {
				count = net_reclaim(&net);
				if (!count)
					wait_on(wait);
			}
		}
		queue_publish(&net.from_guest);
		net_kick(&net, &net.from_guest);
		back += net_reclaim(&net);
		mailbox->done = back;
	}
	await_sent(sent, &back);
	mailbox->ticks = ticks() - start;
	mailbox->kicks = net.kicks;
	mailbox->done = back;
}

static void receive_work(void)
{
	u64 frames = mailbox->frames, count = 0, start = 0;
	struct wait wait;

	net_begin(&net, 0);
	net_post_all(&net);
	mailbox->ready = 1;
	wait = wait_begin();
	while (count < frames && !mailbox->stop) {
		u32 bytes, batch = 0;
		int chain;
		u8 *buffer;

		while (batch < mailbox->frames_per_kick && (buffer = net_receive(&net, &chain, &bytes))) {
			u8 *frame = buffer + net.header_bytes;

			if (!start)
				start = ticks();
			if (!frame_is_whole(frame, bytes) || frame_number(frame) != count)
				mailbox->bad_frames++;
			net_repost(&net, buffer);
			count++;
			batch++;
		}
		if (batch == 0) {
			wait_on(wait);
			continue;
		}
		wait = wait_begin();
		queue_publish(&net.to_guest);
		net_kick(&net, &net.to_guest);
		mailbox->done = count;
	}
	mailbox->ticks = ticks() - start;
	mailbox->kicks = net.kicks;
	mailbox->done = count;
}

/* A frame that came back; 0 if none did yet. */
static int came_back(u64 number)
{
	u32 bytes;
	int chain, found = 0;
	u8 *buffer = net_receive(&net, &chain, &bytes);

	if (!buffer)
		return 0;
	if (frame_is_whole(buffer + net.header_bytes, bytes))
		found = frame_number(buffer + net.header_bytes) == number;
	else
		mailbox->bad_frames++;
	net_repost(&net, buffer);
	queue_publish(&net.to_guest);
	net_kick(&net, &net.to_guest);
	return found;
}

static void round_trip_work(void)
{
	u64 start, back = 0;

	net_begin(&net, 0);
	net_post_all(&net);
	mailbox->ready = 1;
	start = ticks();
	for (u64 number = 0; number < mailbox->frames && !mailbox->stop; number++) {
		struct wait wait = wait_begin();

		require(net_send(&net, number), ANSWER_WRONG, 1, 0);
		queue_publish(&net.from_guest);
		net_kick(&net, &net.from_guest);
		while (!came_back(number))
			wait_on(wait);
		sample(ticks() - wait.since);
		while (back <= number) {
			u64 count = net_reclaim(&net);

			back += count;
			if (!count)
				wait_on(wait);
		}
		mailbox->done = number + 1;
	}
	mailbox->ticks = ticks() - start;
	mailbox->kicks = net.kicks;
}

/* A received buffer is sent as it is, and goes back into the receive queue when it was. */
static u8 *echoed[MOST_ENTRIES];

static u32 echo_some(void)
{
	u32 bytes, count = 0;
	int chain, sent;
	u8 *buffer;

	while (count < mailbox->frames_per_kick && (buffer = net_receive(&net, &chain, &bytes))) {
		struct part part = { buffer, net.header_bytes + bytes, 0 };

		memset(buffer, 0, net.header_bytes);
		sent = queue_add(&net.from_guest, &part, 1);
		require(sent >= 0, ANSWER_WRONG, 0, sent);
		echoed[sent] = buffer;
		count++;
	}
	return count;
}

static void echo_work(void)
{
	u64 back = 0, start;

	net_begin(&net, 0);
	net_post_all(&net);
	mailbox->ready = 1;
	start = ticks();
	while (back < mailbox->frames && !mailbox->stop) {
		u32 bytes;
		int chain, reposted = 0;

		if (echo_some()) {
			queue_publish(&net.from_guest);
			net_kick(&net, &net.from_guest);
		}
		while ((chain = queue_take(&net.from_guest, &bytes)) >= 0) {
			net_repost(&net, echoed[chain]);
			reposted = 1;
			back++;
		}
		if (reposted) {
			queue_publish(&net.to_guest);
			net_kick(&net, &net.to_guest);
		} else {
			pause();
		}
		mailbox->done = back;
	}
	mailbox->ticks = ticks() - start;
	mailbox->kicks = net.kicks;
}

/* Kicks without pause, whether the device wants that or not, each with a frame where there is room. After so many kicks
 * it waits until the device has them all: a kick that was lost stops it there. */
static void kick_work(void)
{
	u64 sent = 0, back = 0, kicks = 0, start;

	net_begin(&net, 0);
	mailbox->ready = 1;
	start = ticks();
	while (!mailbox->stop && (!mailbox->frames || sent < mailbox->frames)) {
		for (u32 at = 0; at < mailbox->frames_per_kick; at++) {
			sent += net_send(&net, sent);
			queue_publish(&net.from_guest);
			queue_kick(&net.from_guest);
			kicks++;
			back += net_reclaim(&net);
		}
		await_sent(sent, &back);
		mailbox->done = back;
		mailbox->kicks = kicks;
	}
	mailbox->ticks = ticks() - start;
}

/* Counts bits, ones, and whether all is as in the round before, whose bytes are behind those of this one. */
static void look_at_random(u8 *bytes, u32 count)
{
	u32 same = 0;

	for (u32 at = 0; at < count; at++) {
		for (u32 bit = 0; bit < 8; bit++)
			mailbox->random[1] += bytes[at] >> bit & 1;
		same += bytes[at] == bytes[RANDOM_BYTES + at];
		bytes[RANDOM_BYTES + at] = bytes[at];
	}
	mailbox->random[0] += 8 * count;
	mailbox->random[2] += same == count;
}

/* Asks for bytes and looks whether they came. */
static void entropy_work(void)
{
	static struct queue queue;
	struct device device = device_find(VIRTIO_ENTROPY);
	u64 features = F_VERSION_1 | (mailbox->flags & FLAG_PACKED ? F_RING_PACKED : 0);
	u8 *buffer;
	u64 start;

	device_begin(&device, features);
	queue_set_up(&queue, &device, 0);
	device_ready(&device);
	buffer = allocate(2 * RANDOM_BYTES, 64);
	mailbox->ready = 1;
	start = ticks();
	for (u64 at = 0; at < mailbox->frames && !mailbox->stop; at++) {
		struct part part = { buffer, RANDOM_BYTES, 1 };
		struct wait wait = wait_begin();
		u32 bytes;

		memset(buffer, 0, RANDOM_BYTES);
		require(queue_add(&queue, &part, 1) >= 0, ANSWER_WRONG, 0, 1);
		queue_publish(&queue);
		if (queue_wants_kick(&queue)) {
			queue_kick(&queue);
			mailbox->kicks++;
		}
		while (queue_take(&queue, &bytes) < 0)
			wait_on(wait);
		sample(ticks() - wait.since);
		require(bytes >= 1 && bytes <= RANDOM_BYTES, ANSWER_WRONG, RANDOM_BYTES, bytes);
		look_at_random(buffer, bytes);
		mailbox->done = at + 1;
	}
	mailbox->ticks = ticks() - start;
}

void main(void)
{
	switch (mailbox->work) {
	case WORK_NOTIFY:
		notify_work();
		break;
	case WORK_SEND:
		send_work();
		break;
	case WORK_RECEIVE:
		receive_work();
		break;
	case WORK_ROUND_TRIP:
		round_trip_work();
		break;
	case WORK_ECHO:
		echo_work();
		break;
	case WORK_CONTROL:
		control_work();
		break;
	case WORK_ENTROPY:
		entropy_work();
		break;
	case WORK_KICK:
		kick_work();
		break;
	default:
		end(ANSWER_WRONG, HERE, WORK_NOTIFY, mailbox->work);
	}
	end(ANSWER_DONE, 0, 0, 0);
}
