//! The mode that an option asks for, as the steward has it.

use model::config::Mode;
use steer::ModeRequest;

pub(crate) fn mode_request(mode: Option<Mode>) -> ModeRequest {
    match mode.unwrap_or_default() {
        Mode::Auto => ModeRequest::Auto,
        Mode::Xdp => ModeRequest::Xdp,
        Mode::Native => ModeRequest::Native,
        Mode::Skb => ModeRequest::Skb,
        Mode::Tap => ModeRequest::Tap,
    }
}
