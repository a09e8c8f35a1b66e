//! `vhost-af-xdp queues`: who holds which NIC queue of this host.
//!
//! Six sources, each of which may be missing: the kernel's netdev family (Documentation/netlink/specs/netdev.yaml:
//! queues, NAPI instances, memory bound to queues), the driver's rings (length of receive buffers), /proc/irq (CPUs of
//! an interrupt), the status of running daemons (the port that a queue belongs to), the steward (the lessee of a
//! queue), and the NIC's rules. The kernel never reports which process holds a socket, so a holder that is not a
//! vhost-af-xdp daemon and has no lease is shown without a name.

mod rules;
mod view;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use host::links::all::for_each;
use host::links::{dump, has_no_peer};
use host::nic::bound::LeasedTo;
use host::nic::rings::{self, Rings, Split};
use model::state::{HintsStatus, LaneStatus, NetworkStatus, PortStatus, Status, Traffic};
use netlink_bindings::netdev::{self, QueueType};
use serde::Serialize;
use steer::{HintSet, ranges_text};

use crate::nic::metadata;
use client::text::or_dash;
pub(crate) use rules::Leased;
use rules::{Answers, Rule};

pub(crate) use view::{Earlier, render};

/// One queue of an interface, both directions.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct Queue {
    pub(crate) interface: String,
    /// Number of the queue.
    pub(crate) queue: u32,
    /// `rx`, `tx`, in this order, as far as the kernel has them.
    pub(crate) directions: Vec<&'static str>,
    /// The NAPI instance that polls it.
    pub(crate) napi: Option<u32>,
    /// Interrupt of the NAPI instance.
    pub(crate) irq: Option<u32>,
    /// CPUs that the interrupt goes to, as the kernel lists them.
    pub(crate) cpus: Option<String>,
    /// PID of its thread, if the NAPI is threaded.
    pub(crate) napi_thread: Option<u32>,
    /// What is bound to the queue: `xsk`, `io_uring`, `dma-buf N`. A NIC's queue leased to a netkit: `lease (interface
    /// I, queue N)`, perhaps with `, network namespace K`; the netkit's queue: `lease of NAME, queue N`.
    pub(crate) bound: Vec<String>,
    /// Length of its receive buffers, as the kernel or the driver reports it.
    pub(crate) rx_buffer_bytes: Option<u32>,
    /// Whether the NIC splits header and data: `off`, `on`, `above N bytes`; none: its driver has no such setting.
    pub(crate) data_split: Option<String>,
    /// It is in another network namespace, or gone: only its lease is known.
    pub(crate) elsewhere: bool,
    pub(crate) lease: Option<Leased>,
    /// Rules that steer frames to it, or let them pass.
    pub(crate) rules: Vec<Rule>,
    /// Hints that the driver can report to programs in native mode; none: the kernel does not say.
    pub(crate) driver_hints: Option<Vec<String>>,
    /// The vhost-af-xdp daemon that uses it, for a port or a network.
    pub(crate) holder: Option<Holder>,
}

/// A vhost-af-xdp daemon that uses a queue.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct Holder {
    /// Its PID.
    pub(crate) pid: u32,
    /// Its command line.
    pub(crate) command: String,
    /// Its configuration file.
    pub(crate) configuration: Option<PathBuf>,
    /// The socket of its API.
    pub(crate) api: Option<PathBuf>,
    /// The network that uses the queue; with a port: the network of the port.
    pub(crate) network: Option<String>,
    /// The name of the port that uses the queue alone; none: the network's ports share it.
    pub(crate) port: Option<String>,
    /// Queue pair of that port.
    pub(crate) pair: Option<usize>,
    /// PID of the VMM, while one is connected.
    pub(crate) vmm: Option<i32>,
    /// The data path in use; none while no guest uses the queue.
    pub(crate) mode: Option<String>,
    /// Hints that are left before its frames.
    pub(crate) hints: Option<HintsStatus>,
    /// Why no frames are forwarded.
    pub(crate) impaired: Option<String>,
    /// MAC addresses whose frames the port's guest receives; empty: all.
    pub(crate) macs: Vec<String>,
    /// VLANs whose frames the port's guest receives; empty: all.
    pub(crate) vlans: Vec<u16>,
    /// What it moved and dropped so far.
    #[serde(flatten)]
    pub(crate) traffic: Traffic,
}

