#include "virtio.h"

#define MAGIC 0x74726976

enum status {
	STATUS_ACKNOWLEDGE = 1,
	STATUS_DRIVER = 2,
	STATUS_DRIVER_OK = 4,
	STATUS_FEATURES_OK = 8,
};

#define DESC_NEXT 1
#define DESC_WRITE 2
#define PACKED_AVAIL (1 << 7)
#define PACKED_USED (1 << 15)
/* RING_EVENT_FLAGS_DESC: notify by the descriptor in the event structure (2.8.10). */
#define BY_DESCRIPTOR 2
/* Bit of InterruptStatus: used buffers (4.2.2). */
#define INTERRUPT_USED 1
/* Split: VIRTQ_USED_F_NO_NOTIFY, VIRTQ_AVAIL_F_NO_INTERRUPT. Packed: RING_EVENT_FLAGS_DISABLE. All are 1. */
#define SUPPRESSED 1

struct descriptor {
	u64 at;
	u32 bytes;
	/* Split: flags, next. Packed: id, flags. */
	u16 first;
	u16 second;
};

struct device device_find(u32 id)
{
	for (u32 place = 0; place < DEVICE_PLACES; place++) {
		struct device device = { DEVICES_AT + place * DEVICE_BYTES, 0 };

		if (reg_read(&device, REG_MAGIC) != MAGIC || reg_read(&device, REG_VERSION) != 2)
			continue;
		if (reg_read(&device, REG_DEVICE_ID) == id)
			return device;
	}
	end(ANSWER_NO_DEVICE, HERE, id, 0);
}

static u64 offered(struct device *device)
{
	u64 low, high;

	reg_write(device, REG_DEVICE_FEATURES_SEL, 0);
	low = reg_read(device, REG_DEVICE_FEATURES);
	reg_write(device, REG_DEVICE_FEATURES_SEL, 1);
	high = reg_read(device, REG_DEVICE_FEATURES);
	return high << 32 | low;
}

void device_begin(struct device *device, u64 wanted)
{
	u32 status = STATUS_ACKNOWLEDGE | STATUS_DRIVER;
	struct wait wait = wait_begin();

	reg_write(device, REG_STATUS, 0);
	while (reg_read(device, REG_STATUS) != 0)
		wait_on(wait);
	reg_write(device, REG_STATUS, STATUS_ACKNOWLEDGE);
	reg_write(device, REG_STATUS, status);
	device->features = offered(device) & wanted;
	require(device->features & F_VERSION_1, ANSWER_WRONG, F_VERSION_1, device->features);
	reg_write(device, REG_DRIVER_FEATURES_SEL, 0);
	reg_write(device, REG_DRIVER_FEATURES, (u32)device->features);
	reg_write(device, REG_DRIVER_FEATURES_SEL, 1);
	reg_write(device, REG_DRIVER_FEATURES, device->features >> 32);
	status |= STATUS_FEATURES_OK;
	reg_write(device, REG_STATUS, status);
	require(reg_read(device, REG_STATUS) == status, ANSWER_WRONG, status, reg_read(device, REG_STATUS));
}

void device_ready(struct device *device)
{
	u32 status = STATUS_ACKNOWLEDGE | STATUS_DRIVER | STATUS_FEATURES_OK | STATUS_DRIVER_OK;

	reg_write(device, REG_STATUS, status);
	require(reg_read(device, REG_STATUS) == status, ANSWER_WRONG, status, reg_read(device, REG_STATUS));
}

static void write_address(struct device *device, u32 offset, volatile void *at)
{
	reg_write(device, offset, (u32)(u64)at);
	reg_write(device, offset + 4, (u64)at >> 32);
}

/* F_EVENT_IDX: the device interrupts when it has used INTERRUPT_STRIDE chains more. */
static void arm(struct queue *queue)
{
	u16 slot = queue->used + INTERRUPT_STRIDE - 1;
	u8 wrap = queue->used_wrap;

	queue->armed = queue->taken + INTERRUPT_STRIDE - 1;
	if (!queue->packed) {
		/* used_event, behind the available ring (2.7.6). */
		queue->driver[2 + queue->size] = queue->armed;
		return;
	}
	if (slot >= queue->size) {
		slot -= queue->size;
		wrap ^= 1;
	}
	queue->driver[0] = slot | wrap << 15;
	write_barrier();
	queue->driver[1] = BY_DESCRIPTOR;
}

