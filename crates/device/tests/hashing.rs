//! A driver and an embedded device, end to end. The driver negotiates features, and configures RSS and hash reports by
//! the control queue. Then frames arrive at the pair that its table selects, each with its report.

use std::sync::Arc;

use device::config_space::ConfigSpace;
use device::control::{Change, ControlQueue, OFFERED};
use device::counters::{PairCounters, ReceiveCounters};
use device::deliver::Incoming;
use device::features::{F_CTRL_VQ, F_HASH_REPORT, F_MQ, F_MRG_RXBUF, F_RSS, F_VERSION_1};
use device::hash::HashTypes;
use device::hash::nic::{NicHash, NicKey};
use device::net_device::{NetDevice, Path};
use device::offloads::Offloads;
use device::pair::QueuePair;
use device::receive::Receive;
use virtqueue::driver::{Buffer, DriverFeatures, GuestRam, QueueDriver};
use virtqueue::{Chains, GuestAddr, MemoryMap, QueueSize, RingFormat, RingShape, TrustedFiles};

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const PAIRS: u16 = 4;
const RING: u32 = 64;
const BUFFER_BYTES: u32 = 1536;
/// "Verifying the RSS Hash Calculation" (Microsoft): the key, and in [`FLOWS`] what it makes of flows.
const KEY: [u8; 40] = [
    0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0, 0xd0,
    0xca, 0x2b, 0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c, 0x6a, 0x42,
    0xb7, 0x3b, 0xbe, 0xac, 0x01, 0xfa,
];

/// Source, destination, ports, and the hash of all that.
type Flow = ([u8; 4], [u8; 4], [u16; 2], u32);

const FLOWS: [Flow; 5] = [
    ([66, 9, 149, 187], [161, 142, 100, 80], [2794, 1766], 0x51cc_c178),
    ([199, 92, 111, 2], [65, 69, 140, 83], [14230, 4739], 0xc626_b0ea),
    ([24, 19, 198, 95], [12, 22, 207, 184], [12898, 38024], 0x5c2b_394a),
    ([38, 27, 205, 30], [209, 142, 163, 6], [48228, 2217], 0xafc7_327f),
    (
        [153, 39, 163, 191],
        [202, 188, 127, 2],
        [44251, 1303],
        0x10e8_28a2,
    ),
];

/// A frame of TCP over IPv4 for the guest, `len` bytes.
fn frame(flow: &Flow, len: usize) -> Vec<u8> {
    let (source, destination, ports, _) = flow;
    let total = (len as u16 - 14).to_be_bytes();
    let mut frame = [&MAC[..], &[2, 0, 0, 0, 0, 9], &[8, 0, 0x45, 0], &total].concat();
    frame.extend([0, 0, 0, 0, 64, 6, 0, 0]);
    frame.extend([*source, *destination].concat());
    frame.extend(ports.map(u16::to_be_bytes).concat());
    frame.resize(len, 0x77);
    frame
}

/// The guest's side and the VMM's, with the data path that the VMM has.
struct Machine {
    ram: Arc<GuestRam>,
    device: NetDevice,
    control: ControlQueue,
    control_driver: QueueDriver,
    /// Receive queues; each buffer by the head of its chain.
    receivers: Vec<(QueueDriver, Vec<GuestAddr>)>,
    pairs: Vec<QueuePair>,
    receive: Receive,
    nic: Option<NicKey>,
    counters: ReceiveCounters,
}

