//! Checks which options may be combined: for each port alone, with the other ports, and with the networks.

use std::collections::{HashMap, HashSet};
use std::mem;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::bail;
use device::offloads::Offloads;
use model::config::Size;
use model::mistakes::nearest;
use packet::ethernet::Mac;
use steer::{ModeRequest, mac_text};
use steward_protocol::{ENTRIES_MAX, STATIONS_MAX, Wanted};
use xsk::BindRequest;

use super::build::machine_share;
use super::network::UnderlayConfig;
use super::port::{Endpoint, ExternalProgram, Inherited, NicConfig, PortConfig, offloads_of};
use super::{Control, MOST_BYTES, MOST_QUEUES, Placement, ServeConfig, state};

const ZERO_COPY_NEEDS_NATIVE: &str =
    "--force-zero-copy excludes --mode skb and tap: zero-copy takes a native program, leave one out";
const HINTS_NEED_NATIVE: &str =
    "exclude --mode skb and tap: drivers report hints in native mode only; leave one out";

/// What an error concerns; if it concerns two ports or networks, the later one.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Owner {
    Daemon,
    /// A network, by its index.
    Network(usize),
    /// A port, by its index.
    Port(usize),
}

/// An error of a configuration, and the table that it is in.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub(crate) struct Wrong {
    pub(crate) owner: Owner,
    error: anyhow::Error,
}

impl ServeConfig {
    /// Checks what can be checked without the kernel; returns what the ports have.
    pub(crate) fn check(&self) -> Result<Taken, Wrong> {
        let of_daemon = |error| Wrong {
            owner: Owner::Daemon,
            error,
        };
        self.check_memory().map_err(of_daemon)?;
        for path in self.own_paths() {
            check_text(&path.to_string_lossy()).map_err(of_daemon)?;
        }
        for at in 0..self.networks.len() {
            let owner = Owner::Network(at);
            self.check_network(at).map_err(|error| Wrong { owner, error })?;
        }
        let mut taken = Taken::default();
        for cable in self.ports.iter().filter_map(|port| port.nic.cable()) {
            *taken.cable_ends.entry(cable.to_owned()).or_default() += 1;
        }
        for at in 0..self.ports.len() {
            let checked = self.check_port(at, &mut taken);
            let owner = Owner::Port(at);
            checked.map_err(|error| Wrong { owner, error })?;
        }
        Ok(taken)
    }

    /// Adds a port without a cable to a configuration that was checked, and checks it.
    pub(super) fn with_another(mut self, port: PortConfig) -> anyhow::Result<Self> {
        let (at, mut taken) = (self.ports.len(), mem::take(&mut self.taken));
        self.ports.push(port);
        self.check_memory()?;
        self.check_port(at, &mut taken)?;
        Ok(Self { taken, ..self })
    }

    /// Checks the limits of guest memory; one that is not configured depends on the number of ports.
    fn check_memory(&self) -> anyhow::Result<()> {
        let share = machine_share(self.ports.len());
        let limits = self.ports.iter().map(|port| &port.keys.memory.max_memory);
        let limits = limits.map(|limit| limit.as_ref().map_or(share, |Size(bytes)| *bytes));
        let bytes = limits.fold(0, u64::saturating_add);
        if bytes > MOST_BYTES {
            bail!(
                "--max-memory: the ports may have {bytes} bytes together, a process has room for {MOST_BYTES}: set less, \
                 or use more processes"
            );
        }
        Ok(())
    }

    /// Paths that the daemon itself uses, for sockets and files.
    fn own_paths(&self) -> impl Iterator<Item = PathBuf> {
        let control = match &self.control {
            Control::Path(path) => Some(path),
            Control::None | Control::Default => None,
        };
        let api = [&self.api.all, &self.api.read_only].into_iter().flatten();
        let paths = api.map(|(path, _)| path).chain(control).chain(&self.steward);
        let files = self.state.iter().chain(self.file.as_ref().map(|file| &file.path));
        let next_state = self.state.as_deref().map(state::next_path);
        paths.chain(files).cloned().chain(next_state)
    }

