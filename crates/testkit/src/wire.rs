//! A wire between two interfaces: the daemon's NIC and the world. Two ends of veth, or two NICs of this machine that
//! its maker joined.
//!
//! NICs are named by their addresses, as nothing else of them is sure in a small guest. Each of the two is moved to a
//! namespace of its own, and comes back by itself when that is removed.

use std::fs;
use std::path::Path;
use std::time::Duration;

use crate::process::run;
use crate::{NetNs, VethPair, wait};

/// Interfaces of this machine, as the namespace in which this process runs sees them.
const INTERFACES: &str = "/sys/class/net";
/// How long a NIC may take to come back from a namespace that was removed, and to have its link.
const LINK_LIMIT: Duration = Duration::from_secs(30);

/// What a wire is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wire {
    /// A veth pair.
    Veth,
    /// Two NICs.
    Nics {
        /// What it is called, where that is not the driver.
        name: Option<String>,
        /// Driver of the daemon's one.
        driver: String,
        /// Address of the daemon's one, as in `52:54:00:00:00:01`.
        nic: String,
        /// Address of the other one.
        peer: String,
        /// NUMA node of the daemon's one, if it is on one.
        node: Option<u64>,
    },
}

impl Wire {
    /// Of `veth`, or `[NAME/]DRIVER=ADDRESS,ADDRESS[,NODE]`.
    pub fn parse(text: &str) -> Option<Self> {
        if text == "veth" {
            return Some(Self::Veth);
        }
        let (names, addresses) = text.split_once('=')?;
        let (name, driver) = match names.split_once('/') {
            Some((name, driver)) => (Some(name.to_owned()), driver),
            None => (None, names),
        };
        let (nic, rest) = addresses.split_once(',')?;
        let (peer, node) = match rest.split_once(',') {
            Some((peer, node)) => (peer, Some(node.parse().ok()?)),
            None => (rest, None),
        };
        Some(Self::Nics {
            name,
            driver: driver.to_owned(),
            nic: nic.to_owned(),
            peer: peer.to_owned(),
            node,
        })
    }

    /// What it is called.
    pub fn name(&self) -> &str {
        match self {
            Self::Nics { name: Some(name), .. } => name,
            _ => self.driver(),
        }
    }

    /// Whether its NICs are devices of a daemon outside this machine: then what a daemon inside makes of them is the
    /// raw benchmarks.
    pub fn is_served(&self) -> bool {
        matches!(self, Self::Nics { name: Some(_), .. })
    }

    /// Whether it is of the rig's own driver (tests/nic), which has all that the kernel knows of.
    pub fn is_the_rigs(&self) -> bool {
        self.driver() == "rig_nic"
    }

    /// Driver of the daemon's NIC.
    pub fn driver(&self) -> &str {
        match self {
            Self::Veth => "veth",
            Self::Nics { driver, .. } => driver,
        }
    }

    /// NUMA node of the daemon's NIC, if it is on one.
    pub fn node(&self) -> Option<u64> {
        match self {
            Self::Veth => None,
            Self::Nics { node, .. } => *node,
        }
    }

    /// Lays it: both ends are up, with one queue and an MTU of 1500 bytes, and take frames to every station.
    ///
    /// # Panics
    /// If an interface is missing, or is another driver's.
    pub fn lay(&self) -> VethPair {
        match self {
            Self::Veth => VethPair::new(),
            Self::Nics {
                driver, nic, peer, ..
            } => lay_nics(driver, nic, peer),
        }
    }

    /// Whether the daemon's NIC can have a queue beside the one that all frames come to.
    pub fn has_a_queue_to_spare(&self) -> bool {
        matches!(self.driver(), "veth" | "igb" | "rig_nic")
    }

    /// The same as [`lay`](Self::lay), where the daemon's NIC has two queues, all frames come to the first, and it
    /// leaves tags in them.
    ///
    /// # Panics
    /// If it cannot be so.
    pub fn lay_with_a_queue_to_spare(&self) -> VethPair {
        assert!(self.has_a_queue_to_spare(), "{}", self.driver());
        let nic = VethPair::NIC;
        if *self == Self::Veth {
            let pair = VethPair::with(2, 1500);
            pair.far.run("ethtool", &["-L", VethPair::WIRE, "tx", "1"]);
            pair.near.run("ethtool", &["-K", nic, "rxvlan", "off"]);
            return pair;
        }
        let pair = self.lay();
        pair.near.run("ethtool", &["-L", nic, "combined", "2"]);
        pair.near.run("ethtool", &["-X", nic, "equal", "1"]);
        await_link(&pair.near, nic);
        pair
    }
}

fn lay_nics(driver: &str, nic: &str, peer: &str) -> VethPair {
    // Debian's default, fq_codel, sends what it takes for another flow before frames that wait, and takes the bytes
    // behind a tag for a flow. Who tests looks at the order of all.
    run("sysctl", &["-qw", "net.core.default_qdisc=pfifo"]);
    let pair = VethPair {
        near: NetNs::new("near"),
        far: NetNs::new("far"),
    };
    for (address, namespace, name) in [
        (nic, &pair.near, VethPair::NIC),
        (peer, &pair.far, VethPair::WIRE),
    ] {
        let found = wait::until_some(LINK_LIMIT, || interface_of(address));
        let found = found.unwrap_or_else(|| panic!("no interface has the address {address}"));
        if address == nic {
            assert_eq!(driver_of(&found), driver, "driver of {found}");
        }
        run("ip", &["link", "set", &found, "down"]);
        run(
            "ip",
            &["link", "set", &found, "netns", namespace.name(), "name", name],
        );
        namespace.ip(&["link set", name, "mtu 1500 arp off promisc on up"]);
    }
    // A case before may have let its interrupts wait.
    let settings = format!("/sys/class/net/{}", VethPair::NIC);
    let at_once = format!("echo 0 >{settings}/napi_defer_hard_irqs; echo 0 >{settings}/gro_flush_timeout");
    let _ = pair.near.with_sysfs(&at_once);
    if driver == "igb" || driver == "rig_nic" {
        // The others have one queue only, and no tags that they take off.
        pair.near.run("ethtool", &["-L", VethPair::NIC, "combined", "1"]);
        pair.near.run("ethtool", &["-K", VethPair::NIC, "rxvlan", "off"]);
    }
    if driver == "rig_nic" {
        // A case before may have given all frames to one queue.
        pair.near.run("ethtool", &["-X", VethPair::NIC, "default"]);
    }
    await_link(&pair.near, VethPair::NIC);
    await_link(&pair.far, VethPair::WIRE);
    pair
}

/// Waits until an interface has its link.
fn await_link(namespace: &NetNs, name: &str) {
    let up = || {
        let said = namespace.output_of("ip", &["link", "show", name]);
        said.contains("LOWER_UP")
    };
    assert!(wait::until(LINK_LIMIT, up), "{name} gets no link");
}

/// Name of the interface that has an address, in the namespace of this process.
fn interface_of(address: &str) -> Option<String> {
    let entries = fs::read_dir(INTERFACES).ok()?;
    let mut names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names.find(|name| {
        fs::read_to_string(Path::new(INTERFACES).join(name).join("address"))
            .is_ok_and(|found| found.trim() == address)
    })
}

/// Driver of an interface; empty if it has none.
fn driver_of(name: &str) -> String {
    let link = fs::read_link(Path::new(INTERFACES).join(name).join("device/driver"));
    let link = link.unwrap_or_default();
    link.file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default()
}
