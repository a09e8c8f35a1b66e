//! Command lines for a running daemon: `port`, `network`, `events`.

use std::path::PathBuf;

use anyhow::anyhow;
use clap::{Args, Subcommand};
use model::config::{Mistake, NamedTable};
use serde_json::{Map, Value};

pub(crate) const PORT_EXAMPLES: &str = "\
Examples:
  One more guest on a network:
    vhost-af-xdp port add vm3 network=lan mac=52:54:00:00:00:03 \\
        socket-path=/run/vhost-af-xdp-lan/vm3.sock socket-group=vm3
  Set a VLAN, guest stays connected; remove the VLAN:
    vhost-af-xdp port set vm3 vlan=100
    vhost-af-xdp port set vm3 vlan=
  Set filter rules, in order; remove all:
    vhost-af-xdp port set vm3 \\
        rule='direction=to-guest action=allow protocol=tcp destination-ports=22,80' \\
        rule='direction=to-guest action=allow protocol=icmp'
    vhost-af-xdp port set vm3 rule=
  Remove it:
    vhost-af-xdp port remove vm3";

pub(crate) const NETWORK_EXAMPLES: &str = "\
Examples:
  One more network, by queues 4 and 5 of eth1; one that reaches no NIC:
    vhost-af-xdp network add blue uplink=eth1 start-queue=4 queues=2
    vhost-af-xdp network add internal
  Another uplink: guests stay connected; remove the network when it has no ports:
    vhost-af-xdp network set blue uplink=eth2 start-queue=
    vhost-af-xdp network remove blue
  Networks of the one daemon that runs, and of another one:
    vhost-af-xdp network list
    vhost-af-xdp network list --control /run/vhost-af-xdp-2/control.sock --json";

pub(crate) const EVENTS_EXAMPLES: &str = "\
Examples:
  Past and new events, until Ctrl-C:
    vhost-af-xdp events
  Closed ports, with reasons:
    vhost-af-xdp events --json | jq -r 'select(.event == \"closed\") | .port + \" \" + .reason'";

/// The daemon to ask.
#[derive(Debug, Clone, Args)]
pub(crate) struct AtArgs {
    /// Control socket of the daemon [default: that of the one daemon that is found]
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Option<PathBuf>,
}

/// The daemon to ask, and the form of the output.
#[derive(Debug, Clone, Args)]
pub(crate) struct ListArgs {
    #[command(flatten)]
    pub(crate) at: AtArgs,
    /// Print JSON, in the form of the API
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum PortCommand {
    /// Add a port to those of the file. It stays until it is removed; without --state of serve it ends with the daemon
    #[command(after_help = PORT_EXAMPLES)]
    Add(KeysArgs),
    /// Change a port that was added; its guest stays connected where that is possible
    #[command(after_help = PORT_EXAMPLES)]
    Set(SetArgs),
    /// Remove a port that was added: its guest is disconnected
    #[command(after_help = PORT_EXAMPLES)]
    Remove(RemoveArgs),
    /// List all ports
    List(ListArgs),
    /// List the filter rules of a port, and how many frames each of them matched
    Rules(RulesArgs),
}

#[derive(Debug, Args)]
pub(crate) struct KeysArgs {
    /// Name of the port
    #[arg(value_name = "NAME")]
    pub(crate) name: String,
    /// Keys of [port.NAME] of a configuration file; a key without = is true, an empty value removes the key; repeat rule
    /// for each rule
    #[arg(value_name = "KEY=VALUE", required = true)]
    pub(crate) keys: Vec<String>,
    #[command(flatten)]
    pub(crate) at: AtArgs,
}

#[derive(Debug, Args)]
pub(crate) struct SetArgs {
    #[command(flatten)]
    pub(crate) keys: KeysArgs,
    /// Disconnect the guest if a changed key requires it
    #[arg(long)]
    pub(crate) disconnect: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RemoveArgs {
    /// Name of the port
    #[arg(value_name = "NAME")]
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) at: AtArgs,
}

#[derive(Debug, Args)]
pub(crate) struct RulesArgs {
    /// Name of the port
    #[arg(value_name = "NAME")]
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) list: ListArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum NetworkCommand {
    /// Add a network to those of the file. It stays until it is removed; without --state of serve it ends with the daemon
    #[command(after_help = NETWORK_EXAMPLES)]
    Add(NetworkKeysArgs),
    /// Change a network that was added; guests stay connected
    #[command(after_help = NETWORK_EXAMPLES)]
    Set(NetworkKeysArgs),
    /// Remove a network that was added and has no ports
    #[command(after_help = NETWORK_EXAMPLES)]
    Remove(NetworkRemoveArgs),
    /// List all networks
    List(ListArgs),
}

#[derive(Debug, Args)]
pub(crate) struct NetworkKeysArgs {
    /// Name of the network
    #[arg(value_name = "NETWORK")]
    pub(crate) name: String,
    /// Keys of [network.NAME] of a configuration file; a key without = is true, an empty value removes the key
    #[arg(value_name = "KEY=VALUE")]
    pub(crate) network_keys: Vec<String>,
    #[command(flatten)]
    pub(crate) at: AtArgs,
}

#[derive(Debug, Args)]
pub(crate) struct NetworkRemoveArgs {
    /// Name of the network
    #[arg(value_name = "NETWORK")]
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) at: AtArgs,
}

