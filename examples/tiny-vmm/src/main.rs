//! Runs one piece of work of the guest program: `tiny-vmm --help`.

#[cfg(target_arch = "x86_64")]
mod run;

fn main() {
    #[cfg(target_arch = "x86_64")]
    let done = run::run();
    #[cfg(not(target_arch = "x86_64"))]
    let done: anyhow::Result<()> = Err(anyhow::anyhow!("the guest program is for x86-64"));
    if let Err(error) = done {
        eprintln!("error: {error:#}");
        std::process::exit(1);
    }
}
