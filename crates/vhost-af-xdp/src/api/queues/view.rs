//! The text of `vhost-af-xdp queues`: a table with a row for each queue, then the fields that the table leaves out,
//! once for queues with equal values.

use std::time::Duration;

use client::text::tree::tree;
use client::text::views::{Cell, View};
use serde_json::{Value, json};

use super::{Queue, named};

/// An earlier reading, for rates.
#[derive(Clone, Copy)]
pub(crate) struct Earlier<'a> {
    pub(crate) queues: &'a [Queue],
    /// How long ago.
    pub(crate) ago: Duration,
}

/// Fields of a queue that the table shows.
const OF_QUEUE: [&str; 8] = [
    "interface",
    "queue",
    "directions",
    "napi",
    "irq",
    "cpus",
    "bound",
    "elsewhere",
];
/// Fields of its holder that the table shows.
const OF_HOLDER: [&str; 7] = [
    "pair",
    "mode",
    "from_guest_frames",
    "from_guest_bytes",
    "to_guest_frames",
    "to_guest_bytes",
    "drops",
];

/// The text; with rates instead of counts, if there is an `earlier` reading.
/// Errors: a queue has no JSON form.
pub(crate) fn render(queues: &[Queue], earlier: Option<Earlier<'_>>) -> anyhow::Result<String> {
    if queues.is_empty() {
        return Ok(
            "no queues: the interface has none that are up, or the kernel does not report them (Linux 6.8 does)\n"
                .to_owned(),
        );
    }
    let mut header = vec![
        "interface",
        "queue",
        "",
        "napi",
        "irq",
        "cpu",
        "bound",
        "lease",
        "rules",
        "daemon",
        "network",
        "port",
        "pair",
        "mode",
    ];
    header.extend(match earlier {
        None => ["from guest", "to guest", "drops"],
        Some(_) => ["from pps", "to pps", "drops/s"],
    });
    let rows = queues.iter().map(|queue| row(queue, earlier)).collect();
    let mut text = View { header, rows }.to_string();
    for (interface, details, numbers) in details(queues)? {
        let heading = format!("{interface} {}", named(&numbers));
        text += &tree(&json!({ heading: details }))?;
    }
    Ok(text)
}

fn place(queue: &Queue) -> String {
    match queue.elsewhere {
        false => queue.interface.clone(),
        true => format!("{} (elsewhere)", queue.interface),
    }
}

fn row(queue: &Queue, earlier: Option<Earlier<'_>>) -> Vec<Cell> {
    let text = |text: Option<&String>| text.map_or(Cell::Unknown, |text| text.as_str().into());
    let count = |count: Option<u32>| count.map_or(Cell::Unknown, |count| Cell::Count(count.into()));
    let bound = queue.bound.join(", ");
    let holder = queue.holder.as_ref();
    let mut row = vec![
        place(queue).into(),
        count(Some(queue.queue)),
        queue.directions.join("/").into(),
        count(queue.napi),
        count(queue.irq),
        text(queue.cpus.as_ref()),
        text(Some(&bound).filter(|bound| !bound.is_empty())),
        count(queue.lease.as_ref().map(|lease| lease.pid)),
        Cell::Count(queue.rules.len() as u64),
        count(holder.map(|holder| holder.pid)),
        text(holder.and_then(|holder| holder.network.as_ref())),
        text(holder.and_then(|holder| holder.port.as_ref())),
        holder
            .and_then(|holder| holder.pair)
            .map_or(Cell::Unknown, |pair| Cell::Count(pair as u64)),
        holder.map_or(Cell::Unknown, |holder| {
            holder.mode.as_deref().unwrap_or("stopped").into()
        }),
    ];
    let same = |other: &&Queue| (&other.interface, other.queue) == (&queue.interface, queue.queue);
    row.extend(match (holder.map(|holder| holder.traffic), earlier) {
        (None, _) => [const { Cell::Unknown }; 3],
        (Some(now), None) => [now.from_guest_frames, now.to_guest_frames, now.drops].map(Cell::Count),
        (Some(now), Some(Earlier { queues, ago })) => {
            let before = queues.iter().find(same).and_then(|queue| queue.holder.as_ref());
            let rates = now.rates(before.map(|holder| holder.traffic).unwrap_or_default(), ago);
            [rates.from_guest_frames, rates.to_guest_frames, rates.drops].map(Cell::Number)
        }
    });
    row
}

/// The interface, the fields that the table leaves out, and the numbers of the queues with these values.
fn details(queues: &[Queue]) -> serde_json::Result<Vec<(String, Value, Vec<u32>)>> {
    let mut alike: Vec<(String, Value, Vec<u32>)> = Vec::new();
    for queue in queues {
        let mut fields = serde_json::to_value(queue)?;
        if let Some(fields) = fields.as_object_mut() {
            fields.retain(|key, _| !OF_QUEUE.contains(&key.as_str()));
        }
        if let Some(holder) = fields["holder"].as_object_mut() {
            holder.retain(|key, _| !OF_HOLDER.contains(&key.as_str()));
        }
        let place = place(queue);
        match alike
            .iter_mut()
            .find(|(other, known, _)| *other == place && *known == fields)
        {
            Some((.., numbers)) => numbers.push(queue.queue),
            None => alike.push((place, fields, vec![queue.queue])),
        }
    }
    Ok(alike)
}