#[derive(Debug, Args)]
pub(crate) struct EventsArgs {
    #[command(flatten)]
    pub(crate) at: AtArgs,
    /// Only events after the one of this number
    #[arg(long, value_name = "SEQUENCE", default_value_t = 0)]
    pub(crate) after: u64,
    /// Print past events, and exit
    #[arg(long)]
    pub(crate) no_wait: bool,
    /// Print JSON, an event a line
    #[arg(long)]
    pub(crate) json: bool,
}

/// The keys of words `KEY=VALUE` for a port or network, as the daemon reads them; null: remove the key.
/// Errors: one line, naming the key.
pub(crate) fn keys_of<T: NamedTable>(name: &str, words: &[String]) -> anyhow::Result<Map<String, Value>> {
    let wrong = |mistake: Mistake| anyhow!(mistake.what);
    let mut keys = T::keys_of_words(words.iter().map(String::as_str)).map_err(wrong)?;
    for value in keys.values_mut().filter(|value| **value == "") {
        *value = Value::Null;
    }
    // In the daemon's notation. `Table::keys` leaves out false, which must be sent: it stays as the user wrote it.
    keys.extend(T::read(keys.clone()).map_err(wrong)?.keys());
    // Parsed as the daemon does it, to report mistakes without a daemon.
    T::named(name, &keys).map_err(wrong)?;
    Ok(keys)
}

#[cfg(test)]
mod tests {
    use clap::{Command, FromArgMatches};
    use model::config::{Network, Port, Table};
    use serde_json::json;
    use testkit::assert_has;

    use super::*;

    fn keys(words: &[&str]) -> anyhow::Result<Value> {
        let command = KeysArgs::augment_args(Command::new("add").no_binary_name(true));
        let args = KeysArgs::from_arg_matches(&command.get_matches_from([&["vm1"], words].concat()))?;
        keys_of::<Port>(&args.name, &args.keys).map(Value::Object)
    }

    #[test]
    fn keys_are_json_of_their_kind() {
        let said = keys(&[
            "queues=2",
            "isolated",
            "force-copy=false",
            "vlan=100,200-203",
            "mac=",
        ]);
        let wanted = json!({
            "queues": 2, "isolated": true, "force-copy": false, "vlan": "100,200-203", "mac": null
        });
        assert_eq!(said.expect("well said"), wanted);
        let network = keys_of::<Network>("lan", &["uplink=eth1".to_owned(), "queues=".to_owned()]);
        let wanted = json!({"uplink": "eth1", "queues": null});
        assert_eq!(Value::Object(network.expect("well said")), wanted);
        let error = keys(&["queus=2"]).expect_err("misspelt").to_string();
        assert_has(&error, &["unknown key \"queus\": did you mean \"queues\"?"]);
    }

    #[test]
    fn rules_are_given_one_by_one_and_other_keys_once() {
        let said = keys(&[
            "rule=direction=to-guest action=allow protocol=tcp destination-ports=22,80",
            "rule=direction=to-guest action=deny",
        ]);
        let wanted = json!({"rule": [
            {"direction": "to-guest", "action": "allow", "protocol": "tcp", "destination-ports": "22,80"},
            {"direction": "to-guest", "action": "deny"},
        ]});
        assert_eq!(said.expect("well said"), wanted);
        for [first, second] in [
            ["mac=02:00:00:00:00:01", "mac=02:00:00:00:00:02"],
            ["isolated", "isolated=false"],
            ["vlan=", "vlan=100"],
            ["vlan=100", "vlan="],
            ["vlan=", "vlan="],
            ["rule=", "rule=direction=to-guest action=deny"],
            ["rule=direction=to-guest action=deny", "rule="],
        ] {
            let error = keys(&[first, second]).expect_err("one would be lost").to_string();
            assert!(
                error.ends_with("is given more than once: give it once"),
                "{error}"
            );
        }
        let error = keys(&["rule=direction=to-guest deny"])
            .expect_err("no key")
            .to_string();
        assert_has(
            &error,
            &["rule 1: \"deny\": a rule is written as words key=value"],
        );
    }

    #[test]
    fn every_key_of_true_and_false_refuses_all_else() {
        let flags: Vec<String> = Port::schema()
            .into_iter()
            .filter(|(_, property)| property["type"] == "boolean")
            .map(|(key, _)| key)
            .collect();
        for known in ["isolated", "learning", "guard", "router", "promiscuous"] {
            assert!(flags.iter().any(|flag| flag == known), "{known}: {flags:?}");
        }
        for flag in &flags {
            for (word, on) in [("", true), ("=true", true), ("=false", false)] {
                let said = keys(&[&format!("{flag}{word}")]).expect("well said");
                assert_eq!(said[flag], on, "{flag}{word}");
            }
            for value in [
                "yes", "no", "on", "off", "1", "0", "TRUE", "True", "FALSE", " true",
            ] {
                let error = keys(&[&format!("{flag}={value}")]).expect_err("neither of both");
                let wanted = format!("{flag} = \"{value}\": give true or false");
                assert_eq!(error.to_string(), wanted);
            }
        }
    }
}
