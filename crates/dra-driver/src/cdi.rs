//! What a container gets of a claim: a file for the container runtime (Container Device Interface, CDI), and files with
//! metadata of devices (KEP-5304).
//!
//! The runtime reads `CDI_DIR/DRIVER-UID.json` when it creates a container. The whole claim's directory is mounted once
//! (edits of the file). Each request is a device: it sets the environment variables with the paths of its sockets, and
//! mounts its metadata where k8s.io/dynamic-resource-allocation documents it (api/metadata/doc.go). A file of metadata has
//! the same object in each version of its format, newest first.

use std::fs::{self, File};
use std::io;
use std::path::PathBuf;

use serde_json::{Map, Value, json};

use crate::checkpoint::{Checkpoint, ClaimName, ClaimPort, absent_is_fine, write_whole};
use crate::names;

/// Version of CDI that has all that is used here.
const CDI: &str = "0.5.0";
/// Where containers find metadata of devices.
const METADATA: &str = "/var/run/kubernetes.io/dra-device-attributes";
/// Versions of the metadata.
const METADATA_VERSIONS: [&str; 2] = ["v1beta1", "v1alpha1"];
/// The driver writes these files again when it starts, so they need not survive a power failure.
const NO_SYNC: fn(&File) -> io::Result<()> = |_| Ok(());
/// Mount options: the directory is for sockets, and nothing else.
const OPTIONS: [&str; 5] = ["ro", "bind", "nosuid", "nodev", "noexec"];

/// Where the files are.
#[derive(Debug)]
pub(crate) struct Files {
    pub(crate) driver: String,
    pub(crate) cdi: PathBuf,
    pub(crate) metadata: PathBuf,
}

impl Files {
    /// The device of a request, in the runtime's words.
    pub(crate) fn id(&self, claim: &ClaimName, request: &str) -> String {
        format!("{}/claim={}", self.driver, device_name(claim, request))
    }

    /// Writes the files of a claim.
    ///
    /// # Errors
    /// A file cannot be written.
    pub(crate) fn write(&self, checkpoint: &Checkpoint, sockets: &str) -> io::Result<()> {
        let claim = &checkpoint.claim;
        let metadata = self.metadata.join(&claim.uid);
        fs::create_dir_all(&metadata)?;
        let mut devices = Vec::new();
        for (request, ports) in by_request(&checkpoint.ports) {
            let file = metadata.join(format!("{request}.json"));
            write_whole(&file, &self.metadata_of(claim, &ports), NO_SYNC)?;
            let environment = |port: &&ClaimPort| {
                let name = names::variable(&claim.in_containers(), request, port.device.number);
                format!("{name}={}", socket_in_container(claim, port))
            };
            devices.push(json!({
                "name": device_name(claim, request),
                "containerEdits": {
                    "env": ports.iter().map(environment).collect::<Vec<_>>(),
                    "mounts": [{
                        "hostPath": file,
                        "containerPath": self.metadata_in_container(claim, request),
                        "options": OPTIONS,
                    }],
                },
            }));
        }
        let mount = json!({
            "hostPath": sockets, "containerPath": names::in_container(&claim.in_containers()), "options": OPTIONS,
        });
        let text = json!({
            "cdiVersion": CDI,
            "kind": format!("{}/claim", self.driver),
            "containerEdits": {"mounts": [mount]},
            "devices": devices,
        });
        write_whole(&self.path(&claim.uid), text.to_string().as_bytes(), NO_SYNC)
    }

    /// The names of a claim, as its metadata has them; `None`: it has none, or they cannot be read.
    pub(crate) fn claim(&self, uid: &str) -> Option<ClaimName> {
        let file = fs::read_dir(self.metadata.join(uid)).ok()?.next()?.ok()?;
        let text = fs::read(file.path()).ok()?;
        let mut versions = serde_json::Deserializer::from_slice(&text).into_iter::<Value>();
        let metadata = versions.next()?.ok()?;
        let text = |path: &str| Some(metadata.pointer(path)?.as_str()?.to_owned());
        Some(ClaimName {
            namespace: text("/metadata/namespace")?,
            name: text("/metadata/name")?,
            uid: uid.to_owned(),
            in_pod: text("/podClaimName"),
        })
    }

    /// Removes the files of a claim.
    ///
    /// # Errors
    /// A file cannot be removed.
    pub(crate) fn remove(&self, uid: &str) -> io::Result<()> {
        let path = self.path(uid);
        // A driver that was killed may not have finished it.
        absent_is_fine(fs::remove_file(path.with_extension("new")))?;
        absent_is_fine(fs::remove_file(path))?;
        absent_is_fine(fs::remove_dir_all(self.metadata.join(uid)))
    }