/* Which interrupts there are to be. With F_EVENT_IDX the flag of split rings has to be 0 (2.7.7.1). */
static void choose_interrupts(struct queue *queue)
{
	queue->added = queue->taken = 0;
	queue->event_idx = (queue->device->features & F_EVENT_IDX) != 0;
	queue->interrupts = (mailbox->flags & FLAG_INTERRUPTS) != 0;
	if (queue->event_idx)
		arm(queue);
	else if (!queue->interrupts)
		/* We poll. Packed: the event structure's second half has the flags (2.8.14). */
		queue->driver[queue->packed ? 1 : 0] = SUPPRESSED;
}

/* So many chains (packed: slots) were taken: as an interrupt's handler would (4.2.3.4), and on to the next one. */
static void took(struct queue *queue, u16 count)
{
	u32 status;

	queue->taken += count;
	if (queue->interrupts) {
		status = reg_read(queue->device, REG_INTERRUPT_STATUS);
		require(status & INTERRUPT_USED, ANSWER_WRONG, INTERRUPT_USED, status);
		reg_write(queue->device, REG_INTERRUPT_ACK, status);
	}
	/* Passed: further on by less than half of all numbers. */
	if (queue->event_idx && (u16)(queue->taken - queue->armed - 1) < 0x8000)
		arm(queue);
}

void queue_set_up(struct queue *queue, struct device *device, u16 index)
{
	u32 most;

	reg_write(device, REG_QUEUE_SEL, index);
	require(reg_read(device, REG_QUEUE_READY) == 0, ANSWER_WRONG, 0, 1);
	most = reg_read(device, REG_QUEUE_NUM_MAX);
	require(most > 0, ANSWER_WRONG, 1, most);
	queue->device = device;
	queue->index = index;
	queue->size = most < MOST_ENTRIES ? most : MOST_ENTRIES;
	queue->packed = (device->features & F_RING_PACKED) != 0;
	queue->descriptors = allocate(16 * queue->size, 16);
	queue->driver = allocate(6 + 2 * queue->size, 4);
	queue->from_device = allocate(6 + 8 * queue->size, 4);
	queue->wrap = queue->used_wrap = 1;
	queue->next = queue->used = 0;
	queue->free_slots = queue->free_count = queue->size;
	for (u16 at = 0; at < queue->size; at++)
		queue->free[at] = queue->size - 1 - at;
	choose_interrupts(queue);
	reg_write(device, REG_QUEUE_NUM, queue->size);
	write_address(device, REG_QUEUE_DESC, queue->descriptors);
	write_address(device, REG_QUEUE_DRIVER, queue->driver);
	write_address(device, REG_QUEUE_DEVICE, queue->from_device);
	reg_write(device, REG_QUEUE_READY, 1);
	require(reg_read(device, REG_QUEUE_READY) == 1, ANSWER_WRONG, 1, 0);
}

static volatile struct descriptor *descriptor(struct queue *queue, u16 at)
{
	return (volatile struct descriptor *)queue->descriptors + at;
}

static int add_split(struct queue *queue, const struct part *parts, u16 count)
{
	u16 head;

	if (queue->free_count < count)
		return -1;
	head = queue->free[queue->free_count - 1];
	for (u16 at = 0; at < count; at++) {
		u16 number = queue->free[--queue->free_count];
		volatile struct descriptor *slot = descriptor(queue, number);
		int last = at + 1 == count;

		slot->at = (u64)parts[at].at;
		slot->bytes = parts[at].bytes;
		slot->first = (parts[at].writable ? DESC_WRITE : 0) | (last ? 0 : DESC_NEXT);
		slot->second = last ? 0 : queue->free[queue->free_count - 1];
		queue->chain[head][at] = number;
	}
	queue->chain_length[head] = count;
	queue->driver[2 + queue->next % queue->size] = head;
	queue->next++;
	queue->added++;
	return head;
}

