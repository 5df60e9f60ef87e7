-- The two locks on every tenant row begin here.
--
-- Three roles exist before this file runs (`throughline migrate` makes them, or prints the SQL):
--   the owner               runs migrations, owns tables, serves no request
--   throughline_service     NOLOGIN; holds every grant; the login the service uses is a member
--   throughline_definer     NOLOGIN; owns the few functions that must look before a tenant is known
-- None of them is superuser or has BYPASSRLS.

grant usage on schema public to throughline_service;
-- A function's owner needs CREATE on its schema. Nobody can log in as this role.
grant usage, create on schema public to throughline_definer;

-- Puts the one tenant policy on a table. Its text stands here and nowhere else; the catalog test
-- compares every policy with it. The sub-select is evaluated once a statement, not once a row.
-- nullif: after a transaction that set it, the setting reads '' and not null.
create function install_tenant_policy(target regclass) returns void
language plpgsql
set search_path = pg_catalog, public
as $$
begin
  execute format('alter table %s enable row level security', target);
  execute format('alter table %s force row level security', target);
  execute format(
    'create policy tenant_isolation on %s to throughline_service
       using (tenant_id = (select nullif(current_setting(''app.tenant_id'', true), '''')::uuid))
       with check (tenant_id = (select nullif(current_setting(''app.tenant_id'', true), '''')::uuid))',
    target);
end
$$;
revoke execute on function install_tenant_policy(regclass) from public;

-- Lets the definer functions read a table across tenants. Under FORCE a function owned by the
-- table's owner would see nothing, and BYPASSRLS needs a superuser: a policy needs neither.
create function install_definer_read(target regclass) returns void
language plpgsql
set search_path = pg_catalog, public
as $$
begin
  execute format('create policy definer_read on %s for select to throughline_definer using (true)', target);
  execute format('grant select on %s to throughline_definer', target);
end
$$;
revoke execute on function install_definer_read(regclass) from public;

-- Global, allow-listed: one row a customer, nothing a customer wrote but its name and settings.
--   limits           only what its operator changed, so that a new default reaches everyone else
--   settings         a document that the service checks
--   allowed_origins  apart from it, because every credential brings them along
-- A tenant that is being deleted refuses every credential at once; its rows go in the background.
-- The row with the nil id is the operator's own plane: it scopes what operators do (idempotency,
-- audit) and no key can ever be made for it.
create table tenants (
  id               uuid        constraint tenants_pkey primary key,
  name             text        not null constraint tenants_name_length check (char_length(name) between 1 and 100),
  state            text        not null constraint tenants_state_known
                   check (state in ('active', 'suspended', 'deleting', 'operator')),
  limits           jsonb       not null default '{}' constraint tenants_limits_object check (jsonb_typeof(limits) = 'object'),
  settings         jsonb       not null default '{}' constraint tenants_settings_object check (jsonb_typeof(settings) = 'object'),
  allowed_origins  text[]      not null default '{}',
  created_at       timestamptz not null,
  updated_at       timestamptz not null,
  constraint tenants_operator_is_nil
    check ((state = 'operator') = (id = '00000000-0000-0000-0000-000000000000'))
);
grant select, insert on tenants to throughline_service;
grant update (name, state, limits, settings, allowed_origins, updated_at) on tenants to throughline_service;
grant select on tenants to throughline_definer;

insert into tenants (id, name, state, created_at, updated_at)
values ('00000000-0000-0000-0000-000000000000', 'operator', 'operator', now(), now());
