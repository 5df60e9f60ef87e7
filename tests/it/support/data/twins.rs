//! Two tenants with the same rows: one that acts, and a neighbour who must neither be seen nor moved.

use serde_json::{Value, json};
use sqlx::AssertSqlSafe;

use crate::support::data::catalog::{disable_row_level_security, dump_people, mirror_rows};
use crate::support::world::{OPERATOR_KEY, WorldOptions};
use crate::support::{Reply, Scene, Tenant, World};

/// What each of them says has its own word in it.
pub const OURS: &str = "ours";
const THEIRS: &str = "theirs";

/// What is different next door, so that whoever looks there by mistake is noticed: other words; turns that run
/// where ours have ended, with full queues before and something newer after them; events before and after ours;
/// deliveries that are not due, or overdue; messages that are known and came to nothing. Nothing of it is due.
const DIFFERENT: &str = r#"
    update messages set content = replace(content::text, 'ours', 'theirs')::json, step = step + 100
     where tenant_id = $theirs;
    update turns set input = replace(input::text, 'ours', 'theirs')::json, detail = 'theirs'
     where tenant_id = $theirs;
    update turns set reply_via = null where tenant_id = $theirs and ended_at is not null;
    update turns t set state = 'running', ended_at = null, lease_until = now()
     where t.tenant_id = $theirs and t.ended_at is not null
       and not exists (select 1 from turns a
                        where a.tenant_id = $theirs and a.conversation_id = t.conversation_id
                          and (a.ended_at is null or a.turn_no > t.turn_no));
    update turns set lease_until = now() + interval '1 day'
     where tenant_id = $theirs and lease_until is not null;
    insert into turns (tenant_id, id, conversation_id, turn_no, state, ended_at, agent, principal, request_hash,
                       input, session_info, detail, created_at)
    select $theirs, gen_random_uuid(), a.conversation_id, p.number, p.state,
           case p.state when 'cancelled' then now() end, 'main', 'theirs', '\x00', '{"messages": []}', '{}',
           'theirs', now()
      from turns a,
           (select -number, 'queued' from generate_series(1, 100) as g (number)
             union all
            select 1000000, 'cancelled') as p (number, state)
     where a.tenant_id = $theirs and a.state in ('running', 'waiting_client');
    update events set data = replace(data::text, 'ours', 'theirs')::json where tenant_id = $theirs;
    insert into events (tenant_id, conversation_id, seq, turn_id, attempt, kind, session_id, message_seq, data,
                        created_at)
    select e.tenant_id, e.conversation_id, e.seq + s.shift, e.turn_id, e.attempt, e.kind, e.session_id,
           e.message_seq, e.data, e.created_at
      from events e, unnest(array[1000, -2000]) as s (shift)
     where e.tenant_id = $theirs;
    update conversations set next_event_seq = next_event_seq + 5000 where tenant_id = $theirs;
    update deliveries
       set payload = replace(payload::text, 'ours', 'theirs')::jsonb, attempt = 10,
           visible_at = now() + case state when 'pending' then 1 else -1 end * interval '1 day'
     where tenant_id = $theirs;
    update inbound_receipts set turn_id = null, answer_enc = null where tenant_id = $theirs;
"#;

pub struct Twins {
    /// Of the one that acts.
    pub chat: Scene,
    neighbour: Tenant,
}

/// What the neighbour had.
pub struct Theirs(String);

impl Twins {
    pub async fn new(row_level_security: bool) -> Self {
        let world = World::with(WorldOptions {
            nodes: 2,
            private_upstreams: true,
            ..WorldOptions::default()
        })
        .await;
        if !row_level_security {
            disable_row_level_security(&mut world.superuser().await).await;
        }
        // The older of the two has the lower id: see `mirror`.
        let neighbour = world.tenant(THEIRS).await;
        let chat = Scene::builder().tenant(OURS).echo().bridge(&["telegram"]);
        let chat = chat.build_in(world).await;
        sqlx::query("delete from jobs where tenant_id = $1")
            .bind(neighbour.uuid())
            .execute(&mut chat.world.superuser().await)
            .await
            .unwrap();
        // Fewer than run next door.
        let limits = format!("/v1/operator/tenants/{}/limits", chat.tenant.id);
        let few = json!({"concurrent_turns": 2});
        let put = chat.world.put(OPERATOR_KEY, &limits, few).await;
        put.expect(200);
        Self { chat, neighbour }
    }

    /// Gives the neighbour all our rows as they are now, but `DIFFERENT`; `also` is what else is to be different
    /// there. Theirs come first in their tables: a statement that wants one row, whosever it is, gets theirs.
    pub async fn mirror(&self, also: &str) -> Theirs {
        let mut superuser = self.chat.world.superuser().await;
        let ours = self.chat.tenant.uuid();
        let theirs = self.neighbour.uuid();
        let changes = format!("{DIFFERENT} {also}").replace("$theirs", &format!("'{theirs}'"));
        mirror_rows(&mut superuser, ours, theirs, &changes).await;
        for table in ["turns", "deliveries", "inbound_receipts", "conversations"] {
            let sql = format!("cluster {table} using {table}_pkey");
            sqlx::raw_sql(AssertSqlSafe(sql))
                .execute(&mut superuser)
                .await
                .unwrap();
        }
        self.theirs().await
    }

    async fn theirs(&self) -> Theirs {
        let mut superuser = self.chat.world.superuser().await;
        Theirs(dump_people(&mut superuser, self.neighbour.uuid()).await)
    }

    /// The neighbour has what they had.
    #[track_caller]
    pub fn unchanged(&self, before: &Theirs, what: &str) -> impl Future<Output = ()> {
        let caller = std::panic::Location::caller();
        async move {
            let now = self.theirs().await;
            let lines = before.0.lines().zip(now.0.lines());
            for (before, now) in lines {
                assert_eq!(now, before, "{caller}: {what}");
            }
            let rows = |theirs: &Theirs| theirs.0.lines().count();
            assert_eq!(rows(&now), rows(before), "{caller}: {what}");
        }
    }

    /// What a bridge brings in, as an answer that tells nothing of the neighbour.
    pub async fn send(&self, body: Value) -> Reply {
        let reply = self
            .chat
            .world
            .post(&self.chat.bridge_key, "/v1/inbound", body)
            .await;
        only_ours(&reply.body);
        reply
    }

    /// The same where somebody leaves before the answer comes.
    pub async fn send_and_disconnect(&self, body: &Value) {
        let asked = self.chat.model.requests().len();
        let url = self.chat.world.url("/v1/inbound");
        let request = self
            .chat
            .world
            .client
            .post(url)
            .bearer_auth(&self.chat.bridge_key);
        let waiting = tokio::spawn(request.json(body).send());
        self.chat.model.called(asked + 1).await;
        waiting.abort();
        assert!(waiting.await.is_err());
    }

    pub fn bridge(&self) -> &str {
        &self.chat.bridge_key
    }

    /// A number that the database has of us; `$1` is our id.
    pub async fn number(&self, query: &'static str) -> i64 {
        sqlx::query_scalar(query)
            .bind(self.chat.tenant.uuid())
            .fetch_one(&mut self.chat.world.superuser().await)
            .await
            .unwrap()
    }
}

#[track_caller]
pub fn only_ours(text: &str) {
    assert!(!text.contains(THEIRS), "{text}");
}
