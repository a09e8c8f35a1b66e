//! Completes the command lines of the programs: the hidden command `complete`.

use clap::{Args as _, Command, CommandFactory as _};
use common::complete::Names;
use model::config::{Network, Port};

use super::Cli;

/// Candidates for the word at the cursor, a line each. `words`: the command line up to the cursor.
pub(crate) fn complete(words: &[String], names: &'static dyn Names) -> String {
    let [program, words @ ..] = words else {
        return String::new();
    };
    let all = Cli::command();
    let command = match program.rsplit('-').next() {
        Some("dra") => program::dra::Options::command(),
        Some("steward") => program::steward::Options::command(),
        // `vhost-af-xdp-top` has the options of the command `top`.
        name => name
            .and_then(|name| all.find_subcommand(name))
            .unwrap_or(&all)
            .clone(),
    };
    common::complete::complete(command, words, names)
}

/// See [`Names::keys`].
pub(crate) fn keys(id: &str) -> Option<Command> {
    let table = Command::new("table");
    match id {
        "keys" | "port" => Some(Port::augment_args(table)),
        "network_keys" => Some(Network::augment_args(table)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    struct Known;

    impl Names for Known {
        fn interfaces(&self) -> Vec<String> {
            vec!["eth0".to_owned(), "eth1".to_owned()]
        }

        fn ports(&self) -> Vec<String> {
            vec!["vm1".to_owned()]
        }

        fn networks(&self) -> Vec<String> {
            vec!["lan".to_owned()]
        }

        fn keys(&self, id: &str) -> Option<Command> {
            keys(id)
        }
    }

    /// The candidates for the last word of a line.
    fn offered(line: &str) -> Vec<String> {
        let words: Vec<_> = line.split(' ').map(str::to_owned).collect();
        let lines = complete(&words, &Known);
        let word = |line: &str| line.split('\t').next().unwrap_or_default().to_owned();
        lines.lines().map(word).collect()
    }

    #[test]
    fn commands_options_and_their_values_are_offered() {
        for (line, wanted) in [
            ("vhost-af-xdp ch", &["check"][..]),
            ("vhost-af-xdp port re", &["remove"]),
            ("vhost-af-xdp serve --ifn", &["--ifname"]),
            ("vhost-af-xdp serve --ifname ", &["eth0", "eth1"]),
            ("vhost-af-xdp serve --ifname=eth1", &["--ifname=eth1"]),
            ("vhost-af-xdp serve --memory se", &["send-direct"]),
            ("vhost-af-xdp serve --force-copy --memory=cop", &["--memory=copy"]),
            ("vhost-af-xdp check ", &["eth0", "eth1"]),
            ("vhost-af-xdp mark set eth0 7 --prot", &["--protocol"]),
            ("vhost-af-xdp capture -w x --direction to", &["to-guest"]),
            ("vhost-af-xdp-steward --ta", &["--take-back"]),
            ("/usr/bin/vhost-af-xdp-top --int", &["--interval"]),
            ("vhost-af-xdp-bench se", &[]),
        ] {
            assert_eq!(offered(line), wanted, "{line}");
        }
    }

    #[test]
    fn names_of_running_daemons_and_keys_of_ports_are_offered() {
        for (line, wanted) in [
            ("vhost-af-xdp port remove ", &["vm1"][..]),
            ("vhost-af-xdp port add vm9 isol", &["isolated"]),
            (
                "vhost-af-xdp port set vm1 mac=02:00:00:00:00:01 netw",
                &["network="],
            ),
            ("vhost-af-xdp port set vm1 network=", &["network=lan"]),
            ("vhost-af-xdp network remove ", &["lan"]),
            ("vhost-af-xdp network add blue upl", &["uplink="]),
            (
                "vhost-af-xdp network set lan uplink=",
                &["uplink=eth0", "uplink=eth1"],
            ),
            ("vhost-af-xdp port set vm1 isolated memory=d", &["memory=direct"]),
            (
                "vhost-af-xdp serve --port socket-path=/x,ifn",
                &["socket-path=/x,ifname="],
            ),
            ("vhost-af-xdp serve --port ifname=eth1", &["ifname=eth1"]),
            ("vhost-af-xdp capture ", &["vm1"]),
        ] {
            assert_eq!(offered(line), wanted, "{line}");
        }
    }

    #[test]
    fn paths_are_looked_up_and_hidden_commands_are_not_offered() {
        let directory = tempfile::tempdir().expect("a directory");
        let root = directory.path().display();
        fs::create_dir(directory.path().join("inner")).expect("made");
        for name in ["lan.toml", "other file", ".hidden"] {
            fs::write(directory.path().join(name), "").expect("written");
        }
        assert_eq!(
            offered(&format!("vhost-af-xdp serve --config {root}/")),
            [format!("{root}/inner/"), format!("{root}/lan.toml")]
        );
        assert_eq!(
            offered(&format!("vhost-af-xdp port add vm1 socket-path={root}/in")),
            [format!("socket-path={root}/inner/")]
        );
        let commands = offered("vhost-af-xdp ");
        assert!(commands.contains(&"serve".to_owned()), "{commands:?}");
        assert!(
            !commands.contains(&"helper".to_owned()) && !commands.contains(&"complete".to_owned()),
            "{commands:?}"
        );
    }
}
