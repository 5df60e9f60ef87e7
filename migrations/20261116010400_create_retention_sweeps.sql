-- How far a tenant's sweep of old conversations has come, so that any node can go on with it and an
-- admin can watch it. One row a tenant: the running sweep, or the last one.
create table retention_sweeps (
  tenant_id      uuid        not null constraint retention_sweeps_tenant_fkey references tenants (id),
  cutoff         timestamptz not null,
  started_at     timestamptz not null,
  finished_at    timestamptz,
  -- The last conversation that was looked at; the next batch begins after it.
  reached        uuid,
  examined       bigint      not null default 0,
  deleted        bigint      not null default 0,
  constraint retention_sweeps_pkey primary key (tenant_id)
);
select install_tenant_policy('retention_sweeps');
grant select, insert, update, delete on retention_sweeps to throughline_service;
