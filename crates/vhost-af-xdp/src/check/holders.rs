//! Lists the queues of the interface that are in use, and how to add one more guest. If a vhost-af-xdp daemon uses
//! them, the guest can be added to it, so its queues and XDP program need not be removed.

use super::facts::Facts;
use crate::api::queues::{Holder, Queue, named};

/// How one more guest gets a queue of the interface.
pub(super) enum Way<'a> {
    /// By a daemon of its own, through a steward if there is one.
    Daemon { steward: bool },
    /// As a port of this daemon, whose XDP program is attached.
    Port(&'a Holder),
}

impl Facts {
    /// Who uses which of its queues, in words, each user once.
    pub(super) fn holders(&self) -> Vec<String> {
        self.holders_of(|queue| queue.queue < self.link.rx_queues)
    }

    /// Who uses which of some queues.
    pub(super) fn holders_of(&self, is_asked_for: impl Fn(&Queue) -> bool) -> Vec<String> {
        let taken = self.queues.iter().filter(|queue| !queue.is_free());
        let mut all: Vec<(String, Vec<u32>)> = Vec::new();
        for queue in taken.filter(|queue| is_asked_for(queue)) {
            let whose = whose(queue);
            match all.iter_mut().find(|(known, _)| *known == whose) {
                Some((_, queues)) => queues.push(queue.queue),
                None => all.push((whose, vec![queue.queue])),
            }
        }
        all.into_iter()
            .map(|(whose, queues)| format!("{}: {whose}", named(&queues)))
            .collect()
    }

    /// The network that uses queues of the interface, and their numbers.
    pub(super) fn network_there(&self) -> Option<(&Holder, Vec<u32>)> {
        let of_network = |queue: &&Queue| {
            let holder = queue.holder.as_ref();
            holder.is_some_and(|holder| holder.port.is_none())
        };
        let holder = self.queues.iter().find(of_network)?.holder.as_ref()?;
        let same = |queue: &&Queue| {
            let other = queue.holder.as_ref().filter(|other| other.port.is_none());
            other.is_some_and(|other| (other.pid, &other.network) == (holder.pid, &holder.network))
        };
        let queues = self.queues.iter().filter(same).map(|queue| queue.queue);
        Some((holder, queues.collect()))
    }

    /// The owner of its XDP program, if that is a daemon or the steward.
    pub(super) fn program_holder(&self) -> Option<String> {
        let held = self
            .queues
            .iter()
            .find(|queue| queue.lease.is_some() || queue.holder.is_some())?;
        Some(match (&held.lease, &held.holder) {
            (None, Some(holder)) => format!("process {}'s, for {}", holder.pid, holder.whom()),
            _ => "the steward's".to_owned(),
        })
    }

    /// How one more guest gets a queue.
    pub(super) fn way(&self) -> Way<'_> {
        // A daemon without a lease has attached its own program, and an interface cannot have a second one.
        let mut own = self.queues.iter().filter(|queue| queue.lease.is_none());
        match own.find_map(|queue| queue.holder.as_ref()) {
            Some(holder) => Way::Port(holder),
            None => Way::Daemon {
                steward: self.queues.iter().any(|queue| queue.lease.is_some())
                    || (self.steward && !self.lacking.is_empty()),
            },
        }
    }

    /// The command for a guest with its own queues, the first of which is `queue`; `keys`: its other keys.
    pub(super) fn guest_line(&self, queue: u32, keys: &[(&str, &str)]) -> String {
        let first = queue.to_string();
        let mut all = vec![("ifname", self.link.name.as_str())];
        all.extend((queue > 0).then_some(("start-queue", first.as_str())));
        match self.way() {
            Way::Daemon { steward } => {
                all.extend(steward.then_some(("steward", self.steward_at.as_str())));
                all.extend(keys);
                let options = all.iter().map(|(key, value)| format!(" --{key} {value}"));
                let options: String = options.collect();
                format!("vhost-af-xdp serve --socket-path /run/vm1.sock{options}")
            }
            Way::Port(holder) => {
                if let Some(network) = &holder.network {
                    all.extend([("network", network.as_str()), ("mac", "MAC")]);
                }
                all.extend(keys);
                port_line(holder, &all)
            }
        }
    }
}

/// The command that adds a port to a daemon.
pub(super) fn port_line(holder: &Holder, keys: &[(&str, &str)]) -> String {
    let socket = [("socket-path", "PATH")];
    let keys = || socket.iter().chain(keys);
    match (&holder.configuration, &holder.api) {
        (Some(_), Some(_)) => {
            let keys: String = keys().map(|(key, value)| format!(" {key}={value}")).collect();
            format!("vhost-af-xdp port add NAME{keys}")
        }
        (Some(file), None) => {
            let keys: Vec<_> = keys().map(|(key, value)| in_toml(key, value)).collect();
            format!(
                "# in {}, then `vhost-af-xdp reload`: [port.NAME] with {}",
                file.display(),
                keys.join(", ")
            )
        }
        (None, _) => format!(
            "# process {} has its XDP program there, and its ports are fixed: start it with all ports, or with --config FILE",
            holder.pid
        ),
    }
}

/// A key in the syntax of a configuration file.
fn in_toml(key: &str, value: &str) -> String {
    match value.parse::<u32>() {
        Ok(number) => format!("{key} = {number}"),
        Err(_) => format!("{key} = \"{value}\""),
    }
}

fn whose(queue: &Queue) -> String {
    match (&queue.holder, &queue.lease) {
        (Some(holder), _) => format!("{}, process {}", holder.whom(), holder.pid),
        (None, Some(lease)) => format!("leased by process {} of user {}", lease.pid, lease.uid),
        (None, None) => "somebody else's".to_owned(),
    }
}

/// Whether a process uses a queue, directly or by a lease.
pub(super) fn is_of(queue: &Queue, process: u32) -> bool {
    let holder = queue.holder.as_ref().map(|holder| holder.pid);
    let lease = queue.lease.as_ref().map(|lease| lease.pid);
    [holder, lease].contains(&Some(process))
}
