//! What a placement will be in, and why not in a better mode: the same conditions that `serve` goes by, in its words.

use common::binding::{
    Binding, BufferOrder, GuestBuffers, IntoGuest, Judge, L2_BYTES, LONGEST_FRAME, NoZeroCopy, QueueFacts,
};
use serde::Serialize;
use steward::links::DriverSends;
use steward::server::wants_frags;
use xsk::{BindRequest, Mode};

use super::kernels;
use super::netkit;
use super::seen::Seen;
use crate::config::Placement;
use crate::nic::mode::{Checksums, DataPath, Fallback};

/// One placement.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Expected {
    /// As `--memory` has it.
    pub(super) placement: String,
    /// As `status` will say it; none: it is refused.
    pub(super) mode: Option<String>,
    /// Why it is not in a better one, as `fallbacks` in `status` will say it.
    pub(super) why_not_more: Vec<String>,
    /// On what zero-copy depends that is not to be seen here: what would be said where it is not so.
    pub(super) depends_on: Vec<String>,
    /// Who completes the guest's checksums.
    pub(super) checksums: Option<String>,
}

/// What a guest could be at best: nothing is known of it yet.
const BEST: GuestBuffers = GuestBuffers {
    order: BufferOrder::Any,
    huge_pages: true,
};

impl Seen {
    /// Why a program will not be attached natively.
    /// Errors: that reason.
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

    /// How a queue will be asked for beside a program that is attached like that.
    pub(super) fn facts(&self, native: bool, into_guest: Option<IntoGuest>) -> QueueFacts {
        QueueFacts {
            asked: BindRequest::Auto,
            into_guest,
            native,
            driver: self.sends(),
            line: self.line,
            shares: false,
            frame_limit: self.link.mtu.saturating_add(L2_BYTES),
        }
    }

    /// With nobody's program but ours, no `--mac` and no `--vlan`, and a daemon that root started.
    fn into_guest(&self, guest: GuestBuffers) -> IntoGuest {
        IntoGuest {
            judge: match self.program {
                Some(_) if self.program_holder().is_none() => Judge::Foreign,
                Some(_) | None => Judge::Nic,
            },
            is_own: true,
            translated: self.link.translated,
            guest: Some(guest),
        }
    }

    pub(super) fn expected(&self, placement: Placement) -> Expected {
        let name = placement.to_string();
        if let Some(refusal) = self.refusal(placement) {
            return Expected {
                placement: name,
                mode: None,
                why_not_more: vec![refusal],
                depends_on: Vec::new(),
                checksums: None,
            };
        }
        let native = self.native();
        let ask = |into_guest| self.facts(native.is_ok(), into_guest).binding();
        let direct = placement == Placement::Direct;
        let binding = ask(direct.then(|| self.into_guest(BEST)));
        let (zero_copy, note) = match binding {
            Ok(Binding { ask, note, .. }) => (ask != BindRequest::ForceCopy, note),
            Err(why) => (false, Some(why)),
        };
        let mode = match (&native, zero_copy) {
            (Err(_), _) => Mode::SkbCopy,
            (Ok(()), true) => Mode::ZeroCopy,
            (Ok(()), false) => Mode::NativeCopy,
        };
        let by_tap = self.by_tap().filter(|_| placement == Placement::Copy);
        if let Some(why) = by_tap {
            return Expected {
                placement: name,
                mode: Some(DataPath::Tap.to_string()),
                why_not_more: vec![Fallback::ByTap(why).to_string()],
                depends_on: Vec::new(),
                checksums: Some(self.checksums(false)),
            };
        }
        let mut why: Vec<Fallback> = note.map(Fallback::NoZeroCopy).into_iter().collect();
        let on_skb = native.is_err() && self.link.partial_checksums;
        why.extend(native.clone().err().map(Fallback::NotNative));
        why.extend(on_skb.then_some(Fallback::SkbOnVeth));
        let depends_on = match direct && zero_copy {
            true => self.conditions(ask),
            false => Vec::new(),
        };
        Expected {
            placement: name,
            mode: Some(mode.to_string()),
            why_not_more: why.iter().map(ToString::to_string).collect(),
            depends_on,
            checksums: Some(self.checksums(zero_copy)),
        }
    }

    fn checksums(&self, zero_copy: bool) -> String {
        let metadata = self.kernel.is_some_and(|kernel| kernel >= kernels::TX_METADATA);
        let is_veth = self.link.partial_checksums;
        Checksums::completed(metadata, self.sends(), is_veth, zero_copy).to_string()
    }

    /// Why frames come by a tap where nobody asks for a mode; `None`: they come by an XDP program.
    pub(super) fn by_tap(&self) -> Option<String> {
        let why = self.link.copies(self.sends()).map(str::to_owned);
        why.or_else(|| self.native().err())
    }

    /// Why a placement is not to be had at all.
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
            return Some(format!(
                "MTU {mtu}: frames in guest memory have {LONGEST_FRAME} bytes at most: lower the MTU to {most} or use \
                 memory=copy"
            ));
        }
        let has_pieces = self.kernel.is_none_or(|kernel| kernel >= (6, 6));
        (!has_pieces).then(|| format!("MTU {mtu}: above {most} it takes Linux 6.6, or lower the MTU"))
    }

    /// What would be said if one of the things were otherwise that are not known here.
    fn conditions(&self, ask: impl Fn(Option<IntoGuest>) -> Result<Binding, NoZeroCopy>) -> Vec<String> {
        let best = self.into_guest(BEST);
        let guest = |guest| IntoGuest {
            guest: Some(guest),
            ..best
        };
        let others = [
            IntoGuest {
                judge: Judge::Program,
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
