//! The two documents that everybody reads first stay short.

use super::markdown::Page;

const KB: usize = 1024;

fn check(name: &str, limit: usize) {
    let bytes = Page::read(name).text.len();
    assert!(
        bytes <= limit,
        "{name} has {bytes} bytes of {limit}: move something to docs/"
    );
}

#[test]
fn the_readme_is_a_screen_and_a_half() {
    check("README.md", 6 * KB);
}

#[test]
fn the_architecture_is_a_map() {
    check("ARCHITECTURE.md", 12 * KB);
}
