//! Migrations are compiled into the binary: a new one must rebuild it.
fn main() {
    println!("cargo:rerun-if-changed=migrations");
}