/// Interrupt and thread of a NAPI instance.
#[derive(Default, Clone)]
struct Napi {
    irq: Option<u32>,
    thread: Option<u32>,
}

/// All queues of this network namespace, and those that are leased in others, or those of one interface. Asks daemons
/// at `controls`, and the steward at `steward` or at the default path.
/// Errors: the kernel or a named steward does not answer, or there is no such interface.
pub(crate) fn read(
    only: Option<&str>,
    controls: &[PathBuf],
    steward: Option<&Path>,
) -> anyhow::Result<Vec<Queue>> {
    let (names, without_peer) = interfaces()?;
    let answers = Answers::ask(steward, names.values())?;
    let is_wanted = |name: &str| only.is_none_or(|only| only == name);
    let napis = napis()?;
    let statuses = client::connection::statuses(controls);
    let mut queues: BTreeMap<(String, u32), Queue> = BTreeMap::new();
    let mut hints: BTreeMap<u32, Option<Vec<String>>> = BTreeMap::new();
    let mut rings: BTreeMap<u32, Option<Rings>> = BTreeMap::new();
    let mut leases = Leases::new(without_peer);
    for_each_queue(|index, kind, attributes| {
        let Some(name) = names.get(&index) else { return };
        leases.record(name, &attributes);
        if !is_wanted(name) {
            return;
        }
        let Ok(number) = attributes.get_id() else { return };
        let queue = queues
            .entry((name.clone(), number))
            .or_insert_with(|| Queue::new(name, number, &statuses).with(&answers));
        let hints = hints.entry(index).or_insert_with(|| driver_hints(index));
        queue.driver_hints.clone_from(hints);
        let is_rx = matches!(kind, QueueType::Rx);
        queue.add(kind, &attributes, &napis);
        if is_rx {
            let rings = rings.entry(index).or_insert_with(|| rings::of(index).ok());
            queue.receive_by(rings.as_ref(), &attributes);
        }
    })?;
    leases.add_to(&names, &mut queues);
    let mut elsewhere = answers.elsewhere(|name, queue| queues.contains_key(&(name.to_owned(), queue)));
    elsewhere.retain(|queue| is_wanted(&queue.interface));
    for queue in &mut elsewhere {
        queue.holder = Holder::find(&statuses, &queue.interface, queue.queue);
    }
    let queues: Vec<Queue> = queues.into_values().chain(elsewhere).collect();
    if let Some(name) = only
        && queues.is_empty()
        && !names.values().any(|known| known == name)
    {
        anyhow::bail!("no interface {name:?} in this network namespace: `ip link` lists them");
    }
    Ok(queues)
}

impl Queue {
    fn new(interface: &str, queue: u32, statuses: &[Status]) -> Self {
        Self {
            interface: interface.to_owned(),
            queue,
            holder: Holder::find(statuses, interface, queue),
            ..Self::default()
        }
    }

    /// Whether no user of the queue is known.
    pub(crate) fn is_free(&self) -> bool {
        self.bound.is_empty() && self.lease.is_none() && self.holder.is_none()
    }

