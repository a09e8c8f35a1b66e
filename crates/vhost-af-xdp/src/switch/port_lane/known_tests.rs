//! What is remembered of the frame before changes nothing: against a memory that is new for each frame.

use std::sync::Arc;

use offload::checksum::ChecksumAt;
use proptest::prelude::*;
use rustix::event::{EventfdFlags, eventfd};

use super::*;
use crate::switch::learned::Learned;
use crate::switch::table::PortNumber;
use crate::switch::vlans::Vlans;

/// A frame as far as it is judged here: places in lists of addresses and types that often meet each other.
#[derive(Debug, Clone, Copy)]
struct Shown {
    to: usize,
    from: usize,
    kinds: [usize; 2],
    vlan: u16,
    asks: bool,
}

const TO: [[u8; 6]; 6] = [
    [2, 0, 0, 0, 0, 1],
    [2, 0, 0, 0, 0, 9],
    [0xff; 6],
    [1, 0x80, 0xc2, 0, 0, 1],
    [1, 0x80, 0xc2, 0, 0, 14],
    [2, 0, 0, 0, 0, 1],
];
const FROM: [[u8; 6]; 4] = [
    [2, 0, 0, 0, 0, 0],
    [2, 0, 0, 0, 0, 0],
    [2, 0, 0, 0, 0, 1],
    [2, 0, 0, 0, 0, 7],
];
const KINDS: [u16; 6] = [0x0800, 0x0800, 0x8100, 0x88a8, 0x8808, 0x86dd];

fn shown() -> impl Strategy<Value = Shown> {
    let parts = (
        0..TO.len(),
        0..FROM.len(),
        [0..KINDS.len(), 0..KINDS.len()],
        0..3u16,
        prop::bool::weighted(0.1),
    );
    parts.prop_map(|(to, from, kinds, vlan, asks)| Shown {
        to,
        from,
        kinds,
        vlan,
        asks,
    })
}

fn ports() -> impl Strategy<Value = (Vlans, bool, bool)> {
    let vlans = prop_oneof![
        Just(Vlans::Untagged),
        Just(Vlans::Access(1)),
        Just(Vlans::Trunk(vec![1, 2]))
    ];
    (vlans, any::<bool>(), any::<bool>())
}

/// A table with the port that sends and another one.
fn table((vlans, learns, link_control): (Vlans, bool, bool)) -> Table {
    let news = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("a descriptor");
    let sender = TablePort {
        mac: FROM[0],
        vlans: vlans.clone(),
        link_control,
        learned: learns.then(|| Arc::new(Learned::new(Arc::new(news)))),
        ..TablePort::default()
    };
    let other = TablePort {
        mac: TO[0],
        vlans,
        ..TablePort::default()
    };
    Table::new(vec![Some(sender), Some(other)])
}

fn chain(shown: Shown) -> Judged {
    let mut chain = Judged {
        is_sent: true,
        known: 64,
        ..Judged::NOTHING
    };
    chain.sending.len = 64;
    // In what is judged, or behind it.
    chain.sending.request.csum = shown.asks.then_some(ChecksumAt {
        start: 14 + shown.vlan * 20,
        offset: 2,
    });
    let [kind, inner] = shown.kinds.map(|at| KINDS[at].to_be_bytes());
    let bytes = [
        &TO[shown.to][..],
        &FROM[shown.from],
        &kind,
        &shown.vlan.to_be_bytes(),
        &inner,
    ]
    .concat();
    chain.head[..bytes.len()].copy_from_slice(&bytes);
    chain
}

proptest! {
    #[test]
    fn frame_is_judged_as_if_it_were_the_first(
        of in ports(),
        frames in prop::collection::vec(shown(), 1..40),
        repeated in 1..4usize,
    ) {
        let (table, alone) = (table(of.clone()), table(of));
        let counters = [PairCounters::default(), PairCounters::default()];
        let mut known = Known::default();
        let [port, lone] = [&table, &alone].map(|table| table.port(PortNumber(0)).expect("it is there"));
        for shown in frames {
            for _ in 0..repeated {
                let (mut one, mut other) = (chain(shown), chain(shown));
                let found = known.find(&table, port, &mut one, &counters[0]);
                let wanted = Known::default().find(&alone, lone, &mut other, &counters[1]);
                prop_assert_eq!(found, wanted, "{:?}", shown);
                if found.is_some() {
                    let of = |chain: &Judged| (chain.to, chain.vlan, chain.is_tagged, chain.head);
                    prop_assert_eq!(of(&one), of(&other), "{:?}", shown);
                }
            }
        }
        let refused = counters.map(|counters| format!("{counters:?}"));
        prop_assert_eq!(&refused[0], &refused[1]);
    }
}
