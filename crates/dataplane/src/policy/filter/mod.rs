//! The [rules](acl) of a port for the lanes of its queue pairs, and the capture of its frames.

mod direction_acl;

use std::sync::Arc;

use acl::compile;
pub(crate) use acl::{Facts, FlowKey, Looked, Rules, Verdict};
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use model::config::Action;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use model::config::Rule;
pub(crate) use model::config::{Direction, Filter};
use packet::HEADERS_MAX;
use xsk::metadata::Hints;
use xsk::{RxDesc, Umem};

pub(crate) use self::direction_acl::Acl;
use crate::fdb::Destination;
use crate::frame::bytes::read_start;
use crate::policy::capture::Capture;

/// For each flow that its guest sends it remembers the destination.
pub(crate) type Classifier = acl::Classifier<Destination>;

/// The first bytes of a received frame, as many as rules read, and what else they decide on. `piece` is its first one:
/// the length of a frame in several pieces is not known yet.
#[inline]
pub(crate) fn read_received<'a>(
    umem: &Umem,
    piece: &RxDesc,
    hints: &Hints,
    room: &'a mut [u8; HEADERS_MAX],
) -> (&'a [u8], Facts) {
    let len = match piece.more {
        true => usize::MAX,
        false => piece.len as usize,
    };
    (read_start(umem, piece, room), Facts::with_hints(len, hints))
}

/// The compiled rules of a port, which the lanes of its pairs share.
#[derive(Debug, Clone, Default)]
pub struct PortFilter {
    /// Rules for frames of the guest; `None`: all pass.
    pub from_guest: Option<Arc<Rules>>,
    /// Rules for frames to the guest; `None`: all pass.
    pub to_guest: Option<Arc<Rules>>,
    /// A running capture.
    pub capture: Option<Arc<Capture>>,
}

impl PortFilter {
    /// Compiles the rules of a port.
    pub fn new(filter: &Filter) -> Self {
        Self {
            from_guest: compile(filter, Direction::FromGuest),
            to_guest: compile(filter, Direction::ToGuest),
            capture: None,
        }
    }

    /// Rules and capture for the lane of a queue pair, with memory of its own.
    pub fn for_a_lane(&self, pair: u16) -> LaneFilter {
        let acl = |rules: &Option<Arc<Rules>>, to_guest| {
            Acl::new(rules.as_ref(), self.capture.as_ref(), (to_guest, pair)).map(Box::new)
        };
        LaneFilter {
            from_guest: acl(&self.from_guest, false),
            to_guest: acl(&self.to_guest, true),
        }
    }
}

/// Rules and capture of a lane, by direction; `None`: all frames pass.
#[derive(Debug, Default)]
pub struct LaneFilter {
    pub(crate) from_guest: Option<Box<Acl>>,
    pub(crate) to_guest: Option<Box<Acl>>,
}
