//! What the cluster knows of this node: [`slices`] publish its networks, [`claims`] are read and reported on.

pub(crate) mod claims;
pub(crate) mod slices;

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::Api;
use kube::config::Kubeconfig;
use kube::{Client, Config};

/// Between attempts to reach the cluster.
const PAUSE: Duration = Duration::from_secs(2);

/// How long an answer may take, and a watch be silent: longer than the 290 s after which an API server ends it.
const SILENCE: Duration = Duration::from_secs(300);

/// The cluster, for this node's driver.
#[derive(Clone)]
pub(crate) struct Cluster {
    client: Client,
    node: String,
    driver: String,
}

/// Why the cluster did not do something: the API server's message, or why there is no connection. The text of
/// [`kube::Error`] has the whole answer as a structure of Rust, and of a connection only that it failed.
pub(crate) fn reason(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => status.message.clone(),
        _ => anyhow::Chain::new(error).last().unwrap_or(error).to_string(),
    }
}

impl Cluster {
    /// Reads the credentials; connects later.
    ///
    /// # Errors
    /// They are missing or wrong.
    pub(crate) async fn new(kubeconfig: Option<&Path>, node: &str, driver: &str) -> anyhow::Result<Self> {
        let mut config = match kubeconfig {
            Some(path) => {
                let file = Kubeconfig::read_from(path)
                    .with_context(|| format!("--kubeconfig {}", path.display()))?;
                Config::from_custom_kubeconfig(file, &Default::default()).await?
            }
            None => Config::incluster().context("no service account of a pod: give --kubeconfig FILE")?,
        };
        // Without it a request to a server that is gone without a word would wait for ever.
        config.read_timeout = Some(SILENCE);
        config.reset_reader_on_write = true;
        Ok(Self {
            client: Client::try_from(config)?,
            node: node.to_owned(),
            driver: driver.to_owned(),
        })
    }

    /// The node, as owner of its slices: they are deleted with it. Waits until the cluster has it.
    pub(crate) async fn owner(&self) -> OwnerReference {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let mut logged = String::new();
        loop {
            let why = match nodes.get(&self.node).await {
                Ok(node) => {
                    return OwnerReference {
                        api_version: "v1".to_owned(),
                        kind: "Node".to_owned(),
                        name: self.node.clone(),
                        uid: node.metadata.uid.unwrap_or_default(),
                        ..Default::default()
                    };
                }
                Err(error) => reason(&error),
            };
            if why != logged {
                let node = &self.node;
                tracing::warn!(
                    "cannot read node {node}: {why}: check --node-name and the driver's access; retrying"
                );
                logged = why;
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
}