    /// Checks a network alone and with those before it.
    fn check_network(&self, at: usize) -> anyhow::Result<()> {
        let Some(uplink) = &self.networks[at].uplink else {
            return Ok(());
        };
        check_text(&uplink.at.name)?;
        if !(1..=u32::from(MOST_QUEUES)).contains(&uplink.queues) {
            let queues = uplink.queues;
            bail!("--queues {queues}: an uplink has 1 to {MOST_QUEUES} queues");
        }
        if let Some(underlay) = &uplink.underlay {
            check_text(&underlay.at.name)?;
            if !(1..=u32::from(MOST_QUEUES)).contains(&underlay.queues) {
                let queues = underlay.queues;
                bail!("--underlay-queues {queues}: an underlay has 1 to {MOST_QUEUES} queues");
            }
            if underlay.at.name == uplink.at.name {
                bail!(
                    "--underlay {}: this is the uplink: name the interface that carries its packets",
                    underlay.at.name
                );
            }
        }
        let named = uplink.options.hints.named();
        match uplink.at.mode {
            ModeRequest::Skb | ModeRequest::Tap if !named.is_empty() => {
                bail!("--hints {named} {HINTS_NEED_NATIVE}");
            }
            ModeRequest::Tap if uplink.options.bind == BindRequest::ForceZeroCopy => {
                bail!(ZERO_COPY_NEEDS_NATIVE)
            }
            _ => {}
        }
        for other in &self.networks[..at] {
            if let Some(others) = &other.uplink {
                let shared = [&uplink.underlay, &others.underlay];
                let shared = shared.map(|underlay| underlay.as_ref().map(UnderlayConfig::wanted));
                for (wanted, theirs) in uplink
                    .all_wanted()
                    .flat_map(|wanted| others.all_wanted().map(move |theirs| (wanted.clone(), theirs)))
                    // Networks share an underlay, but no part of it.
                    .filter(|(wanted, theirs)| {
                        wanted != theirs || shared[0] != shared[1] || shared[0].as_ref() != Some(wanted)
                    })
                {
                    check_apart(&wanted, &theirs, format_args!("network {}", other.name))?;
                }
            }
        }
        Ok(())
    }

    /// Checks a port alone and with those before it.
    fn check_port(&self, at: usize, taken: &mut Taken) -> anyhow::Result<()> {
        let port = &self.ports[at];
        port.check()?;
        if port.has_external_program() && self.steward.is_some() {
            bail!(
                "--inhibit and --steward exclude each other: the steward has a program of its own, leave one out"
            );
        }
        if let Some(path) = port.endpoint.path()
            && self.own_paths().any(|own| own == path)
        {
            bail!(
                "socket-path = {path:?}: the daemon itself uses this path (control, api, steward or a file): choose another"
            );
        }
        for Inherited { fd, .. } in port.descriptors() {
            if !taken.descriptors.insert(fd) {
                bail!("descriptor {fd} is named twice: each socket or map needs one of its own");
            }
        }
        taken.add(&self.ports, at)?;
        if let Some(name) = port.nic.network() {
            let network = self.networks.iter().find(|network| network.name == name);
            let Some(network) = network else {
                let names = self.networks.iter().map(|network| network.name.as_str());
                match nearest(name, names) {
                    Some(near) => {
                        bail!("network {name:?}: there is none of that name: did you mean {near:?}?")
                    }
                    None => bail!(
                        "network {name:?}: there is none of that name: name one that the file has, or add it there with a \
                         line `[network.{name}]`"
                    ),
                }
            };
            let stations = taken.stations_of.entry(name.to_owned()).or_default();
            *stations += port.nic.stations().len();
            if network.uplink.is_some() && *stations > STATIONS_MAX {
                bail!(
                    "network {name}: its ports have {stations} addresses, each in as many VLANs as it has; an uplink can \
                     have {STATIONS_MAX}: use several"
                );
            }
            let uplink = network.uplink.as_ref().map(|uplink| &uplink.at.name);
            if let Some(own) = port.nic.queues().filter(|own| uplink != Some(&own.name)) {
                bail!(
                    "ifname {}: the uplink of network {name} is {}, and a port's own queues must be of that one: name it, \
                     or leave ifname out",
                    own.name,
                    uplink.map_or("none", |uplink| uplink)
                );
            }
        }
        if let Some(wanted) = port.wanted() {
            for network in &self.networks {
                if let Some(uplink) = &network.uplink {
                    let whose = format_args!("network {}", network.name);
                    uplink
                        .all_wanted()
                        .try_for_each(|theirs| check_apart(&wanted, &theirs, whose))?;
                }
            }
        }
        if let Some(name) = port.nic.cable() {
            let ends = taken.cable_ends[name];
            if ends != 2 {
                bail!(
                    "cable {name}: {ends} port(s) name it, a cable joins two: give cable={name} to two ports"
                );
            }
        }
        Ok(())
    }
}

