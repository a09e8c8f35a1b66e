/* A driver of virtio-mmio (VirtIO 1.3, 4.2) with split virtqueues (2.7). */
#pragma once

#include <linux/virtio_mmio.h>
#include <linux/virtio_ring.h>

#include "machine.h"

/* Steps of the driver: ACKNOWLEDGE and DRIVER; FEATURES_OK; DRIVER_OK (2.1). */
enum status { STATUS_BEGIN = 3, STATUS_FEATURES = 11, STATUS_READY = 15 };

#define MOST_ENTRIES 256

/* A virtqueue with a buffer for each descriptor. */
struct queue {
	u16 index;
	u16 size;
	volatile struct vring_desc *descriptors;
	/* Available ring: flags, index, descriptors. Used ring: flags, index, elements of two u32. */
	volatile u16 *available;
	volatile u16 *used;
	u8 *buffers;
	u16 free[MOST_ENTRIES];
	u16 free_count;
	u16 added;
	u16 taken;
};

static inline u32 reg_read(u64 offset)
{
	return *(volatile u32 *)(DEVICE_AT + offset);
}

static inline void reg_write(u64 offset, u32 value)
{
	*(volatile u32 *)(DEVICE_AT + offset) = value;
}

static inline u8 config_byte(u64 offset)
{
	return *(volatile u8 *)(DEVICE_AT + VIRTIO_MMIO_CONFIG + offset);
}

static inline u8 *queue_buffer(struct queue *queue, int descriptor)
{
	return queue->buffers + descriptor * BUFFER_BYTES;
}

/* The descriptor, and buffer, of the next chain; -1 if there is none. */
static inline int queue_next(struct queue *queue)
{
	return queue->free_count ? queue->free[queue->free_count - 1] : -1;
}

/* Resets the device of this type and negotiates those of `wanted` that it offers (3.1.1), which it returns. */
u64 device_begin(u32 type, u64 wanted);
/* Writes the status register, and checks that the device accepts it. */
void device_set_status(u32 status);
void queue_set_up(struct queue *queue, u16 index);
/* Adds a chain: the next free buffer with that many bytes for the device to read, and one with that many to write;
 * 0 leaves one out. */
void queue_add(struct queue *queue, u32 readable, u32 writable);
/* Makes the added chains available. */
void queue_publish(struct queue *queue);
/* Notifies the device if it wants that, or mailbox->always is set. */
void queue_kick(struct queue *queue);
/* Takes back a chain: its first descriptor, or -1. `bytes`: how many the device has written. */
int queue_take(struct queue *queue, u32 *bytes);
