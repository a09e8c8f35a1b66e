//! Frames and what is found in them.
