//! What is remembered of the frame before changes nothing: against a memory that is new for each frame.

use std::sync::Arc;

use packet::checksum::ChecksumAt;
use proptest::prelude::*;
use rustix::event::{EventfdFlags, eventfd};

use super::*;
use crate::fdb::PortNumber;
use crate::fdb::learned::{Entry, Learned};
use crate::fdb::vlans::Vlans;
use crate::policy::filter::{Action, Filter, PortFilter, Rule};

/// A frame, reduced to what the classification reads: indices into lists of addresses and types that often coincide.
#[derive(Debug, Clone, Copy)]
struct Sample {
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

fn sample() -> impl Strategy<Value = Sample> {
    let parts = (
        0..TO.len(),
        0..FROM.len(),
        [0..KINDS.len(), 0..KINDS.len()],
        0..3u16,
        prop::bool::weighted(0.1),
    );
    parts.prop_map(|(to, from, kinds, vlan, asks)| Sample {
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
fn fdb((vlans, learns, link_control): (Vlans, bool, bool)) -> Fdb {
    let news = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("a descriptor");
    let sender = FdbPort {
        mac: FROM[0],
        vlans: vlans.clone(),
        options: model::config::MemberOptions {
            link_control,
            ..Default::default()
        },
        learned: learns.then(|| Arc::new(Learned::new(Arc::new(news)))),
        ..FdbPort::default()
    };
    let other = FdbPort {
        mac: TO[0],
        vlans,
        ..FdbPort::default()
    };
    Fdb::new(vec![Some(sender), Some(other)])
}

fn chain(sample: Sample) -> Classified {
    let mut chain = Classified {
        is_sent: true,
        known: 64,
        ..Classified::NOTHING
    };
    chain.sending.len = 64;
    // In the checked bytes, or behind them.
    chain.sending.request.csum = sample.asks.then_some(ChecksumAt {
        start: 14 + sample.vlan * 20,
        offset: 2,
    });
    let [kind, inner] = sample.kinds.map(|at| KINDS[at].to_be_bytes());
    let bytes = [
        &TO[sample.to][..],
        &FROM[sample.from],
        &kind,
        &sample.vlan.to_be_bytes(),
        &inner,
    ]
    .concat();
    chain.head[..bytes.len()].copy_from_slice(&bytes);
    chain
}

/// As the rules of [`classifier`] see it, by its content: UDP to a port that they let pass, or another one.
fn with_content(mut chain: Classified, passes: bool) -> Classified {
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
    let acl = filter.for_a_lane(0).from_guest.expect("of its direction");
    acl.rules.expect("they are there")
}

/// What a port has learned.
fn learned(port: &FdbPort) -> Vec<FdbKey> {
    let entries = port.learned.iter().flat_map(|learned| learned.entries());
    entries.map(Entry::key).collect()
}

proptest! {
    #[test]
    fn frame_is_classified_as_if_it_were_the_first(
        of in ports(),
        frames in prop::collection::vec((sample(), any::<bool>()), 1..40),
        repeated in 1..4usize,
        is_filtered in any::<bool>(),
        is_refused in any::<bool>(),
    ) {
        let (fdb, alone) = (fdb(of.clone()), fdb(of));
        let counters = [PairCounters::default(), PairCounters::default()];
        let mut rules = [classifier(), classifier()];
        let mut known = Known::default();
        let [port, lone] = [&fdb, &alone].map(|fdb| fdb.port(PortNumber(0)).expect("it is there"));
        if is_refused {
            // One that control took from it.
            for learned in [port, lone].into_iter().filter_map(|port| port.learned.as_ref()) {
                learned.record(FdbKey::new(0, FROM[3]));
                learned.entries().for_each(|entry| learned.refuse(entry));
            }
        }
        for (sample, passes) in frames {
            // One that the rules refuse, and then those that they let pass.
            for passes in std::iter::once(passes).chain(std::iter::repeat_n(true, repeated)) {
                let (mut one, mut other) = (with_content(chain(sample), passes), with_content(chain(sample), passes));
                let [first, second] = &mut rules;
                let (found, wanted) = if is_filtered {
                    let found = known.find_filtered(&fdb, port, (&mut one, first), &counters[0]);
                    (found, Known::default().find_filtered(&alone, lone, (&mut other, second), &counters[1]))
                } else {
                    let found = known.find(&fdb, port, &mut one, &counters[0]);
                    (found, Known::default().find(&alone, lone, &mut other, &counters[1]))
                };
                prop_assert_eq!(found, wanted, "{:?}", sample);
                if found.is_some() {
                    let of = |chain: &Classified| (chain.to, chain.vlan, chain.is_tagged, chain.head);
                    prop_assert_eq!(of(&one), of(&other), "{:?}", sample);
                }
                prop_assert_eq!(learned(port), learned(lone), "{:?}", sample);
            }
        }
        let refused = counters.map(|counters| format!("{counters:?}"));
        prop_assert_eq!(&refused[0], &refused[1]);
    }
}
