//! Segments by an independent parser.
