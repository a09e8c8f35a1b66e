//! Registers the driver with kubelet.
//!
//! Kubelet finds the socket in `plugins_registry` and calls GetInfo, then NotifyRegistrationStatus, by gRPC. Its
//! `:authority` is the percent-encoded path of the socket, which is no authority (RFC 3986, section 3.2), and HTTP/2
//! libraries reset such a stream. So these two calls are answered here by hand: frames of HTTP/2 (RFC 9113) with as much of
//! HPACK (RFC 7541) as the answers take; headers of requests are not read. The calls differ by their message: that of
//! GetInfo is empty, that of NotifyRegistrationStatus is not. Only root can connect, as to kubelet itself.

use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use prost::Message as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};

use super::messages::registration::{PluginInfo, RegistrationStatus};

/// How a client begins (RFC 9113, section 3.4).
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Longest frame that a client may send without asking (SETTINGS_MAX_FRAME_SIZE).
const LONGEST_FRAME: usize = 16_384;
/// Longest message.
const LONGEST_MESSAGE: usize = 65_536;
/// How long a connection may last without a frame of the client; kubelet's lasts for two calls.
const IDLE: Duration = Duration::from_secs(60);

/// Types of frames.
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
/// Flags: of SETTINGS and PING; of DATA and HEADERS; of HEADERS.
const ACK: u8 = 1;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

/// `:status: 200` (static table), then `content-type: application/grpc` (name indexed, without indexing).
const RESPONSE: &[u8] = b"\x88\x0f\x10\x10application/grpc";
/// `grpc-status: 0`, a literal without indexing.
const TRAILERS: &[u8] = b"\x00\x0bgrpc-status\x010";

/// Introduces the driver to each kubelet that connects.
pub(crate) async fn serve(listener: UnixListener, driver: String, endpoint: PathBuf) {
    let info = Arc::new(PluginInfo {
        r#type: "DRAPlugin".to_owned(),
        name: driver,
        endpoint: endpoint.to_string_lossy().into_owned(),
        supported_versions: vec!["v1.DRAPlugin".to_owned()],
    });
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            // No descriptor is free.
            tokio::time::sleep(Duration::from_secs(1)).await;
            continue;
        };
        let info = Arc::clone(&info);
        tokio::spawn(async move {
            match answer(stream, &info).await {
                Err(error) if error.kind() != ErrorKind::UnexpectedEof => {
                    tracing::debug!("registration: {error}");
                }
                _ => {}
            }
        });
    }
}

struct Frame {
    kind: u8,
    flags: u8,
    stream: u32,
    body: Vec<u8>,
}

impl Frame {
    async fn read(from: &mut UnixStream) -> io::Result<Self> {
        let mut head = [0; 9];
        from.read_exact(&mut head).await?;
        let [l0, l1, l2, kind, flags, s0, s1, s2, s3] = head;
        let length = u32::from_be_bytes([0, l0, l1, l2]) as usize;
        if length > LONGEST_FRAME {
            return Err(too_long());
        }
        let mut body = vec![0; length];
        from.read_exact(&mut body).await?;
        let stream = u32::from_be_bytes([s0 & 0x7f, s1, s2, s3]);
        Ok(Self {
            kind,
            flags,
            stream,
            body,
        })
    }

    fn write(kind: u8, flags: u8, stream: u32, body: &[u8]) -> Vec<u8> {
        // All that are written here are short.
        let [_, length @ ..] = (body.len() as u32).to_be_bytes();
        [&length[..], &[kind, flags], &stream.to_be_bytes(), body].concat()
    }
}

/// Answers the calls of a connection until the client closes it.
async fn answer(mut stream: UnixStream, info: &PluginInfo) -> io::Result<()> {
    let mut preface = [0; PREFACE.len()];
    tokio::time::timeout(IDLE, stream.read_exact(&mut preface)).await??;
    if preface != *PREFACE {
        return Err(io::Error::new(ErrorKind::InvalidData, "this is not HTTP/2"));
    }
    stream.write_all(&Frame::write(SETTINGS, 0, 0, &[])).await?;
    // Of one call: kubelet begins the next one after the answer.
    let mut message = Vec::new();
    loop {
        let frame = tokio::time::timeout(IDLE, Frame::read(&mut stream)).await??;
        match frame.kind {
            SETTINGS if frame.flags & ACK == 0 => {
                stream.write_all(&Frame::write(SETTINGS, ACK, 0, &[])).await?;
            }
            PING if frame.flags & ACK == 0 => {
                stream.write_all(&Frame::write(PING, ACK, 0, &frame.body)).await?;
            }
            GOAWAY => return Ok(()),
            DATA => {
                message.extend(&frame.body);
                if message.len() > LONGEST_MESSAGE {
                    return Err(too_long());
                }
                if frame.flags & END_STREAM != 0 {
                    let answer = answer_to(&std::mem::take(&mut message), info)?;
                    stream.write_all(&response(frame.stream, &answer)).await?;
                }
            }
            _ => {}
        }
    }
}

/// The message that answers a call with this one, which begins with a flag and its length, 5 bytes in all.
fn answer_to(message: &[u8], info: &PluginInfo) -> io::Result<Vec<u8>> {
    let Some(status) = message.get(5..).filter(|status| !status.is_empty()) else {
        return Ok(info.encode_to_vec());
    };
    let status = RegistrationStatus::decode(status).map_err(io::Error::other)?;
    match status.plugin_registered {
        true => tracing::info!("registered with kubelet"),
        false => tracing::error!("kubelet rejects the driver: {}", status.error),
    }
    Ok(Vec::new())
}

fn response(stream: u32, message: &[u8]) -> Vec<u8> {
    let data = [&[0][..], &(message.len() as u32).to_be_bytes(), message].concat();
    [
        Frame::write(HEADERS, END_HEADERS, stream, RESPONSE),
        Frame::write(DATA, 0, stream, &data),
        Frame::write(HEADERS, END_HEADERS | END_STREAM, stream, TRAILERS),
    ]
    .concat()
}

fn too_long() -> io::Error {
    io::Error::new(ErrorKind::InvalidData, "a message is too long")
}
