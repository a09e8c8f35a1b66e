//! The control queue of an embedded device, and what its commands make of frames.
//!
//! Invariants: a command is done exactly where the rules allow it, however descriptors cut it, and is told to the data
//! path before it is answered; one byte of the answer is written, and that alone; a chain without room for it is a
//! fault; no frame goes to a pair that there is not, or that is off.

use std::sync::Arc;

use device::control::{ControlQueue, MOST_TABLE_ENTRIES, OFFERED};
use device::counters::ReceiveCounters;
use device::features::{
    F_CTRL_GUEST_OFFLOADS, F_CTRL_MAC_ADDR, F_CTRL_RX, F_CTRL_RX_EXTRA, F_CTRL_VLAN, F_CTRL_VQ,
    F_GUEST_ANNOUNCE, F_HASH_REPORT, F_MQ, F_RSS, F_VERSION_1,
};
use device::hash::nic::{NicHash, NicKey};
use device::net_device::NetDevice;
use device::offloads::Offloads;
use virtqueue::driver::{Buffer, DriverFeatures, GuestRam, SplitDriver};
use virtqueue::{GuestAddr, MemoryMap, QueueSize, TrustedFiles};

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
const PAIRS: u16 = 4;
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
/// The offloads for the guest that are negotiated.
const GUEST_OFFLOADS: u64 = 1 << 1 | 1 << 7 | 1 << 8;
const SIZE: u32 = 64;

struct Machine {
    ram: Arc<GuestRam>,
    driver: SplitDriver,
    device: NetDevice,
    queue: ControlQueue,
    area: GuestAddr,
    ack: GuestAddr,
    follows: bool,
}

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
    let mut machine = Machine::new(F_VERSION_1 | F_CTRL_VQ | GUEST_OFFLOADS | features);
    for step in input.steps.iter().take(32) {
        let goes_on = match step {
            Step::Raw(chain) => {
                let command = [&[chain.class, chain.command], &chain.data[..]].concat();
                machine.command(&command, &chain.cuts, chain.answer)
            }
            Step::Rss(rss) => machine.command(&rss.command(), &rss.cuts, 1),
            Step::Frame(head, value, rss_type) => {
                let nic = NicHash {
                    value: *value,
                    rss_type: (*rss_type).into(),
                };
                machine.arrive(head, nic);
                true
            }
            Step::Follow(follows) => {
                machine.follows = *follows;
                true
            }
        };
        if !goes_on {
            return;
        }
    }
}

impl Machine {
    fn new(features: u64) -> Self {
        let ram = Arc::new(GuestRam::new(&[(GuestAddr(0), 1 << 18)]).expect("memory"));
        let size = QueueSize::new(SIZE).expect("a power of two");
        let driver = SplitDriver::new(&ram, size, DriverFeatures::default()).expect("room");
        let mut device = NetDevice::new(PAIRS, Offloads::all()).with_control(MAC, OFFERED);
        let map = MemoryMap::new(ram.regions().expect("descriptors"), 0, &TrustedFiles).expect("mapped");
        device.set_memory(Some(Arc::new(map)));
        device.acknowledge(features).expect("offered");
        let index = device.control_index();
        device.set_size(index, SIZE).expect("a size");
        let addresses = driver.ring_user_addresses();
        device.set_addresses(index, addresses).expect("there");
        device.start(index, None).expect("there");
        Self {
            queue: device.control_queue().expect("a good ring"),
            area: ram.alloc(1 << 16, 64).expect("room"),
            ack: ram.alloc(256, 64).expect("room"),
            ram,
            driver,
            device,
            follows: true,
        }
    }

    /// A command with so many bytes for its answer; whether the queue goes on.
    fn command(&mut self, command: &[u8], cuts: &[u8], answer: u8) -> bool {
        let wanted = Wanted::of(command, self.device.features()) && self.follows;
        let mut buffers = Vec::new();
        let mut at = 0;
        self.ram.write(self.area, command);
        self.ram.write(self.ack, &[0xaa; 256]);
        for cut in cuts
            .iter()
            .take(SIZE as usize - 2)
            .map(|&cut| usize::from(cut))
            .chain([command.len()])
        {
            let len = cut.min(command.len() - at);
            if len > 0 {
                let addr = self.area.checked_add(at as u64).expect("inside");
                buffers.push(Buffer::readable(addr, len as u32));
                at += len;
            }
        }
        if answer > 0 {
            buffers.push(Buffer::writable(self.ack, answer.into()));
        }
        self.driver.add(&buffers).expect("all chains came back");
        self.driver.publish();
        let (ram, ack, follows) = (&self.ram, self.ack, self.follows);
        let mut told = 0;
        let served = self.queue.serve(&mut self.device, 4, |_, _| {
            assert_eq!(ram.read_vec(ack, 1), [0xaa], "answered before the data path knew");
            told += 1;
            follows
        });
        if answer == 0 {
            assert_eq!(
                served.expect_err("no room for an answer").name(),
                "control-without-ack"
            );
            return false;
        }
        assert_eq!(served.expect("a good chain"), 1);
        let used = self.driver.take_used().expect("answered");
        let answer = self.ram.read_vec(self.ack, 256);
        assert_eq!((used.len, answer[0]), (1, u8::from(!wanted)), "{command:x?}");
        assert_eq!(answer[1..], [0xaa; 255]);
        assert!(told == 1 || !wanted);
        true
    }

    fn arrive(&self, head: &[u8], nic: NicHash) {
        let key = NicKey::toeplitz(&[0; 40]);
        let counters = ReceiveCounters::default();
        let receive = self.device.receive(Some(&key));
        let Some(place) = receive.place(head, Some(nic), &counters) else {
            assert_eq!(counters.to_guest_filtered.get(), 1);
            return;
        };
        if let Some(pair) = place.pair {
            let index = u32::from(pair) * 2;
            let enabled = self.device.vring(index).expect("a pair of the device's").enabled;
            assert!(enabled || pair == 0, "pair {pair} is off");
        }
        if let Some(kind) = place.report.kind {
            let types = receive.hashing().expect("hashed").types();
            assert!(types.has(kind) && self.device.features() & F_HASH_REPORT != 0);
        }
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
