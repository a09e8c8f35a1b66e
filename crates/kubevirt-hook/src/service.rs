//! The gRPC services that virt-launcher calls on a socket in its directory of hooks.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::sync::Arc;

use anyhow::Context as _;
use program::kubevirt::Options;
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status, async_trait};

use crate::domain::{self, PciAddress, VhostUser};
use crate::metadata::{self, Port};
use crate::vmi::{Interface, Vmi};

/// Generated from proto/.
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic)]
mod api {
    pub(super) mod info {
        tonic::include_proto!("kubevirt.hooks.info");
    }
    pub(super) mod v1alpha3 {
        tonic::include_proto!("kubevirt.hooks.v1alpha3");
    }
}

use api::info::info_server::{Info, InfoServer};
use api::info::{HookPoint, InfoParams, InfoResult};
use api::v1alpha3::callbacks_server::{Callbacks, CallbacksServer};
use api::v1alpha3::{OnDefineDomainParams, OnDefineDomainResult};

/// The call before the domain is defined (`OnDefineDomainHookPointName` in kubevirt/kubevirt, pkg/hooks/info).
const ON_DEFINE_DOMAIN: &str = "OnDefineDomain";
const VERSION: &str = "v1alpha3";

/// Serves until the pod ends.
///
/// # Errors
/// The socket cannot be made.
pub(crate) fn run(options: Options) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(serve(options))
}

async fn serve(options: Options) -> anyhow::Result<()> {
    let socket = options.hooks_dir.join(format!("{}.sock", options.binding));
    // A predecessor in the same pod leaves its socket.
    match fs::remove_file(&socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("cannot replace {}", socket.display()));
        }
        _ => {}
    }
    let listener = UnixListener::bind(&socket).with_context(|| {
        format!(
            "cannot listen at {}: is --hooks-dir right, and this a sidecar of KubeVirt?",
            socket.display()
        )
    })?;
    tracing::info!("ready at {}", socket.display());
    let hooks = Hooks(Arc::new(options));
    let mut terminated = signal(SignalKind::terminate())?;
    tonic::transport::Server::builder()
        .add_service(InfoServer::new(hooks.clone()))
        .add_service(CallbacksServer::new(hooks))
        .serve_with_incoming_shutdown(UnixListenerStream::new(listener), async {
            let _ = terminated.recv().await;
        })
        .await?;
    let _ = fs::remove_file(&socket);
    Ok(())
}

/// The hooks of a binding.
#[derive(Debug, Clone)]
struct Hooks(Arc<Options>);

#[async_trait]
impl Info for Hooks {
    async fn info(&self, _: Request<InfoParams>) -> Result<Response<InfoResult>, Status> {
        Ok(Response::new(InfoResult {
            name: self.0.binding.clone(),
            hook_points: vec![HookPoint {
                name: ON_DEFINE_DOMAIN.to_owned(),
                priority: 0,
            }],
            versions: vec![VERSION.to_owned()],
        }))
    }
}

#[async_trait]
impl Callbacks for Hooks {
    async fn on_define_domain(
        &self,
        request: Request<OnDefineDomainParams>,
    ) -> Result<Response<OnDefineDomainResult>, Status> {
        let OnDefineDomainParams { domain_xml, vmi } = request.into_inner();
        match self.define(&domain_xml, &vmi) {
            Ok(domain) => Ok(Response::new(OnDefineDomainResult {
                domain_xml: domain.into_bytes(),
            })),
            Err(error) => {
                let message = format!("{error:#}");
                tracing::error!("{message}");
                Err(Status::failed_precondition(message))
            }
        }
    }
}

impl Hooks {
    /// The domain with an interface for each of the VM's that has this binding.
    fn define(&self, domain: &[u8], vmi: &[u8]) -> anyhow::Result<String> {
        let Options {
            binding,
            driver_name,
            metadata_dir,
            ..
        } = &*self.0;
        let mut domain = str::from_utf8(domain)
            .context("virt-launcher sent a domain that is no text")?
            .to_owned();
        let vmi: Vmi = serde_json::from_slice(vmi).context("virt-launcher sent no VirtualMachineInstance")?;
        let mut sockets = HashSet::new();
        for interface in vmi.interfaces(binding) {
            let model = vmi.model(interface)?;
            let port = metadata::port(metadata_dir, driver_name, &vmi.request(interface, binding)?)?;
            if !sockets.insert(port.socket.clone()) {
                let name = &interface.name;
                anyhow::bail!(
                    "interface {name:?} has the same claim and request as another one; a port is for one interface: add a \
                     request to the claim"
                );
            }
            check_mac(interface, &port)?;
            let (name, socket) = (&interface.name, port.socket.display());
            tracing::info!("interface {name:?}: {socket} with MAC address {}", port.mac);
            let vhost_user = VhostUser {
                name,
                mac: &port.mac,
                socket: &port.socket,
                model,
                queues: vmi.is_multiqueue().then_some(port.queues),
                pci_address: interface
                    .pci_address
                    .as_deref()
                    .map(PciAddress::parse)
                    .transpose()?,
                boot_order: interface.boot_order,
                acpi_index: interface.acpi_index,
                is_down: interface.state.as_deref() == Some("down"),
            };
            domain = domain::with_interface(&domain, &vhost_user)?;
        }
        Ok(domain)
    }
}

