#include "virtio.h"

#define MAGIC 0x74726976

static u64 heap = HEAP_AT;

static void *allocate(u64 bytes)
{
	u64 at = heap;

	heap += (bytes + 63) & ~63ul;
	require(heap <= RAM_BYTES, RAM_BYTES, heap);
	return (void *)at;
}

void device_set_status(u32 status)
{
	u32 found;

	reg_write(VIRTIO_MMIO_STATUS, status);
	found = reg_read(VIRTIO_MMIO_STATUS);
	require(found == status, status, found);
}

u64 device_begin(u32 type, u64 wanted)
{
	u64 features;

	require(reg_read(VIRTIO_MMIO_MAGIC_VALUE) == MAGIC, MAGIC, reg_read(VIRTIO_MMIO_MAGIC_VALUE));
	require(reg_read(VIRTIO_MMIO_VERSION) == 2, 2, reg_read(VIRTIO_MMIO_VERSION));
	require(reg_read(VIRTIO_MMIO_DEVICE_ID) == type, type, reg_read(VIRTIO_MMIO_DEVICE_ID));
	device_set_status(0);
	device_set_status(STATUS_BEGIN);
	reg_write(VIRTIO_MMIO_DEVICE_FEATURES_SEL, 1);
	features = (u64)reg_read(VIRTIO_MMIO_DEVICE_FEATURES) << 32;
	reg_write(VIRTIO_MMIO_DEVICE_FEATURES_SEL, 0);
	features = (features | reg_read(VIRTIO_MMIO_DEVICE_FEATURES)) & wanted;
	reg_write(VIRTIO_MMIO_DRIVER_FEATURES_SEL, 0);
	reg_write(VIRTIO_MMIO_DRIVER_FEATURES, (u32)features);
	reg_write(VIRTIO_MMIO_DRIVER_FEATURES_SEL, 1);
	reg_write(VIRTIO_MMIO_DRIVER_FEATURES, features >> 32);
	device_set_status(STATUS_FEATURES);
	return features;
}

static void write_address(u32 offset, volatile void *at)
{
	reg_write(offset, (u32)(u64)at);
	reg_write(offset + 4, (u64)at >> 32);
}

void queue_set_up(struct queue *queue, u16 index)
{
	u32 most;

	reg_write(VIRTIO_MMIO_QUEUE_SEL, index);
	most = reg_read(VIRTIO_MMIO_QUEUE_NUM_MAX);
	require(most > 0, 1, most);
	queue->index = index;
	queue->size = most < MOST_ENTRIES ? most : MOST_ENTRIES;
	queue->descriptors = allocate(16 * queue->size);
	queue->available = allocate(6 + 2 * queue->size);
	queue->used = allocate(6 + 8 * queue->size);
	queue->buffers = allocate((u64)BUFFER_BYTES * queue->size);
	/* The guest polls. */
	queue->available[0] = VRING_AVAIL_F_NO_INTERRUPT;
	for (u16 at = 0; at < queue->size; at++)
		queue->free[at] = queue->size - 1 - at;
	queue->free_count = queue->size;
	reg_write(VIRTIO_MMIO_QUEUE_NUM, queue->size);
	write_address(VIRTIO_MMIO_QUEUE_DESC_LOW, queue->descriptors);
	write_address(VIRTIO_MMIO_QUEUE_AVAIL_LOW, queue->available);
	write_address(VIRTIO_MMIO_QUEUE_USED_LOW, queue->used);
	reg_write(VIRTIO_MMIO_QUEUE_READY, 1);
	require(reg_read(VIRTIO_MMIO_QUEUE_READY) == 1, 1, 0);
}

static u16 add_buffer(struct queue *queue, u32 bytes, u16 flags)
{
	u16 descriptor = queue->free[--queue->free_count];
	volatile struct vring_desc *slot = &queue->descriptors[descriptor];

	slot->addr = (u64)queue_buffer(queue, descriptor);
	slot->len = bytes;
	slot->flags = flags;
	return descriptor;
}

void queue_add(struct queue *queue, u32 readable, u32 writable)
{
	u16 head;

	require(queue->free_count >= 2 || (queue->free_count && !(readable && writable)), 2, queue->free_count);
	if (readable) {
		head = add_buffer(queue, readable, writable ? VRING_DESC_F_NEXT : 0);
		if (writable)
			queue->descriptors[head].next = add_buffer(queue, writable, VRING_DESC_F_WRITE);
	} else {
		head = add_buffer(queue, writable, VRING_DESC_F_WRITE);
	}
	queue->available[2 + queue->added++ % queue->size] = head;
}

void queue_publish(struct queue *queue)
{
	barrier();
	queue->available[1] = queue->added;
}

void queue_kick(struct queue *queue)
{
	full_barrier();
	if (queue->used[0] == VRING_USED_F_NO_NOTIFY && !mailbox->always)
		return;
	reg_write(VIRTIO_MMIO_QUEUE_NOTIFY, queue->index);
	mailbox->kicks++;
}

int queue_take(struct queue *queue, u32 *bytes)
{
	volatile u32 *element = (volatile u32 *)(queue->used + 2) + 2 * (queue->taken % queue->size);
	u32 head, at;

	if (queue->used[1] == queue->taken)
		return -1;
	barrier();
	head = element[0];
	*bytes = element[1];
	require(head < queue->size, queue->size, head);
	queue->taken++;
	for (at = head; queue->descriptors[at].flags & VRING_DESC_F_NEXT; at = queue->descriptors[at].next)
		queue->free[queue->free_count++] = at;
	queue->free[queue->free_count++] = at;
	return head;
}
