-- First answers of requests that carried an Idempotency-Key, kept a day. The row is inserted in the
-- transaction of the effect: a concurrent twin blocks on the primary key and then replays, and a
-- crash leaves neither effect nor answer. Both parts of the answer are encrypted by the service;
-- secrets are apart, because they are replayed for ten minutes only and then erased.
create table idempotency (
  tenant_id     uuid        not null constraint idempotency_tenant_fkey references tenants (id),
  principal     text        not null,
  route         text        not null,
  key           text        not null constraint idempotency_key_length check (char_length(key) between 1 and 255),
  request_hash  bytea       not null constraint idempotency_request_hash_length check (octet_length(request_hash) = 32),
  status        smallint,
  answer_enc    bytea,
  secrets_enc   bytea,
  created_at    timestamptz not null,
  constraint idempotency_pkey primary key (tenant_id, principal, route, key)
);
create index idempotency_by_age on idempotency (tenant_id, created_at);
select install_tenant_policy('idempotency');
grant select, insert, update, delete on idempotency to throughline_service;
