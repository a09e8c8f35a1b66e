/* Commands by the control queue (VirtIO 1.3, 5.1.6.5), each answer looked at. */
#include "net.h"

#define ACK_OK 0
#define ACK_ERR 1

static struct net net;
static u8 *command;
static volatile u8 *ack;

/* Sends class, number and so many bytes behind them, and waits; `want` is the answer that is right. */
static void ask(u8 class, u8 number, u32 bytes, u8 want, u32 place)
{
	struct part parts[] = { { command, 2, 0 }, { command + 2, bytes, 0 }, { ack, 1, 1 } };
	struct wait wait = wait_begin();
	u32 written;

	command[0] = class;
	command[1] = number;
	*ack = 0x5a;
	if (bytes == 0) {
		parts[1] = parts[2];
	}
	if (queue_add(&net.control, parts, bytes ? 3 : 2) < 0)
		end(ANSWER_WRONG, place, 0, 1);
	queue_publish(&net.control);
	net_kick(&net, &net.control);
	while (queue_take(&net.control, &written) < 0)
		wait_on(wait);
	if (*ack != want)
		end(ANSWER_REFUSED, place, want, *ack);
	mailbox->done++;
	mailbox->commands[class % 8][number % 8]++;
}

#define ASK(class, number, bytes, want) ask(class, number, bytes, want, HERE)

static int has(u64 feature)
{
	return (net.device.features & feature) == feature;
}

static void put_u16(u32 at, u16 value)
{
	command[2 + at] = value & 0xff;
	command[3 + at] = value >> 8;
}

static void put_u32(u32 at, u32 value)
{
	put_u16(at, value & 0xffff);
	put_u16(at + 2, value >> 16);
}

static void receive_modes(void)
{
	for (u8 mode = 0; mode < (has(NET_F_CTRL_RX_EXTRA) ? 6 : 2); mode++) {
		command[2] = 1;
		ASK(0, mode, 1, ACK_OK);
		command[2] = 0;
		ASK(0, mode, 1, ACK_OK);
	}
	/* Two addresses, and one group. */
	put_u32(0, 2);
	memset(command + 6, 2, 12);
	put_u32(16, 1);
	memset(command + 22, 3, 6);
	ASK(1, 0, 26, ACK_OK);
	/* More addresses than there are bytes for. */
	put_u32(0, 9);
	ASK(1, 0, 26, ACK_ERR);
}

static void address(void)
{
	for (u32 at = 0; at < 6; at++)
		command[2 + at] = 2 + at;
	ASK(1, 1, 6, ACK_OK);
	for (u32 at = 0; at < 6; at++)
		require(config_byte(&net.device, at) == 2 + at, ANSWER_WRONG, 2 + at, config_byte(&net.device, at));
}

static void vlans(void)
{
	put_u16(0, 7);
	ASK(2, 0, 2, ACK_OK);
	ASK(2, 1, 2, ACK_OK);
	put_u16(0, 4096);
	ASK(2, 0, 2, ACK_ERR);
}

static void multiqueue(void)
{
	put_u16(0, net.most_pairs);
	ASK(4, 0, 2, ACK_OK);
	put_u16(0, 0);
	ASK(4, 0, 2, ACK_ERR);
	put_u16(0, net.most_pairs + 1);
	ASK(4, 0, 2, ACK_ERR);
	put_u16(0, 1);
	ASK(4, 0, 2, ACK_OK);
}

/* RSS: hash types, mask of a table of 2, where other frames go, the table, pairs that send, key. */
static void receive_scaling(void)
{
	put_u32(0, 0x3f);
	put_u16(4, 1);
	put_u16(6, 0);
	put_u16(8, 0);
	put_u16(10, net.most_pairs - 1);
	put_u16(12, net.most_pairs);
	command[16] = 40;
	memset(command + 17, KEY_BYTE, 40);
	ASK(4, 1, 55, ACK_OK);
	/* A pair that there is not. */
	put_u16(10, net.most_pairs);
	ASK(4, 1, 55, ACK_ERR);
}

/* Hash report: hash types, four reserved words, key. With RSS its configuration counts, and this one is refused
 * (5.1.6.5.6.4). */
static void hash_report(void)
{
	put_u32(0, 0x3f);
	memset(command + 6, 0, 8);
	command[14] = 40;
	memset(command + 15, KEY_BYTE, 40);
	ASK(4, 2, 53, has(NET_F_RSS) ? ACK_ERR : ACK_OK);
}

void control_work(void)
{
	u64 wanted = NET_F_CTRL_VQ | NET_F_CTRL_RX | NET_F_CTRL_RX_EXTRA | NET_F_CTRL_VLAN | NET_F_CTRL_MAC_ADDR;
	u64 start;

	if (mailbox->flags & FLAG_MULTIQUEUE)
		wanted |= NET_F_MQ | NET_F_RSS | NET_F_HASH_REPORT;
	if (mailbox->flags & FLAG_HASH_REPORT)
		wanted |= NET_F_HASH_REPORT;
	net_begin(&net, wanted);
	require(has(NET_F_CTRL_VQ), ANSWER_WRONG, NET_F_CTRL_VQ, net.device.features);
	command = allocate(512, 64);
	ack = allocate(1, 1);
	mailbox->ready = 1;
	start = ticks();
	for (u64 round = 0; round < mailbox->frames; round++) {
		if (has(NET_F_CTRL_RX))
			receive_modes();
		if (has(NET_F_CTRL_MAC_ADDR))
			address();
		if (has(NET_F_CTRL_VLAN))
			vlans();
		if (has(NET_F_MQ))
			multiqueue();
		if (has(NET_F_RSS))
			receive_scaling();
		if (has(NET_F_HASH_REPORT))
			hash_report();
		/* No such class. */
		ASK(0x77, 0, 1, ACK_ERR);
	}
	mailbox->ticks = ticks() - start;
	pairs_work(&net);
	mailbox->kicks = net.kicks;
}
