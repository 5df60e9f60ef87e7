-- What was done in a tenant, by whom and to what: ids and words of our own, never a text that a person
-- wrote. The service may add entries and read them; it can neither change nor remove one.
--
-- Entries are chained: the hash of each is an HMAC, with a key that the database does not hold, over
-- the entry and the hash before it. So whoever can write to this table, past every policy, still cannot
-- change, remove, insert or swap entries without `throughline audit verify` naming the first one that
-- is wrong. key_id says which of the service's keys made the hash: entries stay verifiable when a new
-- key is put in front, for as long as the old one is kept behind it.
--
-- seq has no gap and decides the order. `at` is the time the change itself carries, so of two changes
-- at once the one with the lower seq may have the later time.
create table audit (
  tenant_id  uuid        not null constraint audit_tenant_fkey references tenants (id),
  seq        bigint      not null constraint audit_seq_positive check (seq > 0),
  at         timestamptz not null,
  actor      text        not null constraint audit_actor_length check (char_length(actor) between 1 and 200),
  action     text        not null constraint audit_action_form check (action ~ '^[a-z_]+\.[a-z_]+$'),
  target     text        constraint audit_target_length check (char_length(target) between 1 and 300),
  detail     jsonb       not null constraint audit_detail_is_object check (jsonb_typeof(detail) = 'object'),
  key_id     bytea       not null constraint audit_key_id_length check (octet_length(key_id) = 4),
  prev_hash  bytea       not null constraint audit_prev_hash_length check (octet_length(prev_hash) = 32),
  hash       bytea       not null constraint audit_hash_length check (octet_length(hash) = 32),
  constraint audit_pkey primary key (tenant_id, seq)
);
create index audit_by_action on audit (tenant_id, action, seq);
create index audit_by_actor on audit (tenant_id, actor, seq);
select install_tenant_policy('audit');
grant select, insert on audit to throughline_service;

-- Where a tenant's chain ends. A writer locks this row until its transaction ends, after every other
-- lock it needs: two writers cannot both follow the same entry, so the chain cannot fork.
--
-- The head has an HMAC of its own, over tenant, seq, hash and time: without it, removing the last
-- entries and pointing the head at the one before would leave a chain that looks whole. No entry is
-- added to a head whose HMAC is wrong, because that would sign what somebody else made of it.
--
-- Known limit: a head that was copied earlier and is put back, with every later entry removed, is what
-- the chain truly was at that time, and nothing inside the database can tell. A tenant that wants to
-- notice keeps what GET /v1/audit/head answered, elsewhere, and compares: the entry with that seq must
-- still be there and have that hash.
create table audit_heads (
  tenant_id  uuid        not null constraint audit_heads_tenant_fkey references tenants (id),
  seq        bigint      not null constraint audit_heads_seq_not_negative check (seq >= 0),
  hash       bytea       not null constraint audit_heads_hash_length check (octet_length(hash) = 32),
  at         timestamptz not null,
  key_id     bytea       not null constraint audit_heads_key_id_length check (octet_length(key_id) = 4),
  mac        bytea       not null constraint audit_heads_mac_length check (octet_length(mac) = 32),
  constraint audit_heads_pkey primary key (tenant_id)
);
select install_tenant_policy('audit_heads');
grant select, insert on audit_heads to throughline_service;
grant update (seq, hash, at, key_id, mac) on audit_heads to throughline_service;
