//! A real API server, and what a scheduler would write.

use std::path::{Path, PathBuf};
use std::process::Command;

use k8s_openapi::api::core::v1::{Event, Node};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::config::Kubeconfig;
use kube::{Client, Config};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::daemon::private_dir;
use tokio::runtime::{Builder, Runtime};

pub(crate) const NODE: &str = "node-1";
pub(crate) const DRIVER: &str = "vhost-af-xdp.dev";

/// etcd and an API server in the calling thread's network namespace, with a node. Ended on drop.
pub(crate) struct Cluster {
    dir: TempDir,
    client: Client,
    runtime: Runtime,
}

/// A claim in the default namespace.
#[derive(Debug, Clone)]
pub(crate) struct Claim {
    pub(crate) name: String,
    pub(crate) uid: String,
}

/// A device of an allocation: request, device, queue pairs, and which share.
pub(crate) type Share<'a> = (&'a str, &'a str, u16, Option<&'a str>);

impl Cluster {
    pub(crate) fn start() -> Self {
        let dir = private_dir();
        script("up", dir.path());
        let runtime = Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        let client = runtime.block_on(async {
            let file = Kubeconfig::read_from(dir.path().join("admin.kubeconfig")).expect("written");
            let config = Config::from_custom_kubeconfig(file, &Default::default())
                .await
                .expect("valid");
            Client::try_from(config).expect("valid")
        });
        let cluster = Self { dir, client, runtime };
        let _: Node = cluster.create(&cluster.everywhere(), json!({"metadata": {"name": NODE}}));
        cluster
    }

    pub(crate) fn kubeconfig(&self) -> PathBuf {
        self.dir.path().join("admin.kubeconfig")
    }

    fn everywhere<T: kube::Resource<DynamicType = ()>>(&self) -> Api<T> {
        Api::all(self.client.clone())
    }

    fn claims(&self) -> Api<ResourceClaim> {
        Api::namespaced(self.client.clone(), "default")
    }

    fn create<T>(&self, api: &Api<T>, object: Value) -> T
    where
        T: kube::Resource + Clone + DeserializeOwned + serde::Serialize + std::fmt::Debug,
    {
        let object: T = serde_json::from_value(object).expect("an object");
        let params = PostParams::default();
        self.runtime
            .block_on(api.create(&params, &object))
            .expect("created")
    }

