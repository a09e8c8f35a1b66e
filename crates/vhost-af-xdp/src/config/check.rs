//! Checks which options may be combined: for each port alone, with the other ports, and with the networks.

use std::collections::HashSet;
use std::path::PathBuf;

use device::offloads::Offloads;
use model::mistakes::nearest;
use steer::{ModeRequest, mac_text};
use steward::protocol::{ENTRIES_MAX, STATIONS_MAX, Wanted};
use xsk::BindRequest;

use super::error::{ConfigError, Owner, Wrong};
use super::port::{Endpoint, ExternalProgram, Inherited, NicConfig, PortConfig, PortQueues, offloads_of};
use super::{Control, MOST_BYTES, MOST_QUEUES, Placement, ServeConfig, state};

impl ServeConfig {
    /// Checks what can be checked without the kernel.
    pub(crate) fn check(&self) -> Result<(), Wrong> {
        let of_daemon = |error| Wrong {
            owner: Owner::Daemon,
            error,
        };
        let most = self.ports.iter().map(|port| port.memory.most_bytes);
        let bytes = most.fold(0, u64::saturating_add);
        if bytes > MOST_BYTES {
            return Err(of_daemon(ConfigError::MaxMemory { bytes }));
        }
        for path in self.own_paths() {
            check_text(&path.to_string_lossy()).map_err(of_daemon)?;
        }
        for at in 0..self.networks.len() {
            let owner = Owner::Network(at);
            self.check_network(at).map_err(|error| Wrong { owner, error })?;
        }
        let mut descriptors = HashSet::new();
        for at in 0..self.ports.len() {
            let checked = self.check_port(at, &mut descriptors);
            let owner = Owner::Port(at);
            checked.map_err(|error| Wrong { owner, error })?;
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
    fn check_network(&self, at: usize) -> Result<(), ConfigError> {
        let Some(uplink) = &self.networks[at].uplink else {
            return Ok(());
        };
        check_text(&uplink.name)?;
        if !(1..=u32::from(MOST_QUEUES)).contains(&uplink.queues) {
            return Err(ConfigError::UplinkQueues(uplink.queues));
        }
        let named = uplink.hints.named();
        match uplink.mode {
            ModeRequest::Skb | ModeRequest::Tap if !named.is_empty() => {
                return Err(ConfigError::HintsNeedNative(named));
            }
            ModeRequest::Tap if uplink.bind == BindRequest::ForceZeroCopy => {
                return Err(ConfigError::ZeroCopyNeedsNative);
            }
            _ => {}
        }
        for other in &self.networks[..at] {
            if let Some(others) = &other.uplink {
                let whose = format_args!("network {}", other.name);
                check_apart(&uplink.wanted(), &others.wanted(), whose)?;
            }
        }
        Ok(())
    }

    /// Checks a port alone and with those before it, whose descriptors are in `descriptors`.
    fn check_port(&self, at: usize, descriptors: &mut HashSet<i32>) -> Result<(), ConfigError> {
        let port = &self.ports[at];
        port.check()?;
        if port.has_external_program() && self.steward.is_some() {
            return Err(ConfigError::ExternalAndSteward);
        }
        if let Endpoint::Server(path) | Endpoint::Client(path) = &port.endpoint
            && self.own_paths().any(|own| own == *path)
        {
            return Err(ConfigError::OwnPath(path.clone()));
        }
        for Inherited { fd, .. } in port.descriptors() {
            if !descriptors.insert(fd) {
                return Err(ConfigError::SharedDescriptor(fd));
            }
        }
        for other in &self.ports[..at] {
            port.check_beside(other)?;
        }
        if let Some(name) = port.nic.network() {
            let network = self.networks.iter().find(|network| network.name == name);
            let network = network.ok_or_else(|| {
                let names = self.networks.iter().map(|network| network.name.as_str());
                ConfigError::NoNetwork {
                    name: name.to_owned(),
                    near: nearest(name, names).map(str::to_owned),
                }
            })?;
            let all = self.ports.iter().filter(|port| port.nic.network() == Some(name));
            let stations = all.map(|port| port.nic.stations().len()).sum();
            if network.uplink.is_some() && stations > STATIONS_MAX {
                let name = name.to_owned();
                return Err(ConfigError::ManyStations { name, stations });
            }
            let uplink = network.uplink.as_ref().map(|uplink| &uplink.name);
            if let Some(own) = port.nic.queues().filter(|own| uplink != Some(&own.name)) {
                return Err(ConfigError::NetworkInterface {
                    name: own.name.clone(),
                    network: name.to_owned(),
                    uplink: uplink.map_or_else(|| "none".to_owned(), Clone::clone),
                });
            }
        }
        for network in &self.networks {
            if let (Some(wanted), Some(uplink)) = (port.wanted(), &network.uplink) {
                check_apart(
                    &wanted,
                    &uplink.wanted(),
                    format_args!("network {}", network.name),
                )?;
            }
        }
        if let Some(name) = port.nic.cable() {
            let ends = self.ports.iter().filter(|port| port.nic.cable() == Some(name));
            let (name, ends) = (name.to_owned(), ends.count());
            if ends != 2 {
                return Err(ConfigError::Cable { name, ends });
            }
        }
        Ok(())
    }
}

impl PortConfig {
    fn check(&self) -> Result<(), ConfigError> {
        if !(1..=MOST_QUEUES).contains(&self.queues) {
            return Err(ConfigError::Queues(self.queues));
        }
        let cannot = self.offload.without(offloads_of(self.placement));
        if cannot != Offloads::NONE {
            return Err(ConfigError::Offload(cannot));
        }
        if let (true, Some(name)) = (self.placement.has_guest_ram(), self.nic.cable()) {
            return Err(ConfigError::CableDirect(name.to_owned()));
        }
        if self.nic.network().is_some() {
            match self.placement {
                Placement::SendDirect | Placement::Direct if self.nic.queues().is_none() => {
                    return Err(ConfigError::NetworkDirect);
                }
                Placement::Copy | Placement::SendDirect | Placement::Direct => {}
            }
            if self.nic.queues().is_some() && self.mac.is_none() {
                return Err(ConfigError::NetworkMac);
            }
            if self.has_external_program() {
                return Err(ConfigError::NetworkExternal);
            }
        }
        if self.keys.guard != model::config::Guard::default() && self.mac.is_none() {
            return Err(ConfigError::Guard);
        }
        self.check_bind()?;
        self.check_hints()?;
        self.check_shared()?;
        if !self.vlans.is_empty() && !matches!(self.nic, NicConfig::Interface(_)) {
            return Err(ConfigError::Vlans);
        }
        if self.vlans.len() > ENTRIES_MAX {
            return Err(ConfigError::ManyVlans(self.vlans.len()));
        }
        self.check_external()?;
        if let NicConfig::Null { frame_bytes } = self.nic
            && frame_bytes != 0
            && !(14..=1514).contains(&frame_bytes)
        {
            return Err(ConfigError::FrameBytes(frame_bytes));
        }
        self.check_texts()?;
        match &self.endpoint {
            Endpoint::Server(path) | Endpoint::Client(path) if path.as_os_str().len() > 107 => {
                Err(ConfigError::LongPath(path.clone()))
            }
            _ => Ok(()),
        }
    }

    /// Checks names and paths: the log and terminals show them.
    fn check_texts(&self) -> Result<(), ConfigError> {
        check_text(&self.name)?;
        check_text(self.nic.cable().unwrap_or_default())?;
        check_text(self.nic.queues().map_or("", |queues| &queues.name))?;
        if let Endpoint::Server(path) | Endpoint::Client(path) = &self.endpoint {
            check_text(&path.to_string_lossy())?;
        }
        match &self.external {
            ExternalProgram::PinnedMap { path, .. } | ExternalProgram::Plugin { path, .. } => {
                check_text(&path.to_string_lossy())
            }
            _ => Ok(()),
        }
    }

    fn check_shared(&self) -> Result<(), ConfigError> {
        match self.nic {
            _ if self.slices_from.is_none() => Ok(()),
            _ if self.has_external_program() => Err(ConfigError::SharedExternal),
            NicConfig::Interface(PortQueues {
                bind: BindRequest::ForceZeroCopy,
                ..
            }) => Err(ConfigError::SharedZeroCopy),
            _ => Ok(()),
        }
    }

    fn check_bind(&self) -> Result<(), ConfigError> {
        match self.nic.queues() {
            Some(queues) if queues.mode == ModeRequest::Tap => self.check_tap(queues),
            Some(queues) if queues.bind != BindRequest::ForceZeroCopy => Ok(()),
            Some(queues) if queues.mode == ModeRequest::Skb => Err(ConfigError::ZeroCopyNeedsNative),
            Some(_) if self.placement == Placement::Direct => Err(ConfigError::ForcedDirect),
            Some(_) | None => Ok(()),
        }
    }

    /// Checks for options that tap mode excludes, because it binds no queue.
    fn check_tap(&self, queues: &PortQueues) -> Result<(), ConfigError> {
        if matches!(self.nic, NicConfig::Network { .. }) {
            return Err(ConfigError::TapExcludes("a queue of the port's own"));
        }
        if self.placement.has_guest_ram() {
            return Err(ConfigError::TapExcludes("memory=direct and send-direct"));
        }
        if self.has_external_program() {
            return Err(ConfigError::TapExcludes("inhibit"));
        }
        match queues.bind {
            BindRequest::ForceZeroCopy => Err(ConfigError::ZeroCopyNeedsNative),
            _ => Ok(()),
        }
    }

    /// Checks whether the configured hints can be left before the port's frames.
    fn check_hints(&self) -> Result<(), ConfigError> {
        let named = self.hints.named();
        let Some(queues) = self.nic.queues().filter(|_| !named.is_empty()) else {
            return Ok(());
        };
        if self.placement.has_guest_ram() {
            return Err(ConfigError::HintsDirect(named, self.asked));
        }
        if self.has_external_program() {
            return Err(ConfigError::HintsExternal(named));
        }
        match queues.mode {
            ModeRequest::Skb | ModeRequest::Tap => Err(ConfigError::HintsNeedNative(named)),
            ModeRequest::Auto | ModeRequest::Xdp | ModeRequest::Native => Ok(()),
        }
    }

    fn check_external(&self) -> Result<(), ConfigError> {
        if self.external == ExternalProgram::None {
            return Ok(());
        }
        if !matches!(self.nic, NicConfig::Interface(_)) {
            return Err(ConfigError::ExternalWithoutInterface);
        }
        if self.placement.has_guest_ram() {
            return Err(ConfigError::ExternalDirect);
        }
        if !self.vlans.is_empty() {
            return Err(ConfigError::ExternalVlans);
        }
        match &self.external {
            ExternalProgram::Sockets(fds) if fds.len() != usize::from(self.queues) => {
                Err(ConfigError::SocketCount {
                    fds: fds.len(),
                    queues: self.queues,
                })
            }
            _ => Ok(()),
        }
    }

    fn check_beside(&self, other: &Self) -> Result<(), ConfigError> {
        if self.endpoint == other.endpoint {
            return Err(ConfigError::SharedEndpoint(self.endpoint.clone()));
        }
        if let (Some(mac), Some(network)) = (self.mac, self.nic.network())
            && (other.mac, other.nic.network()) == (self.mac, self.nic.network())
            && let Some(&vlan) = self
                .nic
                .stations()
                .iter()
                .find(|vlan| other.nic.stations().contains(vlan))
        {
            return Err(ConfigError::SharedAddress {
                mac: mac_text(mac),
                port: other.name.to_string(),
                network: network.to_owned(),
                vlan: match vlan {
                    0 => String::new(),
                    vlan => format!(" in VLAN {vlan}"),
                },
            });
        }
        match (self.wanted(), other.wanted()) {
            (Some(wanted), Some(others)) => {
                check_apart(&wanted, &others, format_args!("port {}", other.name))
            }
            _ => Ok(()),
        }
    }
}

fn check_text(text: &str) -> Result<(), ConfigError> {
    match text.contains(char::is_control) {
        true => Err(ConfigError::ControlCharacters(text.to_owned())),
        false => Ok(()),
    }
}

/// Checks whether both can be leased at the same time. The second lease is that of `other`.
fn check_apart(wanted: &Wanted, others: &Wanted, other: std::fmt::Arguments<'_>) -> Result<(), ConfigError> {
    let name = wanted.interface.clone();
    if name != others.interface {
        return Ok(());
    }
    let modes = [wanted.mode, others.mode];
    if modes[0] != modes[1] && !modes.contains(&ModeRequest::Auto) {
        return Err(ConfigError::TwoModes(name));
    }
    let queue = wanted.start_queue.max(others.start_queue);
    let end = |wanted: &Wanted| wanted.start_queue.saturating_add(wanted.queues);
    match queue < end(wanted).min(end(others)) {
        true => Err(ConfigError::SharedQueue {
            name,
            queue,
            other: other.to_string(),
        }),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use device::features::OnRequest;

    use super::super::{ApiConfig, FileKinds, MemoryRules, Segments};
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
            nic: NicConfig::Interface(PortQueues {
                name: "eth0".into(),
                start_queue,
                mode: ModeRequest::Xdp,
                bind: BindRequest::Auto,
            }),
            external: ExternalProgram::None,
            placement: Placement::Copy,
            asked: Placement::Copy,
            memory: MemoryRules {
                most_bytes: 1 << 30,
                files: FileKinds::Shared,
            },
            segments: Segments::Auto,
            busy_poll: None,
            hints: super::super::HintsConfig::default(),
            mac: None,
            vlans: Vec::new(),
            packet_bytes: COPY_BYTES,
            slices_from: None,
            offload: Offloads::NONE,
            offer: OnRequest::NONE,
            rates: PortRates::UNLIMITED,
        }
    }

    fn serve(ports: Vec<PortConfig>) -> ServeConfig {
        ServeConfig {
            file: None,
            keys: model::config::Daemon::default(),
            options: model::config::Daemon::default(),
            ports,
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
        assert!(error.to_string().contains("queue 2 of eth0"), "{error}");
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
        assert!(
            error.contains("\"/run/a\": the daemon itself uses this path"),
            "{error}"
        );
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
