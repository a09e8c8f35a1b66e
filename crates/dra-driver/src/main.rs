//! The DRA driver: gives ports of a daemon's networks to pods of Kubernetes (docs/kubernetes.md).
//!
//! ```text
//!    kubelet ── registration, DRA service ──┐               ┌── claims, slices, events ── kube-apiserver
//!                                        driver ────────────┤
//!    checkpoints, directories, CDI files ───┘               └── ports, networks ── control socket of the daemon
//! ```
//!
//! | module | |
//! |---|---|
//! | [`kubelet`] | answers kubelet |
//! | [`cluster`] | publishes networks, reads claims, reports on them |
//! | [`config`] | parameters of a claim |
//! | [`ports`] | prepares and releases claims: [`checkpoint`], [`directory`], [`daemon`], [`cdi`] |
//! | [`driver`] | calls them in order, and watches the daemon |
//! | [`names`] | names of ports, paths and devices |
//!
//! The state is in the daemon and in the checkpoints. The driver can end at any moment, and another one, also of another
//! release, continues.

mod cdi;
mod checkpoint;
mod cluster;
mod config;
mod daemon;
mod directory;
mod driver;
mod kubelet;
mod names;
mod ports;

use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use clap::Parser as _;
use program::dra::Options;
use program::users;
use serde_json::{Map, Value};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio_stream::wrappers::UnixListenerStream;

use crate::cdi::Files;
use crate::checkpoint::Store;
use crate::cluster::{Cluster, slices};
use crate::daemon::Daemon;
use crate::directory::{Access, Sockets};
use crate::driver::Driver;
use crate::kubelet::messages::dra::dra_plugin_server::DraPluginServer;
use crate::kubelet::{listen, registration, service::Service};
use crate::ports::Ports;

fn main() -> ExitCode {
    let options = Options::parse();
    // kube logs each failure, too, without its reason.
    options.log.start("info,kube_client=off");
    program::log::exit("vhost-af-xdp-dra", run(&options))
}

#[tokio::main(flavor = "current_thread")]
async fn run(options: &Options) -> anyhow::Result<()> {
    let (node, driver) = (&options.node_name, &options.driver_name);
    let cluster = Cluster::new(options.kubeconfig.as_deref(), node, driver).await?;
    let ports = open(options)?;
    ports.restore_files();
    let [service, registration] = kubelet::sockets(&options.kubelet_dir, driver);
    let cannot_listen = |path: &Path| format!("cannot listen at {}", path.display());
    let calls = listen(&service).with_context(|| cannot_listen(&service))?;
    let registrations = listen(&registration).with_context(|| {
        format!(
            "{}: is --kubelet-dir right, and kubelet set up?",
            cannot_listen(&registration)
        )
    })?;
    let (mut terminated, mut interrupted) =
        (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let the_driver = Arc::new(Driver::new(cluster.clone(), ports));
    let (devices, published) = watch::channel(None);
    let calls = tonic::transport::Server::builder().serve_with_incoming(
        DraPluginServer::new(Service(Arc::clone(&the_driver))),
        UnixListenerStream::new(calls),
    );
    tokio::select! {
        served = calls => served.context("the DRA service ended")?,
        () = registration::serve(registrations, driver.clone(), service.clone()) => {}
        () = the_driver.watch_daemon(options.ports, devices) => {}
        () = slices::publish(cluster, published) => {}
        () = the_driver.collect() => {}
        _ = terminated.recv() => {}
        _ = interrupted.recv() => {}
    }
    // So that kubelet knows at once. Ports stay: their pods run on.
    for socket in [registration, service] {
        let _ = fs::remove_file(socket);
    }
    tracing::info!("ended; ports of claims stay");
    Ok(())
}

/// Opens directories and checkpoints.
fn open(options: &Options) -> anyhow::Result<Ports> {
    let sockets = &options.sockets_dir;
    if sockets.as_os_str().len() > names::LONGEST_DIRECTORY || !sockets.is_absolute() {
        let (path, longest) = (sockets.display(), names::LONGEST_DIRECTORY);
        bail!("--sockets-dir {path}: give an absolute path of at most {longest} bytes");
    }
    let name = |text: &str| text.parse().ok();
    let group = |group: &String| {
        name(group)
            .or_else(|| users::group_number(group))
            .with_context(|| format!("no group {group}"))
    };
    let group = options
        .directory_group
        .as_ref()
        .map(group)
        .transpose()
        .context("--directory-group")?;
    if let Some(owner) = options
        .socket_owner
        .as_ref()
        .filter(|owner| name(owner).is_none())
    {
        users::user(owner).with_context(|| format!("--socket-owner: no user {owner}"))?;
    }
    let access = Access {
        group,
        mode: options
            .directory_mode
            .unwrap_or(if group.is_some() { 0o775 } else { 0o755 }),
        label: options.selinux_label.clone(),
    };
    let plugin = options.kubelet_dir.join("plugins").join(&options.driver_name);
    fs::create_dir_all(&options.cdi_dir)
        .with_context(|| format!("--cdi-dir {}", options.cdi_dir.display()))?;
    let directory = plugin.join("claims");
    let store =
        Store::open(directory.clone()).with_context(|| format!("cannot use {}", directory.display()))?;
    let metadata = plugin.join("metadata");
    fs::create_dir_all(&metadata).with_context(|| format!("cannot use {}", metadata.display()))?;
    Ok(Ports {
        daemon: Daemon {
            control: options.control.clone(),
        },
        sockets: Sockets::open(sockets.clone(), access)
            .with_context(|| format!("cannot use --sockets-dir {}", sockets.display()))?,
        files: Files {
            driver: options.driver_name.clone(),
            cdi: options.cdi_dir.clone(),
            metadata,
        },
        store,
        defaults: defaults(options),
        networks: Vec::new(),
        paused: None,
        unfinished: HashSet::new(),
        failing: HashSet::new(),
    })
}

/// Keys of sockets whose claims name none.
fn defaults(options: &Options) -> Map<String, Value> {
    let keys = [
        ("socket-owner", options.socket_owner.as_ref()),
        ("socket-group", options.socket_group.as_ref()),
        ("socket-mode", Some(&options.socket_mode)),
    ];
    let set = keys
        .into_iter()
        .filter_map(|(key, value)| Some((key.to_owned(), value?.as_str().into())));
    set.collect()
}
