//! Builds the configuration of ports, networks and the daemon from their options ([`model::config`], where each value
//! was checked alone). Errors are one line that names the option.

use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use common::binding::LARGE_CHUNK;
use common::options::{bind_request, busy_poll, mode_request};
use device::features::OnRequest;
use model::config::{
    Account, Action, Api, Attachment, Daemon, Direction, External, Interface, Limits, Network, Placement,
    Port, Process, Rule, Segments, Size, Socket, Uplink, Vlans, Words, names_of_set, set_keys,
};
use serde::Serialize;
use steer::ModeRequest;
use steward_protocol::is_interface_name;
use xsk::{BindRequest, BusyPoll};

use super::port::offloads_of;
use super::{
    ApiConfig, Control, Endpoint, ExternalProgram, HintsConfig, InterfaceQueues, MOST_BYTES, MemberVlans,
    MemoryRules, NetworkConfig, NicConfig, PortConfig, QueueOptions, ServeConfig, UnderlayConfig,
    UplinkConfig, offload,
};
use crate::listener::Access;
use dataplane::nic::endpoint::{COPY_BYTES, LEAST_COPY_BYTES};
use dataplane::worker::polling::Waits;
use model::rates::{Beyond, LONGEST_BURST_SECONDS, PortRates, Rate, Rates, Unit};
use program::choice::Choice;
use program::sandbox::{Layer, Layers, User, group_number, user_number};

/// How long an idle worker polls before it sleeps, microseconds.
const SPIN_US: u64 = 50;
/// How long a worker lets frames of busy guests gather, microseconds.
const MODERATION_US: u64 = 800;
/// Longest moderation, microseconds: a frame without a notification waits a millisecond, too.
const MOST_MODERATION_US: u64 = 1000;
/// How long the daemon waits for a steward, seconds.
const STEWARD_TIMEOUT: u64 = 10;
/// Length of the frames that the null NIC makes, bytes.
const NULL_FRAME: u32 = 64;

/// The configuration of one of `ports` ports.
/// Errors: options that do not go together.
pub(crate) fn port(port: &Port, ports: usize) -> anyhow::Result<PortConfig> {
    let endpoint = endpoint(&port.socket)?;
    check_access(&port.socket, &endpoint)?;
    let nic = nic(port)?;
    let asked = port.memory.memory.unwrap_or_default();
    let placement = nic.placement(asked);
    let rates = rates(&port.limits, placement)?;
    check_guard(port)?;
    check_filter(port, placement)?;
    // Offloads that are named must be possible (check.rs); `all` means all that are possible.
    let offload = words(&port.offers.offload, "all");
    let offer = words(&port.offers.offer, "none");
    let max_memory = port.memory.max_memory.map(|Size(bytes)| bytes);
    let vlans = port.interface.vlan.as_ref().filter(|_| nic.network().is_none());
    Ok(PortConfig {
        keys: Arc::new(port.clone()),
        name: endpoint.to_string().into(),
        access: access(
            "socket",
            &port.socket.socket_owner,
            &port.socket.socket_group,
            &port.socket.socket_mode,
        )?,
        endpoint,
        queues: port.interface.queues.unwrap_or(1),
        external: external(&port.external)?,
        options: QueueOptions {
            placement,
            ..queue_options(
                port.memory.packet_memory,
                &port.attachment,
                busy_poll(&port.polling)?,
            )?
        },
        asked,
        memory: MemoryRules {
            most_bytes: max_memory.unwrap_or_else(|| machine_share(ports)),
            files: port.memory.memory_files.unwrap_or_default(),
        },
        rates,
        mac: port.interface.mac.map(|mac| mac.0),
        vlans: vlans.map_or_else(Vec::new, |Vlans(vlans)| vlans.clone()),
        offload: offload::parse(offload, offloads_of(placement))
            .map_err(anyhow::Error::msg)
            .with_context(|| format!("--offload {offload}"))?,
        offer: on_request(offer)
            .map_err(anyhow::Error::msg)
            .with_context(|| format!("--offer {offer}"))?,
        nic,
    })
}

