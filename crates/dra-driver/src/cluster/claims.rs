//! Claims: what was allocated to this node, and what the cluster's users see of it.
//!
//! A prepared device has a status in its claim (socket, addresses, condition `Ready`); a failed one has the reason there
//! and in an event. Reports are sent in the background: a pod does not wait for them, and a failure to report is logged.

use std::collections::BTreeMap;

use anyhow::{anyhow, ensure};
use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::api::resource::v1::{DeviceRequestAllocationResult, ResourceClaim};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ObjectMeta, Patch, PatchParams, PostParams};
use kube::core::Status;
use serde_json::{Value, json};

use super::Cluster;
use crate::checkpoint::{Allocated, Checkpoint, ClaimName, ClaimPort};
use crate::config;
use crate::ports::Claim;
use crate::{cdi, names};

/// A generated claim's annotation with the name that the pod has for it.
const NAME_IN_POD: &str = "resource.kubernetes.io/pod-claim-name";
/// Longest message of a condition and of an event, bytes.
const LONGEST: usize = 1024;

impl Cluster {
    fn claims(&self, namespace: &str) -> Api<ResourceClaim> {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// A claim, as it is allocated; `None`: it is gone, or another one has its name now.
    ///
    /// # Errors
    /// The cluster does not answer.
    pub(crate) async fn claim(
        &self,
        namespace: &str,
        name: &str,
        uid: &str,
    ) -> kube::Result<Option<ResourceClaim>> {
        match self.claims(namespace).get(name).await {
            Ok(claim) => Ok(Some(claim).filter(|claim| claim.metadata.uid.as_deref() == Some(uid))),
            Err(kube::Error::Api(status)) if is_absent(&status, name) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether a claim has devices of this node. None: the cluster does not answer.
    pub(crate) async fn has(&self, claim: &ClaimName) -> Option<bool> {
        let object = self.claim(&claim.namespace, &claim.name, &claim.uid).await.ok()?;
        Some(object.is_some_and(|object| !self.allocated(&object).is_empty()))
    }

    /// Devices of this node that the claim has.
    pub(crate) fn allocated(&self, claim: &ResourceClaim) -> Vec<Allocated> {
        self.results(claim)
            .into_iter()
            .map(|(device, _)| device)
            .collect()
    }

    /// The same with keys for their ports.
    ///
    /// # Errors
    /// It has none, or its parameters are wrong.
    pub(crate) fn read(&self, claim: &ResourceClaim) -> anyhow::Result<Claim> {
        let devices = claim
            .status
            .as_ref()
            .and_then(|status| status.allocation.as_ref()?.devices.as_ref());
        let configs = devices
            .and_then(|devices| devices.config.as_deref())
            .unwrap_or_default();
        let with_keys = |(device, result): (Allocated, _)| {
            let keys = config::keys(result, configs);
            let keys = keys.map_err(|error| anyhow!("request {}: {error}", device.request))?;
            Ok((device, keys))
        };
        let devices: Vec<_> = self
            .results(claim)
            .into_iter()
            .map(with_keys)
            .collect::<anyhow::Result<_>>()?;
        ensure!(
            !devices.is_empty(),
            "the claim has no device of this node and driver: delete the pod, so that it is scheduled again"
        );
        Ok(Claim {
            name: name_of(claim),
            devices,
        })
    }

    fn results<'a>(&self, claim: &'a ResourceClaim) -> Vec<(Allocated, &'a DeviceRequestAllocationResult)> {
        let allocation = claim
            .status
            .as_ref()
            .and_then(|status| status.allocation.as_ref());
        let results = allocation.and_then(|allocation| allocation.devices.as_ref()?.results.as_deref());
        let mut numbers: BTreeMap<&str, usize> = BTreeMap::new();
        let is_ours = |result: &&DeviceRequestAllocationResult| {
            result.driver == self.driver && result.pool == self.node
        };
        let ours = results.unwrap_or_default().iter().filter(is_ours);
        let numbered = ours.map(|result| {
            let next = numbers.entry(names::base(&result.request)).or_default();
            let number = std::mem::replace(next, *next + 1);
            let device = Allocated {
                request: result.request.clone(),
                number,
                pool: result.pool.clone(),
                device: result.device.clone(),
                share: result.share_id.clone(),
            };
            (device, result)
        });
        numbered.collect()
    }

    /// Reports that a claim is prepared.
    pub(crate) async fn report_ready(&self, checkpoint: &Checkpoint) {
        let status = |port: &ClaimPort| {
            let mut status = self.device_status(&port.device, ("True", "Prepared"), "");
            status["networkData"] = cdi::network_data(port);
            status["data"] = json!({
                "network": port.text("network"),
                "port": port.port,
                "socketPath": cdi::socket_in_container(&checkpoint.claim, port),
                "hostSocketPath": port.text("socket-path"),
            });
            status
        };
        let devices = checkpoint.ports.iter().map(status).collect();
        self.report_status(&checkpoint.claim, devices).await;
    }

    /// Reports why a claim is not prepared.
    pub(crate) async fn report_failure(&self, claim: &ResourceClaim, why: &str) {
        let (name, why) = (name_of(claim), names::cut(why, LONGEST));
        let status = |device: &Allocated| self.device_status(device, ("False", "PrepareFailed"), why);
        let devices = self.allocated(claim).iter().map(status).collect();
        self.report_status(&name, devices).await;
        self.report_event(&name, why).await;
    }

    /// The status of a device of a claim, with its condition `Ready`: status, reason and message.
    fn device_status(&self, device: &Allocated, (ready, reason): (&str, &str), why: &str) -> Value {
        let mut status = json!({
            "driver": self.driver, "pool": device.pool, "device": device.device,
            "conditions": [{
                "type": "Ready", "status": ready, "reason": reason, "message": why,
                "lastTransitionTime": Time(Timestamp::now()),
            }],
        });
        if let Some(share) = &device.share {
            status["shareID"] = share.as_str().into();
        }
        status
    }

    async fn report_status(&self, claim: &ClaimName, devices: Vec<Value>) {
        let patch = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": {"name": claim.name, "namespace": claim.namespace, "uid": claim.uid},
            "status": {"devices": devices},
        });
        let params = PatchParams::apply(&self.driver).force();
        let patched = self
            .claims(&claim.namespace)
            .patch_status(&claim.name, &params, &Patch::Apply(&patch))
            .await;
        if let Err(error) = patched {
            let (claim, why) = (claim.full(), super::reason(&error));
            tracing::warn!(claim, "cannot write its status: {why}: check the driver's access");
        }
    }

