//! `vhost-af-xdp queues`: who holds which NIC queue of this host.
//!
//! Three sources, each of which may be silent: the kernel's netdev family (Documentation/netlink/specs/netdev.yaml: queues, NAPI
//! instances, who has memory bound to a queue), /proc/irq (which CPU an interrupt goes to), and the running daemons' status (whose port a
//! queue is of). The kernel never says which process holds a socket; so a holder that is none of our daemons has no name here.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use comfy_table::{CellAlignment, Table, presets};
use netlink_bindings::netdev::{self, QueueType};
use netlink_bindings::rt_link::{self, Ifinfomsg};
use netlink_socket2::NetlinkSocket;
use serde::Serialize;

use super::control_socket;
use super::status::{LaneStatus, PortStatus, Status};

/// One queue of an interface, both directions.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct Queue {
    /// Interface.
    pub(crate) interface: String,
    /// Number of the queue.
    pub(crate) queue: u32,
    /// `rx`, `tx`, in this order, where the kernel has them.
    pub(crate) directions: Vec<&'static str>,
    /// The NAPI instance that polls it.
    pub(crate) napi: Option<u32>,
    /// That one's interrupt.
    pub(crate) irq: Option<u32>,
    /// CPUs that the interrupt goes to, as the kernel lists them.
    pub(crate) cpus: Option<String>,
    /// Thread of a threaded NAPI.
    pub(crate) napi_thread: Option<u32>,
    /// What is bound to the queue: `xsk`, `io_uring`, `dma-buf N`, `lease`.
    pub(crate) bound: Vec<String>,
    /// Our daemon whose port has it.
    pub(crate) holder: Option<Holder>,
}

/// A daemon of ours that has a queue.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Holder {
    /// Its process.
    pub(crate) pid: u32,
    /// That one's command line.
    pub(crate) command: String,
    /// The port's socket.
    pub(crate) port: String,
    /// Queue pair of that port.
    pub(crate) pair: usize,
    /// Process of the VMM, while one is connected.
    pub(crate) vmm: Option<i32>,
    /// The data path in use; none while no guest runs.
    pub(crate) mode: Option<String>,
    /// Why no frames move although they should.
    pub(crate) impaired: Option<String>,
    /// Frames of the guest sent so far.
    pub(crate) from_guest_frames: u64,
    /// Frames delivered to the guest so far.
    pub(crate) to_guest_frames: u64,
    /// Frames lost so far, whatever the reason.
    pub(crate) drops: u64,
}

/// Interrupt and thread of a NAPI instance.
#[derive(Default, Clone)]
struct Napi {
    irq: Option<u32>,
    thread: Option<u32>,
}

/// All queues of this network namespace, or of one interface; daemons are asked at `controls`.
///
/// # Errors
/// The kernel does not answer, or there is no such interface.
pub(crate) fn read(only: Option<&str>, controls: &[PathBuf]) -> anyhow::Result<Vec<Queue>> {
    let names = interfaces()?;
    if let Some(name) = only
        && !names.values().any(|known| known == name)
    {
        anyhow::bail!("no interface {name:?} in this network namespace: `ip link` lists them");
    }
    let napis = napis()?;
    let statuses: Vec<Status> = controls
        .iter()
        .filter_map(|path| control_socket::ask(path).ok())
        .collect();
    let mut queues: BTreeMap<(String, u32), Queue> = BTreeMap::new();
    for_each_queue(|index, kind, attributes| {
        let Some(name) = names.get(&index) else { return };
        if only.is_some_and(|only| only != name) {
            return;
        }
        let Ok(number) = attributes.get_id() else { return };
        let queue = queues
            .entry((name.clone(), number))
            .or_insert_with(|| Queue::new(name, number, &statuses));
        queue.add(kind, &attributes, &napis);
    })?;
    Ok(queues.into_values().collect())
}

impl Queue {
    fn new(interface: &str, queue: u32, statuses: &[Status]) -> Self {
        Self {
            interface: interface.to_owned(),
            queue,
            holder: statuses
                .iter()
                .find_map(|status| Holder::find(status, interface, queue)),
            ..Self::default()
        }
    }

