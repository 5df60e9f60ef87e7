-- The canonical person inside a tenant. First contact makes one; linking joins them later.
create table users (
  tenant_id     uuid        not null constraint users_tenant_fkey references tenants (id),
  id            uuid        not null,
  -- The name a tenant's own import gave this person.
  external_id   text        constraint users_external_id_length check (char_length(external_id) between 1 and 256),
  display_name  text        constraint users_display_name_length check (char_length(display_name) between 1 and 100),
  time_zone     text,
  -- When a second identity was linked; from then on all platforms share one slot, for good.
  shared_since  timestamptz,
  created_at    timestamptz not null,
  constraint users_pkey primary key (tenant_id, id),
  constraint users_external_id_once unique (tenant_id, external_id)
);
select install_tenant_policy('users');
grant select, insert, update, delete on users to throughline_service;

-- One account of a person on one platform; belongs to exactly one user. The unique key makes a
-- thousand concurrent first contacts one person. Scope '' is a platform without workspaces.
create table identities (
  tenant_id    uuid        not null,
  id           uuid        not null,
  user_id      uuid        not null,
  platform     text        not null,
  scope        text        not null default '',
  external_id  text        not null constraint identities_external_id_length
               check (char_length(external_id) between 1 and 512),
  -- The issuer whose token proved this identity; null where a bridge vouched for it.
  issuer       text,
  created_at   timestamptz not null,
  constraint identities_pkey primary key (tenant_id, id),
  constraint identities_once unique (tenant_id, platform, scope, external_id),
  constraint identities_user_fkey foreign key (tenant_id, user_id) references users (tenant_id, id)
);
create index identities_of_user on identities (tenant_id, user_id);
select install_tenant_policy('identities');
grant select, insert, update, delete on identities to throughline_service;
