//! The sandbox of a worker: it limits what a guest or VMM can do that takes over the process which reads its data.
//!
//! # Theory of operation
//!
//! [`enter`] is called once, on the only thread that there is, after everything that needs a privilege is done
//! (sockets are bound, the [helper](helper) runs) and before anything of a guest is read. Threads
//! that begin later inherit all of it; none of it can be undone. There are six layers; each is effective without
//! the others:
//!
//! | layer | what it removes |
//! |---|---|
//! | `user` | root's files and processes: another user, without supplementary groups that were not asked for |
//! | `mounts` | paths: an empty root directory, in which no socket of others can be connected to |
//! | `network` | interfaces, abstract sockets: an empty network namespace, where leased sockets keep working |
//! | `capabilities` | all five sets are empty, and no program that is executed gains anything (no_new_privs) |
//! | `files` | the file system, by landlock: nothing can be opened but this process's own /proc directory and program |
//! | `calls` | system calls that are not in [the table](calls), by seccomp: the process ends |
//!
//! The order matters: mounts and network need CAP_SYS_ADMIN, emptying the bounding set CAP_SETPCAP, another user
//! CAP_SETUID; landlock and seccomp need no_new_privs, and seccomp would forbid all that comes before it.
//!
//! A layer that this kernel does not have, or that this user may not set up, is left out; the log and `status` report
//! that. It is an error if the user of `--user` cannot be set.

mod calls;
mod capabilities;
mod files;
mod filter;
mod mounts;
mod user;

use std::fmt;

use anyhow::{anyhow, bail};
use model::state::Sandbox;
use rustix::io::Errno;
use rustix::thread::CapabilitySet;

use crate::choice::Choice;

pub use mounts::{Reach, without_links};
pub use user::{User, group_number, user_number};

/// The message for a step that failed.
fn failed(step: &str) -> String {
    format!("cannot enter the sandbox: {step} (`--sandbox off` omits it)")
}

const NAMES: &str = "user, mounts, network, capabilities, files, calls";

/// A layer of the sandbox, see the module's head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)] // the table there has them
pub enum Layer {
    User,
    Mounts,
    Network,
    Capabilities,
    Files,
    Calls,
}

const LAYERS: [(&str, Layer); 6] = [
    ("user", Layer::User),
    ("mounts", Layer::Mounts),
    ("network", Layer::Network),
    ("capabilities", Layer::Capabilities),
    ("files", Layer::Files),
    ("calls", Layer::Calls),
];

/// Which layers are wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layers(Vec<Layer>);

impl Layers {
    /// Reads `all`, `off`, names (only these), or names with a `-` before each (all but these).
    ///
    /// # Errors
    /// What is wrong with the list.
    pub fn parse(list: &str) -> anyhow::Result<Self> {
        let choice = Choice::read(list, &[','], "off").map_err(|why| anyhow!("--sandbox {list}: {why}"))?;
        let (named, on) = match choice {
            Choice::Only(names) => (names, true),
            Choice::AllBut(names) => (names, false),
        };
        let is_known = |word: &str| LAYERS.iter().any(|(name, _)| *name == word);
        if let Some(word) = named.iter().find(|word| !is_known(word)) {
            bail!("--sandbox {list}: {word:?} is no layer: all, off, or some of {NAMES}");
        }
        let wanted = LAYERS.iter().filter(|(name, _)| named.contains(name) == on);
        Ok(Self(wanted.map(|(_, layer)| *layer).collect()))
    }

    /// Whether a layer is on.
    #[must_use]
    pub fn has(&self, layer: Layer) -> bool {
        self.0.contains(&layer)
    }

    /// The names of those that are off.
    #[must_use]
    pub fn off(&self) -> Vec<&'static str> {
        let off = LAYERS.iter().filter(|(_, layer)| !self.has(*layer));
        off.map(|(name, _)| *name).collect()
    }
}

impl fmt::Display for Layers {
    /// As [`parse`](Layers::parse) reads them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.off().as_slice() {
            [] => f.write_str("all"),
            off if off.len() == LAYERS.len() => f.write_str("off"),
            off => write!(f, "-{}", off.join(",-")),
        }
    }
}

/// What is to be set up.
#[derive(Debug)]
pub struct Plan {
    /// Layers that are on.
    pub layers: Layers,
    /// User to switch to; `None`: no change.
    pub user: Option<User>,
    /// Paths that are needed later on.
    pub reach: Reach,
    /// Another program's sockets or maps are used: this needs the current network namespace and additional calls.
    pub external: bool,
    /// Which system calls stay allowed, if layer `calls` is on.
    pub calls: Calls,
    /// Capabilities that are needed later on, if there are any.
    pub keeps: CapabilitySet,
}

/// A table of system calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Calls {
    /// Those of a process that serves guests.
    Worker,
    /// Not yet: see [`limit_calls`].
    Later,
}

const OFF: &str = "not confined";
/// What an empty root directory, or an empty network, needs.
const NEEDS: &str = "an empty one needs CAP_SYS_ADMIN";

/// Whether systemd started this process as a service (systemd.exec(5), `$INVOCATION_ID`).
fn is_service() -> bool {
    std::env::var_os("INVOCATION_ID").is_some()
}

