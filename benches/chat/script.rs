//! The service's statements for a turn in a session, as a script for pgbench: the transaction that accepts
//! it and the one that ends it.

use serde_json::json;
use throughline::domain::conversation::message::{Content, MessageKind, NewMessage, Role};
use throughline::domain::turn::event::{NewEvent, TURN_STARTED, of_end};
use throughline::domain::turn::{SessionInfo, TurnInput, TurnState};
use throughline::store::conversation::tips::TIP_BY_ID;
use throughline::store::turn::turn_sql::{START, WRITE};
use uuid::Uuid;

use crate::AGENT;
use crate::pgbench::{Pgbench, quoted, with_values};
use crate::seed::{Sessions, TEXT, session_sql};
use crate::upstream::{PIECES, WORD};

/// The principal of these turns.
pub const PRINCIPAL: &str = "pgbench";
const LEASE_MS: &str = "15000::bigint";
const TOKENS: &str = "9000000::bigint";
/// More turns than run at one time.
const RUNNING: &str = "1000000::bigint";

/// One row and a commit.
pub fn commit(pgbench: &Pgbench, sessions: Sessions, clients: u32) -> String {
    let choose = sessions.choose_sql(clients);
    let id = session_sql(":number");
    let tenant = pgbench.tenant;
    format!(
        "{choose}update sessions set last_active_at = now() where tenant_id = '{tenant}'::uuid and id = {id};\n"
    )
}

/// A whole turn, in a session of the client's own.
pub fn turn(pgbench: &Pgbench, sessions: Sessions, clients: u32) -> anyhow::Result<String> {
    let session = session_sql(":number");
    let turn = session_sql(":turn");
    let values = Values::new(pgbench, session, turn, Origin::default());
    let choose = sessions.choose_sql(clients) + "\\set turn random(1, 281474976710655)\n";
    let accept = pgbench.transaction(&values.accept()?);
    let end = pgbench.transaction(&values.end()?);
    Ok(choose + &accept + &end)
}

/// SQL of the values that both transactions use.
pub struct Values {
    tenant: String,
    session: String,
    turn: String,
    node: String,
    origin: Origin,
}

/// SQL of the sender, the platform and the target of the answer.
pub struct Origin {
    pub identity: String,
    pub platform: String,
    pub reply_to: String,
    pub reply_via: String,
}

/// No sender, no platform, no target.
impl Default for Origin {
    fn default() -> Self {
        Self {
            identity: "null::uuid".to_owned(),
            platform: "null::text".to_owned(),
            reply_to: "null::jsonb".to_owned(),
            reply_via: "null::text".to_owned(),
        }
    }
}

impl Values {
    /// The values of a turn and a session with these ids, in SQL.
    pub fn new(pgbench: &Pgbench, session: String, turn: String, origin: Origin) -> Self {
        Self {
            tenant: format!("'{}'::uuid", pgbench.tenant),
            session,
            turn,
            node: format!("'{}'::uuid", Uuid::from_u128(7)),
            origin,
        }
    }

    /// The statements of the transaction that accepts it.
    pub fn accept(&self) -> anyhow::Result<String> {
        let tenant = &self.tenant;
        let session = &self.session;
        let said = message(Role::User, TEXT);
        let input = TurnInput {
            messages: vec![said.clone()],
            instruction: None,
            options: throughline::domain::values::raw_members::RawMembers::default(),
        };
        let session_info = SessionInfo {
            requested_session_id: Some("ses_00000000000070008000000000000000".to_owned()),
            ..SessionInfo::default()
        };
        let nil = format!("'{}'::uuid", Uuid::nil());
        let find = with_values(TIP_BY_ID, &[tenant, session, &nil, "null::uuid", "now()"]);
        let events = [NewEvent::new(TURN_STARTED), NewEvent::of_message(0)];
        let more = [
            quoted(AGENT),
            quoted(PRINCIPAL),
            format!("decode('{}', 'hex')", "0f".repeat(32)),
            quoted(&serde_json::to_string(&input)?),
            quoted(&serde_json::to_string(&session_info)?),
            self.node.clone(),
            self.origin.reply_to.clone(),
            self.origin.reply_via.clone(),
            RUNNING.to_owned(),
            TOKENS.to_owned(),
            "10000::bigint".to_owned(),
            "null::uuid".to_owned(),
            "array[null]".to_owned(),
        ];
        let start = self.write_statement(START, &said, &events, &more)?;
        Ok(find + &start)
    }

    /// The statements of the transaction that ends it.
    pub fn end(&self) -> anyhow::Result<String> {
        let answer = format!("{WORD} ").repeat(PIECES);
        let events = [
            NewEvent::delta(answer.clone()),
            NewEvent::of_message(0),
            NewEvent::new(of_end(TurnState::Completed)).with(json!({ "reason": null })),
        ];
        let more = [
            "1::bigint".to_owned(),
            "1::bigint".to_owned(),
            format!("{}::text", quoted(TurnState::Completed.as_str())),
            "null::text".to_owned(),
            "null::text".to_owned(),
            "'stop'::text".to_owned(),
            "null::json".to_owned(),
            "50::bigint".to_owned(),
            "20::bigint".to_owned(),
            "false".to_owned(),
            self.session.clone(),
            "600000::bigint".to_owned(),
            "false".to_owned(),
            "array[null]".to_owned(),
        ];
        self.write_statement(WRITE, &message(Role::Assistant, &answer), &events, &more)
    }

    /// A statement that writes one message with its events; `more` are the additional values of the statement.
    fn write_statement(
        &self,
        statement: &str,
        said: &NewMessage,
        events: &[NewEvent],
        more: &[String],
    ) -> anyhow::Result<String> {
        let kinds: Vec<String> = events.iter().map(|event| quoted(event.kind)).collect();
        let named = events.iter().map(|event| match event.message {
            Some(index) => index.to_string(),
            None => "null".to_owned(),
        });
        let data = events.iter().map(|event| match &event.data {
            Some(data) => quoted(&data.to_string()),
            None => "null".to_owned(),
        });
        let content = serde_json::to_string(&said.content)?;
        let is_user = said.role == Role::User;
        let common = [
            self.tenant.clone(),
            self.turn.clone(),
            self.session.clone(),
            "now()".to_owned(),
            LEASE_MS.to_owned(),
            "1::integer".to_owned(),
            format!("{}::bigint", events.len()),
            "1::integer".to_owned(),
            format!("{}::bigint", said.tokens()),
            is_user.to_string(),
            self.origin.identity.clone(),
            self.origin.platform.clone(),
            format!("array[{}]", quoted(said.role.as_str())),
            format!("array[{}]", quoted(said.kind.as_str())),
            format!("array[{}]", quoted(&content)),
            "array[null]".to_owned(),
            "array[null]".to_owned(),
            format!("array[{}]", said.tokens()),
            format!("array[{is_user}]"),
            format!("array[{}]", kinds.join(",")),
            format!("array[{}]", named.collect::<Vec<_>>().join(",")),
            format!("array[{}]", data.collect::<Vec<_>>().join(",")),
        ];
        let values: Vec<&str> = common.iter().chain(more).map(String::as_str).collect();
        Ok(with_values(statement, &values))
    }
}

fn message(role: Role, text: &str) -> NewMessage {
    NewMessage {
        role,
        kind: MessageKind::Normal,
        content: Some(Content::text(text)),
        tool_calls: None,
        tool_call_id: None,
        token_count: None,
        extra: None,
    }
}
