//! The parts of a VirtualMachineInstance (kubevirt.io/v1) that decide which interfaces the sidecar adds.

use anyhow::{Context as _, bail};
use serde::Deserialize;

/// A VirtualMachineInstance, as virt-launcher sends it.
#[derive(Debug, Deserialize)]
pub(crate) struct Vmi {
    spec: Spec,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Spec {
    domain: Domain,
    #[serde(default)]
    networks: Vec<Network>,
    #[serde(default)]
    resource_claims: Vec<PodClaim>,
}

#[derive(Debug, Deserialize)]
struct Domain {
    #[serde(default)]
    devices: Devices,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Devices {
    #[serde(default)]
    interfaces: Vec<Interface>,
    #[serde(default)]
    network_interface_multiqueue: Option<bool>,
    #[serde(default)]
    use_virtio_transitional: Option<bool>,
}

/// An interface of the VM.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Interface {
    pub(crate) name: String,
    binding: Option<Binding>,
    pub(crate) mac_address: Option<String>,
    pub(crate) model: Option<String>,
    pub(crate) pci_address: Option<String>,
    pub(crate) boot_order: Option<u32>,
    pub(crate) acpi_index: Option<u32>,
    /// `absent`: it is about to be removed. `down`: the guest sees no carrier.
    pub(crate) state: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Binding {
    name: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Network {
    name: String,
    resource_claim: Option<Reference>,
}

/// A network's request in a claim of the pod.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Reference {
    claim_name: Option<String>,
    request_name: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodClaim {
    name: String,
    resource_claim_name: Option<String>,
}

/// A request of a claim, by the names that its pod knows.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Request<'a> {
    pub(crate) claim: Claim<'a>,
    pub(crate) request: &'a str,
}

/// A claim, by the name that is the same on each node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Claim<'a> {
    /// The name of a ResourceClaim.
    Named(&'a str),
    /// The pod's name for a claim that Kubernetes made from a template.
    OfTemplate(&'a str),
}

impl Vmi {
    /// The interfaces that have this binding and are not about to be removed.
    pub(crate) fn interfaces<'a>(&'a self, binding: &'a str) -> impl Iterator<Item = &'a Interface> {
        self.spec
            .domain
            .devices
            .interfaces
            .iter()
            .filter(move |interface| {
                interface.binding.as_ref().is_some_and(|its| its.name == binding)
                    && interface.state.as_deref() != Some("absent")
            })
    }

    /// The request of the claim that an interface's network uses.
    ///
    /// # Errors
    /// The VM has no such network or claim.
    pub(crate) fn request(&self, interface: &Interface, binding: &str) -> anyhow::Result<Request<'_>> {
        let name = &interface.name;
        let network = self.spec.networks.iter().find(|network| network.name == *name);
        let network = network.with_context(|| {
            format!("interface {name:?}: the VM has no network {name:?}; add it to spec.networks")
        })?;
        let reference = network.resource_claim.as_ref();
        let names =
            reference.and_then(|its| Some((its.claim_name.as_deref()?, its.request_name.as_deref()?)));
        let (claim_name, request) = names.with_context(|| {
            format!(
                "network {name:?}: `resourceClaim` with `claimName` and `requestName` is missing; the binding {binding:?} \
                 needs a claim"
            )
        })?;
        let claim = self
            .spec
            .resource_claims
            .iter()
            .find(|claim| claim.name == claim_name);
        let claim = claim.with_context(|| {
            format!(
                "network {name:?}: the VM has no resource claim {claim_name:?}; add it to spec.resourceClaims"
            )
        })?;
        let claim = match &claim.resource_claim_name {
            Some(named) => Claim::Named(named),
            None => Claim::OfTemplate(&claim.name),
        };
        Ok(Request { claim, request })
    }

    /// Libvirt's name for the device model of an interface, as KubeVirt chooses it for its own virtio devices.
    ///
    /// # Errors
    /// The interface asks for a device that is not virtio.
    pub(crate) fn model(&self, interface: &Interface) -> anyhow::Result<&'static str> {
        let Interface { name, model, .. } = interface;
        match (model.as_deref(), self.spec.domain.devices.use_virtio_transitional) {
            (None | Some("" | "virtio"), Some(true)) => Ok("virtio-transitional"),
            (None | Some("" | "virtio"), _) => Ok("virtio-non-transitional"),
            (Some(model), _) => {
                bail!(
                    "interface {name:?}: model {model:?} is not possible with vhost-user; leave `model` out"
                )
            }
        }
    }

    /// Whether interfaces have several queue pairs.
    pub(crate) fn is_multiqueue(&self) -> bool {
        self.spec.domain.devices.network_interface_multiqueue == Some(true)
    }
}
