/* A driver of virtio-net (VirtIO 1.3, 5.1): queue pairs and the control queue. */
#pragma once

#include "virtio.h"

/* The receive queue of a pair, its transmit queue, and the control queue behind all pairs (5.1.2). */
#define to_guest(pair) (&queues[2 * (pair)])
#define from_guest(pair) (&queues[2 * (pair) + 1])
#define control (&queues[2 * mailbox->pairs])

extern struct queue queues[2 * MOST_PAIRS + 1];

/* Brings the device up. */
void net_begin(void);
/* Adds a frame with this number to a pair; 0 if there is no room. */
int net_send(u16 pair, u64 number);
/* Takes back sent buffers; how many. */
u64 net_reclaim(u16 pair);
/* Lets the device receive into a buffer. */
#define net_post() queue_add(to_guest(0), 0, BUFFER_BYTES)
/* Takes a received frame: its number, or -1. Counts frames that are not as they were sent. */
long net_receive(void);
void control_work(void);
