//! What a hostile VMM or guest may try against the whole daemon, beside an honest guest on the same worker: that one
//! loses no frame, the daemon lives and tells its status, holds afterwards what it held before, and serves an honest
//! guest where the hostile one was.

mod descriptors;
mod eventfds;
mod floods;
mod large;
mod scribbled;
mod sparse;
mod stalled;
mod truncated;
