/* The processor, the mailbox, and how the guest ends. */
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long u64;

/* Addresses, numbers and struct mailbox: build.rs writes this file from src/layout.rs. */
#include "layout.h"

#define mailbox ((volatile struct mailbox *)MAILBOX_AT)

#define ticks() __builtin_ia32_rdtsc()
/* Orders stores before it with stores after it, and loads with loads (VirtIO 1.3, 2.7.13, 2.7.14). */
#define barrier() __atomic_thread_fence(__ATOMIC_ACQ_REL)
/* Orders stores before it with loads after it: the available index, then the flag that suppresses kicks (2.7.10). */
#define full_barrier() __atomic_thread_fence(__ATOMIC_SEQ_CST)

/* Ends the guest with this answer, at this line. */
static inline _Noreturn void end(u64 answer, const char *file, u64 line, u64 expected, u64 found)
{
	mailbox->file = (u64)file;
	mailbox->line = line;
	mailbox->expected = expected;
	mailbox->found = found;
	barrier();
	mailbox->answer = answer;
	for (;;)
		__asm__ volatile("outb %0, %1" ::"a"((u8)0), "N"(END_PORT) : "memory");
}

#define require(condition, expected, found)                                                   \
	do {                                                                                  \
		if (!(condition))                                                             \
			end(ANSWER_WRONG, __FILE_NAME__, __LINE__, (u64)(expected), (u64)(found)); \
	} while (0)

/* Called in a loop that began at `since`: ends the guest after mailbox->patience_ticks. */
#define wait_on(since)                                                           \
	do {                                                                     \
		__builtin_ia32_pause();                                          \
		if (ticks() - (since) > mailbox->patience_ticks)                 \
			end(ANSWER_TIMEOUT, __FILE_NAME__, __LINE__, 0, 0);      \
	} while (0)
