//! A socket with its UMEM and free frames, and what tests do with one.

use std::time::Instant;

use testkit::wait::SOON;
use xsk::{Frame, FramePool, Kick, OpenError, QueueId, Socket, SocketConfig, TxDesc, Umem};

use super::{Veth, own_umem};

/// A socket on the near end with a UMEM of its own.
pub(crate) struct Rig {
    pub(crate) umem: Umem,
    pub(crate) pool: FramePool,
    pub(crate) socket: Socket,
}

impl Rig {
    pub(crate) fn open(config: &SocketConfig) -> Self {
        let (umem, pool) = own_umem(256);
        Self::over(umem, pool, config)
    }

    pub(crate) fn over(umem: Umem, pool: FramePool, config: &SocketConfig) -> Self {
        let socket = Socket::open(&umem, config).unwrap();
        Self { umem, pool, socket }
    }

    /// Sends `pieces` as one frame, a descriptor each.
    pub(crate) fn send(&mut self, pieces: &[&[u8]]) {
        let mut batch = self.socket.tx.reserve(pieces.len() as u32);
        for (at, piece) in pieces.iter().enumerate() {
            let frame = self.pool.take().unwrap();
            self.umem.write(frame.offset(), piece).unwrap();
            batch.push(TxDesc {
                more: at + 1 < pieces.len(),
                ..TxDesc::whole(frame, piece.len() as u32)
            });
        }
        assert_eq!(batch.submit() as usize, pieces.len());
        assert!(
            self.socket.tx.needs_wakeup(),
            "copy mode must always ask for a kick"
        );
        self.kick();
    }

    pub(crate) fn kick(&self) -> Kick {
        loop {
            match self.socket.kick_tx().unwrap() {
                Kick::Again => {}
                outcome => return outcome,
            }
        }
    }

    /// Waits for `wanted` completions.
    pub(crate) fn complete(&mut self, wanted: usize) -> Vec<Frame> {
        let deadline = Instant::now() + SOON;
        let mut frames = Vec::new();
        while frames.len() < wanted && Instant::now() < deadline {
            frames.extend(self.socket.completion.peek(64));
        }
        frames
    }

    /// Waits for a frame, of one or more pieces; says its bytes and how many pieces it had.
    pub(crate) fn receive(&mut self) -> Option<(Vec<u8>, usize)> {
        let deadline = Instant::now() + SOON;
        let (mut bytes, mut pieces) = (Vec::new(), 0);
        while Instant::now() < deadline {
            let Some(desc) = self.socket.rx.peek(1).next() else {
                continue;
            };
            let mut piece = vec![0; desc.len as usize];
            self.umem.read(desc.data, &mut piece).unwrap();
            bytes.extend(piece);
            pieces += 1;
            self.pool.put(desc.frame);
            if !desc.more {
                return Some((bytes, pieces));
            }
        }
        None
    }
}

pub(crate) fn config(veth: &Veth) -> SocketConfig {
    SocketConfig::new(veth.near, QueueId(0))
}

pub(crate) fn refused(umem: &Umem, config: &SocketConfig) -> OpenError {
    Socket::open(umem, config).map(drop).unwrap_err()
}
