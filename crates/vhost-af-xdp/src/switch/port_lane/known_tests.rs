//! What is remembered of the frame before changes nothing: against a memory that is new for each frame.

use std::sync::Arc;

use offload::checksum::ChecksumAt;
use proptest::prelude::*;
use rustix::event::{EventfdFlags, eventfd};

use super::*;
use crate::switch::filter::{Action, Filter, PortFilter, Rule};
use crate::switch::learned::{Learned, Note};
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
        options: model::config::MemberOptions {
            link_control,
            ..Default::default()
        },
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

/// As the rules of [`classifier`] see it, by its content: UDP to a port that they let pass, or another one.
fn with_content(mut chain: Judged, passes: bool) -> Judged {
    let port = if passes { 9 } else { 10 };
    let at = match chain.head[12..14] {
        [0x81, 0] => 18,
        _ => 14,
    };
    chain.head[at..at + 4].copy_from_slice(&[0x45, 0, 0, 46]);
    chain.head[at + 9] = 17;
    chain.head[at + 20..at + 26].copy_from_slice(&[0, 9, 0, port, 0, 26]);
    chain
}

fn classifier() -> Classifier {
    let rule = "direction=from-guest action=allow protocol=udp destination-ports=9";
    let filter = PortFilter::new(&Filter {
        rule: vec![rule.parse::<Rule>().expect("a rule")],
        from_guest_default: Some(Action::Deny),
        to_guest_default: Some(Action::Allow),
    });
    let lane = filter.for_a_lane(0).expect("it has rules");
    let judge = lane.from_guest.expect("of its direction");
    judge.rules.expect("they are there")
}

/// What a port has learned.
fn learned(port: &TablePort) -> Vec<Station> {
    let notes = port.learned.iter().flat_map(|learned| learned.notes());
    notes.map(Note::station).collect()
}

proptest! {
    #[test]
    fn frame_is_judged_as_if_it_were_the_first(
        of in ports(),
        frames in prop::collection::vec((shown(), any::<bool>()), 1..40),
        repeated in 1..4usize,
        is_filtered in any::<bool>(),
        is_refused in any::<bool>(),
    ) {
        let (table, alone) = (table(of.clone()), table(of));
        let counters = [PairCounters::default(), PairCounters::default()];
        let mut rules = [classifier(), classifier()];
        let mut known = Known::default();
        let [port, lone] = [&table, &alone].map(|table| table.port(PortNumber(0)).expect("it is there"));
        if is_refused {
            // One that control took from it.
            for learned in [port, lone].into_iter().filter_map(|port| port.learned.as_ref()) {
                learned.note(Station::new(0, FROM[3]));
                learned.notes().for_each(|note| learned.refuse(note));
            }
        }
        for (shown, passes) in frames {
            // One that the rules refuse, and then those that they let pass.
            for passes in std::iter::once(passes).chain(std::iter::repeat_n(true, repeated)) {
                let (mut one, mut other) = (with_content(chain(shown), passes), with_content(chain(shown), passes));
                let [first, second] = &mut rules;
                let (found, wanted) = if is_filtered {
                    let found = known.find_filtered(&table, port, (&mut one, first), &counters[0]);
                    (found, Known::default().find_filtered(&alone, lone, (&mut other, second), &counters[1]))
                } else {
                    let found = known.find(&table, port, &mut one, &counters[0]);
                    (found, Known::default().find(&alone, lone, &mut other, &counters[1]))
                };
                prop_assert_eq!(found, wanted, "{:?}", shown);
                if found.is_some() {
                    let of = |chain: &Judged| (chain.to, chain.vlan, chain.is_tagged, chain.head);
                    prop_assert_eq!(of(&one), of(&other), "{:?}", shown);
                }
                prop_assert_eq!(learned(port), learned(lone), "{:?}", shown);
            }
        }
        let refused = counters.map(|counters| format!("{counters:?}"));
        prop_assert_eq!(&refused[0], &refused[1]);
    }
}
