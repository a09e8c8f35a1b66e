//! Options to use somebody else's XDP program, map and sockets: names and rules are those of QEMU's `-netdev af-xdp`
//! (qapi/net.json, since 10.1); `map-fd` and `afxdp-plugin` are further ways to the same.

use std::path::PathBuf;

use anyhow::{anyhow, bail};
use clap::Args;

use crate::config::ExternalProgram;

/// As a port has them.
#[derive(Debug, Clone, Args)]
pub(crate) struct ExternalArgs {
    /// Load no XDP program, use the one that is there: takes --sock-fds, --map-path or --map-fd, and --memory copy
    #[arg(long)]
    inhibit: bool,
    /// AF_XDP sockets that somebody else opened, put into the program's map and did not bind: inherited descriptors in
    /// the order of the queues
    #[arg(long, value_name = "FD:FD...")]
    sock_fds: Option<String>,
    /// Put sockets into the XSKMAP that is pinned there
    #[arg(long, value_name = "PATH")]
    map_path: Option<PathBuf>,
    /// Put sockets into the XSKMAP that is this inherited descriptor
    #[arg(long, value_name = "FD")]
    map_fd: Option<i32>,
    /// Place in the map of the first queue's socket [default: 0]
    #[arg(long, value_name = "N")]
    map_start_index: Option<u32>,
    /// Get the interface's XSKMAP from the AF_XDP device plugin for Kubernetes, which listens there, and load no XDP
    /// program
    #[arg(long, value_name = "PATH")]
    afxdp_plugin: Option<PathBuf>,
    /// What the program leaves before frames: the structure of this name, as the types (BTF) of a program that uses the
    /// map describe it [default: nothing that is read]
    #[arg(long, value_name = "STRUCT")]
    map_layout: Option<String>,
}

impl ExternalArgs {
    /// What they say together.
    /// Errors: those that do not go together, by name.
    pub(super) fn build(&self) -> anyhow::Result<ExternalProgram> {
        let first = self.map_start_index.unwrap_or(0);
        let has_map = self.map_path.is_some() || self.map_fd.is_some();
        if self.map_start_index.is_some() && !has_map {
            bail!("map-start-index requires map-path or map-fd");
        }
        if self.map_layout.is_some() && !has_map && self.afxdp_plugin.is_none() {
            bail!(
                "map-layout requires map-path, map-fd or afxdp-plugin: its types are those of a program that uses the map"
            );
        }
        if !self.inhibit && (has_map || self.sock_fds.is_some()) {
            bail!("sock-fds, map-path and map-fd require inhibit");
        }
        let layout = self.map_layout.clone();
        match (&self.sock_fds, &self.map_path, self.map_fd, &self.afxdp_plugin) {
            (None, None, None, None) if self.inhibit => {
                bail!("inhibit requires sock-fds, map-path, map-fd or afxdp-plugin")
            }
            (None, None, None, None) => Ok(ExternalProgram::None),
            (Some(list), None, None, None) => {
                let numbers: Result<_, _> = list.split(':').map(str::parse).collect();
                let numbers =
                    numbers.map_err(|_| anyhow!("sock-fds {list}: descriptor numbers joined by colons"))?;
                Ok(ExternalProgram::Sockets(numbers))
            }
            (None, Some(path), None, None) => Ok(ExternalProgram::PinnedMap {
                path: path.clone(),
                first,
                layout,
            }),
            (None, None, Some(fd), None) => Ok(ExternalProgram::Map { fd, first, layout }),
            (None, None, None, Some(path)) => Ok(ExternalProgram::Plugin {
                path: path.clone(),
                layout,
            }),
            _ => bail!("sock-fds, map-path, map-fd and afxdp-plugin exclude each other: give one"),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::{Command, FromArgMatches};

    use super::*;

    fn build(args: &[&str]) -> anyhow::Result<ExternalProgram> {
        let command = ExternalArgs::augment_args(Command::new("serve").no_binary_name(true));
        ExternalArgs::from_arg_matches(&command.try_get_matches_from(args)?)?.build()
    }

    #[test]
    fn each_way_is_taken_with_inhibit() {
        let on = "--inhibit";
        assert_eq!(build(&[]).expect("none"), ExternalProgram::None);
        assert_eq!(
            build(&[on, "--sock-fds=7:8"]).expect("sockets"),
            ExternalProgram::Sockets(vec![7, 8])
        );
        assert_eq!(
            build(&[on, "--map-fd=9", "--map-start-index=3"]).expect("a map"),
            ExternalProgram::Map {
                fd: 9,
                first: 3,
                layout: None
            }
        );
        let path = PathBuf::from("/sys/fs/bpf/x");
        assert_eq!(
            build(&[on, "--map-path=/sys/fs/bpf/x", "--map-layout=frame_hints"]).expect("a pinned map"),
            ExternalProgram::PinnedMap {
                path,
                first: 0,
                layout: Some("frame_hints".to_owned())
            }
        );
        assert!(matches!(
            build(&["--afxdp-plugin=/x"]),
            Ok(ExternalProgram::Plugin { layout: None, .. })
        ));
    }

    #[test]
    fn rules_are_those_of_qemu() {
        let on = "--inhibit";
        let refused = |args: &[&str]| build(args).expect_err("refused").to_string();
        assert!(refused(&[on]).contains("requires"));
        assert!(refused(&["--sock-fds=7"]).contains("require inhibit"));
        assert!(refused(&[on, "--sock-fds=7", "--map-path=/x"]).contains("exclude"));
        assert!(refused(&[on, "--sock-fds=7", "--map-start-index=1"]).contains("requires map-path"));
        assert!(refused(&[on, "--sock-fds=7", "--map-layout=x"]).contains("map-layout requires"));
        assert!(refused(&[on, "--sock-fds=7:"]).contains("colons"));
        assert!(refused(&[on, "--map-fd=x"]).contains("'x' for '--map-fd"));
        assert!(refused(&[on, "--map-start-index=-1"]).contains("'-1' for '--map-start-index"));
    }
}
