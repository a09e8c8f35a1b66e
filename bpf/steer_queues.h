/* SPDX-License-Identifier: (Apache-2.0 OR BSD-3-Clause) */
/*
 * steer_queues.h: which frames an interface's queues take, in maps that the XDP program and the programs of tap.bpf.c share.
 */
#ifndef VHOST_AF_XDP_STEER_QUEUES_H
#define VHOST_AF_XDP_STEER_QUEUES_H

#include "steer.h"

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "steer_groups.h"
#include "steer_key.h"

/* Written by the loader (mapped into it), only read here. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, STEER_MAX_QUEUES);
	__type(key, __u32);
	__type(value, __u64);
} steer_queues SEC(".maps");

/* Written by the loader: a set, of which only the keys count. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, STEER_MAX_ENTRIES);
	__type(key, struct steer_entry);
	__type(value, __u8);
} steer_entries SEC(".maps");

/*
 * Whether an entry is in the set; `mac` may be absent.
 *
 * The key is a steer_entry, see steer_key.h.
 */
static __always_inline int has_entry(__u32 queue, __u32 vlan, const __u8 *mac)
{
	volatile __u64 key[2];
	__u64 first = (__u64)(__u16)queue << SHIFT(0, 2) | (__u64)(__u16)vlan << SHIFT(2, 2);
	__u64 second = 0;

	if (mac) {
		first |= BYTE(mac, 0, 4) | BYTE(mac, 1, 5) | BYTE(mac, 2, 6) | BYTE(mac, 3, 7);
		second = BYTE(mac, 4, 0) | BYTE(mac, 5, 1);
	}
	key[0] = first;
	key[1] = second;
	return !!bpf_map_lookup_elem(&steer_entries, (const void *)key);
}

#endif
