//! A kubelet that is played: it finds the driver by its registration socket, as kubelet does, and calls it.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use prost::Message;
use testkit::wait;
use tokio::runtime::{Builder, Runtime};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Endpoint;

use super::cluster::{Claim, DRIVER};

#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, dead_code)]
mod registration {
    tonic::include_proto!("pluginregistration");
}
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, dead_code)]
mod dra {
    tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1");
}

pub(crate) use dra::Device;

/// Kubelet, with its directory.
pub(crate) struct Kubelet {
    pub(crate) dir: PathBuf,
    runtime: Runtime,
}

impl Kubelet {
    pub(crate) fn new(dir: PathBuf) -> Self {
        std::fs::create_dir_all(dir.join("plugins_registry")).expect("ours");
        let runtime = Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        Self { dir, runtime }
    }

    pub(crate) fn registration_socket(&self) -> PathBuf {
        self.dir
            .join("plugins_registry")
            .join(format!("{DRIVER}-reg.sock"))
    }

    pub(crate) fn service_socket(&self) -> PathBuf {
        self.dir.join("plugins").join(DRIVER).join("dra.sock")
    }

    /// Registers the driver. Returns the path of its service.
    pub(crate) fn register(&self) -> PathBuf {
        let socket = self.registration_socket();
        let mut stream = connect(&socket);
        let authority: String = socket.to_str().expect("UTF-8").replace('/', "%2F");
        stream
            .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            .expect("it reads");
        stream.write_all(&frame(4, 0, 0, &[])).expect("it reads");
        let info = registration::InfoRequest {}.encode_to_vec();
        call(&mut stream, 1, &authority, "GetInfo", &info);
        let info = registration::PluginInfo::decode(&*answer(&mut stream, 1)).expect("its message");
        assert_eq!((info.r#type.as_str(), info.name.as_str()), ("DRAPlugin", DRIVER));
        assert_eq!(info.supported_versions, ["v1.DRAPlugin"]);
        let status = registration::RegistrationStatus {
            plugin_registered: true,
            error: String::new(),
        };
        call(
            &mut stream,
            3,
            &authority,
            "NotifyRegistrationStatus",
            &status.encode_to_vec(),
        );
        assert_eq!(answer(&mut stream, 3), b"");
        info.endpoint.into()
    }

    /// Prepares claims: devices or the error of each, in this order.
    pub(crate) fn prepare(&self, claims: &[&Claim]) -> Vec<Result<Vec<Device>, String>> {
        let request = dra::NodePrepareResourcesRequest {
            claims: names(claims),
        };
        let mut answer: dra::NodePrepareResourcesResponse = self.call("NodePrepareResources", request);
        let mut of = |claim: &&Claim| {
            let answer = answer
                .claims
                .remove(&claim.uid)
                .expect("an answer for each claim");
            if answer.error.is_empty() {
                Ok(answer.devices)
            } else {
                Err(answer.error)
            }
        };
        claims.iter().map(&mut of).collect()
    }

    /// Prepares a claim.
    #[track_caller]
    pub(crate) fn prepared(&self, claim: &Claim) -> Vec<Device> {
        self.prepare(&[claim]).remove(0).expect("prepared")
    }

    /// Releases a claim.
    pub(crate) fn release(&self, claim: &Claim) -> Result<(), String> {
        let request = dra::NodeUnprepareResourcesRequest {
            claims: names(&[claim]),
        };
        let answer: dra::NodeUnprepareResourcesResponse = self.call("NodeUnprepareResources", request);
        let error = answer.claims[&claim.uid].error.clone();
        if error.is_empty() { Ok(()) } else { Err(error) }
    }

    fn call<Q, A>(&self, method: &str, request: Q) -> A
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let socket = self.service_socket();
        let path = format!("/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/{method}");
        let path = PathAndQuery::try_from(path).expect("a path");
        let answer = self.runtime.block_on(async {
            let channel = Endpoint::try_from(format!("unix:{}", socket.display())).expect("a path");
            let mut client = tonic::client::Grpc::new(channel.connect().await.expect("it listens"));
            client.ready().await.expect("it answers");
            let codec = tonic_prost::ProstCodec::default();
            client.unary(tonic::Request::new(request), path, codec).await
        });
        answer.expect("no error of the call").into_inner()
    }
}

fn names(claims: &[&Claim]) -> Vec<dra::Claim> {
    let name = |claim: &&Claim| dra::Claim {
        namespace: "default".to_owned(),
        uid: claim.uid.clone(),
        name: claim.name.clone(),
    };
    claims.iter().map(name).collect()
}

/// Connects to a socket that is there soon.
pub(crate) fn connect(socket: &Path) -> UnixStream {
    let stream = wait::until_some(wait::SOON, || UnixStream::connect(socket).ok());
    let stream = stream.unwrap_or_else(|| panic!("nobody listens at {}", socket.display()));
    stream.set_read_timeout(Some(wait::SOON)).expect("a socket");
    stream
}

fn frame(kind: u8, flags: u8, stream: u32, body: &[u8]) -> Vec<u8> {
    let [_, length @ ..] = u32::try_from(body.len()).expect("short").to_be_bytes();
    [&length[..], &[kind, flags], &stream.to_be_bytes(), body].concat()
}

/// Sends a call as grpc-go does for kubelet: its `:authority` is the percent-encoded path of the socket.
fn call(stream: &mut UnixStream, id: u32, authority: &str, method: &str, message: &[u8]) {
    let text = |index: u8, value: &str| {
        let length = u8::try_from(value.len())
            .ok()
            .filter(|length| *length < 127)
            .expect("short");
        [&[index, length], value.as_bytes()].concat()
    };
    let path = format!("/pluginregistration.Registration/{method}");
    // Indexed: `:method: POST`, `:scheme: http`; literals with indexed names: `:path`, `:authority`, `content-type`.
    let content = [&[0x0f, 0x10, 16][..], b"application/grpc"].concat();
    let headers = [
        &[0x83, 0x86][..],
        &text(0x04, &path),
        &text(0x01, authority),
        &content,
    ]
    .concat();
    let length = u32::try_from(message.len()).expect("short");
    let data = [&[0][..], &length.to_be_bytes(), message].concat();
    stream.write_all(&frame(1, 4, id, &headers)).expect("it reads");
    stream.write_all(&frame(0, 1, id, &data)).expect("it reads");
}

/// The message that answers a call.
fn answer(stream: &mut UnixStream, id: u32) -> Vec<u8> {
    let mut messages: HashMap<u32, Vec<u8>> = HashMap::new();
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head).expect("a frame");
        let [l0, l1, l2, kind, flags, stream_id @ ..] = head;
        let mut body = vec![0; u32::from_be_bytes([0, l0, l1, l2]) as usize];
        stream.read_exact(&mut body).expect("a frame");
        let of = u32::from_be_bytes(stream_id);
        match kind {
            0 => messages.entry(of).or_default().extend(body),
            // The trailers.
            1 if flags & 1 != 0 && of == id => {
                assert!(body.ends_with(b"grpc-status\x010"), "{body:?}");
                return messages.remove(&id).expect("a message")[5..].to_vec();
            }
            _ => {}
        }
    }
}

/// What a client that is no kubelet sends to the registration socket does not harm the driver.
pub(crate) fn send_garbage(socket: &Path) {
    let ping = [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &frame(6, 0, 0, &[7; 8])].concat();
    for garbage in [
        b"GET / HTTP/1.1\r\n\r\n          ".to_vec(),
        [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &[0xff; 64]].concat(),
        [&ping[..], &frame(0, 1, 5, &[0, 0, 0, 0, 9, 0xff, 0xff])].concat(),
    ] {
        let mut stream = connect(socket);
        stream
            .set_read_timeout(Some(Duration::from_secs(30)))
            .expect("a socket");
        stream.write_all(&garbage).expect("it reads");
        // It closes the connection.
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
    }
    // Connections that say nothing stay for a while; others are answered all the same.
    let idle: Vec<_> = (0..10).map(|_| connect(socket)).collect();
    drop(idle);
}