impl PortConfig {
    fn check(&self) -> anyhow::Result<()> {
        if !(1..=MOST_QUEUES).contains(&self.queues) {
            let queues = self.queues;
            bail!("--queues {queues}: a port has 1 to {MOST_QUEUES} queue pairs");
        }
        let cannot = self.offload.without(offloads_of(self.options.placement));
        if cannot != Offloads::NONE {
            bail!(
                "--offload {cannot}: memory=direct receives each frame where it stays, use memory=copy for these"
            );
        }
        if let (true, Some(name)) = (self.options.placement.has_guest_ram(), self.nic.cable()) {
            bail!(
                "cable {name}: its guests have no queue of an interface that could read their memory, use memory=copy"
            );
        }
        if self.nic.network().is_some() {
            if self.options.placement.has_guest_ram() && self.nic.queues().is_none() {
                bail!(
                    "memory: ports of a network share its queues, and frames of queues that are shared are copied: use \
                     memory = \"copy\", or name a queue of its own with ifname and start-queue"
                );
            }
            if self.nic.queues().is_some() && self.mac.is_none() {
                bail!(
                    "network with ifname: a port's own queue receives by address: set mac, the same that its VMM has"
                );
            }
            if self.has_external_program() {
                bail!("inhibit: a network cannot have foreign queues: leave network or inhibit out");
            }
        }
        if self.keys.guard != model::config::Guard::default() && self.mac.is_none() {
            bail!("guard and ips need the guest's address: set mac to the one that the VMM uses");
        }
        self.check_bind()?;
        self.check_hints()?;
        self.check_shared()?;
        if !self.vlans.is_empty() && !matches!(self.nic, NicConfig::Interface(_)) {
            bail!("--vlan: needs the frames of an interface: set --ifname NAME");
        }
        if self.vlans.len() > ENTRIES_MAX {
            let vlans = self.vlans.len();
            bail!("--vlan: {vlans} VLANs, a port has {ENTRIES_MAX} at most: give fewer, or none for all");
        }
        self.check_external()?;
        if let NicConfig::Null { frame_bytes } = self.nic
            && frame_bytes != 0
            && !(14..=1514).contains(&frame_bytes)
        {
            bail!("frame-size {frame_bytes}: the null NIC makes frames of 14 to 1514 bytes, or with 0 none");
        }
        self.check_texts()?;
        if let Some(path) = self.endpoint.path()
            && let len @ 108.. = path.as_os_str().len()
        {
            bail!(
                "socket path {path:?} is {len} bytes long: a Unix socket path has at most 107: choose a shorter one"
            );
        }
        Ok(())
    }

    /// Checks names and paths: the log and terminals show them.
    fn check_texts(&self) -> anyhow::Result<()> {
        check_text(&self.name)?;
        check_text(self.nic.cable().unwrap_or_default())?;
        check_text(self.nic.queues().map_or("", |queues| &queues.name))?;
        if let Some(path) = self.endpoint.path() {
            check_text(&path.to_string_lossy())?;
        }
        match &self.external {
            ExternalProgram::PinnedMap { path, .. } | ExternalProgram::Plugin { path, .. } => {
                check_text(&path.to_string_lossy())
            }
            _ => Ok(()),
        }
    }