impl Machine {
    fn new(format: RingFormat, features: u64, nic: Option<NicKey>) -> Self {
        let ram = Arc::new(GuestRam::new(&[(GuestAddr(0), 8 << 20)]).expect("memory"));
        let mut device = NetDevice::new(PAIRS, Offloads::NONE).with_control(MAC, OFFERED);
        let map = MemoryMap::new(ram.regions().expect("regions"), 0, &TrustedFiles).expect("a map");
        device.set_memory(Some(Arc::new(map)));
        let packed = match format {
            RingFormat::Packed => device::features::F_RING_PACKED,
            RingFormat::Split => 0,
        };
        device
            .acknowledge(F_VERSION_1 | F_CTRL_VQ | packed | features)
            .expect("offered");
        let shape = RingShape::new(format, QueueSize::new(RING).expect("a size"));
        let mut start = |index: u32| {
            let driver = QueueDriver::new(&ram, shape, DriverFeatures::default()).expect("room");
            device.set_size(index, RING).expect("a size");
            let addresses = driver.ring_user_addresses();
            device.set_addresses(index, addresses).expect("there");
            device.set_base(index, driver.base()).expect("a base");
            device.start(index, None).expect("there");
            driver
        };
        let mut drivers: Vec<_> = (0..2 * u32::from(PAIRS)).map(&mut start).collect();
        let control_driver = start(2 * u32::from(PAIRS));
        for index in [0, 1] {
            device.set_enabled(index, true).expect("there");
        }
        let path = Path {
            frame_limit: 1518,
            partial_checksums: false,
            in_place: false,
        };
        let mut machine = Self {
            pairs: (0..PAIRS)
                .map(|pair| device.queue_pair(pair, path).expect("rings"))
                .collect(),
            control: device.control_queue().expect("a ring"),
            receive: device.receive(nic.as_ref()),
            receivers: drivers
                .drain(..)
                .step_by(2)
                .map(|driver| (driver, Vec::new()))
                .collect(),
            counters: ReceiveCounters::default(),
            control_driver,
            device,
            nic,
            ram,
        };
        machine.post();
        machine
    }

    /// The guest fills its receive queues.
    fn post(&mut self) {
        for (driver, buffers) in &mut self.receivers {
            buffers.resize(RING as usize, GuestAddr(0));
            for _ in 0..32 {
                let addr = self.ram.alloc(BUFFER_BYTES.into(), 64).expect("room");
                let chain = driver.add(&[Buffer::writable(addr, BUFFER_BYTES)]).expect("room");
                buffers[usize::from(chain)] = addr;
            }
            driver.publish();
        }
    }

    /// Sends a command as the guest, serves it as the VMM, which updates its data path, and returns the answer.
    fn command(&mut self, bytes: &[u8]) -> u8 {
        let at = self.ram.alloc(bytes.len() as u64, 4).expect("room");
        let ack = self.ram.alloc(1, 1).expect("room");
        self.ram.write(at, bytes);
        let chain = [
            Buffer::readable(at, 2),
            Buffer::readable(at.checked_add(2).expect("inside"), bytes.len() as u32 - 2),
            Buffer::writable(ack, 1),
        ];
        self.control_driver.add(&chain).expect("room");
        self.control_driver.publish();
        let (pairs, receive, nic) = (&mut self.pairs, &mut self.receive, &self.nic);
        let apply = |device: &mut NetDevice, change| {
            if change == Change::Steering {
                for (index, pair) in (0..).zip(pairs.iter_mut()) {
                    pair.to_guest.enabled = device.vring(2 * index).expect("there").enabled;
                    pair.from_guest.enabled = device.vring(2 * index + 1).expect("there").enabled;
                }
            }
            *receive = device.receive(nic.as_ref());
            true
        };
        assert_eq!(self.control.serve(&mut self.device, 8, apply).expect("sound"), 1);
        self.control_driver.take_used().expect("answered");
        self.ram.read_vec(ack, 1)[0]
    }

    /// RSS_CONFIG: that table, and frames without a hash to `unclassified`.
    fn configure_rss(&mut self, table: &[u16], unclassified: u16, key: &[u8]) {
        let mut bytes = vec![4, 1];
        bytes.extend(HashTypes::ALL.bits().to_le_bytes());
        let words = [table.len() as u16 - 1, unclassified].into_iter();
        let words = words.chain(table.iter().copied()).chain([PAIRS]);
        bytes.extend(words.flat_map(u16::to_le_bytes));
        bytes.push(key.len() as u8);
        bytes.extend(key);
        assert_eq!(self.command(&bytes), 0, "VIRTIO_NET_OK");
    }

    /// Delivers a frame from the network, with the hash that its NIC reported.
    fn arrive(&mut self, frame: &[u8], nic: Option<NicHash>) {
        let Some(place) = self.receive.place(frame, nic, &self.counters) else {
            return;
        };
        let pair = &mut self.pairs[usize::from(place.pair.unwrap_or(0))];
        let counters = PairCounters::default();
        let incoming = Incoming::plain(frame, place.report);
        let done = pair
            .to_guest
            .deliver(&[incoming], &mut Chains::default(), &counters)
            .expect("sound");
        assert_eq!((done, counters.to_guest_frames.get()), (1, 1));
    }

