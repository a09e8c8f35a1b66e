/* The guest: does the work that the mailbox names, and ends. */
#include "net.h"

static void notify_work(void)
{
	u64 start = ticks();

	for (u64 at = 0; at < mailbox->frames; at++)
		queue_kick(from_guest(0));
	mailbox->ticks = ticks() - start;
	mailbox->done = mailbox->frames;
}

/* Takes back sent buffers, until at most `left` are in the ring. */
static void await_sent(u64 sent, u64 *back, u64 left)
{
	u64 since = ticks();

	while (sent - *back > left) {
		u64 count = net_reclaim(0);

		*back += count;
		if (count)
			since = ticks();
		else
			wait_on(since);
	}
}

/* Without a number of frames until mailbox->stop. With mailbox->always it waits for each batch: a lost kick stops it. */
static void send_work(void)
{
	u64 sent = 0, back = 0, start = ticks();
	u64 most = from_guest(0)->size - mailbox->frames_per_kick;

	while ((!mailbox->frames || sent < mailbox->frames) && !mailbox->stop) {
		await_sent(sent, &back, most);
		for (u32 at = 0; at < mailbox->frames_per_kick && (!mailbox->frames || sent < mailbox->frames); at++)
			sent += net_send(0, sent);
		queue_publish(from_guest(0));
		queue_kick(from_guest(0));
		back += net_reclaim(0);
		if (mailbox->always)
			await_sent(sent, &back, 0);
		mailbox->done = back;
	}
	await_sent(sent, &back, 0);
	mailbox->ticks = ticks() - start;
	mailbox->done = back;
}

/* Waits for the frame with this number. Others that come, such as those of a network's hosts, are not counted. */
static void await_frame(u64 number, u64 since)
{
	long found;

	do {
		while ((found = net_receive()) < 0)
			wait_on(since);
		net_post();
		queue_publish(to_guest(0));
		queue_kick(to_guest(0));
	} while ((u64)found != number);
}

static void round_trip_work(void)
{
	volatile u32 *samples = (volatile u32 *)SAMPLES_AT;
	u64 start, back = 0;

	while (queue_next(to_guest(0)) >= 0)
		net_post();
	queue_publish(to_guest(0));
	queue_kick(to_guest(0));
	start = ticks();
	for (u64 number = 0; number < mailbox->frames; number++) {
		u64 since = ticks(), took;

		net_send(0, number);
		queue_publish(from_guest(0));
		queue_kick(from_guest(0));
		await_frame(number, since);
		took = ticks() - since;
		if (mailbox->samples < MOST_SAMPLES)
			samples[mailbox->samples++] = took > 0xffffffff ? 0xffffffff : (u32)took;
		await_sent(number + 1, &back, 0);
		mailbox->done = number + 1;
	}
	mailbox->ticks = ticks() - start;
}

void main(void)
{
	net_begin();
	if (mailbox->work == WORK_NOTIFY)
		notify_work();
	else if (mailbox->work == WORK_SEND)
		send_work();
	else if (mailbox->work == WORK_ROUND_TRIP)
		round_trip_work();
	else
		control_work();
	end(ANSWER_DONE, "", 0, 0, 0);
}
