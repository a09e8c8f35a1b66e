// SPDX-License-Identifier: (Apache-2.0 OR BSD-3-Clause)
/*
 * steer.bpf.c: the plain steering programs, see steer_body.h.
 */
#include "steer_body.h"

SEC("xdp")
int steer(struct xdp_md *ctx)
{
	return steer_frame(ctx);
}

SEC("xdp.frags")
int steer_frags(struct xdp_md *ctx)
{
	return steer_frame(ctx);
}
