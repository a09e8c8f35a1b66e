mod headers;
mod packets;

use std::net::{IpAddr, Ipv4Addr};

use proptest::prelude::*;

use self::packets::{Fragment, Packet, Wanted, packet, reference, rules};
use device::counters::PairCounters;
use packet::ip::is_long;

use super::key::*;
use super::rules::*;
use super::*;

fn compiled(rules: &[Rule], default: Action) -> Rules {
    let numbered: Vec<(usize, &Rule)> = rules.iter().enumerate().collect();
    Rules::new(&numbered, default, Direction::ToGuest)
}

fn key(packet: &Packet) -> FlowKey {
    let bytes = packet.bytes();
    FlowKey::of(&bytes[..bytes.len().min(256)], bytes.len())
        .expect("whole")
        .key
}

fn rule(words: &str) -> Rule {
    format!("direction=to-guest {words}")
        .parse::<Rule>()
        .unwrap_or_else(|error| panic!("{words}: {error}"))
}

fn is_plain(packet: &Packet) -> bool {
    packet.vlan.is_none()
        && packet.ethertype.is_none()
        && packet.source.is_ipv4()
        && matches!(packet.protocol, 6 | 17)
        && packet.fragment == Fragment::Whole
        && packet.further < 4
}

fn udp(port: u16) -> Packet {
    Packet {
        vlan: None,
        ethertype: None,
        source: IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)),
        destination: IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2)),
        protocol: 17,
        ports: (1024, port),
        fragment: Fragment::Whole,
        hops: 64,
        further: 0,
        mark: 0,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn rules_say_what_the_slow_and_obvious_reference_says(
        rules in rules(200),
        packets in prop::collection::vec(packet(), 1..60),
        allows in any::<bool>(),
    ) {
        let default = if allows { Action::Allow } else { Action::Deny };
        let (wanted, said): (Vec<Wanted>, Vec<Rule>) = rules.into_iter().unzip();
        let rules = compiled(&said, default);
        for packet in packets {
            let found = rules.find(&key(&packet), packet.mark.into());
            match reference(&wanted, &packet) {
                Some((at, action)) => {
                    let verdict = Verdict {
                        allows: action == Action::Allow,
                        slot: RuleSlot(at as u16),
                    };
                    prop_assert_eq!(found, verdict, "{:?}", packet);
                }
                None => {
                    let is_of_the_link = key(&packet).is_of_the_link(true);
                    prop_assert_eq!(found.allows, allows || is_of_the_link, "{:?}", packet);
                    let behind = usize::from(!allows && is_of_the_link);
                    prop_assert_eq!(usize::from(found.slot.0), wanted.len() + behind);
                }
            }
        }
    }

    #[test]
    fn cache_decides_as_the_rules_do_whatever_the_hash_is(
        lists in prop::collection::vec(rules(20), 2..4),
        packets in prop::collection::vec(packet(), 1..24),
        steps in prop::collection::vec((any::<u16>(), 0u8..12, 0u64..3, any::<bool>()), 1..400),
    ) {
        let said = |list: Vec<(Wanted, Rule)>| -> Vec<Rule> { list.into_iter().map(|(_, rule)| rule).collect() };
        let lists: Vec<Arc<Rules>> = lists
            .into_iter()
            .map(|list| Arc::new(compiled(&said(list), Action::Deny)))
            .collect();
        let counters = PairCounters::default();
        let (mut list, mut table) = (0, 0u16);
        let classifier = |list: usize| Classifier::<u16>::new(Arc::clone(&lists[list]));
        let mut cached = classifier(list);
        let destination = |station: u64, table: u16| table * 4 + station as u16;
        for (at, what, station, same_hash) in steps {
            match what {
                0 => {
                    list = (list + 1) % lists.len();
                    cached = classifier(list);
                }
                1 => {
                    table += 1;
                    cached.forget();
                }
                _ => {
                    let key = key(&packets[usize::from(at) % packets.len()]);
                    // What rules look at as a mark, too. All flows in one set, or each by its number.
                    let hash = if same_hash { 7 } else { u64::from(at) };
                    let found = cached.decide((&key, station, hash), &counters, || destination(station, table));
                    let wanted = lists[list].find(&key, station);
                    prop_assert_eq!(found.verdict, wanted);
                    prop_assert_eq!(found.destination, destination(station, table));
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn any_bytes_are_judged_or_refused(
        bytes in prop::collection::vec(any::<u8>(), 0..300),
        tagged in any::<bool>(),
        kind in 0usize..4,
    ) {
        let mut bytes = bytes;
        let kinds: [[u8; 2]; 4] = [[0x08, 0], [0x86, 0xdd], [0x08, 0x06], [0x81, 0]];
        let at = if tagged { 16 } else { 12 };
        if let Some(place) = bytes.get_mut(at..at + 2) {
            place.copy_from_slice(&kinds[kind]);
        }
        if tagged && let Some(place) = bytes.get_mut(12..14) {
            place.copy_from_slice(&[0x81, 0]);
        }
        let known = bytes.len().min(256);
        if let Ok(looked) = FlowKey::of(&bytes[..known], bytes.len()) {
            prop_assert!(looked.bytes <= known);
        }
    }

    #[test]
    fn cut_packet_is_refused_and_longer_frame_is_the_same(packet in packet(), cut in any::<u16>(), pad in 0usize..40) {
        let bytes = packet.bytes();
        let cut = usize::from(cut) % bytes.len();
        if packet.ethertype.is_none() {
            prop_assert_eq!(FlowKey::of(&bytes[..cut], cut), Err(Malformed));
        }
        let padded = [&bytes[..], &vec![0xff; pad]].concat();
        prop_assert_eq!(FlowKey::of(&padded, padded.len()), FlowKey::of(&bytes, bytes.len()));
    }

    #[test]
    fn plain_packet_is_judged_as_any_is(packet in packet(), at in 0usize..40, byte in any::<u8>(), len in 0usize..400) {
        let mut bytes = packet.bytes();
        let whole = bytes.len();
        prop_assert_eq!(FlowKey::of_plain(&bytes, whole).is_some(), is_plain(&packet), "{:?}", packet);
        if let Some(place) = bytes.get_mut(at) {
            *place = byte;
        }
        for len in [whole, len] {
            let head = &bytes[..whole.min(len)];
            if let Some(looked) = FlowKey::of_plain(head, len) {
                prop_assert_eq!(FlowKey::of(head, len), Ok(looked));
            }
        }
    }

    #[test]
    fn short_head_tells_all_unless_it_says_that_it_does_not(packet in packet()) {
        let mut bytes = packet.bytes();
        let len = bytes.len();
        bytes.resize(len.max(64), 0);
        let head: &[u8; 64] = bytes.first_chunk().expect("64");
        if !is_long(head) {
            prop_assert_eq!(FlowKey::of(&head[..len.min(64)], len), FlowKey::of(&bytes[..len], len));
        }
    }

    #[test]
    fn rule_is_read_as_it_is_written(rules in rules(8)) {
        for (_, rule) in rules {
            prop_assert_eq!(rule.to_string().parse::<Rule>(), Ok(rule));
        }
    }
}

#[test]
fn first_of_ten_thousand_rules_decides() {
    let each = |at: u32| {
        let [_, a, b, c] = at.to_be_bytes();
        rule(&format!(
            "action=allow protocol=udp destination=10.{a}.{b}.{c} mark={}",
            at % 7 + 1
        ))
    };
    let mut list: Vec<Rule> = (0..5000).map(each).collect();
    list.extend((0..4999).map(each));
    list.push(rule("action=allow protocol=udp destination-ports=9"));
    let rules = compiled(&list, Action::Deny);
    for at in 0..5001u32 {
        let [_, a, b, c] = at.to_be_bytes();
        let packet = Packet {
            destination: IpAddr::V4(Ipv4Addr::new(10, a, b, c)),
            ..udp(80)
        };
        let find = |mark: u32| rules.find(&key(&packet), mark.into());
        let found = find(at % 7 + 1);
        match at {
            5000 => assert_eq!((found.allows, found.slot.0), (false, 10_000)),
            at => assert_eq!(u32::from(found.slot.0), at),
        }
        for other in [0, at % 7 + 2] {
            assert_eq!((find(other).allows, find(other).slot.0), (false, 10_000));
        }
    }
    let other = Packet {
        destination: IpAddr::V4(Ipv4Addr::new(11, 0, 0, 1)),
        ..udp(9)
    };
    assert_eq!(rules.find(&key(&other), 0).slot.0, 9999);
    assert!(rules.bytes() < 4 << 20, "{}", rules.bytes());
}

#[test]
fn most_memory_that_ten_thousand_rules_take_is_bounded() {
    let ports: Vec<String> = (0..15).map(|at| (at * 3 + 1).to_string()).collect();
    let ports = ports.join(",");
    let words = format!("action=allow protocol=tcp source-ports={ports} destination-ports={ports}");
    let each = |at: u32| {
        let [_, a, b, c] = at.to_be_bytes();
        rule(&format!(
            "{words} source=10.{a}.{b}.{c} destination=11.{a}.{b}.{c} mark={}",
            at + 1
        ))
    };
    let rules = compiled(&(0..10_000).map(each).collect::<Vec<_>>(), Action::Deny);
    assert!(rules.bytes() < 24 << 20, "{}", rules.bytes());
}

#[test]
fn frame_without_a_mark_matches_no_rule_that_names_one() {
    let rules = [
        rule("action=allow protocol=udp mark=7"),
        rule("action=deny protocol=udp mark=0xffffffff"),
        rule("action=allow protocol=udp destination-ports=53"),
    ];
    let mut classifier = Classifier::<u16>::new(Arc::new(compiled(&rules, Action::Deny)));
    let counters = PairCounters::default();
    let mut passes = |port, mark| {
        let facts = Facts {
            mark,
            ..Facts::of_len(300)
        };
        classifier.allows(&udp(port).bytes(), facts, &counters)
    };
    // Twice: the second time the flow is known, with that mark.
    for _ in 0..2 {
        for (mark, both) in [
            (None, [true, false]),
            (Some(0), [true, false]),
            (Some(7), [true, true]),
            (Some(8), [true, false]),
            (Some(u32::MAX), [false, false]),
        ] {
            assert_eq!([passes(53, mark), passes(54, mark)], both, "{mark:?}");
        }
    }
    assert_eq!(
        (counters.filter_misses.get(), counters.filter_hits.get()),
        (8, 12)
    );
}

#[test]
fn later_fragment_matches_no_rule_that_names_ports() {
    let rules = [
        rule("action=allow protocol=udp destination-ports=0-65535"),
        rule("action=allow protocol=udp"),
    ];
    let rules = compiled(&rules, Action::Deny);
    let of = |fragment| {
        let packet = Packet { fragment, ..udp(53) };
        rules.find(&key(&packet), 0).slot.0
    };
    assert_eq!(
        [of(Fragment::Whole), of(Fragment::First), of(Fragment::Later)],
        [0, 0, 1]
    );
}

#[test]
fn link_works_without_a_rule_and_not_against_one() {
    let arp = Packet {
        ethertype: Some(0x0806),
        ..udp(0)
    };
    let message = |kind: u16| Packet {
        source: "fe80::1".parse().expect("an address"),
        destination: "ff02::1".parse().expect("an address"),
        protocol: 58,
        ports: (0, kind << 8),
        hops: if matches!(kind, 130..=132 | 143) { 1 } else { 255 },
        ..udp(0)
    };
    let lldp = Packet {
        ethertype: Some(0x88cc),
        ..udp(0)
    };
    let passes = |rules: &Rules, packet: &Packet| rules.find(&key(packet), 0).allows;
    let none = Rules::new(&[], Action::Deny, Direction::FromGuest);
    for kind in [130, 131, 132, 133, 135, 136, 143] {
        assert!(passes(&none, &message(kind)), "{kind}");
    }
    assert!(passes(&none, &arp));
    assert!(!passes(&none, &lldp));
    assert!(!passes(&none, &message(128)));
    assert!(!passes(&none, &message(134)) && !passes(&none, &message(137)));
    let to_guest = Rules::new(&[], Action::Deny, Direction::ToGuest);
    assert!(passes(&to_guest, &message(134)) && !passes(&to_guest, &message(137)));
    assert_eq!(none.default_counts(), [0, 0]);

    let refused = [
        rule("action=deny ethertype=arp"),
        rule("action=deny protocol=icmpv6 icmp-type=135"),
        rule("action=allow ethertype=0x88cc"),
    ];
    let refused = compiled(&refused, Action::Deny);
    assert!(!passes(&refused, &arp) && !passes(&refused, &message(135)));
    assert!(passes(&refused, &message(136)) && passes(&refused, &lldp));
}

#[test]
fn default_follows_from_the_rules_where_it_is_not_said() {
    let mut config = Filter::default();
    assert_eq!(config.default_for(Direction::FromGuest), Action::Allow);
    let default = |config: &Filter, direction| compile(config, direction).map(|rules| rules.default());
    assert_eq!(default(&config, Direction::FromGuest), None);
    assert_eq!(default(&config, Direction::ToGuest), None);
    let words = "direction=from-guest action=allow protocol=tcp";
    config.rule.push(words.parse::<Rule>().expect(words));
    assert_eq!(config.default_for(Direction::FromGuest), Action::Deny);
    assert_eq!(config.default_for(Direction::ToGuest), Action::Allow);
    config.from_guest_default = Some(Action::Allow);
    config.to_guest_default = Some(Action::Deny);
    assert_eq!(default(&config, Direction::FromGuest), Some(Action::Allow));
    assert_eq!(default(&config, Direction::ToGuest), Some(Action::Deny));
}

#[test]
fn keys_that_cannot_be_together_are_refused_with_the_remedy() {
    for (words, key, remedy) in [
        ("action=allow", "direction", "give from-guest or"),
        ("direction=from-guest", "action", "give allow or deny"),
        ("direction=in action=allow", "direction", "give from-guest or"),
        ("direction=to-guest action=drop", "action", "give allow or deny"),
        ("direction=to-guest action=deny port=1", "port", "unknown key"),
        (
            "direction=to-guest action=deny destination-ports=22",
            "destination-ports",
            "name one",
        ),
        (
            "direction=to-guest action=deny protocol=icmp source-ports=1",
            "source-ports",
            "name one",
        ),
        (
            "direction=to-guest action=deny protocol=tcp icmp-type=8",
            "icmp-type",
            "name one",
        ),
        (
            "direction=to-guest action=deny protocol=icmp source=::1",
            "protocol",
            "give the other one",
        ),
        (
            "direction=to-guest action=deny ethertype=arp protocol=tcp",
            "ethertype",
            "leave",
        ),
        (
            "direction=to-guest action=deny ethertype=ipv6 source=10.0.0.1",
            "ethertype",
            "leave it out",
        ),
        (
            "direction=to-guest action=deny source=10.0.0.1 destination=::1",
            "source",
            "two rules",
        ),
        (
            "direction=to-guest action=deny source=10.0.0.1/8",
            "source",
            "10.0.0.0/8",
        ),
        (
            "direction=to-guest action=deny protocol=tcp source-ports=9-8",
            "source-ports",
            "smaller one",
        ),
        (
            "direction=to-guest action=deny protocol=tcp source-ports=65536",
            "source-ports",
            "list of ports",
        ),
        (
            "direction=to-guest action=deny ethertype=0x5ff",
            "ethertype",
            "0x0600",
        ),
        ("direction=to-guest action=deny protocol=sip", "protocol", "tcp"),
        ("direction=to-guest action=deny mark=0", "mark", "1 to"),
        (
            "direction=from-guest action=deny mark=1",
            "mark",
            "to-guest rules only",
        ),
    ] {
        let error = words.parse::<Rule>().expect_err(words);
        assert!(
            error.starts_with(key) && error.contains(remedy),
            "{words}: {error}"
        );
    }
}

#[test]
fn frame_whose_sender_has_a_sum_stored_in_what_was_looked_at_is_refused() {
    let rules = [rule("action=allow protocol=udp destination-ports=53")];
    let mut classifier = Classifier::<u16>::new(Arc::new(compiled(&rules, Action::Deny)));
    let (counters, packet) = (PairCounters::default(), udp(53).bytes());
    let mut admits = |stored| {
        let facts = Facts {
            stored,
            ..Facts::of_len(300)
        };
        classifier.admits(&packet, facts, &counters).is_ok()
    };
    // IPv4 source, destination port, and where UDP has its own.
    assert_eq!(
        [26, 36, 40].map(|field| admits(Some(field))),
        [false, false, true]
    );
    assert!(admits(None));
    assert_eq!(counters.to_guest_filter_headers.get(), 2);
}

#[test]
fn tags_behind_a_tag_hide_nothing() {
    let rules = [rule("action=deny protocol=udp")];
    let mut classifier = Classifier::<u16>::new(Arc::new(compiled(&rules, Action::Allow)));
    let (counters, packet) = (PairCounters::default(), udp(53).bytes());
    for tags in [
        &[0x81, 0, 0, 0][..],
        &[0x81, 0, 0, 0, 0x81, 0, 0, 0],
        &[0x88, 0xa8, 0, 0],
        &[0x81, 0, 0, 0, 0x91, 0, 0, 0],
    ] {
        let tagged = [&packet[..12], tags, &packet[12..]].concat();
        assert!(
            !classifier.allows(&tagged, Facts::of_len(300 + tags.len()), &counters),
            "{tags:02x?}"
        );
    }
    assert_eq!(counters.to_guest_filter_headers.get(), 3);
}

#[test]
fn flood_of_new_flows_evicts_no_more_than_there_is_room_for() {
    let mut classifier = Classifier::<u16>::new(Arc::new(compiled(
        &[rule("action=allow protocol=udp")],
        Action::Deny,
    )));
    let (flows, counters) = (40_000u32, PairCounters::default());
    let before = device::meter::read().cached;
    for flow in 0..flows {
        let packet = Packet {
            source: IpAddr::V4(Ipv4Addr::from_bits(flow)),
            ..udp(53)
        };
        assert!(classifier.allows(&packet.bytes(), Facts::of_len(300), &counters));
        assert_eq!(classifier.take_work(), 3);
    }
    assert_eq!(
        (counters.filter_hits.get(), counters.filter_misses.get()),
        (0, flows.into())
    );
    assert!(counters.filter_evictions.get() >= u64::from(flows) - 16_384);
    let told = device::meter::read().cached;
    assert_eq!(told.misses - before.misses, u64::from(flows));
    assert_eq!(told.evictions - before.evictions, counters.filter_evictions.get());
    assert_eq!(classifier.rules.counts(), [(0, flows.into())]);
}

#[test]
fn ten_thousand_flows_are_nearly_all_found_again() {
    let mut classifier = Classifier::<u16>::new(Arc::new(compiled(
        &[rule("action=allow protocol=udp")],
        Action::Deny,
    )));
    let counters = PairCounters::default();
    for _ in 0..4 {
        for flow in 0..10_000u32 {
            let packet = Packet {
                source: IpAddr::V4(Ipv4Addr::from_bits(0x0a00_0000 + flow)),
                ..udp(53)
            };
            assert!(classifier.allows(&packet.bytes(), Facts::of_len(300), &counters));
        }
    }
    let hits = counters.filter_hits.get();
    assert!(hits > 29_700, "{hits} of 30,000");
}

#[test]
fn flows_that_a_nic_hashes_alike_are_found_and_displace_nobody() {
    let mut classifier = Classifier::<u16>::new(Arc::new(compiled(
        &[rule("action=allow protocol=udp")],
        Action::Deny,
    )));
    let counters = PairCounters::default();
    let mut pass = |first: u32, flows: u32, hash: Option<u32>| {
        let before = counters.filter_misses.get();
        for flow in first..first + flows {
            let packet = Packet {
                source: IpAddr::V4(Ipv4Addr::from_bits(flow)),
                ..udp(53)
            };
            assert!(classifier.allows(
                &packet.bytes(),
                Facts {
                    hash,
                    ..Facts::of_len(300)
                },
                &counters
            ));
        }
        counters.filter_misses.get() - before
    };
    pass(0, 2000, None);
    let alike = Some(0x1234_5678);
    assert_eq!(pass(1 << 24, 2000, alike), 2000);
    assert_eq!(pass(1 << 24, 2000, alike), 0);
    assert_eq!(pass(0, 2000, None), 0);
}

#[test]
fn frames_are_counted_by_rule_whoever_judged_them_and_when() {
    let rules = Arc::new(compiled(&[rule("action=allow protocol=udp")], Action::Deny));
    let (counters, packet) = (PairCounters::default(), udp(53).bytes());
    let tcp = Packet {
        protocol: 6,
        ..udp(53)
    };
    let mut first = Classifier::<u16>::new(Arc::clone(&rules));
    let mut second = Classifier::<u16>::new(Arc::clone(&rules));
    assert!(first.allows(&packet, Facts::of_len(300), &counters));
    assert!(second.allows(&packet, Facts::of_len(300), &counters));
    assert!(!second.allows(&tcp.bytes(), Facts::of_len(300), &counters));
    drop(first);
    let mut third = Classifier::<u16>::new(Arc::clone(&rules));
    drop(second);
    assert!(third.allows(&packet, Facts::of_len(300), &counters));
    assert_eq!((rules.counts(), rules.default_counts()), (vec![(0, 3)], [1, 0]));
    let _fourth = Classifier::<u16>::new(Arc::clone(&rules));
    assert_eq!((rules.counts(), rules.default_counts()), (vec![(0, 3)], [1, 0]));
}