/// Port and VM have to name the same MAC address: the port drops frames from another one. An address that the driver chose
/// is not enough, because it chooses another for the pod that a VM migrates to, and at each start.
fn check_mac(
    Interface {
        name, mac_address, ..
    }: &Interface,
    port: &Port,
) -> anyhow::Result<()> {
    match mac_address {
        Some(mac) if mac.eq_ignore_ascii_case(&port.mac) => Ok(()),
        Some(mac) => anyhow::bail!(
            "interface {name:?} has macAddress {mac}, but the port of its claim has {}; write the same address into `mac` of \
             the claim's PortConfig",
            port.mac
        ),
        None => anyhow::bail!(
            "interface {name:?} has no macAddress; write the same address into the VM and into `mac` of the claim's \
             PortConfig"
        ),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use tempfile::TempDir;

    use super::*;

    const DOMAIN: &[u8] = b"<domain><devices/></domain>";

    /// What the driver writes for a port, in two versions.
    fn metadata(mac: &str, socket: &str) -> String {
        let version = |version: &str| {
            serde_json::json!({
                "kind": "DeviceMetadata", "apiVersion": format!("metadata.resource.k8s.io/{version}"),
                "metadata": {"name": "vm1-net-x7k"}, "podClaimName": "net",
                "requests": [{"name": "blue", "devices": [{
                    "driver": "vhost-af-xdp.dev", "pool": "node1", "name": "lan",
                    "attributes": {"socketPath": {"string": socket}, "queues": {"int": 2}, "network": {"string": "lan"}},
                    "networkData": {"hardwareAddress": mac, "ips": ["10.0.0.1/24"]}
                }]}]
            })
        };
        ["v9", "v1alpha1"]
            .map(|name| version(name).to_string() + "\n")
            .concat()
    }

    /// The hooks with metadata of both claims of [`vmi`].
    fn hooks() -> (Hooks, TempDir) {
        let dir = tempfile::tempdir().unwrap();
        for (claim, mac, socket) in [
            (
                "resourceclaimtemplates/net/blue",
                "52:54:00:00:00:01",
                "/run/ports/net/blue.sock",
            ),
            (
                "resourceclaims/red-port/port",
                "52:54:00:00:00:0a",
                "/run/ports/red-port/port.sock",
            ),
        ] {
            let directory = dir.path().join(claim);
            fs::create_dir_all(&directory).unwrap();
            fs::write(
                directory.join("vhost-af-xdp.dev-metadata.json"),
                metadata(mac, socket),
            )
            .unwrap();
        }
        let options = Options {
            metadata_dir: dir.path().to_owned(),
            ..Options::parse_from(["vhost-af-xdp-kubevirt"])
        };
        (Hooks(Arc::new(options)), dir)
    }

    /// A VM with two interfaces of its own: one of a template's claim, one of a claim with a name; and the pod's.
    fn vmi() -> serde_json::Value {
        serde_json::json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": "vm1"},
            "spec": {
                "domain": {
                    "devices": {
                        "interfaces": [
                            {"name": "default", "masquerade": {}},
                            {"name": "blue", "binding": {"name": "vhost-af-xdp"}, "macAddress": "52:54:00:00:00:01"},
                            {"name": "red", "binding": {"name": "vhost-af-xdp"}, "macAddress": "52:54:00:00:00:0A"}
                        ],
                        "networkInterfaceMultiqueue": true
                    }
                },
                "networks": [
                    {"name": "default", "pod": {}},
                    {"name": "blue", "resourceClaim": {"claimName": "net", "requestName": "blue"}},
                    {"name": "red", "resourceClaim": {"claimName": "other", "requestName": "port"}}
                ],
                "resourceClaims": [
                    {"name": "net", "resourceClaimTemplateName": "blue-port"},
                    {"name": "other", "resourceClaimName": "red-port"}
                ]
            }
        })
    }

    fn define(vmi: &serde_json::Value) -> Result<String, String> {
        let (hooks, _dir) = hooks();
        hooks
            .define(DOMAIN, vmi.to_string().as_bytes())
            .map_err(|error| format!("{error:#}"))
    }

    #[test]
    fn each_interface_with_the_binding_gets_its_claims_port() {
        let domain = define(&vmi()).unwrap();
        assert_eq!(domain.matches("type=\"vhostuser\"").count(), 2, "{domain}");
        for part in [
            "\"/run/ports/net/blue.sock\"",
            "\"/run/ports/red-port/port.sock\"",
            "\"52:54:00:00:00:01\"",
            "\"52:54:00:00:00:0a\"",
            "ua-blue",
            "ua-red",
            " queues=\"2\"/>",
        ] {
            assert!(domain.contains(part), "{part} is not in {domain}");
        }
        assert!(!domain.contains("ua-default"), "{domain}");
        let mut one_queue = vmi();
        one_queue["spec"]["domain"]["devices"]["networkInterfaceMultiqueue"] = false.into();
        assert!(!define(&one_queue).unwrap().contains(" queues="));
    }

    #[test]
    fn vm_without_the_binding_keeps_its_domain() {
        let mut vmi = vmi();
        for number in [1, 2] {
            vmi["spec"]["domain"]["devices"]["interfaces"][number]["binding"]["name"] = "passt".into();
        }
        assert_eq!(define(&vmi).unwrap().as_bytes(), DOMAIN);
        vmi["spec"]["domain"]["devices"] = serde_json::json!({});
        assert_eq!(define(&vmi).unwrap().as_bytes(), DOMAIN);
    }

    #[test]
    fn interface_that_is_being_removed_is_left_out_and_one_may_be_down() {
        let mut vmi = vmi();
        vmi["spec"]["domain"]["devices"]["interfaces"][1]["state"] = "absent".into();
        assert!(!define(&vmi).unwrap().contains("ua-blue"));
        vmi["spec"]["domain"]["devices"]["interfaces"][1]["state"] = "down".into();
        assert_eq!(define(&vmi).unwrap().matches("<link state=\"down\"/>").count(), 1);
    }

    #[test]
    fn mistakes_are_named() {
        let wrong = |path: &str, value: serde_json::Value, message: &str| {
            let mut vmi = vmi();
            *vmi.pointer_mut(path).expect(path) = value;
            let error = define(&vmi).unwrap_err();
            assert!(error.contains(message), "{error}");
        };
        let interface = "/spec/domain/devices/interfaces/1";
        let null = serde_json::Value::Null;
        let other = "52:54:00:00:00:0f, but the port of its claim has 52:54:00:00:00:01";
        wrong(
            &format!("{interface}/macAddress"),
            "52:54:00:00:00:0f".into(),
            other,
        );
        wrong(
            &format!("{interface}/name"),
            "green".into(),
            "no network \"green\"",
        );
        wrong(
            "/spec/networks/1/resourceClaim",
            null,
            "\"blue\": `resourceClaim`",
        );
        wrong(
            "/spec/networks/1/resourceClaim/requestName",
            "green".into(),
            "net/green/vhost-af-xdp.dev-metadata.json",
        );
        wrong(
            "/spec/resourceClaims/0/name",
            "nett".into(),
            "no resource claim \"net\"",
        );
        let first = serde_json::json!({"claimName": "net", "requestName": "blue"});
        wrong(
            "/spec/networks/2/resourceClaim",
            first,
            "\"red\" has the same claim and request",
        );
        let e1000 =
            serde_json::json!({"name": "blue", "binding": {"name": "vhost-af-xdp"}, "model": "e1000e"});
        wrong(interface, e1000, "model \"e1000e\"");
    }

    #[test]
    fn metadata_of_others_is_refused() {
        let (hooks, dir) = hooks();
        let file = dir
            .path()
            .join("resourceclaimtemplates/net/blue/vhost-af-xdp.dev-metadata.json");
        for (text, message) in [
            ("", "no device with"),
            ("{\"requests\": [{\"devices\": [{}]}]}", "no device with"),
            ("{", "is no metadata"),
        ] {
            fs::write(&file, text).unwrap();
            let error = hooks
                .define(DOMAIN, vmi().to_string().as_bytes())
                .unwrap_err()
                .to_string();
            assert!(error.contains(message), "{error}");
        }
    }
}