    /// Adds what stewards and drivers answered.
    fn with(mut self, answers: &Answers) -> Self {
        let lease = answers.lease_of(&self.interface, self.queue);
        self.rules = answers.rules_of(&self.interface, self.queue);
        self.rules.extend(lease.and_then(rules::entries));
        self.lease = lease.map(Leased::from);
        // A daemon without a lease has its own program; the lease of a network names no addresses.
        self.rules.extend(match (&self.lease, &self.holder) {
            (_, Some(holder)) if holder.port.is_none() => holder.network.as_deref().map(rules::network_rule),
            (None, Some(holder)) => rules::program_rule(&holder.macs, &holder.vlans),
            _ => None,
        });
        self
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
        if let Ok(lease) = attributes.get_lease() {
            bound.push(lease_text(&lease));
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

    /// Adds the buffer length of the interface's rings, or of this queue alone: memory of io_uring has buffers of its
    /// own length.
    fn receive_by(&mut self, rings: Option<&Rings>, attributes: &netdev::IterableQueue<'_>) {
        let own = attributes
            .get_io_uring()
            .and_then(|memory| memory.get_rx_buf_len());
        let usual = rings.and_then(|rings| rings.buffer_bytes);
        self.rx_buffer_bytes = own.ok().or(usual);
        self.data_split = match rings.map(|rings| rings.split) {
            None | Some(Split::Never) => None,
            Some(Split::Off(_)) => Some("off".to_owned()),
            Some(Split::On) => Some("on".to_owned()),
            Some(Split::Above(bytes)) => Some(format!("above {bytes} bytes")),
        };
    }
}

impl Holder {
    fn find(statuses: &[Status], interface: &str, queue: u32) -> Option<Self> {
        let of = |lanes: &[LaneStatus]| lanes.iter().position(|lane| lane.queue == Some(queue));
        statuses.iter().find_map(|status| {
            let ports = status.ports.iter().filter(|port| port.nic == interface);
            let networks = status.networks.iter();
            let networks = networks.map(|network| (network, network.queues_of(interface)));
            let mut of_ports = ports.filter_map(|port| Some((port, &port.lanes[of(&port.lanes)?])));
            let mut of_networks =
                networks.filter_map(|(network, queues)| Some((network, &queues[of(queues)?])));
            match of_ports.next() {
                Some((port, lane)) => Some(Self::of_port(status, port, lane)),
                None => of_networks
                    .next()
                    .map(|(network, lane)| Self::of_network(status, network, lane)),
            }
        })
    }

    fn of_port(status: &Status, port: &PortStatus, lane: &LaneStatus) -> Self {
        Self {
            network: port.network.clone(),
            port: Some(port.name.clone()),
            pair: Some(lane.pair),
            vmm: port.peer.filter(|_| port.connected),
            impaired: port.impaired.clone(),
            macs: port.macs.clone(),
            vlans: port.vlans.clone(),
            ..Self::of_lane(status, lane)
        }
    }

    fn of_network(status: &Status, network: &NetworkStatus, lane: &LaneStatus) -> Self {
        Self {
            network: Some(network.name.clone()),
            impaired: network.impaired.clone(),
            ..Self::of_lane(status, lane)
        }
    }

    fn of_lane(status: &Status, lane: &LaneStatus) -> Self {
        let readings = status.configuration.as_ref();
        Self {
            pid: status.pid,
            command: command_of(status.pid),
            configuration: readings.map(|readings| readings.path.clone()),
            api: status.api.clone(),
            mode: lane.mode.clone(),
            hints: lane.hints.clone(),
            traffic: lane.traffic(),
            ..Self::default()
        }
    }

    /// The port or network that uses the queue, in words.
    pub(crate) fn whom(&self) -> String {
        match (&self.port, &self.network) {
            (Some(port), Some(network)) => format!("port {port} of network {network}"),
            (Some(port), None) => format!("port {port}"),
            (None, network) => format!("network {}", or_dash(network.as_ref())),
        }
    }
}

/// `queue N` or `queues N-M`.
pub(crate) fn named(queues: &[u32]) -> String {
    let numbers = ranges_text(queues.iter().copied());
    match queues.len() {
        1 => format!("queue {numbers}"),
        _ => format!("queues {numbers}"),
    }
}

/// The netkit that a queue is leased to (Linux 7.1), by its index in its network namespace, which may be another one.
fn lease_text(lease: &netdev::IterableLease<'_>) -> String {
    LeasedTo::of(lease).map_or_else(|| "lease".to_owned(), |to| format!("lease ({to})"))
}

/// The NIC's queue behind each queue of a netkit: the kernel reports it at the NIC only.
struct Leases {
    /// Netkits without a peer, by their indexes.
    netkits: BTreeSet<u32>,
    /// Text for each queue of a netkit, by interface index and queue.
    of: BTreeMap<(u32, u32), String>,
}

impl Leases {
    fn new(netkits: BTreeSet<u32>) -> Self {
        let of = BTreeMap::new();
        Self { netkits, of }
    }

    /// Records the lease of a NIC's queue.
    fn record(&mut self, name: &str, attributes: &netdev::IterableQueue<'_>) {
        let to = attributes.get_lease().ok().and_then(|lease| LeasedTo::of(&lease));
        let here = to.filter(|to| to.namespace.is_none());
        if let (Some(to), Ok(queue)) = (here, attributes.get_id()) {
            let words = format!("lease of {name}, queue {queue}");
            self.of.insert((to.ifindex, to.queue), words);
        }
    }

    /// Adds the text to the netkits' queues. Queue 0 of a netkit is not leased.
    fn add_to(&self, names: &BTreeMap<u32, String>, queues: &mut BTreeMap<(String, u32), Queue>) {
        for index in &self.netkits {
            let Some(name) = names.get(index) else { continue };
            let theirs = queues.values_mut().filter(|queue| queue.interface == *name);
            for queue in theirs.filter(|queue| queue.queue > 0 && queue.directions.contains(&"rx")) {
                let known = self.of.get(&(*index, queue.queue)).cloned();
                let words = known.unwrap_or_else(|| "lease of a NIC in another network namespace".to_owned());
                queue.bound.push(words);
            }
        }
    }
}

fn driver_hints(index: u32) -> Option<Vec<String>> {
    HintSet::of_driver(index).ok().map(metadata::names)
}

/// Interface names by index, and the netkits without a peer.
fn interfaces() -> io::Result<(BTreeMap<u32, String>, BTreeSet<u32>)> {
    let (mut names, mut without_peer) = (BTreeMap::new(), BTreeSet::new());
    for_each(|index, attributes| {
        if let Ok(name) = attributes.get_ifname() {
            names.insert(index, name.to_string_lossy().into_owned());
            if has_no_peer(attributes) {
                without_peer.insert(index);
            }
        }
    })?;
    Ok((names, without_peer))
}

fn napis() -> io::Result<BTreeMap<u32, Napi>> {
    let mut napis = BTreeMap::new();
    dump(&netdev::Request::new().op_napi_get_dump(), |attributes| {
        if let Ok(id) = attributes.get_id() {
            let napi = Napi {
                irq: attributes.get_irq().ok(),
                thread: attributes.get_pid().ok(),
            };
            napis.insert(id, napi);
        }
    })?;
    Ok(napis)
}

fn for_each_queue(mut act: impl FnMut(u32, QueueType, netdev::IterableQueue<'_>)) -> io::Result<()> {
    dump(&netdev::Request::new().op_queue_get_dump(), |attributes| {
        let kind = attributes.get_type().ok().map(u64::from);
        if let (Ok(index), Some(kind)) = (attributes.get_ifindex(), kind.and_then(QueueType::from_value)) {
            act(index, kind, attributes);
        }
    })
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
    // A process chooses its command line; control characters must not reach a terminal.
    words
        .join(" ")
        .chars()
        .map(|c| if c.is_control() { '?' } else { c })
        .take(512)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Attributes of a queue whose memory is io_uring's; `None`: without the length of its buffers.
    fn queue_of_io_uring(buffer_bytes: Option<u32>) -> Vec<u8> {
        let mut bytes = Vec::new();
        let memory = netdev::PushQueue::new(&mut bytes).push_id(3).nested_io_uring();
        let memory = match buffer_bytes {
            Some(buffer_bytes) => memory.push_rx_buf_len(buffer_bytes),
            None => memory,
        };
        drop(memory.end_nested());
        bytes
    }

    #[test]
    fn queue_has_buffers_of_its_own_length_or_of_its_rings() {
        let (large, usual) = (Some(16_384), Some(2_048));
        for (own, of_rings, shown) in [(large, usual, large), (None, usual, usual), (None, None, None)] {
            let bytes = queue_of_io_uring(own);
            let mut queue = Queue::default();
            let rings = Rings {
                split: Split::Above(256),
                buffer_bytes: of_rings,
            };
            let attributes = netdev::Queue::new(&bytes);
            queue.add(QueueType::Rx, &attributes, &BTreeMap::new());
            queue.receive_by(Some(&rings), &attributes);
            assert_eq!(queue.bound, ["io_uring"]);
            assert_eq!(queue.rx_buffer_bytes, shown);
            assert_eq!(queue.data_split.as_deref(), Some("above 256 bytes"));
        }
    }

    #[test]
    fn split_that_is_not_told_is_not_shown() {
        let bytes = queue_of_io_uring(None);
        let shown = |split: Option<Split>| {
            let mut queue = Queue::default();
            let rings = split.map(|split| Rings {
                split,
                buffer_bytes: None,
            });
            queue.receive_by(rings.as_ref(), &netdev::Queue::new(&bytes));
            queue.data_split
        };
        assert_eq!(shown(None), None);
        assert_eq!(shown(Some(Split::Never)), None);
        assert_eq!(shown(Some(Split::Off(0))).as_deref(), Some("off"));
        assert_eq!(shown(Some(Split::On)).as_deref(), Some("on"));
    }

    #[test]
    fn command_of_a_process_is_one_line() {
        let own = command_of(std::process::id());
        assert!(!own.is_empty() && !own.contains(char::is_control), "{own}");
        assert_eq!(command_of(u32::MAX), "");
    }
}
