//! Publishes the daemon's networks as devices of this node: one slice, applied again whenever the networks change or
//! somebody else changed or deleted it, as kubelet does when the driver was away.

use std::collections::BTreeMap;
use std::fs;
use std::pin::pin;

use k8s_openapi::api::resource::v1::{
    CapacityRequestPolicy, CapacityRequestPolicyRange, Device, DeviceAttribute, DeviceCapacity, ResourcePool,
    ResourceSlice, ResourceSliceSpec,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{Api, ObjectMeta, Patch, PatchParams, WatchEvent, WatchParams};
use model::state::NetworkStatus;
use tokio::sync::watch;
use tokio_stream::StreamExt as _;

use super::{Cluster, PAUSE};
use crate::names;

/// Most devices in a slice.
const MOST: usize = 128;
/// Most queue pairs of a port.
const MOST_QUEUES: u32 = 128;
/// Longest name of an object, bytes.
const LONGEST_NAME: usize = 253;
/// Longest text of an attribute, bytes.
const LONGEST: usize = 64;

/// The device of a network. `ports`: how many the cluster may allocate on it.
pub(crate) fn device(network: &NetworkStatus, ports: u16) -> Device {
    let text = |text: &str| DeviceAttribute {
        string: Some(names::cut(text, LONGEST).to_owned()),
        ..Default::default()
    };
    let flag = |bool: bool| DeviceAttribute {
        bool: Some(bool),
        ..Default::default()
    };
    let number = |int: i64| DeviceAttribute {
        int: Some(int),
        ..Default::default()
    };
    let mut attributes = vec![
        ("network", text(&network.name)),
        ("mode", text(network.attached.as_deref().unwrap_or("internal"))),
        ("zeroCopy", flag(is_zero_copy(network))),
        ("vlans", flag(true)),
        ("overlay", flag(network.underlay.is_some() || is_tunnel(network))),
        ("mtu", number(network.mtu.into())),
    ];
    if let Some(uplink) = &network.uplink {
        let nic = Nic::of(uplink);
        attributes.push(("uplink", text(uplink)));
        attributes.extend(nic.driver.map(|driver| ("driver", text(&driver))));
        attributes.extend(
            nic.node
                .map(|node| ("resource.kubernetes.io/numaNode", number(node))),
        );
        attributes.extend(
            nic.root
                .map(|root| ("resource.kubernetes.io/pcieRoot", text(&root))),
        );
    }
    let attributes = attributes
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .collect();
    let capacity = BTreeMap::from([
        ("ports".to_owned(), capacity(ports.into(), 1)),
        (
            "queues".to_owned(),
            capacity(u32::from(ports) * MOST_QUEUES, MOST_QUEUES),
        ),
    ]);
    Device {
        name: names::device(&network.name),
        allow_multiple_allocations: Some(true),
        attributes: Some(attributes),
        capacity: Some(capacity),
        ..Default::default()
    }
}

/// A capacity of which a claim gets one, or up to `most`.
fn capacity(all: u32, most: u32) -> DeviceCapacity {
    let number = |number: u32| Quantity(number.to_string());
    let range = CapacityRequestPolicyRange {
        min: number(1),
        max: Some(number(most)),
        step: Some(number(1)),
    };
    DeviceCapacity {
        value: number(all),
        request_policy: Some(CapacityRequestPolicy {
            default: Some(number(1)),
            valid_range: Some(range),
            valid_values: None,
        }),
    }
}

fn is_zero_copy(network: &NetworkStatus) -> bool {
    let mut modes = network.queues.iter().map(|queue| queue.mode.as_deref());
    !network.queues.is_empty() && modes.all(|mode| mode == Some("zero-copy"))
}

/// Whether the uplink is a tunnel device.
fn is_tunnel(network: &NetworkStatus) -> bool {
    let device = |uplink: &String| fs::read_to_string(format!("/sys/class/net/{uplink}/uevent"));
    let uevent = network.uplink.as_ref().and_then(|uplink| device(uplink).ok());
    let types = ["DEVTYPE=vxlan", "DEVTYPE=geneve"];
    uevent.is_some_and(|uevent| types.iter().any(|its| uevent.contains(its)))
}

/// What sysfs has of a physical NIC.
#[derive(Debug, Default)]
struct Nic {
    driver: Option<String>,
    node: Option<i64>,
    /// PCIe root, `pci<domain>:<bus>`.
    root: Option<String>,
}

impl Nic {
    fn of(interface: &str) -> Self {
        let Ok(device) = fs::canonicalize(format!("/sys/class/net/{interface}/device")) else {
            return Self::default();
        };
        let driver = fs::read_link(device.join("driver")).ok();
        let driver = driver.and_then(|path| Some(path.file_name()?.to_str()?.to_owned()));
        let node = fs::read_to_string(device.join("numa_node")).ok();
        let node = node.and_then(|node| node.trim().parse().ok());
        let mut parts = device.components().filter_map(|part| part.as_os_str().to_str());
        Self {
            driver,
            // -1: there is one only.
            node: node.filter(|node| *node >= 0),
            root: parts.find(|part| part.starts_with("pci")).map(str::to_owned),
        }
    }
}

/// Publishes the devices, for ever.
pub(crate) async fn publish(cluster: Cluster, mut devices: watch::Receiver<Option<Vec<Device>>>) {
    let (mut failed, mut version) = (String::new(), None);
    loop {
        let wanted = devices.borrow_and_update().clone();
        let Some(wanted) = wanted else {
            // The driver ends.
            let Ok(()) = devices.changed().await else { return };
            continue;
        };
        // A node that was deleted and is back is another owner.
        let owner = cluster.owner().await;
        match cluster.apply(&wanted, &owner).await {
            Ok(slice) => {
                failed.clear();
                if version != slice.metadata.resource_version {
                    report(&wanted, &slice);
                    version.clone_from(&slice.metadata.resource_version);
                }
                tokio::select! {
                    () = cluster.until_altered(&slice) => {}
                    changed = devices.changed() => if changed.is_err() { return },
                }
            }
            Err(error) => {
                let error = super::reason(&error);
                if error != failed {
                    tracing::warn!(
                        "cannot publish the networks: {error}: check the driver's access; retrying"
                    );
                    failed = error;
                }
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

fn report(wanted: &[Device], slice: &ResourceSlice) {
    let names: Vec<&str> = wanted.iter().map(|device| device.name.as_str()).collect();
    tracing::info!(networks = names.join(","), "published");
    let devices = slice.spec.devices.iter().flatten();
    if devices
        .clone()
        .any(|device| device.allow_multiple_allocations.is_none())
    {
        tracing::warn!(
            "the cluster has no consumable capacity: each network can have one claim only: enable feature gate \
             DRAConsumableCapacity"
        );
    }
}

impl Cluster {
    fn slices(&self) -> Api<ResourceSlice> {
        Api::all(self.client.clone())
    }

    async fn apply(&self, devices: &[Device], owner: &OwnerReference) -> kube::Result<ResourceSlice> {
        if devices.len() > MOST {
            tracing::warn!("the daemon has more than {MOST} networks: only the first ones are published");
        }
        let name = names::short(&format!("{}-{}", self.node, self.driver), LONGEST_NAME);
        let slice = ResourceSlice {
            metadata: ObjectMeta {
                name: Some(name.clone()),
                owner_references: Some(vec![owner.clone()]),
                ..Default::default()
            },
            spec: ResourceSliceSpec {
                driver: self.driver.clone(),
                node_name: Some(self.node.clone()),
                pool: ResourcePool {
                    name: self.node.clone(),
                    generation: 1,
                    resource_slice_count: 1,
                },
                devices: Some(devices.iter().take(MOST).cloned().collect()),
                ..Default::default()
            },
        };
        let params = PatchParams::apply(&self.driver).force();
        self.slices().patch(&name, &params, &Patch::Apply(&slice)).await
    }

    /// Returns when the slice is another one, is gone, or may be, because the watch ended.
    async fn until_altered(&self, slice: &ResourceSlice) {
        let field = |text: &Option<String>| text.clone().unwrap_or_default();
        let (name, version) = (
            field(&slice.metadata.name),
            field(&slice.metadata.resource_version),
        );
        let params = WatchParams::default().fields(&format!("metadata.name={name}"));
        let slices = self.slices();
        if let Ok(events) = slices.watch(&params, &version).await {
            let mut events = pin!(events);
            while let Some(Ok(event)) = events.next().await {
                match event {
                    WatchEvent::Modified(now) | WatchEvent::Added(now) if now.spec == slice.spec => {}
                    WatchEvent::Bookmark(_) => {}
                    _ => return,
                }
            }
        }
        tokio::time::sleep(PAUSE).await;
    }
}
