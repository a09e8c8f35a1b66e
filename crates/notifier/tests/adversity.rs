//! The notifiers with faulty partners: looks that panic, take long or leave chains, backends that misuse their eventfd,
//! a bus that refuses at any time.

use crate::support;
use testkit::assert_soon;

use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread;

use notifier::address::{Bus, NotifyAddress};
use notifier::notifiers::{By, Left, Notifiers, QueueSetup, Serve};
use notifier::state::{Event, State};
use rustix::io::ioctl_fionbio;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
use rustix::thread::gettid;
use support::board::Board;
use support::switching;
use testkit::wait;
use vmm_sys_util::eventfd::EventFd;

const NOTIFY: u64 = 0x50;

/// A device's side that is a closure.
struct Looks<F>(F);

impl<F: FnMut() -> Left + Send> Serve for Looks<F> {
    fn look(&mut self) -> Left {
        (self.0)()
    }
}

fn looks(look: impl FnMut() -> Left + Send + 'static) -> Box<dyn Serve> {
    Box::new(Looks(look))
}

/// Counts what it is called for.
fn counts(looked: &Arc<AtomicU32>) -> Box<dyn Serve> {
    let looked = Arc::clone(looked);
    looks(move || {
        looked.fetch_add(1, Ordering::SeqCst);
        Left::Nothing
    })
}

fn device(board: &Arc<Board>, queues: Vec<(By, Box<dyn Serve>)>) -> Notifiers<Arc<Board>> {
    let setups = queues
        .into_iter()
        .zip(0..)
        .map(|((by, serve), queue)| QueueSetup {
            address: NotifyAddress::mmio(0, queue).unwrap(),
            by,
            serve,
        });
    Notifiers::new(Arc::clone(board), setups.collect(), true).unwrap()
}

fn exit(notifiers: &Notifiers<Arc<Board>>, queue: u32) {
    assert!(notifiers.exit(Bus::Mmio, NOTIFY, &queue.to_le_bytes()).is_some());
}

/// Runs `act`, which may hang, on a thread of its own; returns whether it ended.
fn ends(act: impl FnOnce() + Send + 'static) -> bool {
    let over = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&over);
    thread::spawn(move || {
        act();
        told.store(true, Ordering::SeqCst);
    });
    wait::until(wait::SOON, || over.load(Ordering::SeqCst))
}

/// Queue 0 panics once it is armed, queue 1 counts.
struct Panicking {
    board: Arc<Board>,
    notifiers: Notifiers<Arc<Board>>,
    looked: [Arc<AtomicU32>; 2],
}

impl Panicking {
    fn new(by: By) -> Self {
        let board = Arc::new(Board::new(9));
        let armed = Arc::<AtomicBool>::default();
        let looked = [Arc::<AtomicU32>::default(), Arc::default()];
        let [first, second] = &looked;
        let (arm, first) = (Arc::clone(&armed), Arc::clone(first));
        let panics = looks(move || {
            // Read before the look is counted, because the test arms the panic after the first counted look.
            let errs = arm.load(Ordering::SeqCst);
            first.fetch_add(1, Ordering::SeqCst);
            assert!(!errs, "a device that errs");
            Left::Nothing
        });
        let notifiers = device(&board, vec![(by, panics), (By::Eventfd, counts(second))]);
        switching::start(&notifiers, 2);
        assert_soon!(looked.iter().all(|looked| looked.load(Ordering::SeqCst) > 0));
        armed.store(true, Ordering::SeqCst);
        Self {
            board,
            notifiers,
            looked,
        }
    }

    fn looked(&self, queue: usize) -> u32 {
        self.looked[queue].load(Ordering::SeqCst)
    }

