//! The device of an interface in sysfs.
//!
//! The device is found by its bus, as rtnetlink names both, and not below /sys/class/net, which shows the interfaces of
//! the network namespace that sysfs was mounted in.

use std::fs;
use std::path::{Path, PathBuf};

use xsk::NumaNode;

/// All buses, and their devices.
pub(crate) const BUSES: &str = "/sys/bus";

/// The NUMA node of a device; `None` if it is on none (-1), or if the bus does not report it. Few buses do (PCI:
/// `numa_node`, drivers/pci/pci-sysfs.c). A device on another bus has the node of its parent (`device_add`,
/// drivers/base/core.c): a virtio device's parent is a PCI device.
pub(crate) fn node_of(buses: &Path, bus: &str, device: &str) -> Option<NumaNode> {
    let node = attribute(buses, bus, device, "numa_node")?;
    NumaNode::new(node.trim().parse().ok()?)
}

/// Whether an IOMMU translates the addresses that a device uses for DMA: so unless the device is in no group, or its
/// group's are those of memory (`type`, Documentation/ABI/testing/sysfs-kernel-iommu_groups).
pub(crate) fn is_translated(buses: &Path, bus: &str, device: &str) -> bool {
    attribute(buses, bus, device, "iommu_group/type").is_some_and(|value| value.trim() != "identity")
}

/// The content of that file of a device, or else of the device that it is part of.
fn attribute(buses: &Path, bus: &str, device: &str, file: &str) -> Option<String> {
    let device = place_of(buses, bus, device)?;
    let mut values = device
        .ancestors()
        .map(|place| fs::read_to_string(place.join(file)));
    values.find_map(Result::ok)
}

fn place_of(buses: &Path, bus: &str, device: &str) -> Option<PathBuf> {
    let is_name = |name: &str| !name.contains('/') && !name.starts_with('.');
    if !is_name(bus) || !is_name(device) {
        return None;
    }
    fs::canonicalize(buses.join(bus).join("devices").join(device)).ok()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A virtio device in a PCI device that says this of its node, as sysfs shows them.
    fn sysfs(numa_node: &str) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a directory");
        let pci = root.path().join("devices/pci0000:00/0000:00:03.0");
        fs::create_dir_all(pci.join("virtio0")).expect("made");
        fs::write(pci.join("numa_node"), numa_node).expect("written");
        for (bus, name, target) in [
            ("pci", "0000:00:03.0", "0000:00:03.0"),
            ("virtio", "virtio0", "0000:00:03.0/virtio0"),
        ] {
            let devices = root.path().join("bus").join(bus).join("devices");
            fs::create_dir_all(&devices).expect("made");
            let target = Path::new("../../../devices/pci0000:00").join(target);
            symlink(target, devices.join(name)).expect("linked");
        }
        root
    }

    #[test]
    fn device_is_on_the_node_that_its_bus_or_the_one_above_tells() {
        let root = sysfs("1\n");
        let node = |bus, device| node_of(&root.path().join("bus"), bus, device);
        assert_eq!(node("pci", "0000:00:03.0"), NumaNode::new(1));
        assert_eq!(node("virtio", "virtio0"), NumaNode::new(1));
        assert_eq!(node("virtio", "virtio1"), None);
        assert_eq!(node("pci", "../../virtio/devices/virtio0"), None);
        assert_eq!(node("..", "0000:00:03.0"), None);
    }

    #[test]
    fn dma_addresses_are_translated_by_the_iommu_group_of_the_device() {
        let root = sysfs("0");
        let translated = |device| is_translated(&root.path().join("bus"), "virtio", device);
        assert!(!translated("virtio0"), "it is in no group");
        let group = root.path().join("devices/pci0000:00/0000:00:03.0/iommu_group");
        fs::create_dir(&group).expect("made");
        for (value, is) in [("identity\n", false), ("DMA\n", true), ("DMA-FQ\n", true)] {
            fs::write(group.join("type"), value).expect("written");
            assert_eq!(translated("virtio0"), is, "{value:?}");
        }
        assert!(!translated("virtio1"), "it is not there");
    }

    #[test]
    fn device_on_no_node_or_on_none_that_can_be_has_none() {
        for value in ["-1\n", "1024\n", "one\n", ""] {
            let root = sysfs(value);
            assert_eq!(
                node_of(&root.path().join("bus"), "virtio", "virtio0"),
                None,
                "{value:?}"
            );
        }
    }
}
