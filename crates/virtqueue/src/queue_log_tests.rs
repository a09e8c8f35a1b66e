//! The dirty log of the pages that a queue itself writes: each page that changes, and no other.

use super::*;
use crate::RingAddresses;

/// Pages of guest memory whose bytes differ.
fn changed(before: &[u8], after: &[u8]) -> BTreeSet<u64> {
    let page = LOG_PAGE_BYTES as usize;
    before
        .chunks(page)
        .zip(after.chunks(page))
        .zip(LOW / LOG_PAGE_BYTES..)
        .filter(|((before, after), _)| before != after)
        .map(|(_, page)| page)
        .collect()
}

fn logged(file: &OwnedFd) -> BTreeSet<u64> {
    let mut bitmap = [0u8; 4096];
    rustix::io::pread(file, &mut bitmap, 0).unwrap();
    let set = |page: &u64| bitmap[*page as usize / 8] & 1 << (page % 8) != 0;
    (0..4096 * 8).filter(set).collect()
}

fn new_log() -> (OwnedFd, Arc<DirtyLog>) {
    let file = rustix::fs::memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 4096).unwrap();
    let whole = FileRange {
        offset: 0,
        bytes: 4096,
    };
    let log = DirtyLog::open(file.as_fd(), whole, &TrustedFiles).unwrap();
    (file, Arc::new(log))
}

/// Compares only the memory before the buffers, whose writes the device logs. So each change is the queue's own.
fn every_page_that_changes_is_logged(packed: bool, notes: Notes, size: u32) {
    let (file, log) = new_log();
    let mut world = World::new(size, features(packed), notes);
    let plans: Vec<Plan> = some_plans().into_iter().cycle().take(600).collect();
    let mut queue = world.device();
    queue.set_log(Some(log));
    let snapshot = |world: &World| world.ram.read_vec(GuestAddr(LOW), (BUFFERS - LOW) as usize);
    let (mut all_changed, mut all_logged) = (BTreeSet::new(), BTreeSet::new());
    while world.back < plans.len() {
        world.send(&plans, 40);
        let before = snapshot(&world);
        rustix::io::pwrite(&file, &[0; 4096], 0).unwrap();
        let cell = RefCell::new(world);
        let habits = Habits {
            batch: 64,
            unpop: 1,
            publish_each: 10,
        };
        queue.disable_kicks();
        turn(&mut queue, &cell, &mut 0, habits);
        let _ = queue.enable_kicks();
        world = cell.into_inner();
        let (changed, logged) = (changed(&before, &snapshot(&world)), logged(&file));
        assert!(
            changed.is_subset(&logged),
            "{changed:?} changed, {logged:?} logged"
        );
        all_changed.extend(changed);
        all_logged.extend(logged);
        world.collect();
    }
    assert_eq!(all_changed, all_logged, "nothing is logged that never changes");
}

/// Only what is written: both ends of the ring, and nothing between.
#[test]
fn batch_over_the_end_of_the_ring_is_logged_in_two_parts() {
    const SIZE: u16 = 4096;
    const START: u16 = SIZE - 513;
    const COUNT: u16 = 1400;
    let plan = Plan {
        parts: vec![(1, false)],
        indirect: false,
    };
    for packed in [false, true] {
        let (file, log) = new_log();
        let mut world = World::new(SIZE.into(), features(packed), Notes::Ring);
        world.driver.start_at(START);
        let mut queue = world.device();
        queue.set_log(Some(log));
        world.send(&vec![plan.clone(); COUNT.into()], COUNT.into());
        let newly_logged = || {
            let logged = logged(&file);
            rustix::io::pwrite(&file, &[0; 4096], 0).unwrap();
            logged
        };
        let pages = |ranges: &[(u64, u64)]| -> BTreeSet<u64> {
            let page = |at| (LOW + at) / LOG_PAGE_BYTES;
            let all = ranges
                .iter()
                .map(|&(start, len)| page(start)..=page(start + len - 1));
            all.flatten().collect()
        };
        let both_ends = |first: u64, bytes: u64| {
            let (start, before_end) = (u64::from(START), u64::from(SIZE - START));
            let rest = u64::from(COUNT) - before_end;
            [(first + bytes * start, bytes * before_end), (first, bytes * rest)]
        };
        let RingAddresses { desc, used, .. } = world.driver.rings(&world.memory).offsets();
        let slots = pages(&both_ends(desc, 16));
        let [last, first] = both_ends(used + 4, 8);
        let (taken, published) = if packed {
            (slots.clone(), slots)
        } else {
            let event = used + 4 + 8 * u64::from(SIZE);
            (pages(&[(used, 4), (event, 2)]), pages(&[(used, 4), last, first]))
        };
        let mut chains = Chains::for_queue(queue.size(), COUNT.into());
        assert_eq!(queue.pop(&mut chains, COUNT.into()), Ok(COUNT.into()));
        assert_eq!(newly_logged(), taken, "taken, packed: {packed}");
        queue.unpop(COUNT);
        assert_eq!(newly_logged(), taken, "given back, packed: {packed}");
        assert_eq!(queue.pop(&mut chains, COUNT.into()), Ok(COUNT.into()));
        newly_logged();
        queue.push_all_used(&chains.chains);
        queue.publish();
        assert_eq!(newly_logged(), published, "published, packed: {packed}");
    }
}

#[test]
fn every_page_that_the_queue_writes_is_logged() {
    for size in [64, 1024] {
        for notes in [Notes::None, Notes::Ring] {
            every_page_that_changes_is_logged(false, notes, size);
            every_page_that_changes_is_logged(true, notes, size);
        }
    }
}
