/* The page by which host and guest speak, at a fixed address; src/mailbox.rs has the same fields. */
#ifndef MAILBOX_H
#define MAILBOX_H

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long u64;

#define MAILBOX_AT 0x8000
/* Ticks of the time stamp counter, a u32 each: how long each of the first so many rounds took. */
#define SAMPLES_AT 0x600000
#define MOST_SAMPLES 65536
/* What the guest takes for rings and buffers. */
#define HEAP_AT 0x700000
#define HEAP_END 0x2000000
/* Where the devices' registers are: so many places, some of them empty. */
#define DEVICES_AT 0xd0000000
#define DEVICE_BYTES 0x1000
#define DEVICE_PLACES 8
/* A byte written to this port ends the guest. */
#define END_PORT 0xf4

enum work {
	WORK_NOTIFY = 1,
	WORK_SEND,
	WORK_RECEIVE,
	WORK_ROUND_TRIP,
	WORK_ECHO,
	WORK_CONTROL,
	WORK_ENTROPY,
	WORK_KICK,
};

enum flag {
	/* Packed rings. */
	FLAG_PACKED = 1,
	/* WORK_NOTIFY: also while the device says that it needs none. */
	FLAG_ALWAYS = 2,
	/* Multiqueue is negotiated, and with it RSS and the hash report where they are offered. */
	FLAG_MULTIQUEUE = 4,
	/* The hash report is, without multiqueue and RSS. */
	FLAG_HASH_REPORT = 8,
};

enum answer {
	ANSWER_WORKING = 0,
	ANSWER_DONE,
	/* There is no device of the type that the work needs. */
	ANSWER_NO_DEVICE,
	/* A device did not do as VirtIO says; `line` is where that was seen. */
	ANSWER_WRONG,
	/* Nothing came for `patience_ticks`. */
	ANSWER_TIMEOUT,
	/* A control command was answered otherwise than it should be. */
	ANSWER_REFUSED,
	/* The guest has no memory left. */
	ANSWER_MEMORY,
};

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
	u32 line;
	u64 expected;
	u64 found;
	u64 done;
	u64 kicks;
	u64 ticks;
	u64 bad_frames;
	u64 samples;
	/* 1 once the driver is ready and the work has begun. */
	u64 ready;
};

#define mailbox ((volatile struct mailbox *)MAILBOX_AT)

#endif
