//! The service's side: a node in this process, called through the library and over HTTP.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use futures_util::future::try_join_all;
use reqwest::Client;
use serde_json::{Value, json};
use throughline::app::App;
use throughline::auth::ServiceCaller;
use throughline::clock::Clock;
use throughline::config::Config;
use throughline::dev::service_caller;
use throughline::domain::conversation::message::{Content, MessageKind, NewMessage, Role};
use throughline::domain::conversation::session_name::SessionRef;
use throughline::domain::people::access::Access;
use throughline::domain::values::paging::{MAX_LIMIT, PageRequest};
use throughline::ids::SessionId;
use throughline::server::Node;
use throughline::sessions;
use throughline::store::conversation::messages::{self, Order};
use throughline::store::conversation::tips;

use crate::Task;
use crate::database;
use crate::dev::Dev;
use crate::figures::{Part, Sample, Side, Times};
use crate::seed::{self, LONG_SESSION, SHORT_SESSIONS};

/// Two hundred characters that neither JSON nor SQL escapes.
pub const TEXT: &str = "It is a truth universally acknowledged that a single conversation in possession of \
                        a good fortune of platforms must be in want of a service which finds its end \
                        however often that was moved away from it";

/// A user's message, and the answer.
pub fn turn() -> [NewMessage; 2] {
    [Role::User, Role::Assistant].map(|role| NewMessage {
        role,
        kind: MessageKind::Normal,
        content: Some(Content::text(TEXT)),
        tool_calls: None,
        tool_call_id: None,
        token_count: None,
        extra: None,
    })
}

pub struct Service {
    node: Node,
    client: Arc<ServiceClient>,
}

struct ServiceClient {
    app: App,
    caller: ServiceCaller,
    access: Access,
    http: Client,
    url: String,
    key: String,
    turn: Value,
}

impl Service {
    /// Starts a node with one connection to Postgres for each client.
    pub async fn start(dev: &Dev, clients: u32) -> anyhow::Result<Self> {
        let lookup = |name: &str| match name {
            "THROUGHLINE_DATABASE_POOL" => Some(clients.to_string()),
            "THROUGHLINE_LISTEN" => Some("127.0.0.1:0".to_owned()),
            name => dev.ready["env"][name].as_str().map(str::to_owned),
        };
        let app = App::build(Config::from_lookup(&lookup)?, Clock::system()).await?;
        let node = Node::start(app.clone(), None).await?;
        let messages =
            [Role::User, Role::Assistant].map(|role| json!({"role": role, "content": TEXT}));
        let client = ServiceClient {
            app,
            caller: service_caller(database::tenant_id(dev)?),
            access: Access::of_admin_key(None, None),
            http: Client::new(),
            url: format!("http://{}/v1/sessions", node.address),
            key: dev.ready["api_key"]
                .as_str()
                .context("no api_key")?
                .to_owned(),
            turn: json!({ "messages": messages }),
        };
        Ok(Self {
            node,
            client: Arc::new(client),
        })
    }

    pub async fn stop(self) {
        self.node.stop().await;
    }

    /// Each client repeatedly chooses a random task, like those of pgbench: the cost of a task depends on the
    /// one before it.
    pub async fn run(
        &self,
        side: Side,
        tasks: &[Task],
        clients: u32,
        times: Times,
    ) -> anyhow::Result<Part> {
        let began = Instant::now();
        let end = times.warm_up + times.measured;
        let working = (1..=clients).map(|number| {
            let client = self.client.clone();
            let tasks = tasks.to_vec();
            tokio::spawn(async move {
                let mut samples = Vec::new();
                let mut random = Random(number.into());
                loop {
                    let task = random.below(tasks.len() as u64) as usize;
                    let took = client.perform(side, tasks[task], &mut random).await?;
                    let ended = began.elapsed();
                    samples.push(Sample { task, took, ended });
                    if ended > end {
                        break;
                    }
                }
                anyhow::Ok(samples)
            })
        });
        let done = try_join_all(working).await?;
        let samples = done.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
        Part::new(&samples.concat(), tasks.len(), times.warm_up..end)
    }
}

