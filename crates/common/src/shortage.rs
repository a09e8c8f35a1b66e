//! What an operator does about a resource that this process or machine has run out of.

/// What to do about the shortage that an error's text ends with, wherever it came from.
pub fn shortage(text: &str) -> &'static str {
    match text {
        // EMFILE, as std and rustix write it.
        _ if text.contains("(os error 24)") => {
            ": raise the limit of open files (`ulimit -n`, systemd: LimitNOFILE=)"
        }
        // EAGAIN, of fork(2) and clone(2).
        _ if text.contains("(os error 11)") && ["thread", "start"].iter().any(|of| text.contains(of)) => {
            ": raise the limit of processes and threads (`ulimit -u`, systemd: TasksMax=, LimitNPROC=)"
        }
        // ENFILE.
        _ if text.contains("(os error 23)") => {
            ": raise the machine's limit of open files (`sysctl fs.file-max`)"
        }
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shortage_of_descriptors_is_told_with_its_remedy() {
        let text = std::io::Error::from(rustix::io::Errno::MFILE).to_string();
        assert!(shortage(&text).contains("ulimit -n"));
        let text = format!("x: {}", rustix::io::Errno::NFILE);
        assert!(shortage(&text).contains("fs.file-max"));
        let text = format!(
            "cannot start workers: {}",
            std::io::Error::from(rustix::io::Errno::AGAIN)
        );
        assert!(shortage(&text).contains("ulimit -u"), "{text}");
        assert_eq!(shortage("no such file"), "");
    }
}
