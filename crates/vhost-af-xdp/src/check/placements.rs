//! The mode that a placement will have, and why not a better one: the same conditions and messages as in `serve`.

use common::binding::{
    Binding, BufferOrder, GuestBuffers, IntoGuest, L2_BYTES, LONGEST_FRAME, NoZeroCopy, QueueFacts, SteeredBy,
};
use host::links::DriverSends;
use host::links::wants_frags;
use serde::Serialize;
use steer::ModeRequest;
use xsk::{BindRequest, Mode};

use super::facts::Facts;
use super::kernels;
use super::netkit;
use crate::config::Placement;
use crate::nic::error::InterfaceError;
use crate::nic::mode::{Checksums, DataPath, Fallback};

/// The report for one placement.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct PlacementReport {
    /// As in `--memory`.
    pub(super) placement: String,
    /// As `status` will show it; none: it is not possible.
    pub(super) mode: Option<String>,
    /// Why it is not in a better one, as `fallbacks` in `status` will say it.
    pub(super) why_not_more: Vec<String>,
    /// What zero-copy depends on and cannot be checked here: the messages that `status` shows if it is not met.
    pub(super) depends_on: Vec<String>,
    /// Who completes the guest's checksums.
    pub(super) checksums: Option<String>,
}

/// How a queue is requested.
#[derive(Debug, Clone, Copy)]
pub(super) struct Request {
    pub(super) placement: Placement,
    pub(super) mode: ModeRequest,
    pub(super) bind: BindRequest,
    /// Its memory is a slice of the memory that all queues of the daemon share.
    pub(super) shares: bool,
    /// The XDP program filters by address or VLAN.
    pub(super) has_filter: bool,
    /// A steward of several daemons leases it.
    pub(super) has_steward: bool,
}

impl Request {
    /// The request of root's daemon, with as few options as the placement needs.
    pub(super) fn of(placement: Placement) -> Self {
        Self {
            placement,
            mode: match placement {
                Placement::Copy => ModeRequest::Auto,
                Placement::SendDirect | Placement::Direct => ModeRequest::Xdp,
            },
            bind: BindRequest::Auto,
            shares: false,
            has_filter: false,
            has_steward: false,
        }
    }
}

/// The best guest. It is assumed because no guest is known yet.
const BEST: GuestBuffers = GuestBuffers {
    order: BufferOrder::Any,
    huge_pages: true,
};

impl Facts {
    /// Whether a program can be attached in native mode.
    /// Errors: why not.
    pub(super) fn native(&self) -> Result<(), String> {
        if let Some(why) = self.link.only_skb() {
            return Err(why.to_owned());
        }
        match self.driver {
            Some(driver) if !driver.native && self.link.partial_checksums => Err(
                "the veth has fewer receive queues than its peer has transmit queues (`ethtool -L`), or no peer"
                    .to_owned(),
            ),
            Some(driver) if !driver.native => Err("the driver runs no XDP programs".to_owned()),
            Some(driver) if wants_frags(self.link.mtu) && !driver.pieces => Err(format!(
                "the driver gives no frames in several pieces to XDP, which MTU {} may take",
                self.link.mtu
            )),
            None if self.line.is_none() => {
                Err("the kernel does not say whether the driver runs XDP programs".to_owned())
            }
            _ => Ok(()),
        }
    }

    /// What the driver does for sockets in zero-copy.
    pub(super) fn sends(&self) -> DriverSends {
        self.driver
            .map_or_else(DriverSends::default, |driver| driver.sends)
    }

    /// Facts of a queue with a program that is attached in this mode.
    pub(super) fn queue_facts(
        &self,
        native: bool,
        request: &Request,
        into_guest: Option<IntoGuest>,
    ) -> QueueFacts {
        QueueFacts {
            asked: request.bind,
            into_guest,
            native,
            driver: self.sends(),
            line: self.line,
            shares: request.shares,
            frame_limit: self.link.mtu.saturating_add(L2_BYTES),
        }
    }

    /// For the best guest and VMM.
    fn into_guest(&self, request: &Request) -> IntoGuest {
        IntoGuest {
            steered_by: match self.program {
                Some(_) if self.program_holder().is_none() => SteeredBy::Foreign,
                _ if request.has_filter => SteeredBy::Program,
                _ => SteeredBy::Nic,
            },
            is_own: !request.has_steward,
            translated: self.link.translated,
            guest: Some(BEST),
        }
    }

