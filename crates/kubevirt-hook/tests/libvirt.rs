//! The sidecar between virt-launcher's part, played here by the calls that virt-launcher makes, and a real libvirt.

use std::fs;
use std::process::Command;

use testkit::guest::Guest;
use testkit::libvirt::{self, Libvirt, NAME};
use testkit::world::{HOST, give_address};
use testkit::{Daemon, Running, Serve, VethPair, require, wait};
use tonic::transport::{Channel, Endpoint};

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

use api::info::{InfoParams, info_client::InfoClient};
use api::v1alpha3::{OnDefineDomainParams, callbacks_client::CallbacksClient};

/// A VM with one interface, as virt-launcher sends it.
const VMI: &str = r#"{
    "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": "vm1"},
    "spec": {
        "domain": {"devices": {"interfaces":
            [{"name": "net", "binding": {"name": "vhost-af-xdp"}, "macAddress": "52:54:00:12:34:56"}]}},
        "networks": [{"name": "net", "resourceClaim": {"claimName": "lan", "requestName": "port"}}],
        "resourceClaims": [{"name": "lan", "resourceClaimTemplateName": "lan-port"}]
    }
}"#;

/// As KubeVirt's virt-launcher does: asks what the sidecar wants, then has it change a domain.
async fn changed(channel: Channel, domain: String, vmi: &str) -> Result<String, tonic::Status> {
    let info = InfoClient::new(channel.clone())
        .info(InfoParams {})
        .await?
        .into_inner();
    assert_eq!(
        (info.name.as_str(), &*info.versions),
        ("vhost-af-xdp", &["v1alpha3".to_owned()][..])
    );
    assert_eq!(info.hook_points[0].name, "OnDefineDomain");
    let params = OnDefineDomainParams {
        domain_xml: domain.into_bytes(),
        vmi: vmi.as_bytes().to_vec(),
    };
    let result = CallbacksClient::new(channel).on_define_domain(params).await?;
    Ok(String::from_utf8(result.into_inner().domain_xml).expect("text"))
}

#[test]
fn vm_boots_with_the_interface_that_the_sidecar_adds() {
    require!(Root, Qemu, Libvirt);
    let veth = VethPair::new();
    give_address(&veth);
    let guest = Guest::elsewhere();
    let mut daemon = Daemon::start(&veth.near, &Serve::interface(VethPair::NIC));
    let metadata = guest.state().join("resourceclaimtemplates/lan/port");
    fs::create_dir_all(&metadata).expect("a directory of our own");
    let device = format!(
        r#"{{"requests": [{{"devices": [{{"attributes": {{"socketPath": {{"string": {:?}}}}},
        "networkData": {{"hardwareAddress": "52:54:00:12:34:56"}}}}]}}]}}"#,
        daemon.socket()
    );
    fs::write(metadata.join("vhost-af-xdp.dev-metadata.json"), device).expect("a directory of our own");

    let mut sidecar = Command::new(env!("CARGO_BIN_EXE_vhost-af-xdp-kubevirt"));
    let _ = sidecar
        .arg("--hooks-dir")
        .arg(guest.state())
        .arg("--metadata-dir")
        .arg(guest.state());
    let mut sidecar = Running::start(sidecar);
    let hook = guest.state().join("vhost-af-xdp.sock");
    assert!(wait::until(wait::SOON, || hook.exists()), "{sidecar}");
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    let call = |vmi: &str, domain: &str| {
        runtime.block_on(async {
            let endpoint = Endpoint::from_shared(format!("unix:{}", hook.display())).expect("an address");
            changed(
                endpoint.connect().await.expect("it listens"),
                domain.to_owned(),
                vmi,
            )
            .await
        })
    };

    let before = libvirt::domain(&libvirt::images(guest.state()), guest.state(), "", "");
    let error = call(&VMI.replace("12:34:56", "12:34:57"), &before).expect_err("it is another address");
    assert!(error.message().contains("\"net\" has macAddress"), "{error}");
    let file = guest.state().join("domain.xml");
    fs::write(&file, call(VMI, &before).expect("a domain")).expect("a directory of our own");
    let libvirt = Libvirt::start();
    let _ = libvirt.virsh(&["define", "--validate", file.to_str().expect("ASCII")]);
    let _ = libvirt.virsh(&["start", NAME]);
    guest.await_ready();
    let said = guest.run(&format!("ping -c 5 -i 0.2 -W 60 {HOST}"));
    assert!(said.contains(" 0% packet loss"), "{said}");

    let _ = libvirt.virsh(&["destroy", NAME]);
    sidecar.check();
    daemon.process().check();
}