    /// Checks that all but queue 0 continues after a look at it has panicked.
    fn only_queue_0_is_lost(self) {
        let [first, second] = [0, 1].map(|queue| self.looked(queue));
        assert!(self.board.write(NOTIFY, &1u32.to_le_bytes()));
        assert_soon!(self.looked(1) > second, "queue 1 is served");
        let broken: Vec<_> = self
            .notifiers
            .status()
            .iter()
            .map(|status| status.broken)
            .collect();
        assert_eq!(broken, [true, false]);
        let Self {
            board,
            notifiers,
            looked,
        } = self;
        assert!(ends(move || {
            for event in [Event::Reset, Event::VmStop] {
                notifiers.event(event).unwrap();
            }
            switching::start(&notifiers, 2);
            if !board.write(NOTIFY, &0u32.to_le_bytes()) {
                exit(&notifiers, 0);
            }
            notifiers.event(Event::VmStop).unwrap();
            drop(notifiers);
            assert_eq!(board.bound(), 0);
        }));
        let again = looked[0].load(Ordering::SeqCst);
        assert_eq!(again, first, "nobody looks at a device in no known state");
    }
}

#[test]
fn a_look_that_panics_in_a_vcpu_ends_looks_at_its_queue_alone() {
    let device = Panicking::new(By::Exit);
    assert!(catch_unwind(AssertUnwindSafe(|| exit(&device.notifiers, 0))).is_err());
    device.only_queue_0_is_lost();
}

#[test]
fn a_look_that_panics_in_the_thread_ends_looks_at_its_queue_alone() {
    let device = Panicking::new(By::Eventfd);
    let before = device.looked(0);
    assert!(device.board.write(NOTIFY, &0u32.to_le_bytes()));
    assert_soon!(device.looked(0) > before);
    device.only_queue_0_is_lost();
}

#[test]
fn a_look_that_panics_in_a_transition_ends_looks_at_its_queue_alone() {
    let device = Panicking::new(By::Eventfd);
    let stop = || device.notifiers.event(Event::VmStop);
    assert!(catch_unwind(AssertUnwindSafe(stop)).is_err());
    device.notifiers.event(Event::VmRun).unwrap();
    device.only_queue_0_is_lost();
}

/// The guest puts three chains, and notifies once.
#[test]
fn what_a_bounded_look_leaves_is_looked_at_without_another_notification() {
    for by in [By::Eventfd, By::Exit] {
        let board = Arc::new(Board::new(9));
        let chains = Arc::new(AtomicU32::new(3));
        let there = Arc::clone(&chains);
        let one_a_look = looks(move || {
            let take = |chains: u32| chains.checked_sub(1);
            match there.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take) {
                Ok(1) | Err(_) => Left::Nothing,
                Ok(_) => Left::Something,
            }
        });
        let notifiers = device(&board, vec![(by, one_a_look)]);
        let empty = || chains.load(Ordering::SeqCst) == 0;
        switching::start(&notifiers, 1);
        assert_soon!(empty(), "{by:?}: left by the look of a transition");
        chains.store(3, Ordering::SeqCst);
        if !board.write(NOTIFY, &[0; 4]) {
            exit(&notifiers, 0);
        }
        assert_soon!(empty(), "{by:?}: left by the look of a notification");
    }
}

/// A device that always has more chains delays neither other queues nor transitions, and is not looked at while it
/// is not ready, or a backend has it.
#[test]
fn a_queue_that_is_never_empty_holds_nobody_up() {
    for by in [By::Eventfd, By::Exit] {
        let board = Arc::new(Board::new(9));
        let [endless, other] = [Arc::<AtomicU32>::default(), Arc::default()];
        let looked = Arc::clone(&endless);
        let never_empty = looks(move || {
            looked.fetch_add(1, Ordering::SeqCst);
            Left::Something
        });
        let notifiers = device(&board, vec![(by, never_empty), (By::Eventfd, counts(&other))]);
        switching::start(&notifiers, 2);
        let looks = || endless.load(Ordering::SeqCst);
        assert_soon!(looks() > 100);
        let before = other.load(Ordering::SeqCst);
        assert!(board.write(NOTIFY, &1u32.to_le_bytes()));
        assert_soon!(other.load(Ordering::SeqCst) > before);
        for (off, on) in [
            (Event::BackendStart, Event::BackendStop),
            (Event::QueueReset, Event::QueueEnable),
        ] {
            notifiers.queue_event(0, off).unwrap();
            let quiet = looks();
            thread::sleep(wait::QUIET);
            assert_eq!(looks(), quiet, "{by:?}: after {off:?}");
            assert!(sleeps(notifiers.thread_id()));
            notifiers.queue_event(0, on).unwrap();
            assert_soon!(looks() > quiet + 100);
        }
    }
}

