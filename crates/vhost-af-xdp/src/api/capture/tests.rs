//! Tests of both sides of a capture, and of clients that read slowly or not at all, or that request captures of ports
//! that do not exist.

use model::control::Answer;

use super::link::{Message, NoMessage, message_of};
use super::*;
use dataplane::policy::capture::{About, Record, SHOWN_BYTES, Seen};

const BOTH: Wanted = Wanted {
    from_guest: true,
    to_guest: true,
};

fn record(seen: Seen, len: Option<u32>, received: Option<u64>) -> Record {
    Record {
        at_ns: 1 << 60 | 7,
        to_guest: received.is_some(),
        pair: 513,
        about: About { len, received, seen },
        known: 3,
        head: std::array::from_fn(|at| if at < 3 { at as u8 + 1 } else { 0 }),
    }
}

#[test]
fn messages_are_read_as_they_were_written_and_not_before_they_are_whole() {
    let records = [
        record(Seen::Passed, Some(60), None),
        record(Seen::Denied(Some(258)), None, Some(u64::MAX)),
        record(Seen::Denied(None), Some(u32::MAX), Some(0)),
        record(Seen::Refused, None, None),
    ];
    for record in records {
        let mut bytes = Vec::new();
        put_record(&record, &mut bytes);
        for some in 0..bytes.len() {
            assert!(message_of(&bytes[..some]).expect("part of one").is_none());
        }
        let (message, len) = message_of(&bytes).expect("one").expect("whole");
        let Message::Frame(read) = message else {
            panic!("{message:?}")
        };
        assert_eq!((len, format!("{read:?}")), (bytes.len(), format!("{record:?}")));
    }
    let mut bytes = Vec::new();
    put_end(End::PortGone, 99, &mut bytes);
    assert!(message_of(&bytes[..15]).expect("part of one").is_none());
    let read = message_of(&bytes).expect("one");
    assert!(matches!(
        read,
        Some((
            Message::End {
                why: End::PortGone,
                lost: 99
            },
            16
        ))
    ));
}

#[test]
fn what_is_no_message_is_refused() {
    let mut bytes = Vec::new();
    put_record(&record(Seen::Passed, None, None), &mut bytes);
    for (at, value) in [(0, 3), (2, 3), (7, 2)] {
        let mut wrong = bytes.clone();
        wrong[at] = value;
        assert_eq!(message_of(&wrong).err(), Some(NoMessage), "{at}");
    }
}

#[test]
fn client_that_reads_ever_so_slowly_keeps_no_capture() {
    let capture = Arc::new(Capture::new(BOTH));
    let tap = capture.tap(true, 0).expect("wanted");
    for _ in 0..2000 {
        let about = About {
            len: Some(300),
            received: None,
            seen: Seen::Passed,
        };
        tap.show(about, SHOWN_BYTES, |to| to.fill(1));
    }
    let (ours, mut client) = UnixStream::pair().expect("sockets");
    let reader = std::thread::spawn(move || {
        let mut some = [0; 1024];
        while client.read(&mut some).is_ok_and(|read| read > 0) {
            std::thread::sleep(Duration::from_millis(100));
        }
    });
    finish(&ours, (&capture, Vec::new()), End::Asked).expect_err("it takes a minute for all");
    // What the client has not read yet stays readable.
    drop(reader);
}

#[test]
fn one_capture_of_a_port_and_so_many_in_all() {
    let captures = Captures::new(|_| None);
    let refused = |name: &str| captures.place(name).err().unwrap_or_default();
    let first = captures.place("vm0").expect("free");
    assert!(refused("vm0").contains("captured already"));
    let others: Vec<_> = (1..MOST).map(|at| captures.place(&format!("vm{at}"))).collect();
    assert!(refused("another").contains("captures already"));
    drop(first);
    drop(captures.place("vm0").expect("free again"));
    drop(others);
    assert!(captures.running.lock().expect("ours").is_empty());
}

#[test]
fn capture_without_a_place_or_a_port_is_refused() {
    let captures = Captures::new(|_| None);
    let refused = || {
        let (mut client, stream) = UnixStream::pair().expect("sockets");
        let request = CaptureRequest {
            port: "vm9".to_owned(),
            from_guest: true,
            to_guest: true,
        };
        captures.serve(&stream, request).expect("it reads");
        drop(stream);
        let mut text = String::new();
        client.read_to_string(&mut text).expect("it is answered");
        let answer: Answer<CaptureBegun> = serde_json::from_str(&text).expect("an answer");
        answer.into_result().expect_err("refused").message
    };
    assert!(refused().contains("no port vm9"));
    assert!(
        captures.running.lock().expect("ours").is_empty(),
        "it has no place"
    );
    let _all: Vec<_> = (0..MOST).map(|at| captures.place(&format!("vm{at}"))).collect();
    assert!(refused().contains("captures already"));
}

fn shown(capture: &Arc<Capture>, count: u32) {
    let tap = capture.tap(true, 0).expect("wanted");
    let about = About {
        len: Some(60),
        received: None,
        seen: Seen::Passed,
    };
    (0..count).for_each(|_| tap.show(about, SHOWN_BYTES, |head| head.fill(1)));
}

/// Number of frames in these bytes, and the end message.
fn frames(bytes: &[u8]) -> (u64, Option<(End, u64)>) {
    let (mut rest, mut frames) = (bytes, 0);
    while let Some((message, len)) = message_of(rest).expect("messages") {
        match message {
            Message::Frame(_) => frames += 1,
            Message::End { why, lost } => return (frames, Some((why, lost))),
        }
        rest = &rest[len..];
    }
    (frames, None)
}

#[test]
fn client_that_does_not_read_loses_frames_and_is_told_how_many() {
    const FRAMES: u32 = 100_000;
    let (mut ours, theirs) = UnixStream::pair().expect("sockets");
    let capture = Arc::new(Capture::new(BOTH));
    let shows = Arc::clone(&capture);
    let showing = std::thread::spawn(move || {
        let mut waiting = Vec::new();
        let why = show(&theirs, (&shows, &mut waiting), || true).expect("it is there");
        finish(&theirs, (&shows, waiting), why)
    });
    // Lanes do not wait for the client, which has read nothing so far.
    shown(&capture, FRAMES);
    ours.shutdown(std::net::Shutdown::Write).expect("ours");
    let mut bytes = Vec::new();
    ours.read_to_end(&mut bytes).expect("it ends");
    showing.join().expect("no panic").expect("all was read");
    let (frames, end) = frames(&bytes);
    let (why, lost) = end.expect("it is said");
    assert_eq!((why, frames + lost), (End::Asked, FRAMES.into()));
    assert!(lost > 0 && lost == capture.lost());
}

#[test]
fn capture_ends_with_its_port_and_with_a_client_that_is_gone() {
    let (mut ours, theirs) = UnixStream::pair().expect("sockets");
    let capture = Arc::new(Capture::new(BOTH));
    shown(&capture, 5);
    let mut waiting = Vec::new();
    let why = show(&theirs, (&capture, &mut waiting), || false).expect("the client is there");
    finish(&theirs, (&capture, waiting), why).expect("read");
    drop(theirs);
    let mut bytes = Vec::new();
    ours.read_to_end(&mut bytes).expect("it ends");
    assert_eq!(frames(&bytes), (5, Some((End::PortGone, 0))));

    let (ours, theirs) = UnixStream::pair().expect("sockets");
    drop(ours);
    // Reading or writing shows that the client is gone.
    let over = show(&theirs, (&capture, &mut Vec::new()), || true);
    assert!(over.is_err() || over.is_ok_and(|why| why == End::Asked));
}
