//! Programs with other hints that replace each other on the interface: no frame is lost or misread, and the next owner
//! knows the layouts.

use crate::common;

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::sync::RwLock;
use std::sync::atomic::{AtomicBool, Ordering};

use common::hinted::{self, L4, VLAN, all_sets, attach, pair, set};
use common::program_on;
use common::receiver::Receiver;
use steer::{Flow, HintSet, InterfaceMarks, Program};
use testkit::{BpfFs, TaggedPort, VethPair, frame, soak, wait};
use xsk::RxDesc;
use xsk::metadata::{Field, Found, Layouts, Tag};

#[test]
fn next_owner_of_a_pinned_program_finds_its_hints_marks_and_layouts() {
    let Some(pair) = pair() else { return };
    let bpffs = BpfFs::new();
    let dir = bpffs.pins();
    std::fs::create_dir(&dir).expect("new");
    let mut program = attach(&pair, HintSet::HASH);
    program.pin(&dir).expect("a bpffs");
    let number = program.number();
    program.set_hints(set("vlan,mark")).expect("all of them");
    let flow = Flow {
        protocol: 17,
        from: None,
        to: ("10.0.0.2".parse().expect("an address"), 53),
    };
    let marks = InterfaceMarks::of(pair.ifindex()).expect("of this program");
    marks.set(&flow, 5).expect("room");
    let (id, layouts) = (program.id(), program.layouts());
    assert_eq!(layouts.len(), 2);
    drop(program);
    assert_eq!(program_on(pair.ifindex()), Some(id), "it stays");

    let program = Program::open_pinned(pair.ifindex(), &dir).expect("all is there");
    assert_eq!((program.id(), program.hints()), (id, set("vlan,mark")));
    assert_eq!(program.number(), number, "whatever it leaves, and whoever has it");
    assert_eq!(
        (program.layouts(), marks.all()),
        (layouts.clone(), vec![(flow, 5)])
    );
    program.set_hints(HintSet::HASH).expect("all of them");
    let later = program.layouts();
    // The same hints have the same layout as before.
    let both = [layouts[1], layouts[0]];
    assert_eq!(later, both);
    let all = program.all_layouts();
    assert_eq!((all.len(), &all[..2]), (15, &both[..]));
    steer::detach_pinned(&dir).expect("ours");
}

/// Frames sent at once.
const BURST: u32 = 24;

/// The expected hints of one flow's frames, as far as their layout has the fields.
#[derive(Default)]
struct Truth {
    hashes: HashMap<u16, u32>,
    read: HashMap<u32, u64>,
    bare: u64,
}

impl Truth {
    fn check(
        &mut self,
        receiver: &Receiver,
        desc: &RxDesc,
        layouts: &RwLock<Layouts>,
        flow: u16,
        tagged: bool,
    ) {
        let id = receiver.bytes(desc.data.get() - 4, 4);
        let id = u32::from_ne_bytes(id.try_into().expect("four"));
        // A frame of a new program may arrive before its layout is in the list.
        let known = || {
            layouts
                .read()
                .expect("not poisoned")
                .iter()
                .find(|known| known.id() == id)
        };
        let layout = match id {
            0 => None,
            _ => Some(wait::until_some(wait::SOON, known).unwrap_or_else(|| panic!("id {id:#x}"))),
        };
        let found = layouts
            .read()
            .expect("not poisoned")
            .read(&receiver.umem, desc.data);
        let Some(layout) = layout else {
            assert_eq!(found, Found::Nothing);
            self.bare += 1;
            return;
        };
        *self.read.entry(id).or_default() += 1;
        let hints = found.hints();
        assert_eq!(hints.hash.is_some(), layout.has(Field::Hash));
        if let Some(hash) = hints.hash {
            assert_eq!(hash.kind, L4);
            assert_eq!(*self.hashes.entry(flow).or_insert(hash.value), hash.value);
        }
        let tag = Tag {
            proto: 0x8100,
            tci: VLAN.into(),
        };
        assert_eq!(
            hints.tag,
            Some(tag).filter(|_| tagged && layout.has(Field::VlanTci))
        );
        assert_eq!(
            hints.mark,
            Some(mark_of(flow)).filter(|_| layout.has(Field::Mark))
        );
        assert_eq!((hints.timestamp, hints.port), (None, None));
    }
}

fn mark_of(flow: u16) -> u32 {
    0xabcd_0000 + u32::from(flow)
}

#[test]
fn hints_switched_under_traffic_lose_no_frame_and_misread_none() {
    let Some(pair) = pair() else { return };
    let tagged = TaggedPort::on((&pair.veth.far, VethPair::WIRE), 0x8100, VLAN);
    let program = attach(&pair, HintSet::MARK);
    let marks = InterfaceMarks::of(pair.ifindex()).expect("of this program");
    for flow in 0..8u16 {
        let from = Some((Ipv4Addr::new(10, 9, 0, 1).into(), flow));
        let to = (Ipv4Addr::new(10, 9, 0, 2).into(), 9);
        let flow_ = Flow {
            protocol: 17,
            from,
            to,
        };
        marks.set(&flow_, mark_of(flow)).expect("room");
    }
    program.set_hints(HintSet::NONE).expect("as always");
    let mut receiver = hinted::receiver(&pair, &program);
    let (layouts, over) = (RwLock::new(Layouts::default()), AtomicBool::new(false));
    let (mut truth, mut sent) = (Truth::default(), 0u64);
    let switches = soak::count(50, 1000);
    std::thread::scope(|scope| {
        let (program, layouts, over) = (&program, &layouts, &over);
        scope.spawn(move || {
            let sets: Vec<HintSet> = all_sets().collect();
            for n in 0..switches {
                // 7 and 16 have no divisor in common: each follows each other one.
                program
                    .set_hints(sets[(n * 7 + n / 16) % 16])
                    .expect("all of them");
                *layouts.write().expect("not poisoned") = Layouts::new(&program.layouts());
            }
            // Relaxed: nothing is published with the flag.
            over.store(true, Ordering::Relaxed);
        });
        while !over.load(Ordering::Relaxed) {
            for n in 0..BURST {
                let (port, len) = if n % 2 == 0 {
                    (&pair.far_socket, 64)
                } else {
                    (tagged.port(), 65)
                };
                port.send(&frame::udp((n % 8) as u16, len));
            }
            sent += u64::from(BURST);
            for _ in 0..BURST {
                let desc = receiver.next();
                let bytes = receiver.bytes(desc.data.get(), desc.len as usize);
                let flow = u16::from_be_bytes([bytes[34], bytes[35]]);
                frame::assert_same(&bytes, &frame::udp(flow, bytes.len()));
                truth.check(&receiver, &desc, layouts, flow, bytes.len() == 65);
                receiver.pool.put(desc.frame);
            }
            receiver.post();
        }
    });
    let counters = program.counters(0).expect("counters");
    assert_eq!(
        (counters.redirected, counters.dropped(), counters.no_socket),
        (sent, 0, 0)
    );
    let read: u64 = truth.read.values().sum();
    assert_eq!(read + truth.bare, sent);
    println!(
        "{switches} switches, {sent} frames, {} layouts seen",
        truth.read.len()
    );
}