#[cfg(test)]
mod tests {
    use model::state::Traffic;

    use super::super::Holder;
    use super::super::rules::{self, Leased, Rule};
    use super::*;

    fn held(frames: u64) -> Vec<Queue> {
        vec![
            Queue {
                interface: "eth1".to_owned(),
                queue: 3,
                directions: vec!["rx", "tx"],
                bound: vec!["xsk".to_owned()],
                holder: Some(Holder {
                    pid: 7,
                    command: "vhost-af-xdp serve".to_owned(),
                    port: Some("/run/a.sock".to_owned()),
                    pair: Some(0),
                    impaired: Some("interface eth1 is down".to_owned()),
                    traffic: Traffic {
                        from_guest_frames: frames,
                        ..Traffic::default()
                    },
                    ..Holder::default()
                }),
                lease: Some(Leased {
                    pid: 7,
                    command: "vhost-af-xdp serve".to_owned(),
                    uid: 65_534,
                    start_queue: 3,
                    queues: 1,
                    steered: "n-tuple rules",
                    impaired: true,
                    orphaned: false,
                    zcrx: false,
                }),
                rules: vec![
                    Rule {
                        by: "n-tuple",
                        location: Some(9),
                        what: "MAC 02:00:00:00:00:01".to_owned(),
                        to: Some("queue 3".to_owned()),
                    },
                    rules::program_rule(&["02:00:00:00:00:01".to_owned()], &[7]).expect("some"),
                ],
                ..Queue::default()
            },
            Queue {
                interface: "eth2".to_owned(),
                elsewhere: true,
                ..Queue::default()
            },
        ]
    }

    #[test]
    fn holder_and_what_ails_it_are_shown() {
        let text = render(&held(5), None).expect("JSON");
        for part in [
            "eth1",
            "xsk",
            "/run/a.sock",
            "holder: pid 7, command vhost-af-xdp serve, port /run/a.sock, impaired interface eth1 is down",
            "eth2 (elsewhere)",
            "eth1 queue 3:\n  lease: pid 7, command vhost-af-xdp serve, uid 65534, start_queue 3, queues 1, steered n-tuple \
             rules, impaired true, orphaned false, zcrx false\n",
            "  n-tuple         9  MAC 02:00:00:00:00:01                         queue 3\n",
            "  program         -  to 02:00:00:00:00:01 and multicast of VLAN 7  -\n",
        ] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
    }

    #[test]
    fn queues_that_receive_alike_are_told_together() {
        let queue = |number, rx_buffer_bytes, data_split: Option<&str>| Queue {
            interface: "eth0".to_owned(),
            queue: number,
            rx_buffer_bytes,
            data_split: data_split.map(str::to_owned),
            ..Queue::default()
        };
        let on = Some("on");
        let mut queues = [0, 1, 2, 3].map(|number| queue(number, Some(2_048), on));
        queues[2].rx_buffer_bytes = Some(16_384);
        let text = render(&queues, None).expect("JSON");
        for line in [
            "\neth0 queues 0-1,3: rx_buffer_bytes 2048, data_split on\n",
            "\neth0 queue 2: rx_buffer_bytes 16384, data_split on\n",
        ] {
            assert!(text.contains(line), "{text}");
        }
        let text = render(&[queue(0, None, None)], None).expect("JSON");
        assert!(!text.contains("eth0 queue 0"), "{text}");
    }

    #[test]
    fn queues_of_networks_and_of_their_ports_are_told_by_name() {
        let queue = |number, port: Option<&str>| Queue {
            interface: "eth0".to_owned(),
            queue: number,
            holder: Some(Holder {
                pid: 7,
                network: Some("lan".to_owned()),
                port: port.map(str::to_owned),
                pair: port.map(|_| 0),
                impaired: Some("queue 0 is taken".to_owned()),
                ..Holder::default()
            }),
            ..Queue::default()
        };
        let queues = [queue(0, None), queue(1, None), queue(2, Some("vm1"))];
        let text = render(&queues, None).expect("JSON");
        let row = |at: usize| -> Vec<String> {
            let cells = row(&queues[at], None).into_iter();
            cells.skip(9).take(4).map(|cell| cell.to_string()).collect()
        };
        assert_eq!(row(0), ["7", "lan", "-", "-"]);
        assert_eq!(row(2), ["7", "lan", "vm1", "0"]);
        for line in [
            "eth0 queues 0-1:\n  holder: pid 7, network lan, impaired queue 0 is taken\n",
            "eth0 queue 2:\n  holder: pid 7, network lan, port vm1, impaired queue 0 is taken\n",
        ] {
            assert_eq!(text.matches(line).count(), 1, "{text}");
        }
    }

    #[test]
    fn watching_shows_rates() {
        let earlier = Earlier {
            queues: &held(500),
            ago: Duration::from_secs(2),
        };
        let text = render(&held(2500), Some(earlier)).expect("JSON");
        assert!(text.contains("from pps") && text.contains(" 1k "), "{text}");
    }

    #[test]
    fn nothing_to_show_says_why() {
        assert!(render(&[], None).expect("JSON").contains("no queues"));
    }
}
