//! The dirty log of the pages that a queue itself writes: each page that changes, and no other.

use super::*;

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

/// Compares only the memory before the buffers, whose writes the device logs. So each change is the queue's own.
fn every_page_that_changes_is_logged(packed: bool, notes: Notes, size: u32) {
    let file = rustix::fs::memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 4096).unwrap();
    let log = Arc::new(
        DirtyLog::open(
            file.as_fd(),
            FileRange {
                offset: 0,
                bytes: 4096,
            },
            &TrustedFiles,
        )
        .unwrap(),
    );
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

#[test]
fn every_page_that_the_queue_writes_is_logged() {
    for size in [64, 1024] {
        for notes in [Notes::None, Notes::Ring] {
            every_page_that_changes_is_logged(false, notes, size);
            every_page_that_changes_is_logged(true, notes, size);
        }
    }
}