fn words<'a>(words: &'a Option<Words>, default: &'static str) -> &'a str {
    words.as_ref().map_or(default, |Words(words)| words)
}

/// How the VMM connects.
fn endpoint(socket: &Socket) -> anyhow::Result<Endpoint> {
    Ok(match (socket.socket_path.clone(), socket.fd) {
        (Some(path), None) if socket.client => Endpoint::Client(path),
        (Some(path), None) => Endpoint::Server(path),
        (None, Some(_)) if socket.client => bail!("client needs socket-path instead of fd"),
        (None, Some(fd)) => Endpoint::Fd(fd),
        (Some(_), Some(_)) => bail!("fd excludes socket-path: leave one out"),
        (None, None) => bail!("no socket-path and no fd: give one"),
    })
}

/// Rejects options about the access to a socket that the daemon does not create.
fn check_access(socket: &Socket, endpoint: &Endpoint) -> anyhow::Result<()> {
    match access_option(socket).filter(|_| !matches!(endpoint, Endpoint::Server(_))) {
        Some(key) => bail!("{key}: the daemon does not make this socket: leave it out with client and fd"),
        None => Ok(()),
    }
}

/// The first option about the access to a socket, if one is set.
pub(crate) fn access_option(socket: &Socket) -> Option<&'static str> {
    first_set(socket, &["socket-owner", "socket-group", "socket-mode"])
}

