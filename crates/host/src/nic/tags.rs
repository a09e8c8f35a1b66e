//! Where the VLAN tags of received frames are when XDP sees them, and what to do where that is too late.

use steer::Filter;

use super::{Ethtool, Tags};

/// The visibility of tags on an interface, if a filter needs them. With stripped tags the filter would treat frames of
/// all VLANs as those of VLAN 0, and the inner one of two tags as the only one.
#[must_use]
pub fn tags_of(interface: &str, filter: &Filter) -> Option<Tags> {
    let looks = !filter.vlans.is_empty();
    let driver = || Ethtool::open(interface).map_or(Tags::There, |driver| driver.tags());
    looks.then(driver)
}

/// Whether the program can tell VLANs on this interface, if a filter is for any. `may_restore`: whether the driver may
/// tell it of tags that it takes off.
///
/// # Errors
/// Why not, and what to do.
pub fn check_tags(
    interface: &str,
    filter: &Filter,
    may_restore: impl FnOnce() -> bool,
) -> Result<(), String> {
    match tags_of(interface, filter) {
        Some(Tags::TakenOff) if may_restore() => Ok(()),
        Some(Tags::TakenOff) => Err(blind(interface)),
        Some(Tags::Lost) => Err(format!(
            "the kernel takes VLAN tags off before XDP sees frames of {interface}, so that its VLANs are not known: \
             lease queues of the interface below it"
        )),
        _ => Ok(()),
    }
}

/// Whether an interface's driver or the kernel takes tags off before a program sees frames.
#[must_use]
pub fn strips_tags(interface: &str) -> bool {
    let tags = Ethtool::open(interface).map(|driver| driver.tags());
    matches!(tags, Ok(Tags::TakenOff | Tags::Lost))
}

/// Why the lessee may receive no frames where tags are stripped.
#[must_use]
pub fn blind(interface: &str) -> String {
    format!(
        "the driver of {interface} takes VLAN tags off before XDP sees frames, so that VLANs are not known: `ethtool \
         -K {interface} rxvlan off`, or hints with vlan (native mode, if the driver has them)"
    )
}
