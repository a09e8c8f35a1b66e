//! The control queue of an embedded device, and what its commands make of frames.
//!
//! Invariants: a command is done exactly where the rules allow it, however descriptors cut it, and is told to the data
//! path before it is answered; one byte of the answer is written, and that alone; a chain without room for it is a
//! fault; no frame goes to a pair that there is not, or that is off.

use device::control::MOST_TABLE_ENTRIES;
use device::counters::ReceiveCounters;
use device::features::{
    F_CTRL_GUEST_OFFLOADS, F_CTRL_MAC_ADDR, F_CTRL_RX, F_CTRL_RX_EXTRA, F_CTRL_VLAN, F_CTRL_VQ,
    F_GUEST_ANNOUNCE, F_HASH_REPORT, F_MQ, F_RSS, F_VERSION_1,
};
use device::hash::nic::{NicHash, NicKey};
use device::net_device::NetDevice;
use rig::{PAIRS, Rig};

#[path = "../../crates/device/src/control/rig_tests.rs"]
mod rig;

#[derive(arbitrary::Arbitrary, Debug)]
struct Input {
    /// Which of [`FEATURES`] the driver does without.
    without: u16,
    steps: Vec<Step>,
}

#[derive(arbitrary::Arbitrary, Debug)]
enum Step {
    /// Any bytes.
    Raw(Chain),
    /// A configuration of RSS that is nearly right.
    Rss(Rss),
    /// What comes from the network, and what the NIC said of it.
    Frame(Vec<u8>, u32, u16),
    /// The data path cannot follow from now on, or can again.
    Follow(bool),
}

#[derive(arbitrary::Arbitrary, Debug)]
struct Chain {
    class: u8,
    command: u8,
    data: Vec<u8>,
    /// Lengths of descriptors; the last takes the rest.
    cuts: Vec<u8>,
    answer: u8,
}

#[derive(arbitrary::Arbitrary, Debug)]
struct Rss {
    types: u16,
    order: u8,
    mask: Option<u16>,
    pair: u8,
    entry: u16,
    send_pairs: u8,
    key: Vec<u8>,
    cuts: Vec<u8>,
}

const FEATURES: [u64; 9] = [
    F_CTRL_RX,
    F_CTRL_RX_EXTRA,
    F_CTRL_VLAN,
    F_CTRL_MAC_ADDR,
    F_CTRL_GUEST_OFFLOADS,
    F_GUEST_ANNOUNCE,
    F_HASH_REPORT,
    F_MQ,
    F_RSS,
];
/// The offloads for the guest that are negotiated.
const GUEST_OFFLOADS: u64 = 1 << 1 | 1 << 7 | 1 << 8;

/// Runs one input.
///
/// # Panics
/// If an invariant does not hold.
pub fn run(data: &[u8]) {
    let Some(input) = crate::decode::<Input>(data) else {
        return;
    };
    let taken = FEATURES
        .iter()
        .enumerate()
        .filter(|(at, _)| input.without >> at & 1 == 0);
    let features = taken.fold(0, |all, (_, feature)| all | feature);
    let mut rig = Rig::new(F_VERSION_1 | F_CTRL_VQ | GUEST_OFFLOADS | features);
    for step in input.steps.iter().take(32) {
        let goes_on = match step {
            Step::Raw(chain) => {
                let command = [&[chain.class, chain.command], &chain.data[..]].concat();
                send(&mut rig, &command, &chain.cuts, chain.answer)
            }
            Step::Rss(rss) => send(&mut rig, &rss.command(), &rss.cuts, 1),
            Step::Frame(head, value, rss_type) => {
                let nic = NicHash {
                    value: *value,
                    rss_type: (*rss_type).into(),
                };
                arrive(&rig.device, head, nic);
                true
            }
            Step::Follow(follows) => {
                rig.follows = *follows;
                true
            }
        };
        if !goes_on {
            return;
        }
    }
}

/// Sends a command with so many bytes for its answer; whether the queue goes on.
fn send(rig: &mut Rig, command: &[u8], cuts: &[u8], answer_bytes: u8) -> bool {
    let wanted = Wanted::of(command, rig.device.features()) && rig.follows;
    let before = rig.changes.len();
    let answer = rig.exchange(command, cuts.iter().map(|&cut| cut.into()), answer_bytes);
    if answer_bytes == 0 {
        let fault = answer.expect_err("no room for an answer");
        assert_eq!(fault.name(), "control-without-ack");
        return false;
    }
    assert_eq!(answer.expect("a good chain"), u8::from(!wanted), "{command:x?}");
    assert!(rig.changes.len() == before + 1 || !wanted);
    true
}

