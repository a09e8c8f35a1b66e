//! The driver: what it does for kubelet, and what it watches.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, ensure};
use k8s_openapi::api::resource::v1::{Device as SliceDevice, ResourceClaim};
use model::state::NetworkStatus;
use tokio::sync::{Mutex as AsyncMutex, watch};

use crate::checkpoint::{Checkpoint, ClaimPort};
use crate::cluster::{self, Cluster, slices};
use crate::daemon::{Daemon, DaemonError};
use crate::kubelet::messages::dra::Device;
use crate::names;
use crate::ports::{Ports, PortsError};

/// How often the daemon's networks are read.
const LOOK: Duration = Duration::from_secs(2);
/// How long the networks of a daemon that does not answer stay published: it may be restarting.
const GRACE: Duration = Duration::from_secs(30);
/// How often claims are sought that are gone.
const COLLECT: Duration = Duration::from_secs(60);
/// Failures that are remembered, to report each once.
const MOST_FAILURES: usize = 4096;
/// After this time the same failure is reported again: API servers forget events after an hour.
const REPORT_AGAIN: Duration = Duration::from_secs(30 * 60);

/// The error of calls while the driver ends.
const ENDS: &str = "the driver ends: kubelet tries again";

/// The driver.
pub(crate) struct Driver {
    cluster: Cluster,
    ports: Arc<AsyncMutex<Ports>>,
    /// What failed last for a claim, by UID, and when it was reported.
    failures: Mutex<HashMap<String, (String, Instant)>>,
}

impl Driver {
    pub(crate) fn new(cluster: Cluster, ports: Ports) -> Self {
        Self {
            cluster,
            ports: Arc::new(AsyncMutex::new(ports)),
            failures: Mutex::default(),
        }
    }

    /// Prepares a claim. Returns its devices for kubelet.
    ///
    /// # Errors
    /// Why it is not prepared; also reported to the cluster.
    pub(crate) async fn prepare(
        self: &Arc<Self>,
        namespace: &str,
        name: &str,
        uid: &str,
    ) -> anyhow::Result<Vec<Device>> {
        let started = Instant::now();
        check_uid(uid)?;
        let claim = format!("{namespace}/{name}");
        let (object, prepared) = match self.cluster.claim(namespace, name, uid).await {
            Ok(Some(object)) => {
                let prepared = self.prepare_object(&object).await;
                (Some(object), prepared)
            }
            Ok(None) => {
                let gone = anyhow!("the claim is gone, or another one has its name now: delete the pod");
                (None, Err(gone))
            }
            Err(error) => {
                let why = cluster::reason(&error);
                let unread =
                    anyhow!("cannot read the claim: {why}: check the driver's access to the cluster");
                (None, Err(unread))
            }
        };
        let (checkpoint, devices) = prepared.inspect_err(|error| {
            let why = error.to_string();
            if self.must_report(uid, &why) {
                tracing::error!(claim, uid, "not prepared: {why}");
                if let Some(object) = object {
                    let driver = Arc::clone(self);
                    tokio::spawn(async move { driver.cluster.report_failure(&object, &why).await });
                }
            }
        })?;
        let ms = started.elapsed().as_millis();
        tracing::info!(claim, uid, ports = checkpoint.ports.len(), ms, "prepared");
        self.failures().remove(uid);
        let driver = Arc::clone(self);
        tokio::spawn(async move { driver.cluster.report_ready(&checkpoint).await });
        Ok(devices)
    }

    async fn prepare_object(&self, object: &ResourceClaim) -> anyhow::Result<(Checkpoint, Vec<Device>)> {
        let claim = self.cluster.read(object)?;
        self.with_ports(move |ports| {
            let checkpoint = ports.prepare(&claim)?;
            let devices = devices(ports, &checkpoint);
            Ok((checkpoint, devices))
        })
        .await
    }

    /// Releases a claim; `name` is for the log.
    ///
    /// # Errors
    /// Why something of it is left.
    pub(crate) async fn release(&self, name: &str, uid: &str) -> anyhow::Result<()> {
        check_uid(uid)?;
        let (owned, started) = (uid.to_owned(), Instant::now());
        let released = self.with_ports(move |ports| ports.release(&owned)).await;
        match &released {
            Ok(()) => {
                self.failures().remove(uid);
                tracing::info!(claim = name, uid, ms = started.elapsed().as_millis(), "released");
            }
            Err(error) if self.must_report(uid, &error.to_string()) => {
                tracing::error!(claim = name, uid, "not released: {error}");
            }
            Err(_) => {}
        }
        released
    }

