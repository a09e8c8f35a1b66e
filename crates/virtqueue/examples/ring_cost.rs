//! What a descriptor costs: pop + push_used + publish, in nanoseconds.
//!
//! `cargo run --release -p virtqueue --example ring_cost [queue size]`
//!
//! Two settings. "one thread": driver and device take turns in one thread, so the ring stays in its cache,
//! and the driver's share is measured separately. "two threads": each side polls on a CPU of its own, as in
//! real life, and the time is that of the slower side, with all cache lines that go to and fro. Medians of
//! [`ROUNDS`] rounds.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use virtqueue::driver::{Buffer, DriverFeatures, GuestRam, QueueDriver};
use virtqueue::{
    Chains, GuestAddr, MemoryMap, Queue, QueueFeatures, QueueSize, QueueStart, RingFormat, RingLayout,
    RingShape, TrustedFiles,
};

/// Many short rounds: on a busy machine some of them are undisturbed, and the lowest figure is the cost of the code.
const ROUNDS: usize = 201;
/// Rounds of the two-thread setting, which takes longer and needs both CPUs.
const THREAD_ROUNDS: usize = 21;
const CHAINS_PER_ROUND: u32 = 1 << 14;
const BUFFER_BYTES: u64 = 2048;

#[derive(Clone, Copy)]
enum Shape {
    Single,
    Pair,
    IndirectPair,
}

impl Shape {
    const ALL: [(Self, &'static str); 3] = [
        (Self::Single, "1 descriptor"),
        (Self::Pair, "2 descriptors"),
        (Self::IndirectPair, "indirect, 2 entries"),
    ];

    fn add(self, driver: &mut QueueDriver, buffer: GuestAddr) -> bool {
        let head = Buffer::readable(buffer, 12);
        let body = Buffer::readable(GuestAddr(buffer.get() + 12), 64);
        match self {
            Self::Single => driver.add(&[Buffer::readable(buffer, 76)]),
            Self::Pair => driver.add(&[head, body]),
            Self::IndirectPair => driver.add_indirect(&[head, body]),
        }
        .is_some()
    }
}

struct Bench {
    driver: QueueDriver,
    queue: Queue,
    chains: Chains,
    buffers: Vec<GuestAddr>,
}

impl Bench {
    fn new(shape: RingShape, event_idx: bool) -> Self {
        let ram = Arc::new(GuestRam::new(&[(GuestAddr(0), 64 << 20)]).expect("memory"));
        let features = DriverFeatures {
            event_idx,
            in_order: true,
        };
        let driver = QueueDriver::new(&ram, shape, features).expect("a ring");
        let map =
            Arc::new(MemoryMap::new(ram.regions().expect("descriptors"), 0, &TrustedFiles).expect("a map"));
        let rings = RingLayout::from_user(&map, shape, driver.ring_user_addresses()).expect("a sound ring");
        let features = QueueFeatures {
            event_idx,
            indirect: true,
            in_order: true,
            packed: shape.format == RingFormat::Packed,
        };
        let mut queue = Queue::new(&map, rings, features, QueueStart::default()).expect("a sound ring");
        queue.disable_kicks();
        let buffers = (0..shape.size.get())
            .map(|_| ram.alloc(BUFFER_BYTES, 64).expect("room"))
            .collect();
        Self {
            driver,
            queue,
            chains: Chains::for_queue(shape.size, 256),
            buffers,
        }
    }

    fn device_step(queue: &mut Queue, chains: &mut Chains, batch: usize) -> u32 {
        let taken = queue.pop(chains, batch).expect("a driver without fault");
        for chain in chains.iter() {
            queue.push_used(chain.id, 0);
        }
        queue.publish();
        taken as u32
    }