fn arrive(device: &NetDevice, head: &[u8], nic: NicHash) {
    let key = NicKey::toeplitz(&[0; 40]);
    let counters = ReceiveCounters::default();
    let receive = device.receive(Some(&key));
    let Some(place) = receive.place(head, Some(nic), &counters) else {
        assert_eq!(counters.to_guest_filtered.get(), 1);
        return;
    };
    if let Some(pair) = place.pair {
        let index = u32::from(pair) * 2;
        let enabled = device.vring(index).expect("a pair of the device's").enabled;
        assert!(enabled || pair == 0, "pair {pair} is off");
    }
    if let Some(kind) = place.report.kind {
        let types = receive.hashing().expect("hashed").types();
        assert!(types.has(kind) && device.features() & F_HASH_REPORT != 0);
    }
}

impl Rss {
    fn command(&self) -> Vec<u8> {
        let entries = 1u16 << (self.order % 10);
        let pair = u16::from(self.pair % 5);
        let mut command = vec![4, 1];
        command.extend(u32::from(self.types).to_le_bytes());
        command.extend(self.mask.unwrap_or(entries - 1).to_le_bytes());
        command.extend(pair.to_le_bytes());
        for at in 0..entries {
            let entry = if at + 1 == entries { self.entry } else { at % PAIRS };
            command.extend(entry.to_le_bytes());
        }
        command.extend(u16::from(self.send_pairs % 6).to_le_bytes());
        let key = &self.key[..self.key.len().min(42)];
        command.push(key.len() as u8);
        command.extend(key);
        command
    }
}

/// The rules once more, over the whole command (VirtIO 1.3, 5.1.6.5).
struct Wanted;

impl Wanted {
    fn of(command: &[u8], features: u64) -> bool {
        let has = |feature| features & feature != 0;
        let [class, what, data @ ..] = command else {
            return false;
        };
        match (class, what) {
            (0, 0 | 1) => has(F_CTRL_RX) && matches!(data, [0 | 1]),
            (0, 2..=5) => has(F_CTRL_RX_EXTRA) && matches!(data, [0 | 1]),
            (1, 0) => has(F_CTRL_RX) && Self::table(data).and_then(Self::table) == Some(&[]),
            (1, 1) => has(F_CTRL_MAC_ADDR) && data.len() == 6 && data != [0; 6] && data[0] & 1 == 0,
            (2, 0 | 1) => has(F_CTRL_VLAN) && data.len() == 2 && data[1] < 16,
            (3, 0) => has(F_GUEST_ANNOUNCE) && data.is_empty(),
            (4, 0) => has(F_MQ) && data.len() == 2 && (1..=PAIRS).contains(&Self::word(data, 0)),
            (4, 1) => has(F_RSS) && Self::rss(data),
            (4, 2) => has(F_HASH_REPORT) && !has(F_RSS) && data.len() > 12 && Self::hash(data, &data[12..]),
            (5, 0) => {
                has(F_CTRL_GUEST_OFFLOADS)
                    && data
                        .try_into()
                        .is_ok_and(|bits| u64::from_le_bytes(bits) & !GUEST_OFFLOADS == 0)
            }
            _ => false,
        }
    }

    /// Without a table of addresses at its beginning.
    fn table(data: &[u8]) -> Option<&[u8]> {
        let (entries, rest) = data.split_first_chunk::<4>()?;
        let len = u64::from(u32::from_le_bytes(*entries)) * 6;
        rest.get(usize::try_from(len).ok()?..)
    }

    fn word(data: &[u8], at: usize) -> u16 {
        u16::from_le_bytes([data[at], data[at + 1]])
    }

    /// Types at the beginning of `data`, and a key that is all of `key`.
    fn hash(data: &[u8], key: &[u8]) -> bool {
        let types = u32::from_le_bytes([data[0], data[1], data[2], data[3]]);
        let len = usize::from(key[0]);
        types < 512 && len <= 40 && key.len() == 1 + len && (len > 0 || types == 0)
    }

    fn rss(data: &[u8]) -> bool {
        if data.len() < 8 {
            return false;
        }
        let entries = usize::from(Self::word(data, 4)) + 1;
        let end = 8 + 2 * entries;
        entries <= usize::from(MOST_TABLE_ENTRIES)
            && entries.is_power_of_two()
            && data.len() > end + 2
            && (6..end).step_by(2).all(|at| Self::word(data, at) < PAIRS)
            && (1..=PAIRS).contains(&Self::word(data, end))
            && Self::hash(data, &data[end + 2..])
    }
}
