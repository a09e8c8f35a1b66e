/* SPDX-License-Identifier: (Apache-2.0 OR BSD-3-Clause) */
/*
 * steer_key.h: keys of maps, put together in registers and written in whole words.
 *
 * Kernels like 6.1.176 take each write of a bounded value to the stack for a spilled register, and refuse a later one to
 * a part of the same word, unless the loader has CAP_PERFMON ("attempt to corrupt spilled pointer on stack",
 * kernel/bpf/verifier.c, check_stack_write_fixed_off). Who keeps a key in a volatile word has it written so.
 */
#ifndef VHOST_AF_XDP_STEER_KEY_H
#define VHOST_AF_XDP_STEER_KEY_H

#include <linux/types.h>

/* Shift of a field of so many bytes at a place of a word. */
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define SHIFT(at, bytes) (8 * (at))
/* A number in network order. */
#define NETWORK16(number) __builtin_bswap16(number)
#define NETWORK32(number) __builtin_bswap32(number)
#else
#define SHIFT(at, bytes) (64 - 8 * ((at) + (bytes)))
#define NETWORK16(number) ((__be16)(number))
#define NETWORK32(number) ((__be32)(number))
#endif
#define BYTE(bytes, i, at) ((__u64)(bytes)[i] << SHIFT(at, 1))

#endif