    /// Records a failure of a claim, and returns whether to report it: not if it is the last one again, as kubelet tries
    /// every few seconds, until [`REPORT_AGAIN`] has passed.
    fn must_report(&self, uid: &str, why: &str) -> bool {
        let mut failures = self.failures();
        let known = failures.get(uid);
        if known.is_some_and(|(before, at)| before == why && at.elapsed() < REPORT_AGAIN) {
            return false;
        }
        if failures.len() >= MOST_FAILURES {
            failures.clear();
        }
        failures.insert(uid.to_owned(), (why.to_owned(), Instant::now()));
        true
    }

    /// Reads the daemon's networks, again and again: sends their devices, and restores ports that are missing.
    pub(crate) async fn watch_daemon(
        &self,
        most_ports: u16,
        devices: watch::Sender<Option<Vec<SliceDevice>>>,
    ) {
        let send = |now: Vec<SliceDevice>| {
            devices.send_if_modified(|known| {
                let is_new = known.as_ref() != Some(&now);
                *known = Some(now);
                is_new
            })
        };
        let daemon = self.ports.lock().await.daemon.clone();
        let (mut logged, mut answered) = (String::new(), Instant::now());
        loop {
            match self.look(&daemon).await {
                Ok(networks) => {
                    if !logged.is_empty() {
                        tracing::info!("the daemon answers again");
                        logged.clear();
                    }
                    answered = Instant::now();
                    send(
                        networks
                            .iter()
                            .map(|network| slices::device(network, most_ports))
                            .collect(),
                    );
                }
                Err(error) => {
                    let error = error.to_string();
                    if error != logged {
                        tracing::warn!("{error}: pods that need its networks wait");
                        logged = error;
                    }
                    if answered.elapsed() > GRACE {
                        send(Vec::new());
                    }
                }
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    async fn look(&self, daemon: &Daemon) -> anyhow::Result<Vec<NetworkStatus>> {
        let daemon = daemon.clone();
        let networks = tokio::task::spawn_blocking(move || daemon.networks()).await;
        let networks = networks.context(ENDS)??;
        self.with_ports(move |ports| {
            ports.restore(&networks)?;
            Ok(networks)
        })
        .await
    }

    /// Releases claims that are gone or not allocated to this node any more, again and again: kubelet does not, after it
    /// lost its state.
    pub(crate) async fn collect(&self) {
        loop {
            let claims = self.ports.lock().await.claims();
            for claim in claims {
                if self.cluster.has(&claim).await == Some(false) {
                    tracing::info!(
                        claim = claim.full(),
                        "the claim is gone, and kubelet did not release it"
                    );
                    // Logs its errors; the next round tries again.
                    let _ = self.release(&claim.full(), &claim.uid).await;
                }
            }
            if let Err(error) = self.with_ports(Ports::remove_strays).await
                // The other loop logs that.
                && !matches!(error.downcast_ref(), Some(PortsError::Daemon(DaemonError::NoAnswer { .. })))
            {
                tracing::warn!("{error}");
            }
            tokio::time::sleep(COLLECT).await;
        }
    }

    /// Does something that blocks, while nothing else has the ports. It is finished even if the caller stops waiting.
    async fn with_ports<T: Send + 'static>(
        &self,
        what: impl FnOnce(&mut Ports) -> Result<T, PortsError> + Send + 'static,
    ) -> anyhow::Result<T> {
        let mut ports = Arc::clone(&self.ports).lock_owned().await;
        let done = tokio::task::spawn_blocking(move || what(&mut ports)).await;
        Ok(done.context(ENDS)??)
    }

    fn failures(&self) -> std::sync::MutexGuard<'_, HashMap<String, (String, Instant)>> {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn check_uid(uid: &str) -> anyhow::Result<()> {
    ensure!(
        names::is_uid(uid),
        "UID {uid:?} is none: letters, digits and hyphens are allowed"
    );
    Ok(())
}

/// A claim's devices for kubelet.
fn devices(ports: &Ports, checkpoint: &Checkpoint) -> Vec<Device> {
    let device = |port: &ClaimPort| Device {
        request_names: vec![names::base(&port.device.request).to_owned()],
        pool_name: port.device.pool.clone(),
        device_name: port.device.device.clone(),
        // That of a request is for all of its devices.
        cdi_device_ids: match port.device.number {
            0 => vec![ports.files.id(&checkpoint.claim, &port.device.request)],
            _ => Vec::new(),
        },
        share_id: port.device.share.clone(),
    };
    checkpoint.ports.iter().map(device).collect()
}
