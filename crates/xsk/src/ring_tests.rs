use super::*;
use crate::frame::Frame;

/// The kernel's side of a ring, played on the heap. Frames lie in it as the numbers that they are made of.
fn producer(size: u32) -> (Arc<Heap<u64>>, Producer<Frame>) {
    let heap = Heap::new(size);
    (heap.clone(), producer_of(heap, size))
}

fn producer_of(heap: Arc<Heap<u64>>, size: u32) -> Producer<Frame> {
    Producer::new(Shared::heap(heap, size), AddressCodec::new(4096, true))
}

fn consumer(size: u32) -> (Arc<Heap<u64>>, Consumer<Frame>) {
    let heap = Heap::new(size);
    (heap.clone(), consumer_of(heap, size))
}

fn consumer_of(heap: Arc<Heap<u64>>, size: u32) -> Consumer<Frame> {
    Consumer::new(Shared::heap(heap, size), AddressCodec::new(4096, true))
}

fn put(heap: &Heap<u64>, size: u32, values: impl IntoIterator<Item = u64>) {
    let mut next = heap.producer.load(Ordering::Relaxed);
    for value in values {
        // SAFETY: single-threaded test; the ring under test does not touch slots it does not own.
        heap.slots[(next & (size - 1)) as usize].with_mut(|slot| unsafe { slot.write(value) });
        next = next.wrapping_add(1);
    }
    heap.producer.store(next, Ordering::Release);
}

fn slot(heap: &Heap<u64>, index: usize) -> u64 {
    // SAFETY: single-threaded test.
    heap.slots[index].with(|slot| unsafe { slot.read() })
}

fn drain(taken: Taken<'_, Frame>) -> Vec<u64> {
    taken.map(|frame| frame.offset().get()).collect()
}

#[test]
fn nothing_is_published_before_the_batch_ends() {
    let (heap, mut ring) = producer(4);
    let mut batch = ring.reserve(3);
    batch.push(Frame::new(10));
    batch.push(Frame::new(11));
    assert_eq!(heap.producer.load(Ordering::Acquire), 0);
    assert_eq!(batch.room(), 1);
    assert_eq!(batch.submit(), 2);
    assert_eq!(heap.producer.load(Ordering::Acquire), 2);
    assert_eq!((slot(&heap, 0), slot(&heap, 1), ring.free()), (10, 11, 2));
}

#[test]
fn full_ring_grants_nothing_until_the_kernel_consumes() {
    let (heap, mut ring) = producer(2);
    let mut batch = ring.reserve(9);
    assert_eq!(batch.room(), 2);
    batch.push(Frame::new(1));
    batch.push(Frame::new(2));
    drop(batch);
    assert_eq!((ring.free(), ring.reserve(1).room()), (0, 0));
    heap.consumer.store(1, Ordering::Release);
    let mut batch = ring.reserve(9);
    assert_eq!(batch.room(), 1);
    batch.push(Frame::new(3));
    drop(batch);
    assert_eq!((slot(&heap, 0), slot(&heap, 1)), (3, 2));
}

#[test]
#[should_panic(expected = "more entries than were reserved")]
fn pushing_past_the_reservation_panics() {
    let (_heap, mut ring) = producer(4);
    let mut batch = ring.reserve(1);
    batch.push(Frame::new(1));
    batch.push(Frame::new(2));
}

#[test]
fn counters_run_through_their_wrap() {
    let heap = Heap::new(4);
    for counter in [&heap.producer, &heap.consumer] {
        counter.store(u32::MAX - 1, Ordering::Relaxed);
    }
    let mut ring = producer_of(heap.clone(), 4);
    let mut kernel = consumer_of(heap.clone(), 4);
    for round in 0..5 {
        let mut batch = ring.reserve(4);
        assert_eq!(batch.room(), 4);
        for value in 0..4 {
            batch.push(Frame::new(round * 4 + value));
        }
        drop(batch);
        assert_eq!((ring.free(), kernel.available()), (0, 4));
        assert_eq!(
            drain(kernel.peek(8)),
            (round * 4..round * 4 + 4).collect::<Vec<_>>()
        );
    }
}

#[test]
fn entries_not_read_stay_and_only_read_ones_are_released() {
    let (heap, mut ring) = consumer(4);
    put(&heap, 4, [5, 6, 7]);
    let mut batch = ring.peek(3);
    assert_eq!(batch.len(), 3);
    assert_eq!(batch.next(), Some(Frame::new(5)));
    assert_eq!(heap.consumer.load(Ordering::Acquire), 0);
    drop(batch);
    assert_eq!(heap.consumer.load(Ordering::Acquire), 1);
    assert_eq!((ring.available(), drain(ring.peek(64))), (2, vec![6, 7]));
    assert_eq!((ring.available(), heap.consumer.load(Ordering::Acquire)), (0, 3));
}

#[test]
fn forgotten_batch_loses_entries_but_repeats_none() {
    let (heap, mut ring) = consumer(4);
    put(&heap, 4, [1, 2]);
    let mut batch = ring.peek(2);
    assert_eq!(batch.next(), Some(Frame::new(1)));
    std::mem::forget(batch);
    put(&heap, 4, [3]);
    assert_eq!(drain(ring.peek(4)), [3]);
    assert_eq!(heap.consumer.load(Ordering::Acquire), 3);
}

#[test]
fn empty_and_absent_rings_yield_nothing() {
    let (_heap, mut ring) = consumer(4);
    assert_eq!((ring.available(), ring.peek(4).len()), (0, 0));
    let (_heap, mut absent) = consumer(0);
    assert_eq!(
        (absent.size(), absent.available(), absent.peek(1).len()),
        (0, 0, 0)
    );
    let (_heap, mut absent) = producer(0);
    assert_eq!(
        (absent.size(), absent.free(), absent.reserve(1).room()),
        (0, 0, 0)
    );
}

#[test]
fn wakeup_flag_is_read_as_the_kernel_sets_it() {
    let (heap, ring) = producer(4);
    assert!(!ring.needs_wakeup());
    heap.flags.store(NEED_WAKEUP, Ordering::Relaxed);
    assert!(ring.needs_wakeup());
    heap.flags.store(!NEED_WAKEUP, Ordering::Relaxed);
    assert!(!ring.needs_wakeup());
}
