//! What is there in the end: the rows as a superuser sees them, and what each node shows of them.

use serde_json::Value;
use sqlx::PgConnection;
use throughline::ids::SessionId;

use super::history::History;
use crate::support::conversations::walk;
use crate::support::{Fields, Reply};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    pub session_id: String,
    pub seq: i64,
    pub role: String,
    pub kind: String,
    pub text: String,
    pub tokens: i64,
    pub copied_from: Option<(String, i64)>,
}

#[derive(Debug, Clone)]
pub struct Link {
    pub id: String,
    pub depth: i32,
    pub parent: Option<String>,
    pub state: String,
    pub end_reason: Option<String>,
    pub undone: bool,
    pub next_seq: i64,
    pub born_seq: i64,
    pub message_count: i64,
    pub token_count: i64,
    /// What the compression that made it says to have kept and summarised.
    pub compression: Option<(i64, i64)>,
    pub rows: Vec<Row>,
}

/// What one node shows of a conversation.
#[derive(Debug, Clone)]
pub struct NodeView {
    pub transcript: Vec<Row>,
    pub lineage: Vec<String>,
    /// For each link its own rows.
    pub exact: Vec<(String, Vec<Row>)>,
    /// For each id of the conversation, where it leads.
    pub tips: Vec<(String, String)>,
}

#[derive(Debug, Clone)]
pub struct Chain {
    /// The first id, which is the conversation's.
    pub id: String,
    pub tip: String,
    /// All of them, also the undone ones, by depth.
    pub links: Vec<Link>,
    pub shown: Vec<NodeView>,
}

#[derive(Debug, Clone)]
pub struct State {
    pub chains: Vec<Chain>,
}

/// How a reader gets at the nodes: their URLs, and a key that may read everything.
pub struct Reader<'a> {
    pub client: &'a reqwest::Client,
    pub nodes: Vec<String>,
    pub key: &'a str,
}

/// Reads all conversations of a database that nobody writes to any more.
pub async fn read(reader: &Reader<'_>, database: &mut PgConnection, history: &History) -> State {
    let found: Vec<(SessionId, SessionId)> =
        sqlx::query_as("select id, tip_session_id from conversations order by id")
            .fetch_all(&mut *database)
            .await
            .unwrap();
    let mut chains = Vec::new();
    for (id, tip) in found {
        let mut chain = Chain {
            id: id.to_string(),
            tip: tip.to_string(),
            links: read_links(database, id).await,
            shown: Vec::new(),
        };
        for node in &reader.nodes {
            let shown = read_shown(reader, node, &chain, history).await;
            chain.shown.push(shown);
        }
        chains.push(chain);
    }
    State { chains }
}

#[derive(sqlx::FromRow)]
struct LinkColumns {
    id: SessionId,
    depth: i32,
    chain_parent_id: Option<SessionId>,
    state: String,
    end_reason: Option<String>,
    undone: bool,
    next_seq: i64,
    born_seq: i64,
    message_count: i64,
    token_count: i64,
    kept: Option<i64>,
    summarised: Option<i64>,
}

async fn read_links(database: &mut PgConnection, conversation: SessionId) -> Vec<Link> {
    let found: Vec<LinkColumns> = sqlx::query_as(
        "select id, depth, chain_parent_id, state, end_reason, undone_at is not null as undone, next_seq,
                born_seq, message_count, token_count, (compression ->> 'kept')::bigint as kept,
                (compression ->> 'summarised')::bigint as summarised
           from sessions
          where conversation_id = $1
          order by depth, id",
    )
    .bind(conversation)
    .fetch_all(&mut *database)
    .await
    .unwrap();
    let mut links = Vec::new();
    for link in found {
        links.push(Link {
            rows: read_rows(database, link.id).await,
            id: link.id.to_string(),
            depth: link.depth,
            parent: link.chain_parent_id.map(|id| id.to_string()),
            state: link.state,
            end_reason: link.end_reason,
            undone: link.undone,
            next_seq: link.next_seq,
            born_seq: link.born_seq,
            message_count: link.message_count,
            token_count: link.token_count,
            compression: link.kept.zip(link.summarised),
        });
    }
    links
}

#[derive(sqlx::FromRow)]
struct RowColumns {
    seq: i64,
    role: String,
    kind: String,
    text: String,
    tokens: i64,
    copied_session: Option<SessionId>,
    copied_seq: Option<i64>,
}

async fn read_rows(database: &mut PgConnection, session: SessionId) -> Vec<Row> {
    let found: Vec<RowColumns> = sqlx::query_as(
        "select seq, role, kind, content #>> '{}' as text, token_count::bigint as tokens, copied_session,
                copied_seq
           from messages
          where session_id = $1
          order by seq",
    )
    .bind(session)
    .fetch_all(database)
    .await
    .unwrap();
    let row = |row: RowColumns| Row {
        session_id: session.to_string(),
        seq: row.seq,
        role: row.role,
        kind: row.kind,
        text: row.text,
        tokens: row.tokens,
        copied_from: row
            .copied_session
            .map(|id| id.to_string())
            .zip(row.copied_seq),
    };
    found.into_iter().map(row).collect()
}

async fn read_shown(reader: &Reader<'_>, node: &str, chain: &Chain, history: &History) -> NodeView {
    let url = |id: &str, rest: &str| format!("{node}/v1/sessions/{id}/{rest}");
    let client = reader.client;
    let key = reader.key;
    let rows = async |url: String| -> Vec<Row> {
        let shown = walk(client, key, &url).await;
        shown.iter().map(row_of).collect()
    };
    let mut shown = NodeView {
        transcript: rows(url(&chain.id, "messages?scope=conversation&limit=200")).await,
        lineage: Vec::new(),
        exact: Vec::new(),
        tips: Vec::new(),
    };
    for link in walk(client, key, &url(&chain.id, "lineage?limit=200")).await {
        shown.lineage.push(text_of(&link["id"]));
    }
    for link in &chain.links {
        let exact = rows(url(&link.id, "messages?exact=true&limit=200")).await;
        shown.exact.push((link.id.clone(), exact));
    }
    let mut ids: Vec<&String> = chain.links.iter().map(|link| &link.id).collect();
    let learnt = history.learnt.iter().filter(|(of, _)| *of == chain.id);
    ids.extend(learnt.map(|(_, id)| id));
    ids.sort();
    ids.dedup();
    for id in ids {
        let tip = Reply::of(client.get(url(id, "tip")).bearer_auth(key)).await;
        let led = match tip.status {
            200 => text_of(&tip.expect(200)["session_id"]),
            status => format!("status {status}"),
        };
        shown.tips.push((id.clone(), led));
    }
    shown
}

fn row_of(shown: &Value) -> Row {
    let copied = &shown["copied_from"];
    Row {
        session_id: text_of(&shown["session_id"]),
        seq: shown.number("seq"),
        role: text_of(&shown["role"]),
        kind: text_of(&shown["kind"]),
        text: text_of(&shown["content"]),
        tokens: shown.number("token_count"),
        copied_from: copied["seq"]
            .as_i64()
            .map(|seq| (text_of(&copied["session_id"]), seq)),
    }
}

fn text_of(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}