    fn add(&mut self, kind: QueueType, attributes: &netdev::IterableQueue<'_>, napis: &BTreeMap<u32, Napi>) {
        self.directions.push(match kind {
            QueueType::Rx => "rx",
            QueueType::Tx => "tx",
        });
        let mut bound = Vec::new();
        if attributes.get_xsk().is_ok() {
            bound.push("xsk".to_owned());
        }
        if attributes.get_io_uring().is_ok() {
            bound.push("io_uring".to_owned());
        }
        if let Ok(id) = attributes.get_dmabuf() {
            bound.push(format!("dma-buf {id}"));
        }
        if attributes.get_lease().is_ok() {
            bound.push("lease".to_owned());
        }
        for what in bound {
            if !self.bound.contains(&what) {
                self.bound.push(what);
            }
        }
        // Receive and transmit queue of a number nearly always share an instance; the receive queue's is shown.
        if let (None, Ok(napi)) = (self.napi, attributes.get_napi_id()) {
            self.napi = Some(napi);
            let known = napis.get(&napi).cloned().unwrap_or_default();
            self.irq = known.irq;
            self.napi_thread = known.thread;
            self.cpus = known.irq.and_then(cpus_of);
        }
    }
}

impl Holder {
    fn find(status: &Status, interface: &str, queue: u32) -> Option<Self> {
        let ports = status.ports.iter().filter(|port| port.nic == interface);
        ports
            .flat_map(|port| port.lanes.iter().map(move |lane| (port, lane)))
            .find(|(_, lane)| lane.queue == Some(queue))
            .map(|(port, lane)| Self::new(status.pid, port, lane))
    }

    fn new(pid: u32, port: &PortStatus, lane: &LaneStatus) -> Self {
        let drops = lane.counters.iter().filter(|counter| counter.drop);
        Self {
            pid,
            command: command_of(pid),
            port: port.endpoint.clone(),
            pair: lane.pair,
            vmm: port.peer.filter(|_| port.connected),
            mode: lane.mode.clone(),
            impaired: port.impaired.clone(),
            from_guest_frames: lane.counter("from_guest_frames"),
            to_guest_frames: lane.counter("to_guest_frames"),
            drops: drops.map(|counter| counter.value).sum(),
        }
    }
}

/// Names by index.
fn interfaces() -> io::Result<BTreeMap<u32, String>> {
    let mut socket = NetlinkSocket::new();
    let request = rt_link::Request::new().op_getlink_dump(&Ifinfomsg::default());
    let mut replies = socket.request(&request)?;
    let mut names = BTreeMap::new();
    while let Some(reply) = replies.recv() {
        let (header, attributes) = reply.map_err(io::Error::from)?;
        if let (Ok(index), Ok(name)) = (u32::try_from(header.ifi_index), attributes.get_ifname()) {
            names.insert(index, name.to_string_lossy().into_owned());
        }
    }
    Ok(names)
}

fn napis() -> io::Result<BTreeMap<u32, Napi>> {
    let mut socket = NetlinkSocket::new();
    let request = netdev::Request::new().op_napi_get_dump();
    let mut replies = socket.request(&request)?;
    let mut napis = BTreeMap::new();
    while let Some(reply) = replies.recv() {
        let attributes = reply.map_err(io::Error::from)?;
        if let Ok(id) = attributes.get_id() {
            let napi = Napi {
                irq: attributes.get_irq().ok(),
                thread: attributes.get_pid().ok(),
            };
            napis.insert(id, napi);
        }
    }
    Ok(napis)
}

