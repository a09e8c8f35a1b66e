//! What lanes show is taken out once and in order, or counted as lost; and no more of a frame than there is room for.

use std::thread;

use super::*;

const BOTH: Wanted = Wanted {
    from_guest: true,
    to_guest: true,
};

const ABOUT: About = About {
    len: Some(60),
    received: None,
    seen: Seen::Passed,
};

fn show(tap: &Tap, number: u32) {
    tap.show(ABOUT, 4, |head| head.copy_from_slice(&number.to_be_bytes()));
}

fn numbers(capture: &Capture) -> Vec<u32> {
    let bytes = |record: Record| u32::from_be_bytes(record.bytes().try_into().expect("four"));
    std::iter::from_fn(|| capture.take()).map(bytes).collect()
}

#[test]
fn what_finds_no_room_is_counted_and_what_was_there_stays() {
    let capture = Arc::new(Capture::with_room(BOTH, 3));
    let tap = capture.tap(true, 0).expect("wanted");
    (0..5).for_each(|number| show(&tap, number));
    assert_eq!((capture.lost(), numbers(&capture)), (2, vec![0, 1, 2]));
    show(&tap, 9);
    assert_eq!((capture.lost(), numbers(&capture)), (2, vec![9]));
}

#[test]
fn only_directions_that_are_wanted_have_a_tap() {
    let capture = Arc::new(Capture::new(Wanted {
        to_guest: false,
        ..BOTH
    }));
    assert!(capture.tap(true, 0).is_none());
    let tap = capture.tap(false, 7).expect("wanted");
    show(&tap, 1);
    let record = capture.take().expect("shown");
    assert_eq!((record.to_guest, record.pair), (false, 7));
}

#[test]
fn no_more_of_a_frame_is_shown_than_there_is_room_for() {
    let capture = Arc::new(Capture::new(BOTH));
    let tap = capture.tap(false, 0).expect("wanted");
    tap.show(ABOUT, 9000, |head| head.fill(7));
    assert_eq!(capture.take().expect("shown").bytes(), [7; SHOWN_BYTES]);
    tap.show(ABOUT, 0, |head| assert!(head.is_empty()));
    assert!(capture.take().expect("shown").bytes().is_empty());
}

#[test]
fn frames_of_several_lanes_are_shown_or_counted_each_once_and_in_order() {
    const LANES: u32 = 4;
    const EACH: u32 = 5000;
    let capture = Arc::new(Capture::with_room(BOTH, 64));
    let mut seen: Vec<u32> = Vec::new();
    thread::scope(|scope| {
        let lanes: Vec<_> = (0..LANES)
            .map(|lane| {
                let tap = capture.tap(false, 0).expect("wanted");
                scope.spawn(move || (0..EACH).for_each(|number| show(&tap, lane << 16 | number)))
            })
            .collect();
        while !lanes.iter().all(thread::ScopedJoinHandle::is_finished) {
            seen.extend(numbers(&capture));
        }
    });
    seen.extend(numbers(&capture));
    assert_eq!(seen.len() as u64 + capture.lost(), u64::from(LANES * EACH));
    for lane in 0..LANES {
        let its: Vec<_> = seen.iter().filter(|&&number| number >> 16 == lane).collect();
        assert!(its.windows(2).all(|two| two[0] < two[1]), "lane {lane}");
    }
}