    /// Creates a claim, and allocates it to the node as a scheduler does. `configs`: source and parameters.
    pub(crate) fn allocate(&self, name: &str, shares: &[Share<'_>], configs: &[(&str, Value)]) -> Claim {
        let request =
            |&(request, ..): &Share<'_>| json!({"name": request, "exactly": {"deviceClassName": "any"}});
        let mut requests: Vec<Value> = shares.iter().map(request).collect();
        requests.dedup();
        let claim: ResourceClaim = self.create(
            &self.claims(),
            json!({
                "metadata": {
                    "name": name, "annotations": {"resource.kubernetes.io/pod-claim-name": format!("of-{name}")}
                },
                "spec": {"devices": {"requests": requests}},
            }),
        );
        let claim = Claim {
            name: name.to_owned(),
            uid: claim.metadata.uid.expect("set"),
        };
        self.allocate_again(&claim, shares, configs);
        claim
    }

    /// Allocates other devices to a claim.
    pub(crate) fn allocate_again(&self, claim: &Claim, shares: &[Share<'_>], configs: &[(&str, Value)]) {
        let result = |&(request, device, queues, share): &Share<'_>| {
            let mut result = json!({"driver": DRIVER, "pool": NODE, "request": request, "device": device});
            if let Some(share) = share {
                result["shareID"] = share.into();
                result["consumedCapacity"] = json!({"ports": "1", "queues": queues.to_string()});
            }
            result
        };
        let config = |(source, keys): &(&str, Value)| {
            let mut parameters = json!({"apiVersion": "vhost-af-xdp.dev/v1alpha1", "kind": "PortConfig"});
            let all = parameters.as_object_mut().expect("an object");
            all.extend(keys.as_object().expect("an object").clone());
            json!({"source": source, "opaque": {"driver": DRIVER, "parameters": parameters}})
        };
        let devices = json!({
            "results": shares.iter().map(result).collect::<Vec<_>>(),
            "config": configs.iter().map(config).collect::<Vec<_>>(),
        });
        self.patch_status(&claim.name, &json!({"allocation": null}));
        self.patch_status(&claim.name, &json!({"allocation": {"devices": devices}}));
    }

    fn patch_status(&self, name: &str, status: &Value) {
        let (claims, patch) = (self.claims(), Patch::Merge(json!({"status": status})));
        let (params, patch) = (PatchParams::default(), patch);
        self.runtime
            .block_on(claims.patch_status(name, &params, &patch))
            .expect("allowed");
    }

    pub(crate) fn delete(&self, claim: &Claim) {
        let (claims, params) = (self.claims(), DeleteParams::default());
        self.runtime
            .block_on(claims.delete(&claim.name, &params))
            .expect("deleted");
    }

    /// The status of a claim's devices.
    pub(crate) fn status(&self, claim: &Claim) -> Value {
        let claim = self
            .runtime
            .block_on(self.claims().get(&claim.name))
            .expect("there");
        let devices = claim.status.and_then(|status| status.devices);
        serde_json::to_value(devices.unwrap_or_default()).expect("JSON")
    }

    /// Messages of the events about a claim.
    pub(crate) fn events(&self, claim: &Claim) -> Vec<String> {
        let events: Api<Event> = Api::namespaced(self.client.clone(), "default");
        let params = ListParams::default().fields(&format!("involvedObject.uid={}", claim.uid));
        let events = self.runtime.block_on(events.list(&params)).expect("listed");
        events
            .into_iter()
            .map(|event| event.message.unwrap_or_default())
            .collect()
    }

    /// The devices that are published, as JSON.
    pub(crate) fn devices(&self) -> Option<Vec<Value>> {
        let slices: Api<ResourceSlice> = self.everywhere();
        let slices = self
            .runtime
            .block_on(slices.list(&ListParams::default()))
            .expect("listed");
        let [slice] = slices.items.as_slice() else {
            return None;
        };
        let devices = slice.spec.devices.as_deref().unwrap_or_default();
        Some(
            devices
                .iter()
                .map(|device| serde_json::to_value(device).expect("JSON"))
                .collect(),
        )
    }

    /// Deletes the node and registers it again. Returns its UID.
    pub(crate) fn replace_node(&self) -> String {
        let (nodes, params) = (self.everywhere::<Node>(), DeleteParams::default());
        self.runtime
            .block_on(nodes.delete(NODE, &params))
            .expect("deleted");
        let node = self.create(&nodes, json!({"metadata": {"name": NODE}}));
        node.metadata.uid.expect("set")
    }

    /// UIDs of the slices' owners.
    pub(crate) fn owners(&self) -> Vec<String> {
        let slices: Api<ResourceSlice> = self.everywhere();
        let slices = self.runtime.block_on(slices.list(&ListParams::default()));
        let owners = slices.expect("listed").into_iter();
        let owners = owners.flat_map(|slice| slice.metadata.owner_references.unwrap_or_default());
        owners.map(|owner| owner.uid).collect()
    }

    /// Deletes the driver's slices, as kubelet does when the driver was away.
    pub(crate) fn wipe_slices(&self) {
        let slices: Api<ResourceSlice> = self.everywhere();
        let (delete, all) = (DeleteParams::default(), ListParams::default());
        self.runtime
            .block_on(slices.delete_collection(&delete, &all))
            .expect("deleted");
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        script("down", self.dir.path());
    }
}

fn script(verb: &str, dir: &Path) {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/kube");
    let mut command = Command::new(script);
    let output = command.arg(verb).arg("--dir").arg(dir).output().expect("bash");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() || std::thread::panicking(),
        "{verb}: {said}"
    );
}