    /// What the guest received: the pair, and the bytes in its buffers.
    fn received(&mut self) -> Option<(usize, Vec<u8>)> {
        for (pair, (driver, buffers)) in self.receivers.iter_mut().enumerate() {
            let Some(used) = driver.take_used() else {
                continue;
            };
            let mut bytes = self
                .ram
                .read_vec(buffers[usize::from(used.head)], used.len as usize);
            for _ in 1..u16::from_le_bytes([bytes[10], bytes[11]]) {
                let used = driver.take_used().expect("all buffers of a frame at once");
                bytes.extend(
                    self.ram
                        .read_vec(buffers[usize::from(used.head)], used.len as usize),
                );
            }
            return Some((pair, bytes));
        }
        None
    }
}

/// The header of a frame with that report.
fn header(buffers: u16, hash: u32, report: u16) -> Vec<u8> {
    let mut header = vec![0; 10];
    header.extend(buffers.to_le_bytes());
    header.extend(hash.to_le_bytes());
    header.extend(report.to_le_bytes());
    header.extend([0, 0]);
    header
}

/// VIRTIO_NET_HASH_REPORT_TCPv4.
const TCP_V4: u16 = 2;

#[test]
fn frames_come_on_the_pair_of_the_drivers_table_with_their_report() {
    for format in [RingFormat::Split, RingFormat::Packed] {
        let mut machine = Machine::new(format, F_MQ | F_RSS | F_HASH_REPORT, None);
        assert_eq!(machine.device.negotiated().header_bytes, 20);
        // Before the driver has sent a command: the first pair, and no hash.
        machine.arrive(&frame(&FLOWS[0], 60), None);
        let expected = [header(1, 0, 0), frame(&FLOWS[0], 60)].concat();
        assert_eq!(machine.received(), Some((0, expected)));

        let table = [3, 1, 0, 2, 2, 0, 1, 3];
        machine.configure_rss(&table, 1, &KEY);
        for flow in &FLOWS {
            let (bytes, hash) = (frame(flow, 1000), flow.3);
            machine.arrive(&bytes, None);
            let pair = usize::from(table[hash as usize % table.len()]);
            let expected = [header(1, hash, TCP_V4), bytes].concat();
            assert_eq!(machine.received(), Some((pair, expected)), "{format:?} {flow:?}");
        }
        // No IP packet: unclassified, VIRTIO_NET_HASH_REPORT_NONE.
        let arp = [&MAC[..], &[2, 0, 0, 0, 0, 9], &[8, 6], &[0; 46]].concat();
        machine.arrive(&arp, None);
        assert_eq!(machine.received(), Some((1, [header(1, 0, 0), arp].concat())));
        assert_eq!(machine.received(), None);
        assert_eq!(machine.counters.hashes_computed.get(), FLOWS.len() as u64);
    }
}

#[test]
fn report_stands_in_the_first_of_several_buffers() {
    let features = F_MQ | F_RSS | F_HASH_REPORT | F_MRG_RXBUF;
    let mut machine = Machine::new(RingFormat::Split, features, None);
    machine.configure_rss(&[2], 0, &KEY);
    let bytes = frame(&FLOWS[1], 4000);
    machine.arrive(&bytes, None);
    let expected = [header(3, FLOWS[1].3, TCP_V4), bytes].concat();
    assert_eq!(machine.received(), Some((2, expected)));
}

#[test]
fn hash_of_the_nic_is_told_where_it_has_the_drivers_key_and_computed_where_not() {
    let features = F_MQ | F_RSS | F_HASH_REPORT;
    // XDP_RSS_TYPE_L4_IPV4_TCP.
    let said = NicHash {
        value: FLOWS[0].3,
        rss_type: 0x19,
    };
    let mut nic_key = KEY.to_vec();
    nic_key.extend([0xaa; 12]);
    let mut machine = Machine::new(RingFormat::Split, features, Some(NicKey::toeplitz(&nic_key)));
    machine.configure_rss(&[0, 1, 2, 3], 0, &KEY);
    let bytes = frame(&FLOWS[0], 60);
    let expected = |hash: u32| {
        Some((
            (hash & 3) as usize,
            [header(1, hash, TCP_V4), bytes.clone()].concat(),
        ))
    };
    machine.arrive(&bytes, Some(said));
    assert_eq!(machine.received(), expected(FLOWS[0].3));
    assert_eq!(machine.counters.hashes_of_nic.get(), 1);
    // The driver sets another key: the NIC's hash is not the requested one any more.
    machine.configure_rss(&[0, 1, 2, 3], 0, &[0x11; 40]);
    machine.arrive(&bytes, Some(said));
    let (pair, got) = machine.received().expect("delivered");
    let hash = u32::from_le_bytes(*got[12..].first_chunk().expect("a header"));
    assert_ne!(hash, said.value);
    assert_eq!(Some((pair, got)), expected(hash));
    assert_eq!(
        (
            machine.counters.hashes_of_nic.get(),
            machine.counters.hashes_computed.get()
        ),
        (1, 1)
    );
}

