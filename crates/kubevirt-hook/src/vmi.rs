//! The parts of a VirtualMachineInstance (kubevirt.io/v1) that decide which interfaces the sidecar adds.

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

/// Why a VirtualMachineInstance cannot be served.
#[derive(Debug, thiserror::Error)]
pub(crate) enum VmiError {
    #[error("interface {interface:?}: the VM has no network {interface:?}; add it to spec.networks")]
    NoNetwork { interface: String },
    #[error(
        "network {network:?}: `resourceClaim` with `claimName` and `requestName` is missing; the binding {binding:?} \
         needs a claim"
    )]
    NoClaim { network: String, binding: String },
    #[error("network {network:?}: the VM has no resource claim {claim:?}; add it to spec.resourceClaims")]
    UnknownClaim { network: String, claim: String },
    #[error("interface {interface:?}: model {model:?} is not possible with vhost-user; leave `model` out")]
    Model { interface: String, model: String },
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
    pub(crate) fn request(&self, interface: &Interface, binding: &str) -> Result<Request<'_>, VmiError> {
        let name = &interface.name;
        let network = self.spec.networks.iter().find(|network| network.name == *name);
        let network = network.ok_or_else(|| VmiError::NoNetwork {
            interface: name.clone(),
        })?;
        let reference = network.resource_claim.as_ref();
        let names =
            reference.and_then(|its| Some((its.claim_name.as_deref()?, its.request_name.as_deref()?)));
        let (claim_name, request) = names.ok_or_else(|| VmiError::NoClaim {
            network: name.clone(),
            binding: binding.to_owned(),
        })?;
        let claim = self
            .spec
            .resource_claims
            .iter()
            .find(|claim| claim.name == claim_name);
        let claim = claim.ok_or_else(|| VmiError::UnknownClaim {
            network: name.clone(),
            claim: claim_name.to_owned(),
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
    pub(crate) fn model(&self, interface: &Interface) -> Result<&'static str, VmiError> {
        match interface.model.as_deref() {
            None | Some("" | "virtio") => {}
            Some(model) => {
                return Err(VmiError::Model {
                    interface: interface.name.clone(),
                    model: model.to_owned(),
                });
            }
        }
        Ok(
            if self.spec.domain.devices.use_virtio_transitional == Some(true) {
                "virtio-transitional"
            } else {
                "virtio-non-transitional"
            },
        )
    }

    /// Whether interfaces have several queue pairs.
    pub(crate) fn is_multiqueue(&self) -> bool {
        self.spec.domain.devices.network_interface_multiqueue == Some(true)
    }
}
