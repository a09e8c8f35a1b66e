//! Metadata of claims' devices (KEP-5304): files that the DRA driver writes and Kubernetes mounts into the pod.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow};
use serde::Deserialize;

use crate::vmi::{Claim, Request};

/// The driver writes less than a kilobyte for each device.
const MAX_BYTES: u64 = 1 << 20;

/// `DeviceMetadata` of metadata.resource.k8s.io: only fields that all of its versions have.
#[derive(Debug, Deserialize)]
struct DeviceMetadata {
    #[serde(default)]
    requests: Vec<RequestMetadata>,
}

#[derive(Debug, Deserialize)]
struct RequestMetadata {
    #[serde(default)]
    devices: Vec<Device>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Device {
    #[serde(default)]
    attributes: Attributes,
    #[serde(default)]
    network_data: NetworkData,
}

/// Attributes that the driver writes, as in a ResourceSlice.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Attributes {
    socket_path: Option<Text>,
    queues: Option<Number>,
}

#[derive(Debug, Deserialize)]
struct Text {
    string: PathBuf,
}

#[derive(Debug, Deserialize)]
struct Number {
    int: u16,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct NetworkData {
    hardware_address: Option<String>,
}

/// The port that the driver made for a request.
#[derive(Debug)]
pub(crate) struct Port {
    /// Its socket, as all containers of the pod see it.
    pub(crate) socket: PathBuf,
    pub(crate) mac: String,
    /// Queue pairs.
    pub(crate) queues: u16,
}

/// The port of a request. If the request has several, the first, as everywhere in KubeVirt.
///
/// The path is defined in `k8s.io/dynamic-resource-allocation/api/metadata`. The file has the same object once for each
/// version of the format, newest first; readers use the first.
///
/// # Errors
/// The file is not there, or not the driver's.
pub(crate) fn port(root: &Path, driver: &str, request: &Request<'_>) -> anyhow::Result<Port> {
    let claim = match request.claim {
        Claim::Named(name) => Path::new("resourceclaims").join(name),
        Claim::OfTemplate(name) => Path::new("resourceclaimtemplates").join(name),
    };
    let path = root
        .join(claim)
        .join(request.request)
        .join(format!("{driver}-metadata.json"));
    let file = File::open(&path).map_err(|error| {
        anyhow!(
            "{}: {error}; the claim has to be one of the driver {driver}, and KubeVirt must give it to sidecars of \
             network binding plugins (feature gate NetworkDevicesWithDRA, pull request 18741)",
            path.display()
        )
    })?;
    let file = file.take(MAX_BYTES);
    let mut versions = serde_json::Deserializer::from_reader(file).into_iter::<DeviceMetadata>();
    let metadata = versions.next().transpose();
    let metadata = metadata.with_context(|| format!("{} is no metadata of a device", path.display()))?;
    let requests = metadata.map(|metadata| metadata.requests).unwrap_or_default();
    let port = |Device {
                    attributes,
                    network_data,
                }| {
        Some(Port {
            socket: attributes.socket_path?.string,
            mac: network_data.hardware_address?,
            queues: attributes.queues.map_or(1, |queues| queues.int),
        })
    };
    let mut devices = requests.into_iter().flat_map(|request| request.devices);
    devices.find_map(port).with_context(|| {
        format!(
            "{} has no device with `socketPath` and `hardwareAddress`; is the driver older than this program?",
            path.display()
        )
    })
}
