//! Kubelet's calls for claims.
//!
//! Kubelet waits 45 s for an answer. It calls again after errors, so each call may find all, some or nothing done.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};
use tonic::{Request, Response, Status};

use super::messages::dra::dra_plugin_server::DraPlugin;
use super::messages::dra::{
    Claim, NodePrepareResourceResponse, NodePrepareResourcesRequest, NodePrepareResourcesResponse,
    NodeUnprepareResourceResponse, NodeUnprepareResourcesRequest, NodeUnprepareResourcesResponse,
};
use crate::driver::Driver;

/// Most time for a call.
const DEADLINE: Duration = Duration::from_secs(40);

/// Answers kubelet.
pub(crate) struct Service(pub(crate) Arc<Driver>);

/// Awaits a call, until the deadline at most. Returns its result and an empty text, or the default and the error.
async fn result_of<T: Default>(
    call: impl Future<Output = anyhow::Result<T>>,
    deadline: Instant,
) -> (T, String) {
    let done = timeout_at(deadline, call).await;
    match done {
        Ok(Ok(result)) => (result, String::new()),
        Ok(Err(error)) => (T::default(), error.to_string()),
        Err(_) => {
            let seconds = DEADLINE.as_secs();
            let late = format!(
                "not done within {seconds} s: is the daemon stopped, or the cluster's API server gone?"
            );
            (T::default(), late)
        }
    }
}

#[tonic::async_trait]
impl DraPlugin for Service {
    async fn node_prepare_resources(
        &self,
        request: Request<NodePrepareResourcesRequest>,
    ) -> Result<Response<NodePrepareResourcesResponse>, Status> {
        let deadline = Instant::now() + DEADLINE;
        let mut claims = HashMap::new();
        for Claim { namespace, name, uid } in request.into_inner().claims {
            let (devices, error) = result_of(self.0.prepare(&namespace, &name, &uid), deadline).await;
            claims.insert(uid, NodePrepareResourceResponse { devices, error });
        }
        Ok(Response::new(NodePrepareResourcesResponse { claims }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<NodeUnprepareResourcesRequest>,
    ) -> Result<Response<NodeUnprepareResourcesResponse>, Status> {
        let deadline = Instant::now() + DEADLINE;
        let mut claims = HashMap::new();
        for Claim { namespace, name, uid } in request.into_inner().claims {
            let name = format!("{namespace}/{name}");
            let ((), error) = result_of(self.0.release(&name, &uid), deadline).await;
            claims.insert(uid, NodeUnprepareResourceResponse { error });
        }
        Ok(Response::new(NodeUnprepareResourcesResponse { claims }))
    }
}
