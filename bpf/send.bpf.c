// SPDX-License-Identifier: (Apache-2.0 OR BSD-3-Clause)
/*
 * send.bpf.c: what is written to a tap device leaves by another interface.
 *
 * THEORY OF OPERATION
 *
 * An AF_XDP socket takes frames that are ready for the wire. A guest's GSO packet would have to be cut for it, and each
 * segment sent alone. Written to a tap it is a packet of the kernel's own, which the interface takes whole, or the kernel
 * cuts at the last moment. The program hangs at ingress of the tap; nobody else gets its frames.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

char _license[] SEC("license") = "Dual BSD/GPL";

/* Set before the program is loaded. */
const volatile __u32 send_uplink;
/* The queue that the packets leave from, and 1: as for one that was received there (skb_tx_hash, net/core/dev.c). */
const volatile __u32 send_queue;

SEC("tc")
int to_uplink(struct __sk_buff *skb)
{
	skb->queue_mapping = send_queue;
	return bpf_redirect(send_uplink, 0);
}
