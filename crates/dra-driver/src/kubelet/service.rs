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
    Claim, Device, NodePrepareResourceResponse, NodePrepareResourcesRequest, NodePrepareResourcesResponse,
    NodeUnprepareResourceResponse, NodeUnprepareResourcesRequest, NodeUnprepareResourcesResponse,
};
use crate::driver::{Driver, DriverError};

/// Most time for a call.
const DEADLINE: Duration = Duration::from_secs(40);

/// Answers kubelet.
pub(crate) struct Service(pub(crate) Arc<Driver>);

impl Service {
    async fn prepare(&self, claim: &Claim, deadline: Instant) -> Result<Vec<Device>, DriverError> {
        let Claim { namespace, name, uid } = claim;
        let prepared = timeout_at(deadline, self.0.prepare(namespace, name, uid)).await;
        prepared.unwrap_or(Err(DriverError::Deadline(DEADLINE)))
    }

    async fn release(&self, claim: &Claim, deadline: Instant) -> Result<(), DriverError> {
        let name = format!("{}/{}", claim.namespace, claim.name);
        let released = timeout_at(deadline, self.0.release(&name, &claim.uid)).await;
        released.unwrap_or(Err(DriverError::Deadline(DEADLINE)))
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
        for claim in request.into_inner().claims {
            let prepared = self.prepare(&claim, deadline).await;
            let error = prepared
                .as_ref()
                .err()
                .map(ToString::to_string)
                .unwrap_or_default();
            let devices = prepared.unwrap_or_default();
            claims.insert(claim.uid, NodePrepareResourceResponse { devices, error });
        }
        Ok(Response::new(NodePrepareResourcesResponse { claims }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<NodeUnprepareResourcesRequest>,
    ) -> Result<Response<NodeUnprepareResourcesResponse>, Status> {
        let deadline = Instant::now() + DEADLINE;
        let mut claims = HashMap::new();
        for claim in request.into_inner().claims {
            let error = self.release(&claim, deadline).await.err();
            let error = error.map(|error| error.to_string()).unwrap_or_default();
            claims.insert(claim.uid, NodeUnprepareResourceResponse { error });
        }
        Ok(Response::new(NodeUnprepareResourcesResponse { claims }))
    }
}