static u16 packed_flags(u8 wrap)
{
	return wrap ? PACKED_AVAIL : PACKED_USED;
}

static int add_packed(struct queue *queue, const struct part *parts, u16 count)
{
	u16 id, first_flags = 0, first = queue->next;

	if (queue->free_slots < count || queue->free_count == 0)
		return -1;
	id = queue->free[--queue->free_count];
	for (u16 at = 0; at < count; at++) {
		volatile struct descriptor *slot = descriptor(queue, queue->next);
		u16 flags = packed_flags(queue->wrap) | (parts[at].writable ? DESC_WRITE : 0) |
			    (at + 1 < count ? DESC_NEXT : 0);

		slot->at = (u64)parts[at].at;
		slot->bytes = parts[at].bytes;
		slot->first = id;
		if (at == 0)
			first_flags = flags;
		else
			slot->second = flags;
		if (++queue->next == queue->size) {
			queue->next = 0;
			queue->wrap ^= 1;
		}
	}
	queue->chain_length[id] = count;
	queue->free_slots -= count;
	queue->added += count;
	/* The first one last: with it the whole chain is the device's (2.8.6). */
	write_barrier();
	descriptor(queue, first)->second = first_flags;
	return id;
}

int queue_add(struct queue *queue, const struct part *parts, u16 count)
{
	return queue->packed ? add_packed(queue, parts, count) : add_split(queue, parts, count);
}

void queue_publish(struct queue *queue)
{
	write_barrier();
	if (!queue->packed)
		queue->driver[1] = queue->next;
}

int queue_wants_kick(struct queue *queue)
{
	u16 event, flags, added = queue->added;

	full_barrier();
	queue->added = 0;
	if (!queue->event_idx)
		return queue->from_device[queue->packed ? 1 : 0] != SUPPRESSED;
	if (queue->packed) {
		flags = queue->from_device[1];
		if (flags != BY_DESCRIPTOR)
			return flags != SUPPRESSED;
		read_barrier();
		event = queue->from_device[0] & 0x7fff;
		if (queue->from_device[0] >> 15 != queue->wrap)
			event -= queue->size;
	} else {
		/* avail_event, behind the used ring (2.7.8). */
		event = queue->from_device[2 + 4 * queue->size];
	}
	/* Whether it is among those that were added (2.7.10.1). */
	return (u16)(queue->next - event - 1) < added;
}

void queue_kick(struct queue *queue)
{
	reg_write(queue->device, REG_QUEUE_NOTIFY, queue->index);
}

static int take_split(struct queue *queue, u32 *bytes)
{
	volatile u32 *element = (volatile u32 *)(queue->from_device + 2) + 2 * (queue->used % queue->size);
	u32 head;

	if (queue->from_device[1] == queue->used)
		return -1;
	read_barrier();
	head = element[0];
	*bytes = element[1];
	require(head < queue->size && queue->chain_length[head], ANSWER_WRONG, queue->size, head);
	queue->used++;
	for (u16 at = queue->chain_length[head]; at > 0; at--)
		queue->free[queue->free_count++] = queue->chain[head][at - 1];
	queue->chain_length[head] = 0;
	took(queue, 1);
	return head;
}

static int take_packed(struct queue *queue, u32 *bytes)
{
	volatile struct descriptor *slot = descriptor(queue, queue->used);
	u16 flags = slot->second, id, count;
	u16 both = queue->used_wrap ? PACKED_AVAIL | PACKED_USED : 0;

	if ((flags & (PACKED_AVAIL | PACKED_USED)) != both)
		return -1;
	read_barrier();
	id = slot->first;
	*bytes = slot->bytes;
	require(id < queue->size && queue->chain_length[id], ANSWER_WRONG, queue->size, id);
	count = queue->chain_length[id];
	queue->chain_length[id] = 0;
	queue->free[queue->free_count++] = id;
	queue->free_slots += count;
	queue->used += count;
	if (queue->used >= queue->size) {
		queue->used -= queue->size;
		queue->used_wrap ^= 1;
	}
	took(queue, count);
	return id;
}

int queue_take(struct queue *queue, u32 *bytes)
{
	return queue->packed ? take_packed(queue, bytes) : take_split(queue, bytes);
}
