//! The text of `vhost-af-xdp queues`.

use std::fmt::Write as _;
use std::time::Duration;

use super::{Holder, Queue};
use client::text::{or_dash, table};

/// An earlier reading, for rates.
#[derive(Clone, Copy)]
pub(crate) struct Earlier<'a> {
    pub(crate) queues: &'a [Queue],
    /// How long ago.
    pub(crate) ago: Duration,
}

/// The text; with rates instead of counts, if there is an `earlier` reading.
pub(crate) fn render(queues: &[Queue], earlier: Option<Earlier<'_>>) -> String {
    if queues.is_empty() {
        return "no queues: the interface has none that are up, or the kernel does not report them (Linux 6.8 does)\n"
            .to_owned();
    }
    let header = [
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
        "from guest",
        "to guest",
        "drops",
    ];
    let columns = header.len();
    let mut table = table(header, |column| [1, 3, 4, 7, 8, 12, 14, 15, 16].contains(&column));
    for queue in queues {
        let mut row = row(queue, earlier);
        row.resize(columns, or_dash(None::<&str>));
        table.add_row(row);
    }
    let mut text = format!("{table}\n");
    for line in leases(queues)
        .into_iter()
        .chain(rules(queues))
        .chain(buffers(queues))
        .chain(hints(queues))
    {
        text.push_str(&line);
    }
    let mut listed = Vec::new();
    for holder in queues.iter().filter_map(|queue| queue.holder.as_ref()) {
        if !listed.contains(&holder.pid) {
            listed.push(holder.pid);
            // Writing to a String cannot fail.
            let _ = writeln!(text, "process {}: {}", holder.pid, holder.command);
        }
        let impaired = holder.impaired.as_ref();
        let line = impaired.map(|reason| format!("{} is impaired: {reason}", holder.whom()));
        // A network has several queues: one line is enough.
        if let Some(line) = line.filter(|line| !text.lines().any(|said| said == line)) {
            let _ = writeln!(text, "{line}");
        }
    }
    text
}

fn row(queue: &Queue, earlier: Option<Earlier<'_>>) -> Vec<String> {
    let mut row = vec![
        match queue.elsewhere {
            false => queue.interface.clone(),
            true => format!("{} (elsewhere)", queue.interface),
        },
        queue.queue.to_string(),
        queue.directions.join("/"),
        or_dash(queue.napi),
        or_dash(queue.irq),
        or_dash(queue.cpus.as_ref()),
        or_dash(Some(queue.bound.join(", ")).filter(|bound| !bound.is_empty())),
        or_dash(queue.lease.as_ref().map(|lease| lease.pid)),
        or_dash(Some(queue.rules.len()).filter(|&count| count > 0)),
    ];
    let Some(holder) = &queue.holder else {
        return row;
    };
    row.extend([
        holder.pid.to_string(),
        or_dash(holder.network.as_ref()),
        or_dash(holder.port.as_ref()),
        or_dash(holder.pair),
        holder.mode.clone().unwrap_or_else(|| "stopped".to_owned()),
    ]);
    let earlier = earlier.and_then(|Earlier { queues, ago }| {
        let same = |other: &&Queue| (&other.interface, other.queue) == (&queue.interface, queue.queue);
        let holder = queues.iter().find(same)?.holder.as_ref()?;
        Some((holder, ago))
    });
    let figure = |of: fn(&Holder) -> u64| match earlier {
        None => of(holder).to_string(),
        Some((earlier, ago)) => {
            let more = of(holder).saturating_sub(of(earlier));
            // Counts of a few seconds are exact as doubles.
            format!("{:.0}/s", more as f64 / ago.as_secs_f64())
        }
    };
    row.extend([
        figure(|holder| holder.from_guest_frames),
        figure(|holder| holder.to_guest_frames),
        figure(|holder| holder.drops),
    ]);
    row
}