/// Makes the eventfd blocking, as any process with a duplicate can.
fn make_blocking(kick: &EventFd) {
    let us = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
    let duplicate = pidfd_getfd(us, kick.as_raw_fd(), PidfdGetfdFlags::empty()).unwrap();
    ioctl_fionbio(duplicate, false).unwrap();
}

/// All duplicates share `O_NONBLOCK`: a backend that reads in a thread of its own clears it.
#[test]
fn a_backend_that_makes_its_eventfd_blocking_does_not_hold_the_vmm_up() {
    let board = Arc::new(Board::new(9));
    let looked = Arc::default();
    let notifiers = device(&board, vec![(By::Eventfd, counts(&looked))]);
    switching::start(&notifiers, 1);
    let kick = notifiers.eventfd(0).unwrap();
    notifiers.queue_event(0, Event::BackendStart).unwrap();
    make_blocking(&kick);
    assert!(kick.read().unwrap() > 0);
    assert!(ends(move || {
        notifiers.queue_event(0, Event::BackendStop).unwrap();
        assert_eq!(notifiers.state(0), Some(State::Assigned));
        let kick = notifiers.eventfd(0).unwrap();
        notifiers.queue_event(0, Event::BackendStart).unwrap();
        make_blocking(&kick);
        assert!(kick.read().unwrap() > 0);
        drop(notifiers);
    }));
}

#[test]
fn a_backend_without_an_ioeventfd_gets_one_when_there_is_room() {
    let board = Arc::new(Board::new(0));
    let looked = Arc::default();
    let notifiers = device(&board, vec![(By::Eventfd, counts(&looked))]);
    switching::start(&notifiers, 1);
    let kick = notifiers.eventfd(0).unwrap();
    notifiers.queue_event(0, Event::BackendStart).unwrap();
    assert_eq!((board.bound(), kick.read().unwrap()), (0, 1));
    board.set_room(1);
    notifiers.event(Event::DriverOk).unwrap();
    assert_eq!((board.bound(), kick.read().unwrap()), (1, 1));
    let status = notifiers.status().remove(0);
    assert_eq!((status.state, status.by), (State::OffLimits, By::Eventfd));
    assert!(status.unbound.is_none());
}

/// Threads that wait for a long look sleep.
#[test]
fn nobody_burns_a_cpu_while_a_look_lasts() {
    let board = Arc::new(Board::new(9));
    let (begun, has_begun) = channel();
    let (go_on, may_go_on) = channel::<()>();
    let may_go_on = Mutex::new(may_go_on);
    let slow = looks(move || {
        begun.send(()).unwrap();
        // Fails when the test is over.
        let _ = may_go_on.lock().unwrap().recv();
        Left::Nothing
    });
    let notifiers = device(&board, vec![(By::Exit, slow)]);
    go_on.send(()).unwrap();
    switching::start(&notifiers, 1);
    has_begun.recv().unwrap();
    thread::scope(|scope| {
        let (tell, ids) = channel();
        scope.spawn(|| exit(&notifiers, 0));
        has_begun.recv().unwrap();
        let all_sleep = [true, false, false].into_iter().all(|stops| {
            let (tell, notifiers) = (tell.clone(), &notifiers);
            scope.spawn(move || {
                tell.send(gettid()).unwrap();
                if stops {
                    notifiers.event(Event::VmStop).map(drop).unwrap();
                } else {
                    exit(notifiers, 0);
                }
            });
            sleeps(ids.recv().unwrap())
        });
        drop(go_on);
        assert!(all_sleep);
    });
}

/// Whether a thread sleeps: several checks in a row must find it asleep, so that a short wait does not count.
fn sleeps(thread: Pid) -> bool {
    let mut asleep = 0;
    wait::until(wait::SOON, || {
        asleep = if is_asleep(thread) { asleep + 1 } else { 0 };
        asleep == 20
    })
}

fn is_asleep(thread: Pid) -> bool {
    let path = format!("/proc/self/task/{}/stat", thread.as_raw_nonzero());
    let stat = std::fs::read_to_string(path).unwrap();
    stat.rsplit(')').next().unwrap().trim_start().starts_with('S')
}