    fn check_shared(&self) -> anyhow::Result<()> {
        match self.nic {
            _ if self.options.slices_from.is_none() => Ok(()),
            _ if self.has_external_program() => bail!(
                "--shared-umem and --inhibit exclude each other: foreign sockets are bound to memory of their own; leave \
                 one out"
            ),
            NicConfig::Interface(_) if self.options.bind == BindRequest::ForceZeroCopy => bail!(
                "--shared-umem and --force-zero-copy exclude each other: all queues are as the first that is opened, and \
                 not every interface may have zero-copy; leave one out"
            ),
            _ => Ok(()),
        }
    }

    fn check_bind(&self) -> anyhow::Result<()> {
        match self.nic.queues() {
            Some(queues) if queues.mode == ModeRequest::Tap => self.check_tap(),
            Some(_) if self.options.bind != BindRequest::ForceZeroCopy => Ok(()),
            Some(queues) if queues.mode == ModeRequest::Skb => bail!(ZERO_COPY_NEEDS_NATIVE),
            Some(_) if self.options.placement == Placement::Direct => bail!(
                "--force-zero-copy with memory=direct: zero-copy depends on the guest. Leave the option out (zero-copy is \
                 used where possible, else `status` shows why not), or use memory=send-direct or copy"
            ),
            Some(_) | None => Ok(()),
        }
    }

    /// Checks for options that tap mode excludes, because it binds no queue.
    fn check_tap(&self) -> anyhow::Result<()> {
        let excluded = [
            (self.nic.network().is_some(), "a queue of the port's own"),
            (
                self.options.placement.has_guest_ram(),
                "memory=direct and send-direct",
            ),
            (self.has_external_program(), "inhibit"),
        ];
        match excluded.iter().find(|(is_set, _)| *is_set) {
            Some((_, what)) => bail!(
                "--mode tap excludes {what}: frames pass by a tap device, and no queue is bound; leave one out"
            ),
            None if self.options.bind == BindRequest::ForceZeroCopy => bail!(ZERO_COPY_NEEDS_NATIVE),
            None => Ok(()),
        }
    }

    /// Checks whether the configured hints can be left before the port's frames.
    fn check_hints(&self) -> anyhow::Result<()> {
        let named = self.options.hints.named();
        let Some(queues) = self.nic.queues().filter(|_| !named.is_empty()) else {
            return Ok(());
        };
        if self.options.placement.has_guest_ram() {
            bail!(
                "--hints {named} with memory={}: frames are in the guest's memory, where the virtio-net header takes the \
                 place of hints: use memory=copy for them, or leave hints out",
                self.asked
            );
        }
        if self.has_external_program() {
            bail!(
                "--hints {named} and --inhibit exclude each other: the foreign XDP program defines the metadata"
            );
        }
        match queues.mode {
            ModeRequest::Skb | ModeRequest::Tap => bail!("--hints {named} {HINTS_NEED_NATIVE}"),
            ModeRequest::Auto | ModeRequest::Xdp | ModeRequest::Native => Ok(()),
        }
    }

    fn check_external(&self) -> anyhow::Result<()> {
        if self.external == ExternalProgram::None {
            return Ok(());
        }
        if !matches!(self.nic, NicConfig::Interface(_)) {
            bail!("--inhibit needs an interface: name it with --ifname");
        }
        if self.options.placement.has_guest_ram() {
            bail!(
                "--inhibit with memory=direct or send-direct: a foreign program writes no virtio-net header; its queues \
                 are bound once, to daemon memory; use memory=copy"
            );
        }
        if !self.vlans.is_empty() {
            bail!("--inhibit and --vlan exclude each other: the foreign XDP program selects the frames");
        }
        match &self.external {
            ExternalProgram::Sockets(fds) if fds.len() != usize::from(self.queues) => bail!(
                "--sock-fds names {} descriptor(s) for {} queue pair(s): one each, in the order of the queues",
                fds.len(),
                self.queues
            ),
            _ => Ok(()),
        }
    }
}

