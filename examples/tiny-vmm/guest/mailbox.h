/* The page by which host and guest speak, at a fixed address: src/page.rs has the same fields. */
#ifndef MAILBOX_H
#define MAILBOX_H

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long u64;

/* Addresses, and the numbers of works, flags and answers: written by build.rs of src/layout.rs. */
#include "layout.h"

struct mailbox {
	/* The host writes these before the guest runs. */
	u32 work;
	u32 flags;
	u64 frames;
	u32 frames_per_kick;
	u32 frame_bytes;
	u64 patience_ticks;
	/* The host writes this one at any time. */
	u32 stop;
	u32 unused;
	/* The guest writes these. */
	u32 answer;
	u32 place;
	u64 expected;
	u64 found;
	u64 done;
	u64 kicks;
	u64 ticks;
	u64 bad_frames;
	u64 samples;
	/* 1 once the driver is ready and the work has begun. */
	u64 ready;
	/* Commands of the control queue that were answered as they should be, by class and number, both modulo 8. */
	u16 commands[8][8];
	/* Of the entropy device's bytes: bits, ones among them, and rounds that brought what the round before did. */
	u64 random[3];
};

/* That the fields are where src/page.rs has them. */
CHECK_MAILBOX

#define mailbox ((volatile struct mailbox *)MAILBOX_AT)

#endif
