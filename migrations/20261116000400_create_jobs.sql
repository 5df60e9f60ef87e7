-- Global, allow-listed: which tenant has what to be done, and when. It holds ids and no content, so
-- one loop a node can ask for due work of all tenants and then enter one tenant at a time.
create table jobs (
  id           uuid        constraint jobs_pkey primary key,
  tenant_id    uuid        not null constraint jobs_tenant_fkey references tenants (id),
  kind         text        not null,
  ref          uuid,
  run_at       timestamptz not null,
  lease_until  timestamptz,
  attempts     integer     not null default 0,
  constraint jobs_once unique nulls not distinct (tenant_id, kind, ref)
);
create index jobs_due on jobs (run_at);
grant select, insert, update, delete on jobs to throughline_service;

-- The operator's own plane stores first answers too (new tenants, with their first keys): the job that
-- forgets them is planned for it as for every tenant.
insert into jobs (id, tenant_id, kind, run_at)
values (gen_random_uuid(), '00000000-0000-0000-0000-000000000000', 'expire_answers', now());
