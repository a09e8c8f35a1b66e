//! Ports, networks and the daemon, as an operator configures them.
//!
//! A table of a file or a JSON object is read key by key into sections ([`Table`]): each section is a structure that
//! the code using it gets whole. An error names the key, its value and the remedy ([`Mistake`]). Each value is checked
//! here on its own; the daemon checks combinations of keys when it sets up ports and networks.

mod daemon;
pub(crate) mod file;
mod network;
mod policy;
mod port;
mod prefix;
mod rule;
pub(crate) mod table;
pub(crate) mod values;

pub use self::daemon::{Api, Daemon, Process};
pub use self::file::{
    ADDED, ConfigFile, Entry, NamedTable, TableKind, Tables, WrongLine, is_name, name_rule,
};
pub use self::network::{Network, Uplink};
pub use self::policy::{FilterSummary, Policy};
pub use self::port::{
    Attachment, External, Filter, Guard, Interface, Limits, MemberOptions, Membership, Memory, Offers,
    Polling, Port, Socket,
};
pub use self::prefix::{IpPrefix, Prefixes};
pub use self::rule::{Action, Direction, Intervals, MOST_RULES, NO_PORT, Rule, protocol, protocol_name};
pub use self::table::{Mistake, Table, names_of_set, set_keys, write_block};
pub use self::values::{
    Account, Burst, Cpus, Fds, FileKinds, Mac, Mode, Placement, Rate, Segments, Size, Vlans, Words,
};

/// The table of a configuration file that has this key, if one has.
fn table_with(key: &str) -> Option<&'static str> {
    let tables = [
        ("[port.NAME]", Port::schema()),
        ("[network.NAME]", Network::schema()),
        ("[daemon]", Daemon::schema()),
    ];
    let its = tables.into_iter().find(|(_, known)| known.contains_key(key));
    its.map(|(name, _)| name)
}

#[cfg(test)]
mod tests;
