//! The kernel that runs.

/// Its version.
///
/// # Panics
/// If its release does not begin with two numbers.
#[must_use]
pub fn version() -> (u32, u32) {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut numbers = release.split(['.', '-']).map_while(|word| word.parse().ok());
    let numbers = (numbers.next(), numbers.next());
    let (Some(major), Some(minor)) = numbers else {
        panic!("release {release}");
    };
    (major, minor)
}
