// SPDX-License-Identifier: (Apache-2.0 OR BSD-3-Clause)
/*
 * verdict.bpf.c: programs that drop every frame, or send it back, in the driver.
 *
 * For measuring only: what receiving (XDP_DROP), and receiving and sending (XDP_TX), cost before any socket has a
 * part in it. Each comes in two variants, as in steer.bpf.c: the second declares that it understands frames in
 * several buffers, and drivers ask for it where the MTU needs more than one.
 */
#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_helpers.h>

char _license[] SEC("license") = "Dual BSD/GPL";

/* Frames that got the verdict, per CPU: a CPU runs one receive softirq at a time, so plain additions lose nothing. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} verdict_frames SEC(".maps");

static __always_inline int counted(int verdict)
{
	__u32 key = 0;
	__u64 *frames = bpf_map_lookup_elem(&verdict_frames, &key);

	if (frames)
		*frames += 1;
	return verdict;
}

/* With its MAC addresses swapped, so that a switch takes it back to where it came from. */
static __always_inline int sent_back(struct xdp_md *ctx)
{
	__u8 *frame = (void *)(long)ctx->data;
	__u8 to[6];

	if (frame + 12 > (__u8 *)(long)ctx->data_end)
		return XDP_DROP;
	__builtin_memcpy(to, frame, 6);
	__builtin_memcpy(frame, frame + 6, 6);
	__builtin_memcpy(frame + 6, to, 6);
	return counted(XDP_TX);
}

SEC("xdp")
int drop_all(struct xdp_md *ctx)
{
	(void)ctx;
	return counted(XDP_DROP);
}

SEC("xdp.frags")
int drop_all_frags(struct xdp_md *ctx)
{
	(void)ctx;
	return counted(XDP_DROP);
}

SEC("xdp")
int send_all_back(struct xdp_md *ctx)
{
	return sent_back(ctx);
}

SEC("xdp.frags")
int send_all_back_frags(struct xdp_md *ctx)
{
	return sent_back(ctx);
}
