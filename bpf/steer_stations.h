/* SPDX-License-Identifier: (Apache-2.0 OR BSD-3-Clause) */
/*
 * steer_stations.h: the stations of an interface's networks, a map that the XDP program and the programs of tap.bpf.c share.
 */
#ifndef VHOST_AF_XDP_STEER_STATIONS_H
#define VHOST_AF_XDP_STEER_STATIONS_H

#include "steer.h"

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "steer_key.h"

/* Written by the loader: who is where. Of all networks of the interface. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, STEER_MAX_STATIONS);
	__type(key, struct steer_station);
	__type(value, struct steer_member);
} steer_stations SEC(".maps");

/* The word of a steer_station, of a frame's first bytes. */
static __always_inline __u64 station_key(__u32 vlan, const __u8 *mac)
{
	return (__u64)(__u16)vlan << SHIFT(0, 2) | BYTE(mac, 0, 2) | BYTE(mac, 1, 3) | BYTE(mac, 2, 4) |
	       BYTE(mac, 3, 5) | BYTE(mac, 4, 6) | BYTE(mac, 5, 7);
}

#endif
