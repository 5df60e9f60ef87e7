//! The official `openai` package for Python, unchanged, against a node. What is expected of it is in
//! tests/clients/openai_client.py.

use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;

use crate::support::World;
use crate::support::servers::cluster::project;

/// Long enough for the package to be installed the first time.
const LIMIT: Duration = Duration::from_secs(300);

#[tokio::test(flavor = "multi_thread")]
async fn the_official_python_client_works_unchanged() {
    let python = run(&mut Command::new(project().join("scripts/openai-client"))).await;
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let (_, chat_key) = world.api_key(&tenant, "chat").await;
    let mut client = Command::new(python.trim());
    client
        .arg(project().join("tests/clients/openai_client.py"))
        .env("THROUGHLINE_URL", world.url(""))
        .env("THROUGHLINE_KEY", &tenant.key)
        .env("THROUGHLINE_CHAT_KEY", &chat_key)
        // The client heeds a proxy of the environment, which could not reach the node.
        .env("NO_PROXY", "127.0.0.1")
        .env_remove("no_proxy");
    let passed = run(&mut client).await;
    assert!(passed.contains("ok: "), "no scenario was run: {passed}");
}

/// What the program printed, if it succeeded.
async fn run(program: &mut Command) -> String {
    program.stdin(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(LIMIT, program.output()).await;
    let output = output.expect("it ends within the limit").unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let printed = text(&output.stdout);
    let complaint = text(&output.stderr);
    assert!(
        output.status.success(),
        "{}\n{printed}{complaint}",
        output.status
    );
    printed
}