#[test]
fn without_hash_reports_the_header_has_12_bytes_and_rss_steers_all_the_same() {
    let mut machine = Machine::new(RingFormat::Split, F_RSS, None);
    machine.configure_rss(&[0, 1, 2, 3], 0, &KEY);
    let bytes = frame(&FLOWS[4], 60);
    machine.arrive(&bytes, None);
    let expected = [&[0; 10][..], &[1, 0], &bytes].concat();
    assert_eq!(machine.received(), Some((FLOWS[4].3 as usize & 3, expected)));
}

#[test]
fn what_the_guest_sends_has_the_long_header_in_front_too() {
    let mut machine = Machine::new(RingFormat::Split, F_HASH_REPORT | F_RSS, None);
    let zeros = machine.ram.alloc(80, 64).expect("room");
    let pair = &mut machine.pairs[0];
    assert_eq!(pair.to_guest.guest.header_bytes, 20);
    let buffers = [virtqueue::Buffer {
        offset: pair.to_guest.guest.memory.translate(zeros, 80).expect("memory"),
        len: 80,
        room_before: 0,
    }];
    let chain = virtqueue::Chain {
        readable: 1,
        readable_bytes: 80,
        ..virtqueue::Chain::default()
    };
    let counters = PairCounters::default();
    let sending = pair
        .from_guest
        .check(&chain, &buffers, None, &counters)
        .expect("sound")
        .expect("a frame");
    assert_eq!((sending.len, sending.start.within), (60, 20));
}

#[test]
fn frame_waits_for_buffers_and_one_that_fits_none_is_dropped() {
    let mut machine = Machine::new(RingFormat::Split, F_HASH_REPORT | F_RSS, None);
    let (short, long) = (
        frame(&FLOWS[0], 100),
        frame(&FLOWS[0], BUFFER_BYTES as usize - 19),
    );
    let incoming = |bytes| Incoming::plain(bytes, Default::default());
    let counters = PairCounters::default();
    let pair = &mut machine.pairs[0];
    let mut frames = vec![incoming(&short[..]); 40];
    frames[7] = incoming(&long);
    let done = pair
        .to_guest
        .deliver(&frames, &mut Chains::default(), &counters)
        .expect("sound");
    assert_eq!(
        (done, counters.to_guest_frames.get()),
        (33, 32),
        "32 buffers, one frame too long"
    );
    assert_eq!(
        (
            counters.to_guest_buffer_too_small.get(),
            counters.to_guest_waits.get()
        ),
        (1, 1)
    );
    pair.to_guest.enabled = false;
    let done = pair
        .to_guest
        .deliver(&frames, &mut Chains::default(), &counters)
        .expect("sound");
    assert_eq!(done, 0, "the pair is off");
}

#[test]
fn config_space_tells_what_the_driver_may_ask_for() {
    let machine = Machine::new(RingFormat::Split, F_RSS, None);
    let space = ConfigSpace {
        mac: machine.device.control_state().expect("one").mac(),
        link_up: true,
        max_pairs: PAIRS,
        mtu: 1500,
        announce: false,
        hashing: machine.device.hash_limits(),
    };
    let bytes = space.bytes();
    let (key, table) = (bytes[17], u16::from_le_bytes([bytes[18], bytes[19]]));
    // "The device MUST set rss_max_key_size to at least 40 … rss_max_indirection_table_length to at least 128"
    assert!(key >= 40 && table >= 128, "{key} {table}");
    assert_eq!(bytes[20..24], HashTypes::ALL.bits().to_le_bytes());
}
