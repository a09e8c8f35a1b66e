//! Generates the gRPC services of KubeVirt's hooks from proto/.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = protox::compile(["proto/info.proto", "proto/v1alpha3.proto"], ["proto"])?;
    tonic_prost_build::configure().compile_fds(files)?;
    Ok(())
}
