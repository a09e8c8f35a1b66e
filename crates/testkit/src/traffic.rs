//! Numbered frames at a steady pace both ways, whatever happens to the daemon meanwhile, and what became of them.
//!
//! Theory of operation. Three threads. One sends into the wire, one reads what comes out of it; the third is the
//! guest: it adds frames to its transmit ring when they are due, also while no daemon is there, as a guest does that
//! knows nothing of a daemon, and takes what was received. The guest is behind a lock, so that the test can put it on
//! another connection meanwhile. Nobody waits for calls: who makes them may be dead.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::{Driver, Layout, PacketPort, frame};

/// How long the guest rests between two looks at its ring.
const REST: Duration = Duration::from_micros(300);

/// One direction: what was sent, and what arrived, in order.
#[derive(Clone, Debug, Default)]
pub struct Flow {
    /// When each number was sent.
    pub sent: Vec<Instant>,
    /// Which number arrived when.
    pub arrived: Vec<(u32, Instant)>,
}

impl Flow {
    /// Numbers that arrived more than once.
    pub fn repeated(&self) -> Vec<u32> {
        let mut seen = HashSet::new();
        let again = |&(number, _): &(u32, Instant)| (!seen.insert(number)).then_some(number);
        self.arrived.iter().filter_map(again).collect()
    }

    /// How many have been sent and not arrived, if none came twice.
    fn under_way(&self) -> usize {
        self.sent.len().saturating_sub(self.arrived.len())
    }

    /// How many never arrived.
    pub fn lost(&self) -> usize {
        let arrived: HashSet<_> = self.arrived.iter().map(|&(number, _)| number).collect();
        self.sent.len() - arrived.len()
    }

    /// Of those that were sent between `from` and `to`, how many never arrived.
    pub fn lost_of(&self, from: Instant, to: Instant) -> usize {
        let arrived: HashSet<_> = self.arrived.iter().map(|&(number, _)| number).collect();
        let sent = (0..).zip(&self.sent);
        sent.filter(|(number, at)| (from..to).contains(*at) && !arrived.contains(number))
            .count()
    }

    /// How many arrived after `since`.
    pub fn arrived_since(&self, since: Instant) -> usize {
        self.arrived.iter().filter(|&&(_, at)| at > since).count()
    }

    /// How long after `since` the first one arrived.
    pub fn first_after(&self, since: Instant) -> Option<Duration> {
        let later = |&(_, at): &(u32, Instant)| at.checked_duration_since(since);
        self.arrived.iter().find_map(later)
    }

    /// The longest time without an arrival, of those that touch the time between `from` and `to`.
    pub fn longest_gap(&self, from: Instant, to: Instant) -> Duration {
        let gaps = self.arrived.windows(2).map(|pair| (pair[0].1, pair[1].1));
        let touching = gaps.filter(|&(begun, ended)| ended >= from && begun <= to);
        touching
            .map(|(begun, ended)| ended - begun)
            .max()
            .unwrap_or_default()
    }
}

/// Frames under way. Ended on drop.
#[must_use]
pub struct Traffic {
    guest: Arc<Mutex<Option<Driver>>>,
    stop: Arc<AtomicBool>,
    flows: Arc<Flows>,
    wire: Option<Arc<PacketPort>>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Flows {
    to_guest: Mutex<Flow>,
    from_guest: Mutex<Flow>,
}

impl Traffic {
    /// Starts it, a frame each `pace` in both directions. The guest must have receive buffers posted.
    pub fn start(guest: Driver, wire: PacketPort, pace: Duration) -> Self {
        Self::start_within(guest, wire, pace, usize::MAX)
    }