    /// (device, driver) nanoseconds a chain.
    fn one_thread(&mut self, shape: Shape, batch: usize) -> (f64, f64) {
        let (mut device, mut driver, mut done) = (Duration::ZERO, Duration::ZERO, 0);
        self.driver.disable_calls();
        while done < CHAINS_PER_ROUND {
            let start = Instant::now();
            for buffer in &self.buffers[..batch] {
                assert!(shape.add(&mut self.driver, *buffer));
            }
            self.driver.publish();
            let added = Instant::now();
            done += Self::device_step(&mut self.queue, &mut self.chains, batch);
            let served = Instant::now();
            while self.driver.take_used().is_some() {}
            device += served - added;
            driver += (added - start) + served.elapsed();
        }
        let per_chain = |time: Duration| time.as_nanos() as f64 / f64::from(done);
        (per_chain(device), per_chain(driver))
    }

    /// Nanoseconds a chain, of the slower side.
    fn two_threads(&mut self, shape: Shape, batch: usize) -> f64 {
        let stop = AtomicBool::new(false);
        let Self {
            driver,
            queue,
            chains,
            buffers,
        } = self;
        let start = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                driver.disable_calls();
                let (mut added, mut back) = (0, 0);
                while back < CHAINS_PER_ROUND {
                    let burst = (CHAINS_PER_ROUND - added).min(batch as u32);
                    let fit = (0..burst)
                        .take_while(|i| shape.add(driver, buffers[*i as usize]))
                        .count();
                    added += fit as u32;
                    if fit > 0 {
                        driver.publish();
                    }
                    let before = back;
                    while driver.take_used().is_some() {
                        back += 1;
                    }
                    if fit == 0 && back == before {
                        std::thread::yield_now();
                    }
                }
                stop.store(true, Ordering::Relaxed);
            });
            while !stop.load(Ordering::Relaxed) {
                if Self::device_step(queue, chains, batch) == 0 {
                    std::thread::yield_now();
                }
            }
        });
        start.elapsed().as_nanos() as f64 / f64::from(CHAINS_PER_ROUND)
    }
}

/// (median, least)
fn summary(mut figures: Vec<f64>) -> (f64, f64) {
    figures.sort_by(f64::total_cmp);
    (figures[figures.len() / 2], figures[0])
}

fn main() {
    let size = std::env::args()
        .nth(1)
        .map_or(Ok(256), |arg| arg.parse())
        .expect("a queue size");
    println!("queue of {size}, ns a chain, median (least) of {ROUNDS} rounds");
    println!(
        "{:<8}{:<20}{:>10}{:>6}{:>16}{:>16}{:>16}",
        "ring", "chain", "event idx", "batch", "device", "driver", "two threads"
    );
    let formats = [(RingFormat::Split, "split"), (RingFormat::Packed, "packed")];
    for (format, ring) in formats {
        let size = match format {
            RingFormat::Split => QueueSize::new(size),
            RingFormat::Packed => QueueSize::packed(size),
        };
        let size = size.expect("a queue size");
        for (shape, name) in Shape::ALL {
            for (event_idx, batch) in [(false, 32), (false, 64), (true, 32), (true, 64)] {
                let figures = measure(RingShape::new(format, size), event_idx, shape, batch);
                let event = if event_idx { "on" } else { "off" };
                let [device, driver, threads] = figures;
                println!("{ring:<8}{name:<20}{event:>10}{batch:>6}{device:>16}{driver:>16}{threads:>16}");
            }
        }
    }
}

/// Device, driver, two threads.
fn measure(ring: RingShape, event_idx: bool, shape: Shape, batch: usize) -> [String; 3] {
    let mut bench = Bench::new(ring, event_idx);
    let (device, driver) = (0..ROUNDS).map(|_| bench.one_thread(shape, batch)).unzip();
    let threads = (0..THREAD_ROUNDS)
        .map(|_| bench.two_threads(shape, batch))
        .collect();
    [device, driver, threads].map(|figures| {
        let (median, least) = summary(figures);
        format!("{median:.1} ({least:.1})")
    })
}
