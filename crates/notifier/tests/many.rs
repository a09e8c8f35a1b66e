//! vCPUs of a hostile guest: each notifies any queue with any write, resets, and sets queues up at any time, between
//! any two steps of the others, while the VMM starts and stops backends, and looks at the status.

use crate::support;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use notifier::address::{Bus, NotifyAddress};
use notifier::notifiers::{By, NotifierError, Notifiers, QueueSetup, Report};
use notifier::state::{Event, State};
use support::backend::Backend;
use support::board::Board;
use support::device::{Device, Side, ThreadCounters};
use support::switching;
use testkit::wait::Raised;

const QUEUES: u16 = 3;
const VCPUS: u32 = 4;
const STEPS: u32 = 3_000;
const NOTIFY: u64 = 0x50;

type Queue = Arc<Device<ThreadCounters>>;

/// A VMM, with a lock for its backends.
struct Vmm {
    board: Arc<Board>,
    notifiers: Notifiers<Arc<Board>>,
    queues: Vec<Queue>,
    backends: Mutex<Vec<Option<Backend>>>,
}

impl Vmm {
    fn new() -> Self {
        // Room for one less than there are queues that are to have an eventfd.
        let board = Arc::new(Board::new(1));
        let queues: Vec<_> = (0..QUEUES)
            .map(|_| Device::new(ThreadCounters::default()))
            .collect();
        let by = [By::Eventfd, By::Exit, By::Eventfd];
        let setups = queues
            .iter()
            .zip(by)
            .zip(0..)
            .map(|((device, by), queue)| QueueSetup {
                address: NotifyAddress::mmio(0, queue).unwrap(),
                by,
                serve: Box::new(Side(Arc::clone(device))),
            });
        let notifiers = Notifiers::new(Arc::clone(&board), setups.collect(), true).unwrap();
        let backends = Mutex::new((0..QUEUES).map(|_| None).collect());
        Self {
            board,
            notifiers,
            queues,
            backends,
        }
    }

    /// The report may be outdated: another vCPU's thread has handled it, and the next backend runs.
    fn heed(&self, report: &Report) {
        for &queue in &report.stop_backends {
            self.stop(queue);
        }
    }

    fn start(&self, queue: u16) {
        let place = usize::from(queue);
        let mut backends = self.backends.lock().unwrap();
        let kick = self.notifiers.eventfd(queue).unwrap();
        match self.notifiers.queue_event(queue, Event::BackendStart) {
            Ok(_) => backends[place] = Some(Backend::start(&self.queues[place], kick)),
            Err(NotifierError::Refused { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }

    fn stop(&self, queue: u16) {
        let mut backends = self.backends.lock().unwrap();
        if let Some(backend) = backends[usize::from(queue)].take() {
            assert_eq!(self.notifiers.state(queue), Some(State::OffLimits));
            backend.stop();
            self.notifiers.queue_event(queue, Event::BackendStop).unwrap();
        }
    }

    fn notify(&self, queue: u16) {
        self.queues[usize::from(queue)]
            .counters
            .kicked
            .fetch_add(1, Ordering::SeqCst);
        let data = u32::from(queue).to_le_bytes();
        if !self.board.write(NOTIFY, &data) {
            assert_eq!(self.notifiers.exit(Bus::Mmio, NOTIFY, &data), Some(queue));
        }
    }

    /// One random action of a vCPU or the VMM.
    fn step(&self, random: u32) {
        let queue = u16::try_from((random >> 8) % u32::from(QUEUES)).unwrap();
        let report = match (random >> 16) % 32 {
            0 => self.notifiers.event(Event::Reset),
            1 => self.notifiers.event(Event::BusMasterOff),
            2..5 => self.notifiers.event(Event::BusMasterOn),
            5..8 => self.notifiers.event(Event::DriverOk),
            8 => self.notifiers.queue_event(queue, Event::QueueReset),
            9..14 => self.notifiers.queue_event(queue, Event::QueueEnable),
            14 => return self.start(queue),
            15 => return self.stop(queue),
            16 => return assert_eq!(self.notifiers.status().len(), usize::from(QUEUES)),
            17 => {
                let length = usize::try_from(random >> 28).unwrap();
                let hit = self.notifiers.exit(Bus::Mmio, NOTIFY, &[0xff; 16][..length]);
                return assert_eq!(hit, None);
            }
            _ => return self.notify(queue),
        };
        self.heed(&report.unwrap());
    }
}

#[test]
fn no_notification_is_lost_while_all_vcpus_do_anything_at_once() {
    let vmm = Vmm::new();
    switching::start(&vmm.notifiers, QUEUES);
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        // Notifies without pause, whatever happens.
        scope.spawn(|| {
            for queue in (0..QUEUES).cycle() {
                if over.load(Ordering::Acquire) {
                    return;
                }
                vmm.notify(queue);
            }
        });
        let _over = Raised(&over);
        let vcpus: Vec<_> = (1..=VCPUS)
            .map(|seed| {
                let vmm = &vmm;
                scope.spawn(move || {
                    let mut random = seed;
                    for _ in 0..STEPS {
                        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                        vmm.step(random);
                    }
                })
            })
            .collect();
        for vcpu in vcpus {
            vcpu.join().unwrap();
        }
    });
    for event in [Event::BusMasterOn, Event::VmRun] {
        vmm.heed(&vmm.notifiers.event(event).unwrap());
    }
    switching::start(&vmm.notifiers, QUEUES);
    for queue in &vmm.queues {
        queue.sees_all();
        assert_eq!(queue.met.load(Ordering::SeqCst), 0, "two owners looked at once");
    }
    for queue in 0..QUEUES {
        vmm.stop(queue);
    }
}
