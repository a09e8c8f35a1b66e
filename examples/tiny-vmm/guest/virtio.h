/* A driver's part of virtio: the registers of virtio-mmio (VirtIO 1.3, 4.2) and virtqueues, split and packed. */
#ifndef VIRTIO_H
#define VIRTIO_H

#include "machine.h"

#define VIRTIO_NET 1
#define VIRTIO_ENTROPY 4

#define F_EVENT_IDX (1ul << 29)
#define F_VERSION_1 (1ul << 32)
#define F_RING_PACKED (1ul << 34)

/* Offsets of registers (4.2.2). */
enum reg {
	REG_MAGIC = 0x00,
	REG_VERSION = 0x04,
	REG_DEVICE_ID = 0x08,
	REG_DEVICE_FEATURES = 0x10,
	REG_DEVICE_FEATURES_SEL = 0x14,
	REG_DRIVER_FEATURES = 0x20,
	REG_DRIVER_FEATURES_SEL = 0x24,
	REG_QUEUE_SEL = 0x30,
	REG_QUEUE_NUM_MAX = 0x34,
	REG_QUEUE_NUM = 0x38,
	REG_QUEUE_READY = 0x44,
	REG_QUEUE_NOTIFY = 0x50,
	REG_INTERRUPT_STATUS = 0x60,
	REG_INTERRUPT_ACK = 0x64,
	REG_STATUS = 0x70,
	REG_QUEUE_DESC = 0x80,
	REG_QUEUE_DRIVER = 0x90,
	REG_QUEUE_DEVICE = 0xa0,
	REG_CONFIG = 0x100,
};

#define MOST_ENTRIES 256

struct device {
	u64 base;
	u64 features;
};

/* A piece of a chain. */
struct part {
	const volatile void *at;
	u32 bytes;
	/* The device writes it. */
	u8 writable;
};

struct queue {
	struct device *device;
	u16 index;
	u16 size;
	u8 packed;
	/* Descriptors (2.7.5, 2.8.13), what the driver writes beside them, and what the device writes. */
	volatile u8 *descriptors;
	volatile u16 *driver;
	volatile u16 *from_device;
	/* Split: numbers of free descriptors. Packed: free identities of chains. */
	u16 free[MOST_ENTRIES];
	u16 free_count;
	/* Descriptors of each chain, by its first descriptor or identity. */
	u16 chain_length[MOST_ENTRIES];
	u16 chain[MOST_ENTRIES][4];
	/* Split: the available index that comes next. Packed: the slot, and its wrap counter. */
	u16 next;
	u8 wrap;
	u16 free_slots;
	/* The same for used ones. */
	u16 used;
	u8 used_wrap;
	/* Chains (packed: slots) that were added since a kick was last thought of. */
	u16 added;
	/* FLAG_INTERRUPTS. With F_EVENT_IDX: chains (packed: slots) that were taken, and with which of them the device is to
	 * interrupt. */
	u8 interrupts;
	u8 event_idx;
	u16 taken;
	u16 armed;
};

static inline u32 reg_read(struct device *device, u32 offset)
{
	return *(volatile u32 *)(device->base + offset);
}

static inline void reg_write(struct device *device, u32 offset, u32 value)
{
	*(volatile u32 *)(device->base + offset) = value;
}

static inline u8 config_byte(struct device *device, u32 offset)
{
	return *(volatile u8 *)(device->base + REG_CONFIG + offset);
}

static inline u16 config_u16(struct device *device, u32 offset)
{
	return *(volatile u16 *)(device->base + REG_CONFIG + offset);
}

/* The device of that type; ends the guest if there is none. */
struct device device_find(u32 id);
/* Reset, and features up to FEATURES_OK (3.1.1): those of `wanted` that are offered. */
void device_begin(struct device *device, u64 wanted);
/* DRIVER_OK. */
void device_ready(struct device *device);
/* Sets a queue up. */
void queue_set_up(struct queue *queue, struct device *device, u16 index);
/* Adds a chain of at most four parts; its number, or -1 if there is no room. In a packed ring the device sees it
 * at once, and else with queue_publish. */
int queue_add(struct queue *queue, const struct part *parts, u16 count);
/* Lets the device see what was added to a split ring. */
void queue_publish(struct queue *queue);
/* Whether the device wants to be notified. */
int queue_wants_kick(struct queue *queue);
void queue_kick(struct queue *queue);
/* A chain that the device is done with: its number, or -1. `bytes`: how many were written. */
int queue_take(struct queue *queue, u32 *bytes);

#endif