/// What the ports have that were checked so far. By it the check of a port takes as long with a thousand others as with
/// ten.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Taken {
    descriptors: HashSet<i32>,
    endpoints: HashSet<Endpoint>,
    /// The ports of networks that have an address, by their indices: in different VLANs, of which a trunk may have all.
    with_mac: HashMap<Mac, Vec<usize>>,
    /// How many addresses the ports of a network have.
    stations_of: HashMap<String, usize>,
    /// Queues of interfaces, with the port that has them.
    queues: Vec<(Wanted, Arc<str>)>,
    /// How many ports name a cable, of all ports.
    cable_ends: HashMap<String, usize>,
}

impl Taken {
    /// Checks a port with those before it.
    fn add(&mut self, ports: &[PortConfig], at: usize) -> anyhow::Result<()> {
        let port = &ports[at];
        if !self.endpoints.insert(port.endpoint.clone()) {
            let endpoint = &port.endpoint;
            bail!("{endpoint} is asked for by two ports: each needs a socket of its own");
        }
        if let (Some(mac), Some(network)) = (port.mac, port.nic.network()) {
            let others = self.with_mac.entry(mac).or_default();
            let in_network = others.iter().map(|&other| &ports[other]);
            for other in in_network.filter(|other| other.nic.network() == Some(network)) {
                let theirs = other.nic.stations();
                let Some(vlan) = port.nic.stations().iter().find(|vlan| theirs.contains(vlan)) else {
                    continue;
                };
                let (mac, other) = (mac_text(mac), &other.name);
                let vlan = match vlan {
                    0 => String::new(),
                    vlan => format!(" in VLAN {vlan}"),
                };
                bail!(
                    "mac {mac}: port {other} of network {network} has this address{vlan}, too: give each its own"
                );
            }
            others.push(at);
        }
        if let Some(wanted) = port.wanted() {
            for (others, name) in &self.queues {
                check_apart(&wanted, others, format_args!("port {name}"))?;
            }
            self.queues.push((wanted, Arc::clone(&port.name)));
        }
        Ok(())
    }
}

fn check_text(text: &str) -> anyhow::Result<()> {
    match text.contains(char::is_control) {
        true => bail!("{text:?} has control characters: choose a name or path without"),
        false => Ok(()),
    }
}

