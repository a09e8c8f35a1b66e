/* SPDX-License-Identifier: (Apache-2.0 OR BSD-3-Clause) */
/*
 * steer_groups.h: how many frames to groups of stations a network gets, and what is counted. The XDP program and the one
 * that takes its place in tap mode (tap.bpf.c) share it.
 */
#ifndef VHOST_AF_XDP_STEER_GROUPS_H
#define VHOST_AF_XDP_STEER_GROUPS_H

#include "steer.h"

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

/* How many frames to groups a network gets, by the number of the network; written by the loader. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, STEER_MAX_QUEUES);
	__type(key, __u32);
	__type(value, struct steer_limit);
} steer_limits SEC(".maps");

/* When the next of these is due on this CPU, ns, by the number of the network. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, STEER_MAX_QUEUES);
	__type(key, __u32);
	__type(value, __u64);
} steer_due SEC(".maps");

/* Per CPU, and a CPU runs one receive softirq at a time: plain additions lose nothing. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, STEER_MAX_QUEUES);
	__type(key, __u32);
	__type(value, struct steer_counters);
} steer_counts SEC(".maps");

/*
 * Counts a frame. What follows keeps the compiler from joining the ends of several branches into one that adds to a
 * counter of variable offset: a pointer that it calculates so takes CAP_PERFMON.
 */
#define COUNT(counters, counter)                  \
	do {                                      \
		(counters)->counter++;            \
		asm volatile("" : : : "memory");  \
	} while (0)

/* Whether one more frame is within the limit (GCRA: ITU-T I.371). */
static __always_inline int is_due(__u32 network)
{
	struct steer_limit *limit = bpf_map_lookup_elem(&steer_limits, &network);
	__u64 *due = bpf_map_lookup_elem(&steer_due, &network);
	__u64 now, from;

	if (!limit || !due || !limit->each_ns)
		return 1;
	now = bpf_ktime_get_ns();
	from = *due > now ? *due : now;
	if (from - now > limit->burst_ns)
		return 0;
	*due = from + limit->each_ns;
	return 1;
}

#endif
