//! A tenant with many rows of each kind.

use sqlx::AssertSqlSafe;

use crate::support::{Tenant, World};

/// Rows of each kind.
pub const MANY: usize = 20_000;

/// A tenant with many rows of each kind, `old` of which are due.
pub async fn fill(world: &World, tenant: &Tenant, old: usize) {
    let tenant = tenant.uuid();
    let conversation =
        "(select id from conversations where deleted_at is null order by id limit 1)";
    let sql = format!(
        "insert into users (tenant_id, id, created_at)
         select '{tenant}', md5('u' || n)::uuid, now() from generate_series(1, {MANY}) n;
         insert into identities (tenant_id, id, user_id, platform, external_id, raw, linked_at, created_at)
         select '{tenant}', md5('i' || n)::uuid, md5('u' || n)::uuid, 'telegram', n::text, n::text, now(), now()
           from generate_series(1, {MANY}) n;
         create temp table ages as
         select n, now() - case when n <= {old} then interval '500 days' else interval '1 second' end as at,
                md5('i' || n)::uuid as identity, md5('u' || n)::uuid as user_id
           from generate_series(1, {MANY}) n;
         insert into events (tenant_id, conversation_id, seq, turn_id, attempt, kind, session_id, created_at)
         select '{tenant}', {conversation}, n + 1000, gen_random_uuid(), 1, 'x', gen_random_uuid(), at from ages;
         insert into inbound_receipts (tenant_id, platform, scope, chat_ref, identity_id, message_id, created_at)
         select '{tenant}', 'telegram', '', 'dm:' || n, identity, '1', at from ages;
         insert into chats (tenant_id, platform, scope, chat_ref, next_seq, due_at)
         select '{tenant}', case when n <= 100 then 'discord' else 'telegram' end, '', 'dm:' || n, 10,
                case when n % 2 = 0 then at end
           from ages;
         insert into deliveries (tenant_id, id, platform, scope, chat_ref, seq, kind, identity_id, payload, state,
                                 visible_at, created_at, ended_at)
         select '{tenant}', gen_random_uuid(), case when n <= 100 then 'discord' else 'telegram' end, '',
                'dm:' || n, s, 'notice', identity, '{{}}',
                case when n % 2 = 0 then 'pending' else 'delivered' end, at, at, case when n % 2 = 1 then at end
           from ages, generate_series(1, 2) s;
         insert into codes (tenant_id, id, purpose, digest, n, user_id, minted_by, created_at, expires_at)
         select '{tenant}', gen_random_uuid(), 'link', sha256(n::text::bytea), 1, user_id, identity, at, at from ages;
         insert into code_attempts (tenant_id, subject, failures, window_start)
         select '{tenant}', 's' || n, 1, at from ages;
         insert into pending_links (tenant_id, identity_id, code_enc, expires_at)
         select '{tenant}', identity, '', at + interval '1 hour' from ages;
         insert into identity_moves (tenant_id, id, identity_id, from_user, to_user, kind, created_at)
         select '{tenant}', gen_random_uuid(), identity, user_id, user_id, 'code', at from ages;
         insert into idempotency (tenant_id, principal, route, key, request_hash, created_at, secrets_enc, caller,
                                  acted_for)
         select '{tenant}', 'key_1/telegram:' || n, 'r', 'k', sha256(''), at,
                case when n <= {old} then 'x'::bytea end, 'key_1' || n, 'telegram:' || n from ages;
         insert into usage_hourly (tenant_id, hour, agent, user_id, model, source, requests, turns, input_tokens,
                                   output_tokens)
         select '{tenant}', date_trunc('hour', now()) - h * interval '1 hour', 'main', user_id, 'm', 'turn', 1, 1, 1, 1
           from ages, generate_series(1, 2) h;
         insert into messages (tenant_id, session_id, seq, role, kind, content, token_count, created_at,
                               source_identities)
         select '{tenant}', (select tip_session_id from conversations where id = {conversation}), n + 1000, 'user',
                'summary', '\"x\"', 1, at, array[identity]
           from ages
          where n <= 5000",
    );
    let mut superuser = world.superuser().await;
    sqlx::raw_sql(AssertSqlSafe(sql))
        .execute(&mut superuser)
        .await
        .unwrap();
    sqlx::raw_sql("vacuum analyze")
        .execute(&mut superuser)
        .await
        .unwrap();
}
