-- What a tenant used, summed by the hour. '' and the nil uuid stand for "none", so that what tells two
-- rows apart is the primary key.
create table usage_hourly (
  tenant_id      uuid        not null constraint usage_hourly_tenant_fkey references tenants (id),
  hour           timestamptz not null,
  agent          text        not null,
  user_id        uuid        not null,
  model          text        not null,
  source         text        not null,
  requests       bigint      not null,
  turns          bigint      not null,
  input_tokens   bigint      not null,
  output_tokens  bigint      not null,
  constraint usage_hourly_pkey primary key (tenant_id, hour, agent, user_id, model, source)
);
select install_tenant_policy('usage_hourly');
grant select, insert, update, delete on usage_hourly to throughline_service;