fn for_each_queue(mut act: impl FnMut(u32, QueueType, netdev::IterableQueue<'_>)) -> io::Result<()> {
    let mut socket = NetlinkSocket::new();
    let request = netdev::Request::new().op_queue_get_dump();
    let mut replies = socket.request(&request)?;
    while let Some(reply) = replies.recv() {
        let attributes = reply.map_err(io::Error::from)?;
        let kind = attributes.get_type().ok().map(u64::from);
        if let (Ok(index), Some(kind)) = (attributes.get_ifindex(), kind.and_then(QueueType::from_value)) {
            act(index, kind, attributes);
        }
    }
    Ok(())
}

fn cpus_of(irq: u32) -> Option<String> {
    let read = |file| std::fs::read_to_string(format!("/proc/irq/{irq}/{file}")).ok();
    read("effective_affinity_list")
        .filter(|list| !list.trim().is_empty())
        .or_else(|| read("smp_affinity_list"))
        .map(|list| list.trim().to_owned())
}

fn command_of(pid: u32) -> String {
    let bytes = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words = bytes.split(|&byte| byte == 0).filter(|word| !word.is_empty());
    let words: Vec<_> = words.map(String::from_utf8_lossy).collect();
    words.join(" ")
}

/// As a person reads it. `before`: what was read so long ago, for rates.
pub(crate) fn render(queues: &[Queue], before: Option<(&[Queue], Duration)>) -> String {
    if queues.is_empty() {
        return "no queues: the interface has none that are up, or the kernel does not tell (Linux 6.8 does)\n"
            .to_owned();
    }
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY);
    let mut header = vec![
        "interface",
        "queue",
        "",
        "napi",
        "irq",
        "cpu",
        "bound",
        "daemon",
        "port",
    ];
    header.extend(["pair", "mode", "from guest", "to guest", "drops"]);
    table.set_header(header);
    for queue in queues {
        table.add_row(row(queue, before));
    }
    for column in [1, 3, 4, 9, 11, 12, 13] {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let mut text = format!("{table}\n");
    let mut told = Vec::new();
    for holder in queues.iter().filter_map(|queue| queue.holder.as_ref()) {
        if !told.contains(&holder.pid) {
            told.push(holder.pid);
            // Writing to a String cannot fail.
            let _ = writeln!(text, "process {}: {}", holder.pid, holder.command);
        }
        if let Some(reason) = &holder.impaired {
            let _ = writeln!(text, "port {} is impaired: {reason}", holder.port);
        }
    }
    text
}

fn row(queue: &Queue, before: Option<(&[Queue], Duration)>) -> Vec<String> {
    let number = |value: Option<u32>| value.map_or("-".to_owned(), |value| value.to_string());
    let mut row = vec![
        queue.interface.clone(),
        queue.queue.to_string(),
        queue.directions.join("/"),
        number(queue.napi),
        number(queue.irq),
        queue.cpus.clone().unwrap_or_else(|| "-".to_owned()),
        match queue.bound.as_slice() {
            [] => "-".to_owned(),
            bound => bound.join(", "),
        },
    ];
    let Some(holder) = &queue.holder else {
        row.resize(14, "-".to_owned());
        return row;
    };
    row.extend([
        holder.pid.to_string(),
        holder.port.clone(),
        holder.pair.to_string(),
        holder.mode.clone().unwrap_or_else(|| "stopped".to_owned()),
    ]);
    let earlier = before.and_then(|(queues, passed)| {
        let same = |other: &&Queue| (&other.interface, other.queue) == (&queue.interface, queue.queue);
        let holder = queues.iter().find(same)?.holder.as_ref()?;
        Some((holder, passed))
    });
    let figure = |of: fn(&Holder) -> u64| match earlier {
        None => of(holder).to_string(),
        Some((earlier, passed)) => {
            let more = of(holder).saturating_sub(of(earlier));
            // Counts of a second are exact as doubles.
            format!("{:.0}/s", more as f64 / passed.as_secs_f64())
        }
    };
    row.extend([
        figure(|holder| holder.from_guest_frames),
        figure(|holder| holder.to_guest_frames),
        figure(|holder| holder.drops),
    ]);
    row
}

#[cfg(test)]
mod tests {
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
                    port: "/run/a.sock".to_owned(),
                    pair: 0,
                    vmm: None,
                    mode: None,
                    impaired: Some("interface eth1 is down".to_owned()),
                    from_guest_frames: frames,
                    to_guest_frames: 0,
                    drops: 0,
                }),
                ..Queue::default()
            },
            Queue {
                interface: "eth2".to_owned(),
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
            "eth2",
        ] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
    }

    #[test]
    fn watching_shows_rates() {
        let text = render(&held(2500), Some((&held(500), Duration::from_secs(2))));
        assert!(text.contains("1000/s"), "{text}");
    }

    #[test]
    fn nothing_to_show_says_why() {
        assert!(render(&[], None).contains("no queues"));
    }
}