    /// UIDs of all claims that have files.
    ///
    /// # Errors
    /// A directory cannot be read.
    pub(crate) fn all(&self) -> io::Result<Vec<String>> {
        let prefix = format!("{}-", self.driver);
        let names = |directory: &PathBuf| -> io::Result<Vec<String>> {
            let entries = fs::read_dir(directory)?;
            Ok(entries
                .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
                .collect())
        };
        let uid = |name: String| {
            let name = name.strip_prefix(&prefix)?;
            let uid = name.strip_suffix(".json").or_else(|| name.strip_suffix(".new"))?;
            Some(uid.to_owned())
        };
        let mut uids = names(&self.metadata)?;
        // A driver called DRIVER-2 has DRIVER-2-UID.json.
        let of_cdi = names(&self.cdi)?.into_iter().filter_map(uid);
        uids.extend(of_cdi.filter(|uid| uid.len() == names::UID_LENGTH));
        Ok(uids.into_iter().filter(|uid| names::is_uid(uid)).collect())
    }

    fn path(&self, uid: &str) -> PathBuf {
        self.cdi.join(format!("{}-{uid}.json", self.driver))
    }

    fn metadata_of(&self, claim: &ClaimName, ports: &[&ClaimPort]) -> Vec<u8> {
        let device = |port: &&ClaimPort| {
            json!({
                "driver": self.driver, "pool": port.device.pool, "name": port.device.device,
                "attributes": {
                    "network": {"string": port.text("network")},
                    "socketPath": {"string": socket_in_container(claim, port)},
                    "queues": {"int": port.keys.get("queues").and_then(Value::as_u64).unwrap_or(1)},
                },
                "networkData": network_data(port),
            })
        };
        let devices: Vec<Value> = ports.iter().map(device).collect();
        let request = ports.first().map_or("", |port| &port.device.request);
        let text = METADATA_VERSIONS.map(|version| {
            let mut object = json!({
                "apiVersion": format!("metadata.resource.k8s.io/{version}"), "kind": "DeviceMetadata",
                "metadata": {
                    "name": claim.name, "namespace": claim.namespace, "uid": claim.uid, "generation": 1,
                },
                "requests": [{"name": request, "devices": devices}],
            });
            if let Some(name) = &claim.in_pod {
                object["podClaimName"] = name.as_str().into();
            }
            format!("{object}\n")
        });
        text.concat().into_bytes()
    }

    fn metadata_in_container(&self, claim: &ClaimName, request: &str) -> String {
        let (kind, name) = match &claim.in_pod {
            Some(name) => ("resourceclaimtemplates", name),
            None => ("resourceclaims", &claim.name),
        };
        format!("{METADATA}/{kind}/{name}/{request}/{}-metadata.json", self.driver)
    }
}

/// The path of a port's socket in containers.
pub(crate) fn socket_in_container(claim: &ClaimName, port: &ClaimPort) -> String {
    format!("{}/{}", names::in_container(&claim.in_containers()), port.socket)
}

/// Addresses of a port, as Kubernetes writes them.
pub(crate) fn network_data(port: &ClaimPort) -> Value {
    let ips = port.keys.get("ips").map(|ips| match ips {
        Value::Array(list) => list
            .iter()
            .filter_map(Value::as_str)
            .map(with_length)
            .collect::<Vec<_>>(),
        text => text
            .as_str()
            .unwrap_or_default()
            .split(',')
            .map(with_length)
            .collect(),
    });
    // The status of a claim has room for 16.
    let ips: Vec<String> = ips.unwrap_or_default().into_iter().take(16).collect();
    let mut data = Map::from_iter([("hardwareAddress".to_owned(), port.text("mac").into())]);
    if !ips.is_empty() {
        data.insert("ips".to_owned(), ips.into());
    }
    data.into()
}

/// An IP address with its prefix length.
fn with_length(ip: &str) -> String {
    let ip = ip.trim();
    match (ip.contains('/'), ip.contains(':')) {
        (true, _) => ip.to_owned(),
        (false, true) => format!("{ip}/128"),
        (false, false) => format!("{ip}/32"),
    }
}

/// Ports by their request, in order.
fn by_request(ports: &[ClaimPort]) -> Vec<(&str, Vec<&ClaimPort>)> {
    let mut all: Vec<(&str, Vec<&ClaimPort>)> = Vec::new();
    for port in ports {
        let request = names::base(&port.device.request);
        match all.iter_mut().find(|(known, _)| *known == request) {
            Some((_, its)) => its.push(port),
            None => all.push((request, vec![port])),
        }
    }
    all
}

fn device_name(claim: &ClaimName, request: &str) -> String {
    format!("{}_{}", claim.uid, names::base(request))
}
