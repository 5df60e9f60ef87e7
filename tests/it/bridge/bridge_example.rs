//! The bridge that docs/guides/bridges.md shows, docs/guides/bridge_example.py, as its readers run it: people who
//! write lines to it over TCP.

use std::process::Stdio;
use std::time::Duration;

use serde_json::json;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::time::timeout;

use crate::support::servers::cluster::project;
use crate::support::{Fields, Tenant, World, eventually};

const PROGRAM: &str = "docs/guides/bridge_example.py";
const LIMIT: Duration = Duration::from_secs(30);

struct Bridge {
    port: u16,
    /// Ends with it.
    _process: Child,
}

impl Bridge {
    async fn start(world: &World, tenant: &Tenant) -> Self {
        let body = json!({"name": "tcp", "scopes": ["bridge"], "platforms": ["tcp"]});
        let made = world
            .post(&tenant.key, "/v1/api-keys", body)
            .await
            .expect(201);
        let mut process = Command::new("python3")
            .arg(project().join(PROGRAM))
            .env("THROUGHLINE_URL", world.url(""))
            .env("THROUGHLINE_KEY", made.text("key"))
            .env("BRIDGE_PORT", "0")
            // It heeds a proxy of the environment, which could not reach the node.
            .env("NO_PROXY", "127.0.0.1")
            .env_remove("no_proxy")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let printed = process.stdout.take().unwrap();
        let printed = next_line(&mut BufReader::new(printed)).await;
        let (_, port) = printed.trim().rsplit_once(':').unwrap();
        Self {
            port: port.parse().unwrap(),
            _process: process,
        }
    }
}

/// Somebody who is connected.
struct Visitor {
    stream: BufReader<TcpStream>,
}

impl Visitor {
    async fn connect(bridge: &Bridge, name: &str) -> Self {
        let stream = TcpStream::connect(("127.0.0.1", bridge.port)).await;
        let mut person = Self {
            stream: BufReader::new(stream.unwrap()),
        };
        person.write(name).await;
        person
    }

    async fn write(&mut self, line: &str) {
        let line = format!("{line}\n");
        self.stream.write_all(line.as_bytes()).await.unwrap();
    }

    /// The next line, which must contain `text`.
    async fn read(&mut self, text: &str) -> String {
        let line = next_line(&mut self.stream).await;
        assert!(line.contains(text), "no {text:?} in {line:?}");
        line
    }

    /// Hangs up, and waits until the bridge has noticed: it closes its side then.
    async fn leave(mut self) {
        self.stream.shutdown().await.unwrap();
        let mut rest = String::new();
        let read = timeout(LIMIT, self.stream.read_to_string(&mut rest)).await;
        read.expect("the bridge hangs up too").unwrap();
        assert_eq!(rest, "");
    }
}

async fn next_line(reader: &mut (impl AsyncBufRead + Unpin)) -> String {
    let mut line = String::new();
    let read = timeout(LIMIT, reader.read_line(&mut line)).await;
    read.expect("a line comes within the limit").unwrap();
    line
}

#[tokio::test(flavor = "multi_thread")]
async fn the_example_bridge_carries_messages_commands_and_what_waited() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let bridge = Bridge::start(&world, &tenant).await;
    let mut ada = Visitor::connect(&bridge, "ada").await;
    let mut bob = Visitor::connect(&bridge, "bob").await;
    ada.write("hello").await;
    ada.read("You said: hello (your message 1 here)").await;
    bob.write("hello").await;
    bob.read("You said: hello (your message 1 here)").await;
    ada.write("/new Trip").await;
    ada.read("A new session has begun: Trip.").await;

    // What is for somebody who is away waits for them: here, that their accounts were linked.
    bob.write("/link").await;
    let shown = bob.read("Your code is ").await;
    let (_, code) = shown.trim().rsplit_once(' ').unwrap();
    bob.leave().await;
    ada.write(&format!("/link {code}")).await;
    ada.read("This would make one person of").await;
    ada.write("/link yes").await;
    ada.read("Done: ").await;
    let given_back = async || {
        let count: i64 = sqlx::query_scalar(
            "select count(*) from deliveries where kind = 'security' and state = 'pending' and attempt > 0",
        )
        .fetch_one(&mut world.superuser().await)
        .await
        .unwrap();
        count == 1
    };
    eventually("the bridge could not deliver", LIMIT, given_back).await;
    let mut bob = Visitor::connect(&bridge, "bob").await;
    world.age_deliveries(Duration::from_secs(5)).await;
    bob.read("tcp:ada now belongs to you here").await;

    // And they are one person in one conversation.
    ada.write("one").await;
    ada.read("You said: one").await;
    bob.write("two").await;
    bob.read("You said: two").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_example_bridge_reads_a_group_and_answers_who_calls_it() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let bridge = Bridge::start(&world, &tenant).await;
    let mut ada = Visitor::connect(&bridge, "ada").await;
    let mut bob = Visitor::connect(&bridge, "bob").await;
    // Once each has an answer, the bridge knows both.
    for person in [&mut ada, &mut bob] {
        person.write("hello").await;
        person.read("You said: hello").await;
    }
    ada.write("#room nobody asked").await;
    ada.write("#room @bot are you there?").await;
    for person in [&mut ada, &mut bob] {
        let line = person.read("You said: @bot are you there?").await;
        assert!(line.starts_with("#room "), "{line}");
    }
    bob.write("#room /link").await;
    for person in [&mut ada, &mut bob] {
        person.read("This is only done in a direct chat").await;
    }
}

#[test]
fn the_example_bridge_is_short() {
    let text = std::fs::read_to_string(project().join(PROGRAM)).unwrap();
    let lines = text.lines().count();
    assert!(lines < 100, "{lines} lines");
}
