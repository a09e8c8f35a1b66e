//! Words that are said at a control socket.

/// The file is read again.
pub(super) const RELOAD: &[u8] = b"reload\n";
/// Statistics of workers are reset.
pub(super) const RESET_WORKERS: &[u8] = b"reset\n";
/// What follows is what is to be captured.
pub(super) const CAPTURE: &[u8] = b"capture ";
/// Longest request.
pub(super) const LONGEST_REQUEST: usize = 4096;
