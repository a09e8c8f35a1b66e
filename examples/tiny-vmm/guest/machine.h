/* The processor, and how the guest ends. */
#ifndef MACHINE_H
#define MACHINE_H

#include "mailbox.h"

static inline u64 ticks(void)
{
	u32 low, high;
	__asm__ volatile("rdtsc" : "=a"(low), "=d"(high));
	return (u64)high << 32 | low;
}

static inline void pause(void)
{
	__asm__ volatile("pause" ::: "memory");
}

/* Stores before it are seen before stores after it (VirtIO 1.3, 2.7.13): on x86 the compiler alone could undo that. */
static inline void write_barrier(void)
{
	__asm__ volatile("" ::: "memory");
}

/* Loads before it are done before loads after it: the used index and its element, a descriptor's flags and then its
 * rest. It pairs with the device's release store of the index or the flags (VirtIO 1.3, 2.7.14, 2.8.6); without it an
 * element of the ring's last round could be taken for a new one. On x86 the compiler alone could undo the order. */
static inline void read_barrier(void)
{
	__asm__ volatile("" ::: "memory");
}

/* A store before it is seen before a load after it is done: the index, and then whether a kick is wanted. */
static inline void full_barrier(void)
{
	__asm__ volatile("mfence" ::: "memory");
}

/* Where in the source this is: the file, which build.rs numbers, and the line. */
#define HERE (SOURCE << SOURCE_SHIFT | __LINE__)

/* Ends the guest with that answer; `place` is a HERE. */
_Noreturn void end(u32 answer, u32 place, u64 expected, u64 found);

#define require(condition, answer, expected, found)                                      \
	do {                                                                             \
		if (!(condition))                                                        \
			end(answer, HERE, (u64)(expected), (u64)(found));                \
	} while (0)

/* Time that a wait has: `patience` from the mailbox. */
struct wait {
	u64 since;
};

static inline struct wait wait_begin(void)
{
	return (struct wait){ ticks() };
}

#define wait_on(wait)                                                                            \
	do {                                                                                     \
		pause();                                                                         \
		require(ticks() - (wait).since < mailbox->patience_ticks, ANSWER_TIMEOUT, 0, 0); \
	} while (0)

/* Memory that nobody else has, zeroed; `align` is a power of two. */
void *allocate(u64 bytes, u64 align);
void *memset(void *at, int byte, u64 bytes);
void *memcpy(void *to, const void *from, u64 bytes);

#endif