    async fn report_event(&self, claim: &ClaimName, why: &str) {
        let now = Time(Timestamp::now());
        let event = Event {
            metadata: ObjectMeta {
                generate_name: Some(format!("{}.", names::short(&claim.name, 200))),
                namespace: Some(claim.namespace.clone()),
                ..Default::default()
            },
            involved_object: ObjectReference {
                api_version: Some("resource.k8s.io/v1".to_owned()),
                kind: Some("ResourceClaim".to_owned()),
                name: Some(claim.name.clone()),
                namespace: Some(claim.namespace.clone()),
                uid: Some(claim.uid.clone()),
                ..Default::default()
            },
            reason: Some("PrepareFailed".to_owned()),
            message: Some(why.to_owned()),
            type_: Some("Warning".to_owned()),
            source: Some(EventSource {
                component: Some(self.driver.clone()),
                host: Some(self.node.clone()),
            }),
            first_timestamp: Some(now.clone()),
            last_timestamp: Some(now),
            count: Some(1),
            ..Default::default()
        };
        let events: Api<Event> = Api::namespaced(self.client.clone(), &claim.namespace);
        if let Err(error) = events.create(&PostParams::default(), &event).await {
            let (claim, why) = (claim.full(), super::reason(&error));
            tracing::warn!(claim, "cannot create its event: {why}: check the driver's access");
        }
    }
}

/// Whether the cluster has no object of this name. A cluster or proxy that does not serve claims at the moment also
/// answers 404; ports of running pods must not go because of that.
fn is_absent(status: &Status, name: &str) -> bool {
    let details = status.details.as_ref();
    status.is_not_found() && details.is_some_and(|details| details.name == name)
}

/// Names of a claim.
fn name_of(claim: &ResourceClaim) -> ClaimName {
    let metadata = &claim.metadata;
    let annotations = metadata.annotations.as_ref();
    let in_pod = annotations.and_then(|all| all.get(NAME_IN_POD));
    ClaimName {
        namespace: metadata.namespace.clone().unwrap_or_default(),
        name: metadata.name.clone().unwrap_or_default(),
        uid: metadata.uid.clone().unwrap_or_default(),
        // Users can write annotations, too.
        in_pod: in_pod.filter(|name| names::is_label(name)).cloned(),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::TcpListener;

    use super::*;

    fn claim(uid: &str, in_pod: &str) -> Value {
        json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "spec": {},
            "metadata": {"name": "c", "namespace": "n", "uid": uid, "annotations": {NAME_IN_POD: in_pod}},
        })
    }

    /// What the driver makes of this answer to the question whether it has claim `c`, UID `u`.
    fn has(status: u16, answer: &str) -> Option<bool> {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("bound");
        let answer = format!(
            "HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{answer}",
            answer.len()
        );
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("the driver");
            let _ = stream.read(&mut [0; 4096]).expect("a request");
            stream.write_all(answer.as_bytes()).expect("it is read");
        });
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("kubeconfig");
        let config = json!({
            "current-context": "a", "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
            "clusters": [{"name": "a", "cluster": {"server": format!("http://{address}")}}],
            "users": [{"name": "a", "user": {}}],
        });
        std::fs::write(&file, config.to_string()).expect("ours");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let has = runtime.expect("a runtime").block_on(async {
            let cluster = Cluster::new(Some(&file), "node", "driver").await.expect("valid");
            let name = name_of(&serde_json::from_value(claim("u", "")).expect("a claim"));
            cluster.has(&name).await
        });
        server.join().expect("asked once");
        has
    }

    #[test]
    fn claim_is_gone_only_if_the_cluster_says_so() {
        let absent = |details: &Value| {
            let (reason, message) = ("NotFound", "the server could not find the requested resource");
            json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": 404,
                "reason": reason, "message": message, "details": details})
            .to_string()
        };
        let named = absent(&json!({"name": "c", "group": "resource.k8s.io", "kind": "resourceclaims"}));
        assert_eq!(has(404, &named), Some(false));
        assert_eq!(has(200, &claim("other", "").to_string()), Some(false));
        // Claims are not served, or not here.
        assert_eq!(has(404, &absent(&json!({}))), None);
        assert_eq!(has(404, "404 page not found\n"), None);
        assert_eq!(has(503, ""), None);
    }

    #[test]
    fn name_in_the_pod_is_no_path() {
        for (annotation, shown) in [("lan", "lan"), ("../../etc", "c.claim"), ("a\nb", "c.claim")] {
            let object = serde_json::from_value(claim("u", annotation)).expect("a claim");
            assert_eq!(name_of(&object).in_containers(), shown);
        }
    }
}