/// Hints of each interface, a line each; interfaces without hints are left out.
fn hints(queues: &[Queue]) -> Vec<String> {
    let mut lines = Vec::new();
    for queue in queues {
        let driver = queue.driver_hints.as_deref().unwrap_or_default();
        let of_holder = queue.holder.as_ref().and_then(|holder| holder.hints.as_ref());
        let is_said = of_holder.is_some_and(|hints| !hints.on.is_empty() || hints.why.is_some());
        let said = match of_holder.filter(|_| is_said) {
            Some(hints) => format!("; {hints}"),
            None if driver.is_empty() => continue,
            None => String::new(),
        };
        let driver = match driver {
            [] => "none".to_owned(),
            driver => driver.join(", "),
        };
        let line = format!("hints of {}: its driver has {driver}{said}\n", queue.interface);
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    lines
}

/// Receive buffers of each interface: one line for queues that are alike.
fn buffers(queues: &[Queue]) -> Vec<String> {
    let mut alike: Vec<((&str, String), Vec<u32>)> = Vec::new();
    for queue in queues {
        let bytes = queue.rx_buffer_bytes.map(|bytes| format!("{bytes} bytes each"));
        let split = queue
            .data_split
            .as_ref()
            .map(|split| format!("header/data split {split}"));
        let said: Vec<String> = bytes.into_iter().chain(split).collect();
        if said.is_empty() {
            continue;
        }
        let key = (queue.interface.as_str(), said.join(", "));
        match alike.iter_mut().find(|(known, _)| *known == key) {
            Some((_, numbers)) => numbers.push(queue.queue),
            None => alike.push((key, vec![queue.queue])),
        }
    }
    let line = |((interface, said), numbers): ((&str, String), Vec<u32>)| {
        let numbers: Vec<String> = numbers.iter().map(u32::to_string).collect();
        format!(
            "receive buffers of {interface}, queue(s) {}: {said}\n",
            numbers.join(", ")
        )
    };
    alike.into_iter().map(line).collect()
}

/// One line for each lease.
fn leases(queues: &[Queue]) -> Vec<String> {
    let mut lines = Vec::new();
    for queue in queues {
        let Some(lease) = &queue.lease else { continue };
        let state = match (lease.orphaned, lease.impaired) {
            (true, _) => ", its lessee has not come back to the steward",
            (false, true) => ", impaired",
            (false, false) => "",
        };
        let what = if lease.zcrx { " for zero-copy receive" } else { "" };
        let line = format!(
            "lease of {} queue(s) from {} of {}{what}: process {} of user {}, steered by {}{state}: {}\n",
            lease.queues,
            lease.start_queue,
            queue.interface,
            lease.pid,
            lease.uid,
            lease.steered,
            lease.command
        );
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    lines
}

/// One line for each rule of each queue.
fn rules(queues: &[Queue]) -> Vec<String> {
    let all = queues
        .iter()
        .flat_map(|queue| queue.rules.iter().map(move |rule| (queue, rule)));
    all.map(|(queue, rule)| {
        let (name, number) = (&queue.interface, queue.queue);
        match (rule.location, &rule.to) {
            (Some(location), Some(to)) => {
                format!(
                    "{name} queue {number}: n-tuple rule {location}, {} to {to}\n",
                    rule.what
                )
            }
            _ => format!(
                "{name} queue {number}: the {} takes frames {}\n",
                rule.by, rule.what
            ),
        }
    })
    .collect()
}

#[cfg(test)]
mod tests {
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
                    from_guest_frames: frames,
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
        let text = render(&held(5), None);
        for part in [
            "eth1",
            "xsk",
            "/run/a.sock",
            "process 7: vhost-af-xdp serve",
            "is down",
            "eth2 (elsewhere)",
            "lease of 1 queue(s) from 3 of eth1: process 7 of user 65534, steered by n-tuple rules, impaired: \
             vhost-af-xdp serve",
            "eth1 queue 3: n-tuple rule 9, MAC 02:00:00:00:00:01 to queue 3",
            "eth1 queue 3: the program takes frames to 02:00:00:00:00:01 and multicast of VLAN 7",
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
        let lines = buffers(&queues);
        let expected = [
            "receive buffers of eth0, queue(s) 0, 1, 3: 2048 bytes each, header/data split on\n",
            "receive buffers of eth0, queue(s) 2: 16384 bytes each, header/data split on\n",
        ];
        assert_eq!(lines, expected);
        assert_eq!(buffers(&[queue(0, None, None)]), [""; 0]);
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
        let text = render(&queues, None);
        let row = |at: usize| -> Vec<String> {
            let cells = row(&queues[at], None).into_iter();
            cells.skip(9).take(4).collect()
        };
        assert_eq!(row(0), ["7", "lan", "-", "-"]);
        assert_eq!(row(2), ["7", "lan", "vm1", "0"]);
        let said = |line: &str| text.lines().filter(|said| *said == line).count();
        assert_eq!(said("network lan is impaired: queue 0 is taken"), 1, "{text}");
        assert_eq!(
            said("port vm1 of network lan is impaired: queue 0 is taken"),
            1,
            "{text}"
        );
    }

    #[test]
    fn watching_shows_rates() {
        let earlier = Earlier {
            queues: &held(500),
            ago: Duration::from_secs(2),
        };
        let text = render(&held(2500), Some(earlier));
        assert!(text.contains("1000/s"), "{text}");
    }

    #[test]
    fn nothing_to_show_says_why() {
        assert!(render(&[], None).contains("no queues"));
    }
}
