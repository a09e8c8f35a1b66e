//! Config space: whatever part of it a VMM asks for or writes.
//!
//! Invariants: an answer has exactly the bytes that were asked for, never more than the 256 of the protocol; what two
//! answers say of one byte is the same.

use std::sync::OnceLock;

use vhost_af_xdp::fuzzing::NullPort;

#[derive(arbitrary::Arbitrary, Debug)]
enum Step {
    Get { offset: u32, len: u32 },
    GetNear { offset: u8, len: u8 },
    Set { _offset: u32, _bytes: Vec<u8> },
}

/// Runs one input.
pub fn run(data: &[u8]) {
    static PORT: OnceLock<NullPort> = OnceLock::new();
    let port = PORT.get_or_init(|| NullPort::new(3, false));
    let Some(steps) = crate::decode::<Vec<Step>>(data) else {
        return;
    };
    let whole = port.config(0, 256).expect("the whole structure is always told");
    let get = |offset: u32, len: u32| {
        let Some(bytes) = port.config(offset, len) else {
            return;
        };
        assert_eq!(bytes.len(), len as usize);
        let at = offset as usize;
        assert_eq!(bytes, whole[at..at + bytes.len()], "two answers differ");
    };
    for step in steps.iter().take(64) {
        match step {
            Step::Get { offset, len } => get(*offset, *len),
            Step::GetNear { offset, len } => get((*offset).into(), (*len).into()),
            Step::Set { .. } => port.set_config(),
        }
    }
    assert_eq!(port.config(0, 256).as_ref(), Some(&whole), "a write changed it");
}
