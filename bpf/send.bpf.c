// SPDX-License-Identifier: (Apache-2.0 OR BSD-3-Clause)
/*
 * send.bpf.c: redirects what is written to a tap device to another interface.
 *
 * THEORY OF OPERATION
 *
 * An AF_XDP socket takes frames that are ready for the wire. A guest's GSO packet would have to be segmented for it, and
 * each segment sent alone. Written to a tap it is a packet of the kernel's own, which the interface takes as it is, or
 * the kernel segments at the last moment. The program is attached to the tap's ingress and redirects every frame, so the
 * host's stack gets none; packet sockets see them. Programs of tap.bpf.c at the interface leave them alone.
 */
#include "steer.h"

#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_helpers.h>

char _license[] SEC("license") = "Dual BSD/GPL";

/* Set before the program is loaded. */
const volatile __u32 send_uplink;
/* Transmit queue, plus 1, as skb_record_rx_queue stores it: skb_tx_hash (net/core/dev.c) takes it if neither the driver
 * nor XPS chooses. 0: the kernel chooses.
 */
const volatile __u32 send_queue;

/* A tag of a VLAN (802.1Q). */
#define TAG_BYTES 4

SEC("tc")
int to_uplink(struct __sk_buff *skb)
{
	__u32 mtu = 0;
	long too_long;

	/* Drops what is longer than the interface's MTU allows: the NIC does not check that. Frames may be as long as with a
	 * tag, as for sockets and bridges (is_skb_forwardable, net/core/dev.c). Segments may not: the daemon cuts those.
	 */
	if (skb->gso_size)
		too_long = bpf_check_mtu(skb, send_uplink, &mtu, 0, BPF_MTU_CHK_SEGS);
	else
		too_long = bpf_check_mtu(skb, send_uplink, &mtu, -TAG_BYTES, 0);
	if (too_long)
		return TC_ACT_SHOT;
	skb->queue_mapping = send_queue;
	skb->tc_index = SENT_BY_TAP(skb->ingress_ifindex, send_uplink);
	return bpf_redirect(send_uplink, 0);
}