/// Checks whether both can be leased at the same time. The second lease is that of `other`.
fn check_apart(wanted: &Wanted, others: &Wanted, other: std::fmt::Arguments<'_>) -> anyhow::Result<()> {
    let name = &wanted.interface;
    if *name != others.interface {
        return Ok(());
    }
    let modes = [wanted.mode, others.mode];
    if modes[0] != modes[1] && !modes.contains(&ModeRequest::Auto) {
        bail!(
            "interface {name} is asked for with different modes: a program is attached once, choose one mode"
        );
    }
    let queue = wanted.start_queue.max(others.start_queue);
    let end = |wanted: &Wanted| wanted.start_queue.saturating_add(wanted.queues);
    match queue < end(wanted).min(end(others)) {
        true => bail!(
            "queue {queue} of {name} is asked for by {other}, too: give them disjoint ranges with start-queue; networks \
             share an underlay with the same underlay-queues and underlay-start-queue"
        ),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;
    use testkit::assert_has;

    use device::features::OnRequest;

    use super::super::{
        ApiConfig, Endpoint, FileKinds, InterfaceQueues, MemoryRules, QueueOptions, Segments,
    };
    use super::*;
    use crate::listener::Access;
    use dataplane::nic::endpoint::COPY_BYTES;
    use dataplane::worker::polling::Waits;
    use model::rates::PortRates;
    use program::sandbox::Layers;

    fn port(path: &str, start_queue: u32, queues: u16) -> PortConfig {
        PortConfig {
            keys: Arc::default(),
            name: path.into(),
            access: Access::OWN,
            endpoint: Endpoint::Server(path.into()),
            queues,
            nic: NicConfig::Interface(InterfaceQueues {
                name: "eth0".into(),
                start_queue,
                mode: ModeRequest::Xdp,
            }),
            external: ExternalProgram::None,
            options: QueueOptions {
                bind: BindRequest::Auto,
                placement: Placement::Copy,
                packet_bytes: COPY_BYTES,
                segments: Segments::Auto,
                busy_poll: None,
                hints: super::super::HintsConfig::default(),
                slices_from: None,
            },
            asked: Placement::Copy,
            memory: MemoryRules {
                most_bytes: 1 << 30,
                files: FileKinds::Shared,
            },
            mac: None,
            vlans: Vec::new(),
            offload: Offloads::NONE,
            offer: OnRequest::NONE,
            rates: PortRates::default(),
        }
    }

    fn serve(ports: Vec<PortConfig>) -> ServeConfig {
        ServeConfig {
            file: None,
            keys: model::config::Daemon::default(),
            options: model::config::Daemon::default(),
            ports,
            taken: Taken::default(),
            workers: 1,
            cpus: Vec::new(),
            waits: Waits::default(),
            steward: None,
            steward_timeout: Duration::from_secs(1),
            control: Control::None,
            api: ApiConfig::default(),
            state: None,
            networks: Vec::new(),
            layers: Layers::parse("off").expect("a word"),
            user: None,
        }
    }

    #[test]
    fn disjoint_queues_of_one_interface_are_accepted() {
        serve(vec![port("/a", 0, 2), port("/b", 2, 1)])
            .check()
            .expect("disjoint");
    }

    #[test]
    fn overlapping_queues_are_refused_by_name() {
        let error = serve(vec![port("/a", 0, 3), port("/b", 2, 1)])
            .check()
            .expect_err("overlap");
        assert_has(&error.to_string(), &["queue 2 of eth0"]);
    }

    #[test]
    fn one_socket_for_two_ports_is_refused() {
        assert!(serve(vec![port("/a", 0, 1), port("/a", 1, 1)]).check().is_err());
    }

    #[test]
    fn socket_where_the_daemon_listens_itself_is_refused() {
        let config = ServeConfig {
            control: Control::Path("/run/a".into()),
            ..serve(vec![port("/run/a", 0, 1)])
        };
        let error = config.check().expect_err("one path for both").to_string();
        assert_has(&error, &["\"/run/a\": the daemon itself uses this path"]);
    }

    #[test]
    fn name_or_path_with_control_characters_is_refused_and_shown_escaped() {
        let odd = "/run/a\nb\u{1b}[2J\u{9b}";
        let refused = |config: ServeConfig| {
            let error = config.check().expect_err("it has some").to_string();
            assert!(
                !error.contains(char::is_control) && error.contains("/run/a\\nb"),
                "{error}"
            );
        };
        refused(serve(vec![port(odd, 0, 1)]));
        let with = |change: &dyn Fn(&mut ServeConfig)| {
            let mut config = serve(vec![port("/run/ü", 0, 1)]);
            config.check().expect("as it should be");
            change(&mut config);
            refused(config);
        };
        with(&|config| config.control = Control::Path(odd.into()));
        with(&|config| config.steward = Some(odd.into()));
        with(&|config| config.api.all = Some((odd.into(), Access::OWN)));
        with(&|config| config.api.read_only = Some((odd.into(), Access::OWN)));
        with(&|config| config.ports[0].endpoint = Endpoint::Client(odd.into()));
        with(&|config| config.ports[0].name = odd.into());
        with(&|config| config.ports[0].nic = NicConfig::Cable { name: odd.into() });
        with(&|config| match &mut config.ports[0].nic {
            NicConfig::Interface(queues) => queues.name = odd.into(),
            _ => unreachable!("as above"),
        });
        with(&|config| {
            let path = odd.into();
            config.ports[0].external = ExternalProgram::Plugin { path, layout: None };
        });
    }

    #[test]
    fn path_of_108_bytes_is_refused() {
        assert!(serve(vec![port(&"x".repeat(107), 0, 1)]).check().is_ok());
        assert!(serve(vec![port(&"x".repeat(108), 0, 1)]).check().is_err());
    }
}
