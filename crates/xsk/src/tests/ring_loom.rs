//! Loom model of the ring: every interleaving, and every value that the memory model allows a load to return, of this
//! code against the kernel's side, written as in `net/xdp/xsk_queue.h`. Loom's cells report any slot that both sides
//! touch at once.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p xsk --lib --profile loom`.

use loom::thread;

use super::*;
use crate::frame::Frame;

const SIZE: u32 = 2;
const ENTRIES: u64 = 3;

fn producer(heap: &Arc<Heap<u64>>) -> Producer<Frame> {
    Producer::new(Shared::heap(heap.clone(), SIZE), AddressCodec::new(4096, true))
}

/// The kernel as consumer: `xskq_cons_peek_desc` and `__xskq_cons_release`.
fn kernel_consume(heap: &Heap<u64>, next: &mut u32) -> Option<u64> {
    // smp_load_acquire(&q->ring->producer)
    if heap.producer.load(Ordering::Acquire) == *next {
        return None;
    }
    // SAFETY: loom checks that no other thread touches the slot.
    let value = heap.slots[(*next % SIZE) as usize].with(|slot| unsafe { slot.read() });
    *next += 1;
    // smp_store_release(&q->ring->consumer, ...)
    heap.consumer.store(*next, Ordering::Release);
    Some(value)
}

/// The kernel as producer: `xskq_prod_reserve_addr` and `__xskq_prod_submit`.
fn kernel_produce(heap: &Heap<u64>, next: &mut u32, value: u64) -> bool {
    // READ_ONCE(q->ring->consumer) and a control dependency to the stores below. Loom has no dependencies; acquire is
    // what the dependency amounts to here.
    if heap.consumer.load(Ordering::Acquire) + SIZE == *next {
        return false;
    }
    // SAFETY: loom checks that no other thread touches the slot.
    heap.slots[(*next % SIZE) as usize].with_mut(|slot| unsafe { slot.write(value) });
    *next += 1;
    // smp_store_release(&q->ring->producer, ...)
    heap.producer.store(*next, Ordering::Release);
    true
}

#[test]
fn kernel_reads_what_was_pushed_in_order() {
    loom::model(|| {
        let heap = Heap::new(SIZE);
        let mut ring = producer(&heap);
        let kernel = thread::spawn(move || {
            let (mut next, mut seen) = (0, Vec::new());
            while (seen.len() as u64) < ENTRIES {
                match kernel_consume(&heap, &mut next) {
                    Some(value) => seen.push(value),
                    None => thread::yield_now(),
                }
            }
            seen
        });
        let mut value = 0;
        while value < ENTRIES {
            let mut batch = ring.reserve(2);
            if batch.room() == 0 {
                drop(batch);
                thread::yield_now();
                continue;
            }
            while batch.room() > 0 && value < ENTRIES {
                batch.push(Frame::new(value));
                value += 1;
            }
        }
        assert_eq!(kernel.join().unwrap(), [0, 1, 2]);
    });
}

#[test]
fn we_read_what_the_kernel_produced_in_order() {
    loom::model(|| {
        let heap = Heap::new(SIZE);
        let codec = AddressCodec::new(4096, true);
        let mut ring = Consumer::<Frame>::new(Shared::heap(heap.clone(), SIZE), codec);
        let kernel = thread::spawn(move || {
            let mut next = 0;
            for value in 0..ENTRIES {
                while !kernel_produce(&heap, &mut next, value) {
                    thread::yield_now();
                }
            }
        });
        let mut seen = Vec::new();
        while (seen.len() as u64) < ENTRIES {
            let batch = ring.peek(2);
            if batch.len() == 0 {
                drop(batch);
                thread::yield_now();
                continue;
            }
            seen.extend(batch.map(|frame| frame.offset().get()));
        }
        kernel.join().unwrap();
        assert_eq!(seen, [0, 1, 2]);
    });
}

/// The kernel goes to sleep: it sets the flag, then looks once more. Either it sees our entry or we see its flag.
#[test]
fn no_wakeup_is_lost() {
    loom::model(|| {
        let heap = Heap::new(SIZE);
        let mut ring = producer(&heap);
        let kernel = thread::spawn(move || {
            heap.flags.store(NEED_WAKEUP, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            heap.producer.load(Ordering::Acquire) != 0
        });
        ring.reserve(1).push(Frame::new(7));
        let must_wake = ring.needs_wakeup();
        let kernel_saw_it = kernel.join().unwrap();
        assert!(
            must_wake || kernel_saw_it,
            "entry pushed, kernel asleep, nobody wakes it"
        );
    });
}