/// Enters the sandbox; see the module's head. The calling thread must be the only one.
///
/// # Errors
/// The step that failed; the process is half in the sandbox then, and should end.
pub fn enter(plan: &Plan) -> anyhow::Result<Sandbox> {
    // Page size and vDSO are looked up once. Kernels before 6.4 (without PR_GET_AUXV) report them only in a file, which
    // cannot be opened later.
    let _ = rustix::param::page_size();
    let network = match plan.layers.has(Layer::Network) {
        false => OFF.to_owned(),
        true if plan.external => "that of the interfaces, which are used here".to_owned(),
        true => leave_network(),
    };
    let mounts = match plan.layers.has(Layer::Mounts) {
        true => mounts::leave(&plan.reach),
        false => OFF.to_owned(),
    };
    let locks = match plan.external {
        true => capabilities::locked_memory(),
        // Leased queues need none: the steward locks their memory.
        false => CapabilitySet::empty(),
    };
    let stays = locks | (capabilities::permitted() & plan.keeps);
    if plan.layers.has(Layer::Capabilities) {
        crate::capabilities::empty_bounding_set(stays);
    }
    let become_whom = plan.user.as_ref().filter(|_| plan.layers.has(Layer::User));
    if let Some(user) = become_whom {
        // Keeps capabilities if some are to stay, or if the layer that drops them is off.
        user.enter(!stays.is_empty() || !plan.layers.has(Layer::Capabilities))?;
    }
    let capabilities = match plan.layers.has(Layer::Capabilities) {
        true => capabilities::drop_all(stays)?,
        false => OFF.to_owned(),
    };
    let files = match plan.layers.has(Layer::Files) {
        true => files::confine(),
        false => OFF.to_owned(),
    };
    let user = user::current();
    let calls = match plan.layers.has(Layer::Calls) {
        true if plan.calls == Calls::Later => "later".to_owned(),
        true => filter::install(&filter::worker(plan.external))?,
        false => OFF.to_owned(),
    };
    Ok(Sandbox {
        user,
        mounts,
        network,
        capabilities,
        files,
        calls,
    })
}

/// Allows this process, which entered the sandbox with [`Calls::Later`], only the gateway's calls; returns how many
/// there are, in words.
///
/// # Errors
/// The kernel does not take the filter.
pub fn limit_calls() -> anyhow::Result<String> {
    filter::install(&[calls::API])
}

fn leave_network() -> String {
    #[allow(deprecated)] // its replacement is unsafe for the sake of CLONE_FILES, which is not asked for
    let left = rustix::thread::unshare(rustix::thread::UnshareFlags::NEWNET);
    match left {
        Ok(()) => "empty".to_owned(),
        Err(Errno::PERM) => {
            let list = std::fs::read_to_string("/proc/self/net/dev").unwrap_or_default();
            network_of_service(is_service(), &list)
        }
        Err(errno) => format!("{OFF} ({errno})"),
    }
}

/// The network that a process without CAP_SYS_ADMIN stays in. `list`: what /proc/net/dev has, two lines of heading
/// and one for each interface.
fn network_of_service(is_service: bool, list: &str) -> String {
    let mut interfaces = list
        .lines()
        .skip(2)
        .map(|line| line.trim_start().starts_with("lo:"));
    match (is_service, interfaces.next(), interfaces.next()) {
        (true, Some(true), None) => "only lo, confined by systemd (PrivateNetwork=)".to_owned(),
        (true, ..) => format!("{OFF} ({NEEDS}, or PrivateNetwork=yes in the unit)"),
        (false, ..) => format!("{OFF} ({NEEDS})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_systemd_confines_is_reported_as_confined() {
        let heading = "Inter-|   Receive\n face |bytes\n";
        let (lo, eth0) = ("    lo:       0       0\n", "  eth0:  5668     572\n");
        let private = format!("{heading}{lo}");
        let shared = format!("{heading}{lo}{eth0}");
        assert_eq!(
            network_of_service(true, &private),
            "only lo, confined by systemd (PrivateNetwork=)"
        );
        for (is_service, list) in [(true, &shared), (false, &private), (false, &shared)] {
            let said = network_of_service(is_service, list);
            assert!(
                said.starts_with("not confined (an empty one needs CAP_SYS_ADMIN"),
                "{said}"
            );
        }
        assert_eq!(
            mounts::of_service(true, true),
            "read-only, confined by systemd (ProtectSystem=)"
        );
        assert!(mounts::of_service(true, false).ends_with("or ProtectSystem=strict in the unit)"));
        assert!(mounts::of_service(false, true).starts_with("not confined"));
    }

    #[test]
    fn layers_are_read_as_a_list() {
        let layers = |list: &str| Layers::parse(list).expect(list);
        assert_eq!(layers("off"), Layers(Vec::new()));
        for list in ["off", "all", "user,calls"] {
            assert_eq!(layers(&layers(list).to_string()), layers(list), "{list}");
        }
        assert_eq!(layers("files"), Layers(vec![Layer::Files]));
        assert!(layers("all").off().is_empty());
        assert_eq!(
            layers("user,calls").off(),
            ["mounts", "network", "capabilities", "files"]
        );
    }

    #[test]
    fn layer_taken_away_leaves_all_others_on() {
        for list in ["-files", "all,-files"] {
            let layers = Layers::parse(list).expect(list);
            assert_eq!(layers.off(), ["files"], "{list}");
            assert_eq!(Layers::parse(&layers.to_string()).expect("said"), layers);
        }
    }

    #[test]
    fn list_that_is_none_names_the_word() {
        for (list, word) in [
            ("seccomp", "\"seccomp\""),
            ("-seccomp", "\"seccomp\""),
            ("none", "\"none\""),
        ] {
            let error = Layers::parse(list).expect_err(list).to_string();
            assert!(error.contains(word) && error.contains(NAMES), "{error}");
        }
        for list in ["-all", "", "off,-files", "off,user", "user,-files"] {
            let error = Layers::parse(list).expect_err(list).to_string();
            assert!(!error.contains(NAMES), "{list}: {error}");
        }
    }
}