    /// The same, with no more than `window` frames to the guest that have not arrived: each one that is lost is one
    /// less under way, for good.
    pub fn start_within(guest: Driver, wire: PacketPort, pace: Duration, window: usize) -> Self {
        let mut traffic = Self {
            guest: Arc::new(Mutex::new(Some(guest))),
            stop: Arc::default(),
            flows: Arc::default(),
            wire: None,
            threads: Vec::new(),
        };
        let wire = Arc::new(wire);
        traffic.wire = Some(Arc::clone(&wire));
        let sender = Arc::clone(&wire);
        traffic.spawn(pace, move |flows, due| {
            if due && locked(&flows.to_guest).under_way() < window {
                let number = note_sent(&flows.to_guest);
                let _ = sender.try_send(&frame::numbered(number));
            }
        });
        traffic.spawn(pace, move |flows, _| {
            while let Some(got) = wire.receive(REST) {
                note_arrival(&flows.from_guest, &got);
            }
        });
        let guest = Arc::clone(&traffic.guest);
        traffic.spawn(pace, move |flows, due| {
            let mut guest = locked(&guest);
            let Some(driver) = guest.as_mut() else { return };
            let pair = &mut driver.pairs[0];
            pair.reap_sent();
            if due && pair.has_room() {
                let number = note_sent(&flows.from_guest);
                pair.send(&frame::numbered(number), Layout::Whole);
            }
            while let Some(got) = pair.poll() {
                note_arrival(&flows.to_guest, &got.frame);
            }
        });
        traffic
    }

    fn spawn(&mut self, pace: Duration, work: impl Fn(&Flows, bool) + Send + 'static) {
        let (stop, flows) = (Arc::clone(&self.stop), Arc::clone(&self.flows));
        self.threads.push(std::thread::spawn(move || {
            let mut due = Instant::now();
            while !stop.load(Ordering::Relaxed) {
                let now = Instant::now();
                work(&flows, now >= due);
                if now >= due {
                    // Who was held up does not make up for it: a burst of all that would fill the ring of a daemon that
                    // is gone.
                    due = now.max(due + pace);
                }
                std::thread::sleep(REST);
            }
        }));
    }

    /// Frames of the guest's in one go, beside those that are due.
    ///
    /// # Panics
    /// If the guest is gone.
    pub fn burst(&self, count: usize) {
        let mut guest = locked(&self.guest);
        let frames: Vec<_> = (0..count)
            .map(|_| frame::numbered(note_sent(&self.flows.from_guest)))
            .collect();
        let frames: Vec<_> = frames.iter().map(Vec::as_slice).collect();
        let pair = &mut guest.as_mut().expect("a guest").pairs[0];
        pair.reap_sent();
        pair.send_batch(&frames, Layout::Whole);
    }

    /// Does something with the guest, which is held up for as long.
    ///
    /// # Panics
    /// If the guest is gone.
    pub fn with_guest<T>(&self, work: impl FnOnce(&mut Driver) -> T) -> T {
        work(locked(&self.guest).as_mut().expect("a guest"))
    }

    /// Puts the guest on another connection, say; it is held up for as long.
    ///
    /// # Panics
    /// If the guest is gone.
    pub fn replace_guest(&self, work: impl FnOnce(Driver) -> Driver) {
        let mut guest = locked(&self.guest);
        *guest = Some(work(guest.take().expect("a guest")));
    }

    /// Ends it; the guest, and the far end of the wire.
    ///
    /// # Panics
    /// If the guest is gone, or a thread of the traffic panicked.
    pub fn end(mut self) -> (Driver, PacketPort) {
        self.join();
        let guest = locked(&self.guest).take().expect("a guest");
        let wire = self.wire.take().and_then(Arc::into_inner);
        (guest, wire.expect("nobody else has it"))
    }

    fn join(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let panicked = thread.join().is_err();
            assert!(
                !panicked || std::thread::panicking(),
                "a thread of the traffic panicked"
            );
        }
    }

    /// How long after `since` the first frame arrived: in the guest, and on the wire.
    pub fn first_after(&self, since: Instant) -> Option<[Duration; 2]> {
        Some([
            locked(&self.flows.to_guest).first_after(since)?,
            locked(&self.flows.from_guest).first_after(since)?,
        ])
    }

    /// The same two directions, so far.
    pub fn flows(&self) -> [Flow; 2] {
        [
            locked(&self.flows.to_guest).clone(),
            locked(&self.flows.from_guest).clone(),
        ]
    }
}

impl Drop for Traffic {
    fn drop(&mut self) {
        self.join();
    }
}

fn note_sent(flow: &Mutex<Flow>) -> u32 {
    let mut flow = locked(flow);
    flow.sent.push(Instant::now());
    u32::try_from(flow.sent.len() - 1).expect("a short test")
}

fn note_arrival(flow: &Mutex<Flow>, frame: &[u8]) {
    if let Some(number) = frame::number_of(frame) {
        locked(flow).arrived.push((number, Instant::now()));
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no thread of the traffic panicked")
}