impl ServiceClient {
    /// Performs a task; returns its duration.
    async fn perform(
        &self,
        side: Side,
        task: Task,
        random: &mut Random,
    ) -> anyhow::Result<Duration> {
        let began = Instant::now();
        match (task, side) {
            (Task::Tip { depth }, Side::Http) => {
                let tip = self.get(seed::first_link(depth), "tip").await?;
                ensure!(tip["hops"] == depth, "a wrong tip");
            }
            (Task::Tip { depth }, _) => return self.find_tip(depth).await,
            (Task::History { limit }, Side::Http) => self.read_pages(limit).await?,
            (Task::History { limit }, _) => self.read(limit).await?,
            (Task::Append, Side::Http) => self.post_turn(random.session()).await?,
            (Task::Append, _) => self.append(random.session()).await?,
        }
        Ok(began.elapsed())
    }

    async fn find_tip(&self, depth: u32) -> anyhow::Result<Duration> {
        let session = SessionRef::Id(seed::first_link(depth));
        let now = self.app.clock.now();
        let mut tx = self.caller.begin(&self.app.db).await?;
        let began = Instant::now();
        let tip = tips::find(&mut tx, &self.access, &session, now).await?;
        let took = began.elapsed();
        tx.commit().await?;
        let found = tip.map(|tip| tip.session_id);
        ensure!(found == Some(seed::last_link(depth)), "a wrong tip");
        Ok(took)
    }

    async fn read(&self, limit: u32) -> anyhow::Result<()> {
        let page = PageRequest { limit, after: None };
        let mut tx = self.caller.begin(&self.app.db).await?;
        let page = messages::list(&mut tx, seed::long_session(), Order::NewestFirst, &page).await?;
        tx.commit().await?;
        let first = page.rows.first().map(|message| message.seq);
        ensure!(
            page.rows.len() == limit as usize && first == Some(LONG_SESSION),
            "wrong messages"
        );
        Ok(())
    }

    async fn append(&self, session: SessionId) -> anyhow::Result<()> {
        let session = SessionRef::Id(session);
        let now = self.app.clock.now();
        let mut tx = self.caller.begin(&self.app.db).await?;
        sessions::append(&mut tx, &self.access, &session, &turn(), None, now).await?;
        Ok(tx.commit().await?)
    }

    async fn get(&self, session: SessionId, rest: &str) -> anyhow::Result<Value> {
        let request = self.http.get(format!("{}/{session}/{rest}", self.url));
        let response = request.bearer_auth(&self.key).send().await?;
        Ok(response.error_for_status()?.json().await?)
    }

    /// Reads page by page: one page has at most `MAX_LIMIT` messages.
    async fn read_pages(&self, limit: u32) -> anyhow::Result<()> {
        let mut read = 0;
        let mut cursor = String::new();
        while read < limit as usize {
            let rest = format!("messages?order=desc&limit={}{cursor}", limit.min(MAX_LIMIT));
            let page = self.get(seed::long_session(), &rest).await?;
            read += page["data"].as_array().context("no data")?.len();
            let next = page["next_cursor"].as_str().context("no next_cursor")?;
            cursor = format!("&cursor={next}");
        }
        ensure!(read == limit as usize, "wrong messages");
        Ok(())
    }

    async fn post_turn(&self, session: SessionId) -> anyhow::Result<()> {
        let request = self.http.post(format!("{}/{session}/messages", self.url));
        let request = request.bearer_auth(&self.key).json(&self.turn);
        let response = request.send().await?.error_for_status()?;
        response.bytes().await?;
        Ok(())
    }
}

/// Xorshift: the quality matters little, as long as every number can occur.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }

    fn session(&mut self) -> SessionId {
        seed::short_session(1 + self.below(SHORT_SESSIONS))
    }
}
