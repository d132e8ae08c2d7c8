//! Generates the client and the server from `proto/coord.proto`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto/coord.proto");
    let descriptors = protox::compile(["proto/coord.proto"], ["proto"])?;
    // Payloads as `Bytes`: a received gigabyte is taken out of the message without a copy.
    tonic_prost_build::configure().bytes(".shardfast.coord.v1").compile_fds(descriptors)?;
    Ok(())
}
