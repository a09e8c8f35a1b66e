// SPDX-License-Identifier: (Apache-2.0 OR BSD-3-Clause)
/*
 * steer_bound.bpf.c: the steering programs that are loaded for one interface and leave hints of its NIC before frames,
 * see steer_body.h and steer_hints.h. Native mode only: the kernel refuses them in skb mode.
 */
#define STEER_BOUND
#include "steer_body.h"

SEC("xdp")
int steer_bound(struct xdp_md *ctx)
{
	return steer_frame(ctx);
}

SEC("xdp.frags")
int steer_bound_frags(struct xdp_md *ctx)
{
	return steer_frame(ctx);
}
