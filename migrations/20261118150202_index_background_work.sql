-- Background work reads what it changes, however much a tenant has.
set local lock_timeout = '5s';

-- Stored answers: secrets that are to be erased, and whose answers they are. `caller` is the credential and
-- `acted_for` the identity or user behind it, as `principal` names them; both null where it acted for nobody.
-- Columns, and not expressions: a policy of the table lets only plain comparisons reach an index.
alter table idempotency
  add column caller     text,
  add column acted_for  text;
-- The owner sees no row while row-level security is forced.
alter table idempotency no force row level security;
update idempotency
   set caller = split_part(principal, '/', 1), acted_for = substr(principal, strpos(principal, '/') + 1)
 where strpos(principal, '/') > 0;
alter table idempotency force row level security;
create index idempotency_with_secrets on idempotency (tenant_id, created_at) where secrets_enc is not null;
create index idempotency_of_caller on idempotency (tenant_id, caller) where caller is not null;
create index idempotency_acted_for on idempotency (tenant_id, acted_for) where acted_for is not null;

-- Erasing users. Opening a tenant's stored answers can take many runs of the job:
--   began_at   when the look began that is under way
--   tried_at   when a run last took its part in it: then others come first
--   opened_to  the name of the last answer that was opened: principal, route and key
alter table erased_people
  add column began_at   timestamptz,
  add column tried_at   timestamptz,
  add column opened_to  text[];

-- Merging and erasing users.
create index usage_hourly_of_user on usage_hourly (tenant_id, user_id);

-- What is kept for a while only.
create index code_attempts_by_age on code_attempts (tenant_id, window_start);
create index pending_links_expired on pending_links (tenant_id, expires_at);
create index identity_moves_by_age on identity_moves (tenant_id, created_at) where kind <> 'import';