/// The first of these keys that is set in a section.
fn first_set<T: Serialize + Default>(section: &T, keys: &[&'static str]) -> Option<&'static str> {
    let set = set_keys(section);
    keys.iter().copied().find(|key| set.contains_key(*key))
}

/// The access that the options `X-owner`, `X-group` and `X-mode` describe.
fn access(
    of: &str,
    owner: &Option<Account>,
    group: &Option<Account>,
    mode: &Option<String>,
) -> anyhow::Result<Access> {
    let usual = if group.is_some() { 0o660 } else { 0o600 };
    let owner = owner.as_ref().map(|Account(text)| {
        user_number(text).ok_or_else(|| anyhow!("{of}-owner {text}: no such user: give a name or a number"))
    });
    let group = group.as_ref().map(|Account(text)| {
        group_number(text).ok_or_else(|| anyhow!("{of}-group {text}: no such group: give a name or a number"))
    });
    Ok(Access {
        owner: owner.transpose()?,
        group: group.transpose()?,
        mode: mode.as_ref().map_or(Ok(usual), |text| permissions(of, text))?,
    })
}

fn permissions(of: &str, text: &str) -> anyhow::Result<u32> {
    let digits = text.chars().all(|digit| digit.is_digit(8));
    let mode = u32::from_str_radix(text, 8)
        .ok()
        .filter(|mode| digits && *mode <= 0o777);
    let mode = mode.ok_or_else(|| anyhow!("{of}-mode {text}: give octal digits such as 660, at most 777"))?;
    match mode & 0o222 {
        0 => bail!("{of}-mode {text}: no VMM can connect without write permission: use 660, for instance"),
        _ => Ok(mode),
    }
}

/// Where frames are sent to and received from.
fn nic(port: &Port) -> anyhow::Result<NicConfig> {
    let Interface {
        ifname,
        cable,
        null,
        frame_size,
        ..
    } = &port.interface;
    let queues = queues("ifname", ifname, &port.attachment)?;
    let network = &port.member.network;
    let given = [
        ("ifname", ifname.is_some()),
        ("network", network.is_some()),
        ("cable", cable.is_some()),
        ("null", *null),
    ];
    let given = given.into_iter().filter_map(|(key, given)| given.then_some(key));
    let given: Vec<&str> = given.collect();
    if let [first, .., last @ ("cable" | "null")] = given[..] {
        bail!("{first} excludes {last}: leave one out");
    }
    let Some(network) = network else {
        let trunk = first_set(&port.member, &["trunk"]).map(str::to_owned);
        if let Some(key) = names_of_set(&port.options).into_iter().chain(trunk).next() {
            bail!("{key}: needs a network: name one");
        }
        return Ok(match (queues, cable) {
            (Some(queues), _) => NicConfig::Interface(queues),
            (None, Some(name)) => NicConfig::Cable { name: name.clone() },
            (None, None) if *null => NicConfig::Null {
                frame_bytes: frame_size.unwrap_or(NULL_FRAME),
            },
            (None, None) => bail!(
                "no network and no interface: name one by --ifname or network, join ports by --cable, or use --null"
            ),
        });
    };
    if queues.is_none()
        && let Some(key) = first_set(
            &port.attachment,
            &["start-queue", "mode", "force-copy", "force-zero-copy"],
        )
    {
        bail!(
            "{key}: the queues are the network's: name the uplink by ifname for one of the port's own, or leave it out"
        );
    }
    Ok(NicConfig::Network {
        name: network.clone(),
        vlans: member_vlans(port)?,
        options: port.options,
        own: queues,
    })
}

fn member_vlans(port: &Port) -> anyhow::Result<MemberVlans> {
    match (&port.member.trunk, &port.interface.vlan) {
        (Some(_), Some(_)) => bail!("trunk excludes vlan: leave one out"),
        (Some(trunk), None) if trunk.0.first() == Some(&0) => {
            bail!("trunk {trunk}: there is no VLAN 0: give 1 to 4094")
        }
        (Some(Vlans(trunk)), None) => Ok(MemberVlans::Trunk(trunk.clone())),
        (None, Some(vlans)) => match vlans.0[..] {
            [vlan] if vlan > 0 => Ok(MemberVlans::Access(vlan)),
            _ => bail!("vlan {vlans}: a port of a network has one VLAN, 1 to 4094: for several give trunk"),
        },
        (None, None) => Ok(MemberVlans::Untagged),
    }
}

/// The queues of an interface, if the option `key` names one.
fn queues(
    key: &str,
    name: &Option<String>,
    attachment: &Attachment,
) -> anyhow::Result<Option<InterfaceQueues>> {
    let Some(name) = name.clone() else {
        return Ok(None);
    };
    if !is_interface_name(&name) {
        bail!(
            "{key} {name:?}: no interface can have this name: 1 to 15 bytes, no `/`, `:` or blank (`ip link` lists them)"
        );
    }
    Ok(Some(InterfaceQueues {
        name,
        start_queue: attachment.start_queue.unwrap_or(0),
        mode: mode_request(attachment.mode),
    }))
}

/// How queues are used that copy.
fn queue_options(
    packet_memory: Option<Size>,
    attachment: &Attachment,
    busy_poll: Option<BusyPoll>,
) -> anyhow::Result<QueueOptions> {
    Ok(QueueOptions {
        bind: bind_request(attachment.force_copy, attachment.force_zero_copy)?,
        placement: Placement::Copy,
        packet_bytes: packet_bytes(packet_memory)?,
        segments: attachment.segments.unwrap_or_default(),
        busy_poll,
        hints: hints(attachment.hints.as_ref())?,
        slices_from: None,
    })
}

fn hints(words: Option<&Words>) -> anyhow::Result<HintsConfig> {
    let Some(Words(words)) = words else {
        return Ok(HintsConfig::default());
    };
    words
        .parse()
        .map_err(|error| anyhow!("hints = {words:?}: {error}"))
}

/// XDP program, map and sockets of another program: the rules are QEMU's.
fn external(external: &External) -> anyhow::Result<ExternalProgram> {
    let External {
        inhibit,
        sock_fds,
        map_path,
        map_fd,
        map_start_index,
        afxdp_plugin,
        map_layout: layout,
    } = external.clone();
    let has_map = map_path.is_some() || map_fd.is_some();
    if map_start_index.is_some() && !has_map {
        bail!("map-start-index requires map-path or map-fd: name one, or leave it out");
    }
    if layout.is_some() && !has_map && afxdp_plugin.is_none() {
        bail!(
            "map-layout requires map-path, map-fd or afxdp-plugin: its types are those of a program that uses the map"
        );
    }
    if !inhibit && (has_map || sock_fds.is_some()) {
        bail!("sock-fds, map-path and map-fd require inhibit: add it");
    }
    let first = map_start_index.unwrap_or(0);
    match (sock_fds, map_path, map_fd, afxdp_plugin) {
        (None, None, None, None) if inhibit => {
            bail!("inhibit requires sock-fds, map-path, map-fd or afxdp-plugin: name one")
        }
        (None, None, None, None) => Ok(ExternalProgram::None),
        (Some(fds), None, None, None) => Ok(ExternalProgram::Sockets(fds.0)),
        (None, Some(path), None, None) => Ok(ExternalProgram::PinnedMap { path, first, layout }),
        (None, None, Some(fd), None) => Ok(ExternalProgram::Map { fd, first, layout }),
        (None, None, None, Some(path)) => Ok(ExternalProgram::Plugin { path, layout }),
        _ => bail!("sock-fds, map-path, map-fd and afxdp-plugin exclude each other: give one"),
    }
}

fn check_guard(port: &Port) -> anyhow::Result<()> {
    let names = names_of_set(&port.guard);
    match names.iter().find(|name| *name != "guard") {
        Some(key) if port.guard.ips.is_none() => {
            bail!("{key}: needs ips: name the guest's addresses; without them it may send from any")
        }
        _ => Ok(()),
    }
}

/// Rejects rules for frames to the guest with memory=direct: the NIC writes them before the daemon could drop them.
fn check_filter(port: &Port, placement: Placement) -> anyhow::Result<()> {
    let is_to_guest = |rule: &Rule| rule.direction == Direction::ToGuest;
    let key = match &port.filter {
        filter if filter.rule.iter().any(is_to_guest) => "rule",
        filter if filter.to_guest_default == Some(Action::Deny) => "to-guest-default",
        _ => return Ok(()),
    };
    if placement == Placement::Direct {
        bail!(
            "{key}: with memory=direct a frame is in the guest's memory before the daemon could drop it: use \
             memory=send-direct or copy for rules about what a guest receives"
        );
    }
    Ok(())
}

/// Rate limits; those to the guest need a placement with which the daemon can drop a frame.
fn rates(limits: &Limits, placement: Placement) -> anyhow::Result<PortRates> {
    let bits = |key, rate, burst| rate_of(key, rate, burst, Unit::Bits);
    let packets = |key, rate, burst| rate_of(key, rate, burst, Unit::Packets);
    let rates = PortRates {
        from_guest: Rates {
            bits: bits(
                "from-guest-bits",
                limits.from_guest_bits,
                limits.from_guest_bits_burst,
            )?,
            packets: packets(
                "from-guest-packets",
                limits.from_guest_packets,
                limits.from_guest_packets_burst,
            )?,
        },
        to_guest: Rates {
            bits: bits("to-guest-bits", limits.to_guest_bits, limits.to_guest_bits_burst)?,
            packets: packets(
                "to-guest-packets",
                limits.to_guest_packets,
                limits.to_guest_packets_burst,
            )?,
        },
    };
    if placement == Placement::Direct && rates.to_guest != Rates::default() {
        bail!(
            "to-guest limits: with memory=direct a frame is in the guest's memory before the daemon could drop it: use \
             memory=send-direct or copy for them"
        );
    }
    Ok(rates)
}

fn rate_of(
    key: &str,
    rate: Option<model::config::Rate>,
    burst: Option<model::config::Burst>,
    unit: Unit,
) -> anyhow::Result<Option<Rate>> {
    match (rate.map(|rate| rate.0), burst.map(|burst| burst.0)) {
        (None, None) => Ok(None),
        (None, Some(_)) => bail!("{key}-burst: there is no {key} that it belongs to: name both, or neither"),
        (Some(rate), None) => {
            let beyond = match key.starts_with("to-guest") {
                true => Beyond::IsDropped,
                false => Beyond::Waits,
            };
            Ok(Some(Rate::new(rate, unit, beyond)))
        }
        (Some(rate), Some(burst)) if burst > Rate::most_burst(rate) => bail!(
            "{key}-burst {burst}: takes more than {LONGEST_BURST_SECONDS} s at {rate} a second: give {} at most",
            Rate::most_burst(rate)
        ),
        (Some(per_second), Some(burst)) => Ok(Some(Rate { per_second, burst })),
    }
}

/// Features from a list: `none`, `all`, names, or names with a `-` before each (all but these), joined by `,` or `+`.
/// Errors: one sentence, naming the word.
fn on_request(list: &str) -> Result<OnRequest, String> {
    let named = |words: &[&str]| {
        words.iter().try_fold(OnRequest::NONE, |all, word| {
            let one = OnRequest::named(word).ok_or_else(|| {
                let known = OnRequest::all().names().join(", ");
                format!("{word:?} is not offered on request: give none, all, or some of {known}")
            })?;
            Ok::<_, String>(all.with(one))
        })
    };
    let choice = Choice::read(list, &[',', '+'], "none")?;
    Ok(match choice {
        Choice::Only(words) => named(&words)?,
        Choice::AllBut(words) => OnRequest::all().without(named(&words)?),
    })
}

const NOT_OF_A_PAIR: &str = "is not from 512KiB to 6MiB, in whole pages of 4KiB: give 1MiB, for instance";

/// Packet memory of a queue pair that has its own UMEM: whole pages, and so whole chunks.
fn packet_bytes(size: Option<Size>) -> anyhow::Result<u32> {
    let Some(Size(bytes)) = size else {
        return Ok(COPY_BYTES);
    };
    check_packet_memory(bytes)?;
    let fits = u32::try_from(bytes).ok().filter(|&bytes| bytes <= COPY_BYTES);
    fits.with_context(|| format!("packet-memory: {bytes} bytes for each queue pair {NOT_OF_A_PAIR}"))
}

fn check_packet_memory(bytes: u64) -> anyhow::Result<()> {
    match bytes >= LEAST_COPY_BYTES.into() && bytes.is_multiple_of(LARGE_CHUNK.into()) {
        true => Ok(()),
        false => bail!("packet-memory: {bytes} bytes {NOT_OF_A_PAIR}"),
    }
}

/// `--shared-umem`: gives each queue pair that copies a slice of one shared memory; the size is that of all slices
/// together.
/// Errors: one line: no port can share, or slices would be too small or too large.
pub(crate) fn share(ports: &mut [PortConfig], size: Option<Size>) -> anyhow::Result<()> {
    let sharing = || ports.iter().filter(|port| port.can_share());
    let pairs: u64 = sharing().map(|port| u64::from(port.queues)).sum();
    if pairs == 0 {
        bail!(
            "--shared-umem: no port has queues of an interface with memory=copy, which it is for: leave it out"
        );
    }
    let least = pairs * u64::from(LEAST_COPY_BYTES);
    let bytes = size.map_or_else(|| least.max(COPY_BYTES.into()), |Size(bytes)| bytes);
    check_packet_memory(bytes)?;
    let slice = bytes / pairs / u64::from(LARGE_CHUNK) * u64::from(LARGE_CHUNK);
    let slice = u32::try_from(slice)
        .ok()
        .filter(|slice| (LEAST_COPY_BYTES..=COPY_BYTES).contains(slice))
        .with_context(|| {
            format!(
                "--packet-memory with --shared-umem is for all {pairs} queue pair(s) together, and {bytes} bytes make \
                 {slice} for each, which is not from 512KiB to 6MiB: give {}KiB to {}KiB, or leave it out",
                least >> 10,
                (pairs * u64::from(COPY_BYTES)) >> 10
            )
        })?;
    let mut next = 0;
    for port in ports.iter_mut().filter(|port| port.can_share()) {
        (port.options.packet_bytes, port.options.slices_from) = (slice, Some(next));
        next += u32::from(port.queues);
    }
    Ok(())
}

/// Most memory of a guest without a configured limit: the machine's memory, or less if the guests of all ports would
/// not fit into the address space.
pub(super) fn machine_share(ports: usize) -> u64 {
    machine_bytes().min(MOST_BYTES / ports.max(1) as u64)
}

/// Memory of the machine, with swap. Must be called first outside of the sandbox, in which the kernel refuses it.
pub(crate) fn machine_bytes() -> u64 {
    static BYTES: OnceLock<u64> = OnceLock::new();
    *BYTES.get_or_init(|| {
        let info = rustix::system::sysinfo();
        #[allow(clippy::unnecessary_cast, clippy::useless_conversion)] // other types on other machines
        let (ram, swap) = (u64::from(info.totalram), u64::from(info.totalswap));
        ram.saturating_add(swap).saturating_mul(info.mem_unit.into())
    })
}

/// The configuration of the network of that name.
/// Errors: options that do not go together.
pub(crate) fn network(name: &str, network: &Network) -> anyhow::Result<NetworkConfig> {
    let (options, attachment) = (&network.uplink, &network.attachment);
    let busy_poll = busy_poll(&network.polling)?;
    let uplink = match queues("uplink", &options.uplink, attachment)? {
        None => None,
        Some(at) => Some(UplinkConfig {
            at,
            queues: options.queues.unwrap_or(1),
            options: queue_options(options.packet_memory, attachment, busy_poll)?,
            host: options.host.unwrap_or(true),
            underlay: None,
        }),
    };
    let uplink = match (queues("underlay", &options.underlay, attachment)?, uplink) {
        (Some(_), None) => bail!("underlay: needs an uplink, the vxlan or geneve device: name one"),
        (Some(at), Some(uplink)) => Some(with_underlay(uplink, at, options)?),
        (None, _) if options.drop_unknown_senders => {
            bail!(
                "drop-unknown-senders: needs an underlay: name the interface that carries packets of the uplink"
            )
        }
        (None, uplink) => uplink,
    };
    Ok(NetworkConfig {
        name: name.to_owned(),
        uplink,
    })
}

/// Adds an underlay to an uplink. The options of queues apply to the underlay; the uplink gets tap mode.
fn with_underlay(
    uplink: UplinkConfig,
    at: InterfaceQueues,
    options: &Uplink,
) -> anyhow::Result<UplinkConfig> {
    if !matches!(at.mode, ModeRequest::Auto | ModeRequest::Tap) {
        bail!("mode: with an underlay the uplink is in tap mode: leave `mode` out");
    }
    let underlay = UnderlayConfig {
        at: InterfaceQueues {
            start_queue: options.underlay_start_queue.unwrap_or(0),
            mode: ModeRequest::Xdp,
            ..at
        },
        queues: options.underlay_queues.unwrap_or(1),
        // GSO packets leave by the uplink.
        options: QueueOptions {
            segments: Segments::Whole,
            ..uplink.options
        },
        drops_unknown: options.drop_unknown_senders,
    };
    Ok(UplinkConfig {
        at: InterfaceQueues {
            mode: ModeRequest::Tap,
            ..uplink.at
        },
        options: QueueOptions {
            bind: BindRequest::Auto,
            busy_poll: None,
            hints: HintsConfig::default(),
            ..uplink.options
        },
        underlay: Some(underlay),
        ..uplink
    })
}

/// The configuration of the daemon with these ports.
/// Errors: one line, naming the option.
pub(crate) fn daemon(daemon: &Daemon, ports: Vec<PortConfig>) -> anyhow::Result<ServeConfig> {
    let Process {
        workers,
        cpus,
        spin_us,
        moderation_us,
        steward,
        steward_timeout,
        control,
        user,
        sandbox,
        state,
        socket_directories,
        ..
    } = daemon.process.clone();
    let cpus = cpus.map_or_else(Vec::new, |cpus| cpus.0);
    check_cpus(&cpus)?;
    let pairs: usize = ports.iter().map(|port| usize::from(port.queues)).sum();
    let usable = match cpus.len() {
        // The other half is for guests: if they use all CPUs, more workers only take time from them.
        0 => std::thread::available_parallelism().map_or(1, |all| usize::from(all).div_ceil(2)),
        named => named,
    };
    let workers = workers.unwrap_or_else(|| pairs.clamp(1, usable));
    if !(1..=256).contains(&workers) {
        bail!("--workers {workers}: give 1 to 256 threads");
    }
    let moderation_us = moderation_us.unwrap_or(MODERATION_US);
    if moderation_us > MOST_MODERATION_US {
        bail!("--moderation-us {moderation_us}: give {MOST_MODERATION_US} at most, or 0 for never");
    }
    let control = match control {
        None => Control::Default,
        Some(path) if path.as_os_str() == "none" => Control::None,
        Some(path) => Control::Path(path),
    };
    let sandbox = words(&sandbox, "all");
    let layers = Layers::parse(sandbox)?;
    if let Some(Account(user)) = user.as_ref().filter(|_| !layers.has(Layer::User)) {
        bail!("--user {user} with --sandbox {sandbox}, which leaves the user as it is: add `user` there");
    }
    let is_directory = |path: &&PathBuf| is_plain(path) && path.parent().is_some();
    if let Some(other) = socket_directories.iter().find(|path| !is_directory(path)) {
        bail!("socket-directories: {other:?}: give absolute paths without `..`, such as [\"/run/vms\"]");
    }
    Ok(ServeConfig {
        file: None,
        options: Daemon::default(),
        keys: daemon.clone(),
        ports,
        taken: Default::default(),
        networks: Vec::new(),
        workers,
        cpus,
        waits: Waits {
            spin: Duration::from_micros(spin_us.unwrap_or(SPIN_US)),
            moderation: Duration::from_micros(moderation_us),
        },
        steward,
        steward_timeout: Duration::from_secs(steward_timeout.unwrap_or(STEWARD_TIMEOUT)),
        control,
        api: api(&daemon.api)?,
        state: state.map(std::path::absolute).transpose()?,
        layers,
        user: user.map(|Account(user)| User::parse(&user)).transpose()?,
    })
}

/// Whether a path does not depend on the working directory, and has no `..` that leaves a configured directory.
pub(crate) fn is_plain(path: &Path) -> bool {
    path.is_absolute() && !path.components().any(|part| part == Component::ParentDir)
}

/// Rejects CPUs that this process may not run on.
fn check_cpus(cpus: &[usize]) -> anyhow::Result<()> {
    let allowed = rustix::thread::sched_getaffinity(None).context("cannot read the CPU affinity")?;
    let Some(cpu) = cpus.iter().find(|&&cpu| !allowed.is_set(cpu)) else {
        return Ok(());
    };
    let may: Vec<String> = (0..1024)
        .filter(|&cpu| allowed.is_set(cpu))
        .map(|cpu| cpu.to_string())
        .collect();
    bail!(
        "--cpus: CPU {cpu} does not exist or is not allowed: this process may use {}",
        may.join(",")
    )
}

fn api(api: &Api) -> anyhow::Result<ApiConfig> {
    let without = |path: &Option<PathBuf>, given: bool| path.is_none() && given;
    if without(&api.api, api.api_group.is_some() || api.api_mode.is_some()) {
        bail!("--api-group and --api-mode belong to the socket of --api: name that, too");
    }
    let read_only_given = api.api_read_only_group.is_some() || api.api_read_only_mode.is_some();
    if without(&api.api_read_only, read_only_given) {
        bail!(
            "--api-read-only-group and --api-read-only-mode belong to the socket of --api-read-only: name that, too"
        );
    }
    if api.api_owner.is_some() && api.api.is_none() && api.api_read_only.is_none() {
        bail!("--api-owner belongs to the sockets of --api and --api-read-only: name one");
    }
    if api.api.is_some() && api.api == api.api_read_only {
        bail!("--api-read-only: the socket of --api has this path: choose another");
    }
    let owner = &api.api_owner;
    let all = access("--api", owner, &api.api_group, &api.api_mode)?;
    let read_only = access(
        "--api-read-only",
        owner,
        &api.api_read_only_group,
        &api.api_read_only_mode,
    )?;
    Ok(ApiConfig {
        all: api.api.clone().map(|path| (path, all)),
        read_only: api.api_read_only.clone().map(|path| (path, read_only)),
        metrics: api.metrics,
    })
}