    /// The mode that a queue will have.
    pub(super) fn placement(&self, request: &Request) -> PlacementReport {
        let Request {
            placement,
            mode: asked,
            ..
        } = *request;
        let report = |mode: Option<DataPath>, why: Vec<String>, zero_copy| PlacementReport {
            placement: placement.to_string(),
            mode: mode.map(|mode| mode.to_string()),
            why_not_more: why,
            depends_on: Vec::new(),
            checksums: mode.map(|_| self.checksums(zero_copy)),
        };
        if let Some(refusal) = self.refusal(placement) {
            return report(None, vec![refusal], false);
        }
        let by_tap = match asked {
            ModeRequest::Tap => Some(None),
            ModeRequest::Auto => self.by_tap().map(Fallback::ByTap).map(Some),
            ModeRequest::Xdp | ModeRequest::Native | ModeRequest::Skb => None,
        };
        if let Some(why) = by_tap {
            let why = why.iter().map(ToString::to_string).collect();
            return report(Some(DataPath::Tap), why, false);
        }
        let native = self.native();
        if let (ModeRequest::Native, Err(why)) = (asked, &native) {
            return report(
                None,
                vec![format!("mode=native: {why}: use mode=xdp or mode=skb")],
                false,
            );
        }
        let is_native = native.is_ok() && asked != ModeRequest::Skb;
        let ask = |into_guest| self.queue_facts(is_native, request, into_guest).binding();
        let direct = placement == Placement::Direct;
        let best = self.into_guest(request);
        // The kernel relies on what the driver reports.
        let has_none = self.driver.is_some_and(|driver| !driver.sends.zero_copy);
        let binding = match ask(direct.then_some(best)) {
            Ok(_) if request.bind == BindRequest::ForceZeroCopy && has_none => Err(NoZeroCopy::Driver),
            binding => binding,
        };
        let (zero_copy, note) = match binding {
            Ok(Binding { ask, note, .. }) => (ask != BindRequest::ForceCopy, note),
            Err(why) => {
                let name = self.link.name.clone();
                let refusal = InterfaceError::NoZeroCopy { name, why };
                return report(None, vec![refusal.to_string()], false);
            }
        };
        let mode = match (is_native, zero_copy) {
            (false, _) => Mode::SkbCopy,
            (true, true) => Mode::ZeroCopy,
            (true, false) => Mode::NativeCopy,
        };
        let not_native = native.err().filter(|_| asked != ModeRequest::Skb);
        let on_skb = !is_native && self.link.partial_checksums;
        let mut why: Vec<Fallback> = note.map(Fallback::NoZeroCopy).into_iter().collect();
        why.extend(not_native.map(Fallback::NotNative));
        why.extend(on_skb.then_some(Fallback::SkbOnVeth));
        let why = why.iter().map(ToString::to_string).collect();
        let mut report = report(Some(DataPath::Socket(mode)), why, zero_copy);
        if direct && zero_copy {
            report.depends_on = Self::conditions(best, ask);
        }
        report
    }

    fn checksums(&self, zero_copy: bool) -> String {
        let metadata = self.kernel.is_some_and(|kernel| kernel >= kernels::TX_METADATA);
        let is_veth = self.link.partial_checksums;
        Checksums::completed(metadata, self.sends(), is_veth, zero_copy).to_string()
    }

    /// Why `auto` chooses tap mode; `None`: it chooses an XDP program.
    pub(super) fn by_tap(&self) -> Option<String> {
        let why = self.link.copies(self.sends()).map(str::to_owned);
        why.or_else(|| self.native().err())
    }

    /// Why a placement is not possible at all.
    fn refusal(&self, placement: Placement) -> Option<String> {
        if self.link.has_leased_only {
            return Some(netkit::REFUSED.to_owned());
        }
        let mtu = self.link.mtu;
        let most = LONGEST_FRAME - L2_BYTES;
        if mtu <= most {
            return None;
        }
        if placement.has_guest_ram() {
            let name = self.link.name.clone();
            let limit = LONGEST_FRAME;
            return Some(InterfaceError::MtuTooLargeForDirect { name, mtu, limit }.to_string());
        }
        let has_pieces = self.kernel.is_none_or(|kernel| kernel >= (6, 6));
        (!has_pieces).then(|| format!("MTU {mtu}: above {most} it takes Linux 6.6: lower the MTU"))
    }

    /// For each condition that cannot be checked here, the message that `status` shows if it is not met.
    fn conditions(
        best: IntoGuest,
        ask: impl Fn(Option<IntoGuest>) -> Result<Binding, NoZeroCopy>,
    ) -> Vec<String> {
        let guest = |guest| IntoGuest {
            guest: Some(guest),
            ..best
        };
        let others = [
            IntoGuest {
                steered_by: SteeredBy::Program,
                ..best
            },
            IntoGuest {
                is_own: false,
                ..best
            },
            guest(GuestBuffers {
                order: BufferOrder::InOrder,
                ..BEST
            }),
            guest(GuestBuffers {
                order: BufferOrder::NoRegion,
                ..BEST
            }),
            guest(GuestBuffers {
                huge_pages: false,
                ..BEST
            }),
        ];
        let said = |other| match ask(Some(other)) {
            Ok(binding) => binding.note.map(|note| note.to_string()),
            Err(why) => Some(why.to_string()),
        };
        others.into_iter().filter_map(said).collect()
    }
}
